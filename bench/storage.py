"""Import, second import and export of every peer, in turns, on disk and on tmpfs."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.generate import write_set
from bench.measure import CommandFailedError, Cost, Series, run, sync_tree, tree_size
from bench.peers import Peer

STEPS = ("first", "second", "export")


@dataclass
class Outcome:
    """One peer on one set in one place."""

    series: dict[str, Series] = field(default_factory=lambda: {step: Series() for step in STEPS})
    stored: int = 0
    stored_twice: int = 0
    failure: str = ""

    def report(self, raw: int) -> dict[str, Any]:
        if self.failure:
            return {"failure": self.failure}
        steps = {step: made.report() for step, made in self.series.items()}
        for step, made in self.series.items():
            steps[step]["bytes_per_second"] = raw / made.median()
        return {"stored_bytes": self.stored, "stored_bytes_after_second": self.stored_twice, **steps}


def measure_set(
    name: str, place: Path, *, size: int, runs: int, peers: list[Peer], say: Callable[[str], None]
) -> tuple[int, dict[str, Outcome]]:
    """All peers on one generated set; bytes of the set, and the outcomes by peer name.

    The order of the peers turns by one with every run. Sources were just written (and synced): they are
    in the page cache.
    """
    source, copy = place / "source", place / "copy"
    raw = write_set(name, source, size)
    shutil.copytree(source, copy)
    for folder in (source, copy):
        sync_tree(folder)
    outcomes = {peer.name: Outcome() for peer in peers}
    for number in range(runs):
        turn = number % len(peers)
        for peer in peers[turn:] + peers[:turn]:
            outcome = outcomes[peer.name]
            if outcome.failure:
                continue
            try:
                _round(peer, place / "work", source, copy, outcome, check=number == 0)
            except (CommandFailedError, OSError) as error:
                outcome.failure = str(error)
                say(f"{name} {peer.name}: {error}")
            else:
                speeds = ", ".join(
                    f"{s} {raw / outcome.series[s].costs[-1].seconds / 1e6:.0f}" for s in STEPS
                )
                say(f"{name} run {number + 1} {peer.name}: {speeds} MB/s")
            shutil.rmtree(place / "work", ignore_errors=True)
    shutil.rmtree(source)
    shutil.rmtree(copy)
    return raw, outcomes


def _round(peer: Peer, work: Path, source: Path, copy: Path, outcome: Outcome, *, check: bool) -> None:
    work.mkdir()
    store, target = work / "store", work / "out"
    peer.make_store(store)
    costs = {"first": _take_in(peer, store, source, "a")}
    outcome.stored = tree_size(store)
    costs["second"] = _take_in(peer, store, copy, "b")
    outcome.stored_twice = tree_size(store)
    target.mkdir()
    costs["export"] = run(peer.give_back(store, "a", target))
    if check:
        names = [item.name for item in source.iterdir()]
        _, different, lost = filecmp.cmpfiles(source, peer.place_of("a", target), names, shallow=False)
        if different or lost:
            raise CommandFailedError(f"{peer.name} gave back other bytes: {', '.join([*different, *lost])}")
    for step, cost in costs.items():
        outcome.series[step].costs.append(cost)


def _take_in(peer: Peer, store: Path, source: Path, name: str) -> Cost:
    cost = run(peer.take_in(store, source, name))
    if peer.syncs:
        return cost
    return Cost(cost.seconds + sync_tree(store), cost.cpu, cost.rss)
