"""SIGKILL within incremental imports and within collections of chains, and a parent that is removed and
collected by others while its child is being taken."""

from __future__ import annotations

import hashlib
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import gpuimg
from gpuimg.errors import BusyError, UnknownReferenceError
from gpuimg.store.bases import DEPTH_LIMIT
from gpuimg.store.directory import import_directory
from gpuimg.store.store import Store
from tests.fixtures.incremental import chain, chunk_ids, drifted, put, take
from tests.fixtures.store_data import floats, noise

from . import lab

Expected = dict[str, lab.Files]
# Every point would take minutes; which ones are taken is drawn anew for every run, and printed.
POINTS = 8


def contents(step: int) -> lab.Files:
    """The files at a step of a training: numbers that drift, pages that come, and ballast of its own."""
    weights = floats(600_000, 1)
    pages = lab.random_pages("pages", 120)
    for number in range(step):
        weights = drifted(weights, number)
        at = number * 17 % 100 * lab.PAGE
        pages = pages[:at] + lab.random_pages(("page", number), 5) + pages[at:]
    return {
        "weights.bin": weights,
        "pages-1.img": pages,
        "frozen.bin": floats(300_000, 2),
        "ballast.bin": lab.random_pages(("ballast", step), 250),
        "core-1.img": b"step %d" % step,
    }


def import_job(report: lab.Report, root: Path, directory: Path, parent: str | None) -> None:
    with gpuimg.open_store(root) as store:
        found = store.checkpoint(parent) if parent else None
        report(import_directory(store, directory, parent=found).id)


class Series(NamedTuple):
    """A store with the checkpoints of some steps, each the parent of the next, in order."""

    root: Path
    expected: Expected

    @property
    def last(self) -> str:
        return list(self.expected)[-1]


def make_series(folder: Path, count: int) -> Series:
    root = folder / "series"
    gpuimg.init_store(root, chunk_size=64 * 1024).close()
    expected: Expected = {}
    parent: str | None = None
    for step in range(count):
        directory = lab.write_files(folder / "images", contents(step))
        # Living and dead lie in one pack for sure.
        outcome = lab.run(import_job, root, directory, parent, prepare=[lab.one_pack])
        assert outcome.code == 0, outcome
        parent = outcome.reports[0]
        expected[parent] = contents(step)
        shutil.rmtree(directory)
    return Series(root, expected)


@pytest.fixture
def series(ram: Path) -> Series:
    made = make_series(ram, DEPTH_LIMIT)
    with gpuimg.open_store(made.root) as store:
        chunk = chunk_ids(store, store.checkpoint(made.last), "weights.bin")[0]
        assert len(chain(store, chunk)) == DEPTH_LIMIT
    return made


def some_points(last: int) -> Iterator[int]:
    """Some of the kill points 1 to `last`, in order, and the one behind them, where nothing is killed."""
    for number in [*sorted(random.sample(range(1, last + 1), min(POINTS, last))), last + 1]:
        print("kill point", number, "of", last)
        yield number


def count_points(job: lab.Job, root: Path, *arguments: object) -> int:
    """How many kill points a job has."""
    low, high = 1, 400
    while low < high:
        middle = (low + high) // 2
        store = lab.copy_store(root, root.parent / "counted")
        if lab.run(job, store, *arguments, prepare=[lab.KillAt(middle)]).killed:
            low = middle + 1
        else:
            high = middle
    return low - 1


@pytest.mark.slow
@pytest.mark.parametrize("torn", [False, True], ids=["between calls", "within writes"])
def test_an_increment_killed_anywhere_loses_nothing(series: Series, ram: Path, torn: bool) -> None:
    files = contents(DEPTH_LIMIT)
    directory = lab.write_files(ram / "images", files)
    whole = lab.pack_bytes(series.root)
    points = count_points(import_job, series.root, directory, series.last)
    assert points > 20
    for number in some_points(points):
        store = lab.copy_store(series.root, ram / "store")
        kill = lab.KillAt(number, torn=torn)
        outcome = lab.run(import_job, store, directory, series.last, prepare=[kill])
        assert outcome.killed == (number <= points), number
        expected = dict(series.expected)
        with gpuimg.open_store(store) as opened:
            new = {checkpoint.id for checkpoint in opened.checkpoints()} - expected.keys()
        assert len(new) <= 1
        assert set(outcome.reports) <= new
        expected |= dict.fromkeys(new, files)
        lab.check(store, expected, ram)
        lab.collect(store)
        lab.check(store, expected, ram)
        if not new:
            assert lab.pack_bytes(store) == whole
        # It can go on from there.
        again = lab.run(import_job, store, directory, series.last)
        assert again.code == 0, again
        lab.check(store, {**expected, again.reports[0]: files}, ram)


