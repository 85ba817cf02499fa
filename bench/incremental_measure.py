"""Measuring programs on a pair of checkpoints, on replicas and on a chain, in turns and in fresh stores."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.incremental_peers import Contender, take_next
from bench.measure import Command, CommandFailedError, Cost, Series, run, sync_tree
from bench.peers import Gpuimg, Peer

MEMCPY = 1 << 30

Say = Callable[[str], None]


def spread(values: list[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


class Copier:
    """Copies 1 GiB within memory, one thread: the speed of the machine at this moment."""

    def __init__(self) -> None:
        self._source = np.ones(MEMCPY, dtype=np.uint8)
        self._target = np.ones(MEMCPY, dtype=np.uint8)

    def rate(self) -> float:
        """Bytes per second: the best of three copies, since others only slow it down."""
        seconds = []
        for _ in range(3):
            started = time.monotonic()
            np.copyto(self._target, self._source)
            seconds.append(time.monotonic() - started)
        return self._source.nbytes / min(seconds)


@dataclass
class Outcome:
    """What one program did with one case."""

    series: dict[str, Series] = field(default_factory=dict)
    sizes: dict[str, list[float]] = field(default_factory=dict)
    says: Any = None
    failure: str = ""

    def cost(self, step: str, cost: Cost) -> None:
        self.series.setdefault(step, Series()).costs.append(cost)

    def size(self, name: str, value: float) -> None:
        self.sizes.setdefault(name, []).append(value)

    def report(self) -> dict[str, Any]:
        if self.failure:
            return {"failure": self.failure}
        made: dict[str, Any] = {step: series.report() for step, series in self.series.items()}
        made |= {name: spread(values) for name, values in self.sizes.items()}
        return made if self.says is None else made | {"says": self.says}


def in_turns(
    names: list[str], runs: int, work: Path, action: Callable[[str, Outcome, bool], None], say: Say
) -> dict[str, Outcome]:
    """Run `action(name, outcome, first run?)` for every name, `runs` times, each in an empty folder `work`.

    The order turns by one with every run. One that fails is left out from then on, and says why.
    """
    outcomes = {name: Outcome() for name in names}
    for number in range(runs):
        turn = number % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            outcome = outcomes[name]
            if outcome.failure:
                continue
            work.mkdir()
            try:
                action(name, outcome, number == 0)
            except (CommandFailedError, OSError) as error:
                outcome.failure = str(error)
                say(f"  {name} failed: {error}")
            else:
                say(f"  run {number + 1} {name}: {_summary(outcome)}")
            shutil.rmtree(work, ignore_errors=True)
    return outcomes


def _summary(outcome: Outcome) -> str:
    times = [f"{step} {series.costs[-1].seconds:.2f} s" for step, series in outcome.series.items()]
    sizes = [
        f"{name.removesuffix('_bytes')} {values[-1] / 2**20:.2f} MiB"
        for name, values in outcome.sizes.items()
        if name.endswith("_bytes")
    ]
    return ", ".join(times + sizes)


def measure_pair(
    first: Path,
    after: Path,
    *,
    programs: dict[str, Contender],
    runs: int,
    work: Path,
    say: Say,
    copier: Copier | None = None,
) -> dict[str, Any]:
    """Every program takes `first` and then `after`; reports by name.

    `new_bytes` is what its store grew by with the second; `memcpy`, with a copier, is the speed of memory
    just before that.
    """

    def action(name: str, outcome: Outcome, check: bool) -> None:
        program, store, said = programs[name], work / "store", work / "said.json"
        program.peer.make_store(store)
        warm(first)
        outcome.cost("first", timed(program.peer, program.peer.take_in(store, first, "a"), store))
        before = program.sizes(store)
        # What is still to be written would slow down whoever comes next.
        sync_tree(store)
        warm(after)
        touch(after)
        if copier:
            outcome.size("memcpy", copier.rate())
        command = program.next(store, after, first, said)
        outcome.cost("next", timed(program.peer, command, store))
        grown = program.sizes(store)
        outcome.size("stored_bytes", before["data"])
        outcome.size("new_bytes", grown["data"] - before["data"])
        if "index" in grown:
            outcome.size("new_index_bytes", grown["index"] - before["index"])
        if said.exists():
            outcome.says = json.loads(said.read_text())
        if check and isinstance(program.peer, Gpuimg):
            run(program.peer.give_back(store, "a", work / "out"))
            require_equal(after, work / "out")

    outcomes = in_turns(list(programs), runs, work, action, say)
    return {name: outcome.report() for name, outcome in outcomes.items()}


def measure_copies(
    whole: Path, one: Path, *, programs: dict[str, Contender], runs: int, work: Path, say: Say
) -> dict[str, Any]:
    """Every program takes `whole` (several equal files) into one store and `one` of them into another."""

    def action(name: str, outcome: Outcome, check: bool) -> None:
        del check
        program = programs[name]
        for source, step, size in ((whole, "whole", "stored_bytes"), (one, "one", "stored_one_bytes")):
            store = work / step
            program.peer.make_store(store)
            warm(source)
            outcome.cost(step, timed(program.peer, program.peer.take_in(store, source, "a"), store))
            outcome.size(size, program.sizes(store)["data"])

    outcomes = in_turns(list(programs), runs, work, action, say)
    return {name: outcome.report() for name, outcome in outcomes.items()}


def measure_chain(
    write: Callable[[int, Path], object], steps: int, *, runs: int, work: Path, say: Say
) -> dict[str, Any]:
    """gpuimg gives back the last of `steps` + 1 checkpoints, each taken after the one before, and the same
    checkpoint from a store that holds nothing else.

    Parameters
    ----------
    write
        Writes the checkpoint of a step (from 0) to a directory; only two are on disk at a time.
    """
    work.mkdir()
    outcome = Outcome()
    peer, said = Gpuimg(), work / "said.json"
    chain, full, source, out = (work / name for name in ("chain", "full", "source", "out"))
    try:
        peer.make_store(chain)
        for step in range(steps + 1):
            shutil.rmtree(source, ignore_errors=True)
            write(step, source)
            run(peer.take_in(chain, source, "a") if step == 0 else take_next(chain, source, "a", said))
        peer.make_store(full)
        run(peer.take_in(full, source, "a"))
        sync_tree(work)
        stores = [("chain", chain), ("full", full)]
        for _, store in stores:
            # Not measured: whoever is first touches memory for the other.
            run(peer.give_back(store, "a", out))
            require_equal(source, out)
            shutil.rmtree(out)
        for number in range(runs):
            for name, store in stores[:: -1 if number % 2 else 1]:
                warm(store)
                outcome.cost(name, run(peer.give_back(store, "a", out)))
                shutil.rmtree(out)
            pair = [outcome.series[name].costs[-1].seconds for name, _ in stores]
            outcome.size("relative_speed", pair[1] / pair[0])
            say(f"  run {number + 1}: chain {pair[0]:.2f} s, full {pair[1]:.2f} s")
    except (CommandFailedError, OSError) as error:
        outcome.failure = str(error)
        say(f"  failed: {error}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return outcome.report()


def timed(peer: Peer, command: Command, store: Path) -> Cost:
    """Run it; for programs that do not sync what they store, the time to do so is added."""
    cost = run(command)
    return cost if peer.syncs else Cost(cost.seconds + sync_tree(store), cost.cpu, cost.rss)


def warm(folder: Path) -> None:
    """Read all files below a folder, so that they are in the page cache."""
    buffer = bytearray(1 << 20)
    for where, _, names in os.walk(folder):
        for name in names:
            with (Path(where) / name).open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass


def touch(folder: Path) -> None:
    """Give all files new times, as the files of another checkpoint have.

    Otherwise borg and restic do not even open those that they know by name, inode and time.
    """
    for path in folder.iterdir():
        os.utime(path)


def require_equal(one: Path, other: Path) -> None:
    """CommandFailedError unless both folders hold the same files with the same bytes."""
    names = sorted(item.name for item in one.iterdir())
    if names != sorted(item.name for item in other.iterdir()):
        raise CommandFailedError("gpuimg gave back other files")
    _, different, lost = filecmp.cmpfiles(one, other, names, shallow=False)
    if different or lost:
        raise CommandFailedError(f"gpuimg gave back other bytes: {', '.join([*different, *lost])}")


@contextmanager
def selection(source: Path, target: Path, files: tuple[str, ...]) -> Iterator[Path]:
    """A directory with only these page files of a checkpoint (and all small ones), by hard links."""
    target.mkdir()
    for path in source.iterdir():
        if path.name in files or "pages-" not in path.name:
            os.link(path, target / path.name)
    yield target
    shutil.rmtree(target)
