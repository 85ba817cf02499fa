"""Several processes at work on one store: nothing is lost, whoever comes first."""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import pytest

import gpuimg
from gpuimg.errors import BusyError, GpuimgError, MissingObjectError, UnknownReferenceError
from gpuimg.store import gc as gc_module
from gpuimg.store.index import Index
from gpuimg.store.layout import StoreFolder
from gpuimg.store.lease import exclusive_lock
from gpuimg.store.reader import ChunkReader
from gpuimg.store.store import Store

from . import lab


def recipe(seed: int) -> lab.Files:
    """The files of a checkpoint: some blocks that many share, some of its own."""
    rng = random.Random(seed)
    blocks = [lab.random_pages(("block", rng.randrange(24)), 24) for _ in range(4)]
    own = lab.random_pages(("own", seed), 32)
    return {
        "pages-1.img": bytes(16 * lab.PAGE).join([*blocks, own]),
        "buffer.bin": b"".join(blocks[:2]),
        "core.img": b"%d" % seed,
    }


def writer_job(report: lab.Report, root: Path, name: str, seconds: float) -> None:
    """Imports; moves its tag; removes checkpoints of its own. Reports (id, seed) and (id, None) when gone."""
    rng = random.Random(name)
    own: list[str] = []
    until = time.monotonic() + seconds
    with gpuimg.open_store(root) as store:
        while time.monotonic() < until:
            seed = rng.randrange(1 << 30)
            made = lab.take(store, recipe(seed), tag=f"newest-{name}")
            report((made, seed))
            own.append(made)
            if rng.random() < 0.2:
                store.set_tag("of-all", made)
            if rng.random() < 0.2:
                store.set_tag("kept", rng.choice(own))
            if len(own) > 6:
                victim = own.pop(rng.randrange(len(own) - 1))
                report((victim, None))
                store.remove(victim)