@pytest.mark.slow
def test_increments_killed_at_random_moments_one_after_the_other(series: Series, ram: Path) -> None:
    """Each goes on from the last that was completed; what is killed is left lying about."""
    expected, parent = dict(series.expected), series.last
    killed = done = 0
    for step in range(DEPTH_LIMIT, DEPTH_LIMIT + 8):
        directory = lab.write_files(ram / "images", contents(step))
        outcome = lab.run_killed_after(random.uniform(0.0, 0.1), import_job, series.root, directory, parent)
        killed += outcome.killed
        with gpuimg.open_store(series.root) as store:
            new = {checkpoint.id for checkpoint in store.checkpoints()} - expected.keys()
        expected |= dict.fromkeys(new, contents(step))
        done += len(new)
        parent = next(iter(new), parent)
        shutil.rmtree(directory)
    assert killed
    lab.check(series.root, expected, ram)
    lab.collect(series.root)
    lab.check(series.root, expected, ram)


@pytest.fixture
def half_dead(ram: Path) -> tuple[Series, list[str]]:
    """A store of which gc must keep bases, rewrite packs for the little that lives in them, delete others."""
    made = make_series(ram, 7)
    ids = list(made.expected)
    doomed = [ids[0], ids[1], ids[5], ids[6]]
    with gpuimg.open_store(made.root) as store:
        for checkpoint in doomed:
            store.remove(checkpoint)
    kept = {checkpoint: files for checkpoint, files in made.expected.items() if checkpoint not in doomed}
    return Series(made.root, kept), doomed


@pytest.mark.slow
def test_a_gc_of_chains_killed_anywhere_loses_nothing(half_dead: tuple[Series, list[str]], ram: Path) -> None:
    series, _ = half_dead
    ideal = lab.copy_store(series.root, ram / "ideal")
    with gpuimg.open_store(ideal) as store:
        report = store.gc()
        assert report.rewritten_packs and report.deleted_packs
    lab.check(ideal, series.expected, ram)
    points = count_points(lab.gc_job, series.root)
    assert points > 20
    lost = contents(DEPTH_LIMIT + 1)
    directory = lab.write_files(ram / "images", lost)
    for number in some_points(points):
        store = lab.copy_store(series.root, ram / "store")
        outcome = lab.run(lab.gc_job, store, prepare=[lab.KillAt(number)])
        assert outcome.killed == (number <= points), number
        lab.check(store, series.expected, ram)
        # What the killed gc has left half done is no ground to build on.
        expected = dict(series.expected)
        for parent in (None, series.last):
            again = lab.run(import_job, store, directory, parent)
            assert again.code == 0, again
            expected[again.reports[0]] = lost
        lab.check(store, expected, ram)
        with gpuimg.open_store(store) as opened:
            for checkpoint in expected.keys() - series.expected.keys():
                opened.remove(checkpoint)
        lab.collect(store)
        # What a killed gc has rewritten may be dead itself by now.
        lab.collect(store)
        lab.check(store, series.expected, ram)
        assert lab.pack_bytes(store) <= lab.pack_bytes(ideal) * 1.5
    with gpuimg.open_store(store) as opened:
        for checkpoint in opened.checkpoints():
            opened.remove(checkpoint.id)
    lab.collect(store)
    assert lab.pack_bytes(store) == 0


@pytest.mark.slow
def test_a_child_of_a_removed_parent_outlives_a_killed_gc(series: Series, ram: Path) -> None:
    """It has found chunks and bases in packs that the gc was about to take away when it was killed."""
    new = contents(DEPTH_LIMIT)
    same = {f"same-{name}": data for name, data in contents(DEPTH_LIMIT - 1).items()}
    removed = lab.copy_store(series.root, ram / "removed")
    with gpuimg.open_store(removed) as store:
        for checkpoint in series.expected:
            store.remove(checkpoint)
    for number in some_points(count_points(lab.gc_job, removed)):
        path = lab.copy_store(series.root, ram / "store")
        with gpuimg.open_store(path) as store:
            parent = store.checkpoint(series.last)
            with store.ingest(parent=parent) as session:
                put(session, {**new, **same})
                session.workers.drain()
                for checkpoint in series.expected:
                    store.remove(checkpoint)
                outcome = lab.run(lab.gc_job, path, prepare=[lab.KillAt(number)])
                assert outcome.killed or outcome.code == 0
                made = session.commit().id
        lab.check(path, {made: {**new, **same}}, ram)
        lab.collect(path)
        lab.check(path, {made: {**new, **same}}, ram)


