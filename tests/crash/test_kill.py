"""SIGKILL at every point at which a store changes, and at random moments."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest

import gpuimg
from gpuimg.errors import NotAStoreError
from gpuimg.store.store import repair_store

from . import lab

Expected = dict[str, lab.Files]


@pytest.fixture
def base(ram: Path) -> tuple[Path, Expected]:
    """A store with two checkpoints that share data."""
    return make_base(ram / "base", [1, 2])


def make_base(root: Path, numbers: list[int]) -> tuple[Path, Expected]:
    expected: Expected = {}
    gpuimg.init_store(root).close()
    for number in numbers:
        files = lab.contents(number)
        directory = lab.write_files(root.parent / f"base-images-{number}", files)
        # What gc shall rewrite lies in one pack for sure.
        prepare = [lab.one_pack] if number == 1 else []
        outcome = lab.run(lab.import_job, root, directory, f"t{number}", prepare=prepare)
        assert outcome.code == 0, outcome
        expected[outcome.reports[0]] = files
        shutil.rmtree(directory)
    return root, expected


def deltas(root: Path) -> int:
    """How many chunks are coded against others."""
    with gpuimg.open_store(root) as store:
        return sum(bool(place.base) for _, place in store._context.index.places())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("torn", "parent"),
    [(False, None), (True, None), (True, "t2")],
    ids=["between calls", "within writes", "incremental"],
)
def test_an_import_killed_at_any_call_loses_nothing_and_leaves_only_garbage(
    base: tuple[Path, Expected], ram: Path, torn: bool, parent: str | None
) -> None:
    root, before = base
    files = lab.following(lab.contents(2)) if parent else lab.contents(3)
    directory = lab.write_files(ram / "images", files)
    whole = lab.pack_bytes(root)
    committed = killed = 0
    for number in lab.kill_points():
        store = lab.copy_store(root, ram / "store")
        outcome = lab.run(
            lab.import_job, store, directory, "t1", parent, prepare=[lab.KillAt(number, torn=torn)]
        )
        expected = dict(before)
        if outcome.reports:
            expected[outcome.reports[0]] = files
            committed += 1
        lab.check(store, expected, ram)
        with gpuimg.open_store(store) as opened:
            # The tag is where it was, or at the new checkpoint, whole in any case.
            tagged = opened.checkpoint("t1").id
            present = {checkpoint.id for checkpoint in opened.checkpoints()}
            new = present - before.keys()
            assert tagged in before or tagged in new
            assert len(new) <= 1
            for checkpoint_id in new:
                expected[checkpoint_id] = files
        lab.collect(store)
        lab.check(store, expected, ram)
        if not new:
            assert lab.pack_bytes(store) == whole
        if not outcome.killed:
            assert outcome.code == 0
            assert bool(deltas(store)) == bool(parent)
            break
        killed += 1
    assert killed > 20
    assert committed


@pytest.fixture
def half_dead(ram: Path) -> tuple[Path, Expected, list[lab.Files]]:
    """A store that gc has all its work with: packs that are dead, packs that are mostly dead, and packs in
    which nothing is needed but what others are coded against."""
    root, expected = make_base(ram / "base", [1, 2, 3, 6, 7])
    removed = []
    with gpuimg.open_store(root) as store:
        child = lab.take(store, lab.following(lab.contents(3)), parent="t3")
        grandchild = lab.following(lab.following(lab.contents(3)), 1)
        expected[lab.take(store, grandchild, parent=child)] = grandchild
        doomed = lab.take(store, lab.following(lab.contents(6)), parent="t6")
        store.remove(doomed)
        store.remove(child)
        removed.append(lab.following(lab.contents(6)))
        for tag in ("t1", "t3", "t7"):
            removed.append(expected.pop(store.remove(tag)))
    assert deltas(root)
    return root, expected, removed


@pytest.mark.slow
def test_a_gc_killed_at_any_call_loses_nothing_and_the_next_one_frees_the_space(
    half_dead: tuple[Path, Expected, list[lab.Files]], ram: Path
) -> None:
    root, expected, _ = half_dead
    ideal = lab.copy_store(root, ram / "ideal")
    with gpuimg.open_store(ideal) as store:
        report = store.gc()
        assert report.rewritten_packs and report.deleted_packs
    killed = 0
    for number in lab.kill_points():
        store = lab.copy_store(root, ram / "store")
        outcome = lab.run(lab.gc_job, store, prepare=[lab.KillAt(number)])
        lab.check(store, expected, ram)
        lab.collect(store)
        # What a killed gc has rewritten may be dead itself by now.
        lab.collect(store)
        lab.check(store, expected, ram)
        assert lab.pack_bytes(store) <= lab.pack_bytes(ideal) * 1.5
        if not outcome.killed:
            assert outcome.code == 0
            break
        killed += 1
    assert killed > 30
    # And nothing at all stays once nothing is needed.
    with gpuimg.open_store(store) as opened:
        for checkpoint in opened.checkpoints():
            opened.remove(checkpoint.id)
    lab.collect(store)
    assert lab.pack_bytes(store) == 0


@pytest.mark.slow
def test_a_writer_that_outlives_a_killed_gc_commits(
    half_dead: tuple[Path, Expected, list[lab.Files]], ram: Path
) -> None:
    """It has found chunks in packs that the gc was about to take away when it was killed."""
    root, expected, removed = half_dead
    for number in lab.kill_points():
        path = lab.copy_store(root, ram / "store")
        with gpuimg.open_store(path) as store, store.ingest() as session:
            for i, files in enumerate(removed):
                for name, data in files.items():
                    file = session.file(f"{i}-{name}")
                    file.write(data)
                    file.close()
            session.workers.drain()
            outcome = lab.run(lab.gc_job, path, prepare=[lab.KillAt(number)])
            checkpoint = session.commit(tag="again").id
        again = {f"{i}-{name}": data for i, files in enumerate(removed) for name, data in files.items()}
        lab.check(path, {**expected, checkpoint: again}, ram)
        lab.collect(path)
        lab.check(path, {**expected, checkpoint: again}, ram)
        if not outcome.killed:
            assert outcome.code == 0
            return


@pytest.mark.slow
def test_a_repair_killed_at_any_call_leaves_a_whole_store_whole(
    base: tuple[Path, Expected], ram: Path
) -> None:
    root, expected = base
    for number in lab.kill_points():
        store = lab.copy_store(root, ram / "store")
        outcome = lab.run(lab.repair_job, store, prepare=[lab.KillAt(number)])
        lab.check(store, expected, ram)
        lab.collect(store)
        lab.check(store, expected, ram)
        if not outcome.killed:
            assert outcome.code == 0
            return


@pytest.mark.slow
def test_a_repair_of_damage_killed_at_any_call_can_be_run_again(ram: Path) -> None:
    root, expected = make_base(ram / "base", [1, 2, 6])
    hurt = damage_one_chunk(root, "t1")
    ideal = lab.copy_store(root, ram / "ideal")
    report = repair_store(ideal)
    assert set(report.hurt) == hurt
    saved = {name: files for name, files in expected.items() if name not in hurt}
    assert saved
    killed = 0
    for number in lab.kill_points():
        store = lab.copy_store(root, ram / "store")
        outcome = lab.run(lab.repair_job, store, prepare=[lab.KillAt(number)])
        again = repair_store(store)
        assert set(again.hurt) == hurt
        with gpuimg.open_store(store) as opened:
            assert {fault.checkpoint for fault in opened.verify().faults} == hurt
            # The same contents heal what was hurt.
            lab.take(opened, lab.contents(1))
        lab.check(store, expected, ram)
        lab.collect(store)
        lab.check(store, expected, ram)
        if not outcome.killed:
            assert outcome.code == 0
            break
        killed += 1
    assert killed > 15


def damage_one_chunk(root: Path, tag: str) -> set[str]:
    """Flip a byte in a chunk that only this checkpoint needs, and in the table of another pack of it;
    returns the checkpoints hurt."""
    with gpuimg.open_store(root) as store:
        checkpoint = store.checkpoint(tag)
        reader = store._context.reader
        ids = {
            other.id: {
                chunk_id
                for entry in other.files.values()
                for ref in entry.segments
                for chunk_id in reader.segment(ref).chunk_ids()
            }
            for other in store.checkpoints()
        }
        own = ids[checkpoint.id].difference(*(ids[i] for i in ids if i != checkpoint.id))
        place = store._context.index.lookup([sorted(own)[0]])[0]
        assert place is not None
        entry = store._context.index.pack(place.pack)
        assert entry is not None
        path = store._context.folder.pack(entry.id)
        others = [p for p in (root / "packs").glob("*/*.pack") if p != path]
    flip(path, place.offset + place.stored // 2)
    flip(others[0], others[0].stat().st_size - 100)
    return {checkpoint.id}


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 0x20]))


def test_an_init_killed_at_any_call_is_no_store_or_a_store(ram: Path) -> None:
    for number in lab.kill_points():
        root = ram / f"store-{number}"
        outcome = lab.run(lab.init_job, root, prepare=[lab.KillAt(number)])
        try:
            gpuimg.open_store(root).close()
        except NotAStoreError:
            assert outcome.killed
            gpuimg.init_store(root).close()
        lab.check(root, {}, ram)
        if not outcome.killed:
            assert outcome.code == 0
            return


class History:
    """One store through many killed jobs, and what it must hold."""

    def __init__(self, ram: Path, seed: int) -> None:
        self.ram = ram
        self.root = ram / "store"
        self.rng = random.Random(seed)
        self.expected: Expected = {}
        self.killed = 0
        self.number = 0
        gpuimg.init_store(self.root).close()

    def run(self, job: lab.Job, seconds: float, *arguments: object) -> lab.Outcome:
        outcome = lab.run_killed_after(self.rng.uniform(0, seconds), job, self.root, *arguments)
        assert outcome.code == 0 or outcome.killed, outcome
        self.killed += outcome.killed
        return outcome

    def step(self, seconds: dict[str, float]) -> None:
        kind = self.rng.choice(["import", "import", "remove", "gc", "gc", "repair"])
        if kind == "import":
            self.number += 1
            files = lab.contents(self.number, pages=64)
            parent = None
            if self.expected and self.rng.random() < 0.6:
                parent = self.rng.choice(sorted(self.expected))
                files = lab.following(self.expected[parent], self.number)
            directory = lab.write_files(self.ram / "images", files)
            reports = self.run(lab.import_job, seconds[kind], directory, "newest", parent).reports
            shutil.rmtree(directory)
            if reports:
                self.expected[reports[0]] = files
        elif kind == "remove" and len(self.expected) > 2:
            # Asked to go: whether it is there or not is both right.
            victim = self.rng.choice(sorted(self.expected))
            del self.expected[victim]
            self.run(lab.remove_job, seconds["gc"], victim)
        elif kind == "gc":
            self.run(lab.gc_job, seconds[kind])
        elif kind == "repair":
            self.run(lab.repair_job, seconds[kind])

    def judge(self) -> None:
        lab.check(self.root, self.expected, self.ram)


def durations(ram: Path) -> dict[str, float]:
    """How long the jobs take when nobody kills them."""
    root, _ = make_base(ram / "timing", [1, 2, 3])
    directory = lab.write_files(ram / "timing-images", lab.contents(4, pages=64))
    found = {}
    for kind, job, arguments in (
        ("import", lab.import_job, (directory, "x")),
        ("gc", lab.gc_job, ()),
        ("repair", lab.repair_job, ()),
    ):
        started = time.monotonic()
        lab.run(job, root, *arguments)
        found[kind] = time.monotonic() - started
    return found


def live_through(ram: Path, seed: int, kills: int) -> None:
    seconds = durations(ram)
    history = History(ram, seed)
    while history.killed < kills:
        history.step(seconds)
        history.judge()
    lab.collect(history.root)
    history.judge()
    with gpuimg.open_store(history.root) as store:
        for checkpoint in store.checkpoints():
            store.remove(checkpoint.id)
    lab.collect(history.root)
    assert lab.pack_bytes(history.root) == 0


@pytest.mark.slow
def test_a_store_lives_through_kills_at_random_moments(ram: Path) -> None:
    live_through(ram, 1, 150)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 7))
def test_a_store_lives_through_thousands_of_kills(ram: Path, seed: int) -> None:
    live_through(ram, seed, 1000)