def collector_job(report: lab.Report, root: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    runs = deleted = rewritten = 0
    with gpuimg.open_store(root) as store:
        while time.monotonic() < until:
            found = store.gc()
            runs += 1
            deleted += found.deleted_packs
            rewritten += found.rewritten_packs
    report((runs, deleted, rewritten))


def reader_job(report: lab.Report, root: Path, seconds: float) -> None:
    """Reads what there is. What cannot be read must have been removed meanwhile."""
    rng = random.Random("reader")
    until = time.monotonic() + seconds
    reads = verified = 0
    with gpuimg.open_store(root) as store:
        while time.monotonic() < until:
            found = store.checkpoints()
            if not found:
                continue
            checkpoint = rng.choice(found)
            try:
                files = recipe(int(checkpoint.read("core.img")))
                assert checkpoint.read("buffer.bin") == files["buffer.bin"]
                assert b"".join(checkpoint.stream("pages-1.img")) == files["pages-1.img"]
                reads += 1
            except GpuimgError:
                with contextlib.suppress(UnknownReferenceError):
                    store.checkpoint(checkpoint.id)
                    raise
            if rng.random() < 0.1:
                report_ = store.verify()
                assert not report_.faults, report_.faults
                store.stats()
                verified += 1
    report((reads, verified))


def work_together(root: Path, work: Path, seconds: float) -> None:
    gpuimg.init_store(root).close()
    writers = [lab.Running(writer_job, root, name, seconds) for name in ("a", "b")]
    collector = lab.Running(collector_job, root, seconds)
    reader = lab.Running(reader_job, root, seconds)
    expected: dict[str, lab.Files] = {}
    made = 0
    for writer in writers:
        outcome = writer.wait()
        assert outcome.code == 0, outcome
        for checkpoint, seed in outcome.reports:
            if seed is None:
                del expected[checkpoint]
            else:
                made += 1
                expected[checkpoint] = recipe(seed)
    collected, read = collector.wait(), reader.wait()
    assert collected.code == 0, collected
    assert read.code == 0, read
    runs, deleted, rewritten = collected.reports[0]
    assert made > 20 and runs > 5 and deleted and rewritten
    assert min(read.reports[0]) > 0
    lab.check(root, expected, work)
    with gpuimg.open_store(root) as store:
        assert {checkpoint.id for checkpoint in store.checkpoints()} == set(expected)
    lab.collect(root)
    lab.check(root, expected, work)


@pytest.mark.slow
def test_two_writers_a_collector_and_a_reader_lose_nothing(ram: Path) -> None:
    work_together(ram / "store", ram, 30.0)


@pytest.mark.soak
def test_two_writers_a_collector_and_a_reader_lose_nothing_for_long(ram: Path) -> None:
    work_together(ram / "store", ram, 240.0)


# What could come between


@pytest.fixture
def store(ram: Path) -> Store:
    with gpuimg.init_store(ram / "store") as store:
        yield store  # type: ignore[misc]


def put(session: object, files: lab.Files) -> None:
    for name, data in files.items():
        file = session.file(name)  # type: ignore[attr-defined]
        file.write(data)
        file.close()
    session.workers.drain()  # type: ignore[attr-defined]


def test_a_pack_condemned_when_a_writer_has_chosen_its_chunks_comes_back(store: Store, ram: Path) -> None:
    files = lab.contents(1)
    store.remove(lab.take(store, files))
    with store.ingest() as session:
        put(session, files)
        assert session.workers.failure is None
        outcome = lab.run(lab.gc_job, store.path)
        assert outcome.reports[0].condemned_packs and outcome.reports[0].waiting_packs
        assert not lab.pack_bytes(store.path)
        checkpoint = session.commit(tag="t").id
    lab.check(store.path, {checkpoint: files}, ram)
    lab.collect(store.path)
    lab.check(store.path, {checkpoint: files}, ram)


def test_a_pack_condemned_within_a_look_up_comes_back(
    store: Store, ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gc runs exactly between the look and the use of what was found."""
    files = lab.contents(1)
    store.remove(lab.take(store, files))
    real = Index.contains_whole
    ran = []

    def contains_whole(self: Index, chunk_ids: list[bytes]) -> list[bool]:
        found = real(self, chunk_ids)
        if any(found) and not ran:
            ran.append(True)
            assert lab.run(lab.gc_job, store.path).code == 0
        return found

    monkeypatch.setattr(Index, "contains_whole", contains_whole)
    with store.ingest() as session:
        put(session, files)
        assert ran
        checkpoint = session.commit().id
    monkeypatch.undo()
    lab.check(store.path, {checkpoint: files}, ram)


def test_a_writer_that_comes_while_packs_are_condemned_writes_anew_or_gets_them_back(
    store: Store, ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = lab.contents(1)
    store.remove(lab.take(store, files))
    sessions = []
    real = gc_module.live_leases

    def live_leases(folder: StoreFolder) -> set[bytes]:
        # Between every two steps of gc that ask who is alive, another one begins.
        found = real(folder)
        session = store.ingest()
        put(session, files)
        sessions.append(session)
        return found

    monkeypatch.setattr(gc_module, "live_leases", live_leases)
    store.gc()
    monkeypatch.undo()
    assert len(sessions) > 2
    expected = {session.commit().id: files for session in sessions}
    lab.check(store.path, expected, ram)
    lab.collect(store.path)
    lab.check(store.path, expected, ram)


def test_a_long_writer_keeps_what_it_counts_on_through_many_gcs(store: Store, ram: Path) -> None:
    files, more = lab.contents(1), lab.contents(5)
    store.remove(lab.take(store, files))
    with store.ingest() as session:
        put(session, files)
        late = session.file("late.img")
        late.write(lab.random_pages("late", 300))
        for number in range(5):
            # Its own pack in tmp/ is old by now, and it lives.
            for path in (store.path / "tmp").iterdir():
                os.utime(path, (0, 0))
            outcome = lab.run(lab.gc_job, store.path)
            assert outcome.code == 0 and not outcome.reports[0].deleted_packs
            store.remove(lab.take(store, {f"{number}": more["buffer.bin"]}))
        late.close()
        checkpoint = session.commit(tag="t").id
    expected = {checkpoint: {**files, "late.img": lab.random_pages("late", 300)}}
    lab.check(store.path, expected, ram)
    lab.collect(store.path)
    lab.check(store.path, expected, ram)


def test_a_writer_whose_pack_came_during_a_repair_commits(store: Store, ram: Path) -> None:
    files = lab.contents(1)
    with store.ingest() as session:
        put(session, files)
        outcome = lab.run(lab.repair_job, store.path)
        assert outcome.code == 0
        checkpoint = session.commit().id
    lab.check(store.path, {checkpoint: files}, ram)


def test_a_segment_that_a_collector_moves_is_found_where_it_is_now(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gc rewrites and deletes its pack exactly between look-up and read."""
    dead = {"a": lab.random_pages("dead", 200)}
    kept = {"b": lab.random_pages("kept", 40)}
    outcome = lab.run(import_both, store.path, dead, kept, prepare=[lab.one_pack])
    _, checkpoint_id = outcome.reports
    checkpoint = store.checkpoint(checkpoint_id)
    for doomed in store.checkpoints():
        if doomed.id != checkpoint_id:
            store.remove(doomed.id)
    real = ChunkReader._places
    ran = []

    def places(self: ChunkReader, *arguments: object) -> object:
        found = real(self, *arguments)  # type: ignore[arg-type]
        if not ran:
            ran.append(lab.run(lab.gc_job, store.path))
        return found

    monkeypatch.setattr(ChunkReader, "_places", places)
    assert checkpoint.read("b") == kept["b"]
    assert ran[0].reports[0].rewritten_packs


def import_both(report: lab.Report, root: Path, dead: lab.Files, kept: lab.Files) -> None:
    """Two checkpoints; all of the second lies in the pack of the first."""
    with gpuimg.open_store(root) as store:
        report(lab.take(store, {**dead, **kept}))
        report(lab.take(store, kept))


def test_a_read_that_began_before_a_gc_ends_well(store: Store) -> None:
    outcome = lab.run(
        import_both,
        store.path,
        {"a": lab.random_pages("dead", 1600)},
        {"b": lab.random_pages("kept", 1500)},
        prepare=[lab.one_pack],
    )
    first, second = outcome.reports
    stream = store.checkpoint(second).stream("b")
    data = bytes(next(stream))
    store.remove(first)
    assert lab.run(lab.gc_job, store.path).reports[0].rewritten_packs
    data += b"".join(bytes(part) for part in stream)
    assert data == lab.random_pages("kept", 1500)


def test_a_checkpoint_that_was_removed_says_so_to_its_reader(store: Store) -> None:
    checkpoint = store.checkpoint(lab.take(store, lab.contents(1)))
    store.remove(checkpoint.id)
    assert lab.run(lab.gc_job, store.path).reports[0].deleted_packs
    with pytest.raises(MissingObjectError):
        checkpoint.read("buffer.bin")


def test_chunks_that_two_writers_wrote_at_once_are_no_fault_when_one_copy_goes(
    store: Store, ram: Path
) -> None:
    """The copy that the index knows may be garbage while the other lies in a pack that stays."""
    shared = lab.random_pages("shared", 64)
    kept = {"k": lab.random_pages("kept", 400)}
    first, second = store.ingest(), store.ingest()
    put(first, {"s": shared})
    put(second, {"s": shared, **kept})
    doomed = [first.commit().id, second.commit().id]
    expected = {lab.take(store, kept): kept}
    for checkpoint in doomed:
        store.remove(checkpoint)
    lab.collect(store.path)
    lab.check(store.path, expected, ram)
    again = {"s": shared}
    expected[lab.take(store, again)] = again
    lab.check(store.path, expected, ram)


# rm and tags


def test_a_tag_set_while_its_checkpoint_is_removed_never_dangles(
    store: Store, ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = lab.take(store, lab.contents(1), tag="t")
    catalogue = store._context.catalogue
    real = catalogue.tags_of
    outcomes: list[lab.Running] = []

    def tags_of(checkpoint_id: bytes) -> tuple[str, ...]:
        found = real(checkpoint_id)
        if not outcomes:
            outcomes.append(lab.Running(tag_job, store.path, "new", checkpoint))
            time.sleep(0.3)
        return found

    monkeypatch.setattr(catalogue, "tags_of", tags_of)
    store.remove(checkpoint)
    outcomes[0].wait()
    lab.check(store.path, {}, ram)


def test_a_tag_moved_while_its_old_checkpoint_is_removed_stays(
    store: Store, ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = lab.take(store, lab.contents(1), tag="t")
    new = lab.take(store, lab.contents(2))
    catalogue = store._context.catalogue
    real = catalogue.tags_of
    outcomes: list[lab.Running] = []

    def tags_of(checkpoint_id: bytes) -> tuple[str, ...]:
        found = real(checkpoint_id)
        if not outcomes:
            outcomes.append(lab.Running(tag_job, store.path, "t", new))
            time.sleep(0.3)
        return found

    monkeypatch.setattr(catalogue, "tags_of", tags_of)
    store.remove(old)
    assert outcomes[0].wait().code == 0
    assert store.tags() == {"t": new}
    lab.check(store.path, {new: lab.contents(2)}, ram)


def tag_job(_: lab.Report, root: Path, name: str, reference: str) -> None:
    with gpuimg.open_store(root) as store:
        store.set_tag(name, reference)


def test_gc_beside_an_rm_is_no_error(store: Store, ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doomed = lab.take(store, lab.contents(1))
    kept = {lab.take(store, lab.contents(2)): lab.contents(2)}
    catalogue = store._context.catalogue
    real = catalogue.ids
    ran = []

    def ids() -> list[bytes]:
        found = real()
        if not ran:
            ran.append(lab.run(lab.remove_job, store.path, doomed))
        return found

    monkeypatch.setattr(catalogue, "ids", ids)
    store.gc()
    monkeypatch.undo()
    lab.check(store.path, kept, ram)


def test_verify_beside_an_rm_and_gc_finds_no_fault(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    doomed = lab.take(store, lab.contents(1))
    catalogue = store._context.catalogue
    real = catalogue.load
    ran = []

    def load(checkpoint_id: bytes) -> object:
        found = real(checkpoint_id)
        if not ran:
            ran.append(lab.run(lab.remove_job, store.path, doomed))
            ran.append(lab.run(lab.gc_job, store.path))
        return found

    monkeypatch.setattr(catalogue, "load", load)
    assert not store.verify().faults
    assert ran[1].reports[0].deleted_packs


# Who must wait


@pytest.mark.parametrize("job", [lab.gc_job, lab.repair_job])
def test_of_two_collectors_one_is_told_that_the_other_is_at_work(store: Store, job: lab.Job) -> None:
    holding = lab.Running(hold_job, store.path)
    assert holding.next_report() == "held"
    outcome = lab.run(job, store.path)
    assert outcome.code == BusyError.exit_status
    assert isinstance(outcome.reports[0], BusyError)
    holding.kill()
    holding.wait()
    assert lab.run(job, store.path).code == 0


def hold_job(report: lab.Report, root: Path) -> None:
    with gc_module.only_collector(StoreFolder(root)):
        report("held")
        time.sleep(60)


def test_a_lock_that_is_never_let_go_is_told_in_words(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuimg.store import lease

    monkeypatch.setattr(lease, "_LOCK_SECONDS", 0.1)
    with exclusive_lock(StoreFolder(store.path)), pytest.raises(BusyError):
        lab.take(store, lab.contents(1))