# Beside others


def digest(files: lab.Files) -> str:
    return hashlib.blake2b(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()


def training_job(report: lab.Report, root: Path, seconds: float, seed: int) -> None:
    """Takes increments of what checkpoint there is; reports (id, digest, delta bytes, unchanged bytes)."""
    rng = random.Random(seed)
    until = time.monotonic() + seconds
    files = {
        "weights.bin": floats(400_000, seed),
        "frozen.bin": floats(400_000, 0),
        "pages-1.img": noise(500_000, 1),
    }
    with gpuimg.open_store(root) as store:
        while time.monotonic() < until:
            files["weights.bin"] = drifted(files["weights.bin"], rng.randrange(1 << 30))
            if rng.random() < 0.3:
                files["pages-1.img"] = noise(8192, rng.randrange(1 << 30)) + files["pages-1.img"][:600_000]
            parent = newest(store)
            with store.ingest(parent=parent) as session:
                put(session, files)
                session.workers.drain()
                time.sleep(rng.choice([0.0, 0.01, 0.03]))
                try:
                    made = session.commit(tag="newest")
                except UnknownReferenceError:
                    # Committed, and removed before it could be opened.
                    continue
            report((made.id, digest(files), made.statistics.delta_bytes, made.statistics.unchanged_bytes))


def newest(store: Store) -> gpuimg.Checkpoint | None:
    try:
        return store.checkpoint("newest")
    except UnknownReferenceError:
        return None


def remover_job(report: lab.Report, root: Path, seconds: float) -> None:
    """Removes parents and collects, over and over; reports what it has removed."""
    rng = random.Random("remover")
    until = time.monotonic() + seconds
    removed = []
    runs = deleted = 0
    with gpuimg.open_store(root) as store:
        while time.monotonic() < until:
            for checkpoint in store.checkpoints():
                # The newest, the next one's parent, as gladly as any other.
                if rng.random() < 0.6:
                    try:
                        removed.append(store.remove(checkpoint.id))
                    except UnknownReferenceError:
                        continue
            try:
                deleted += store.gc().deleted_packs
            except BusyError:
                continue
            runs += 1
    report((removed, runs, deleted))


def train_and_remove(root: Path, work: Path, seconds: float) -> None:
    gpuimg.init_store(root, chunk_size=64 * 1024).close()
    trainers = [lab.Running(training_job, root, seconds, seed) for seed in (1, 2)]
    remover = lab.Running(remover_job, root, seconds)
    made: dict[str, str] = {}
    deltas = unchanged = 0
    for trainer in trainers:
        outcome = trainer.wait()
        assert outcome.code == 0, outcome
        for checkpoint, expected, delta, same in outcome.reports:
            made[checkpoint] = expected
            deltas += bool(delta)
            unchanged += bool(same)
    outcome = remover.wait()
    assert outcome.code == 0, outcome
    removed, runs, deleted = outcome.reports[0]
    assert len(made) > 10 and deltas > 5 and unchanged > 5
    assert runs > 5 and deleted and len(removed) > 5
    with gpuimg.open_store(root) as store:
        left = store.checkpoints()
        assert {checkpoint.id for checkpoint in left} == made.keys() - set(removed)
        for checkpoint in left:
            assert digest({name: checkpoint.read(name) for name in checkpoint.files}) == made[checkpoint.id]
        report = store.verify()
        assert not report.faults, report.faults
    lab.collect(root)
    with gpuimg.open_store(root) as store:
        assert not store.verify().faults
        # One more, of what has gone through all that.
        last = take(store, contents(1), parent=newest(store)).id
    lab.check(root, {last: contents(1)}, work)


@pytest.mark.slow
def test_parents_that_others_remove_and_collect_are_no_loss(ram: Path) -> None:
    train_and_remove(ram / "store", ram, 9.0)


@pytest.mark.soak
def test_parents_that_others_remove_and_collect_are_no_loss_for_long(ram: Path) -> None:
    train_and_remove(ram / "store", ram, 240.0)
