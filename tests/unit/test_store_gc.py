"""gc takes what nobody needs and nothing that anybody counts on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest

import gpuimg
from gpuimg.errors import BusyError, DamagedError, GpuimgError
from gpuimg.store import gc as gc_module
from gpuimg.store.lease import exclusive_lock, live_leases
from gpuimg.store.packset import trashed
from tests.fixtures.make_broken import one_core
from tests.fixtures.mini_reader import MiniStore
from tests.fixtures.store_data import KIB, MIB, floats, noise

CHUNK = 64 * KIB


@pytest.fixture
def store(tmp_path):
    with gpuimg.init_store(tmp_path / "store", chunk_size=CHUNK) as opened:
        yield opened


def put(store, files, tag=None):
    with store.ingest() as session:
        write(session, files)
        return session.commit(tag=tag)


def write(session, files):
    for name, data in files.items():
        file = session.file(name)
        file.write(data)
        file.close()


def packs(store):
    return {path.stem for path in (store.path / "packs").rglob("*.pack")}


def condemned(store):
    return {pack_id.hex() for pack_id in trashed(store._folder)}


def size(store):
    return sum(path.stat().st_size for path in (store.path / "packs").rglob("*.pack"))


def wait_for_workers(session):
    """What was written has been looked up."""
    session.workers.drain()


@contextlib.contextmanager
def other_process(store, action):
    """A child that opens the store and does something, then waits to be killed."""
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            with gpuimg.open_store(store.path) as mine:
                keep = action(mine)
                os.write(tell, b"1")
                signal.pause()
                del keep
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(ready, 1) == b"1"
    os.close(ready)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_what_no_checkpoint_needs_is_deleted_and_the_rest_stays(store):
    put(store, {"a": noise(MIB, 1)}, tag="a")
    put(store, {"b": noise(MIB, 2)}, tag="b")
    kept = packs(store)
    put(store, {"c": noise(MIB, 3)}, tag="c")
    store.remove("c")
    report = store.gc()
    assert (report.condemned_packs, report.waiting_packs) == (report.deleted_packs, 0)
    assert report.freed_bytes > MIB
    assert packs(store) == kept
    assert store.checkpoint("a").read("a") == noise(MIB, 1)
    assert not store.verify().faults
    assert store.gc() == gc_module.GcReport(0, 0, 0, 0, 0, 0)


def test_a_checkpoint_without_tags_is_not_garbage(store):
    checkpoint = put(store, {"a": noise(MIB)}, tag="a")
    store.remove_tag("a")
    store.gc()
    assert store.checkpoint(checkpoint.id).read("a") == noise(MIB)


def test_a_chunk_reused_by_a_live_writer_survives_gcs_between_its_look_up_and_its_commit(store):
    put(store, {"a": noise(MIB)}, tag="a")
    before = packs(store)
    with store.ingest() as session:
        write(session, {"a": noise(MIB)})
        wait_for_workers(session)
        store.remove("a")
        report = store.gc()
        assert report.condemned_packs == report.waiting_packs == len(before)
        assert report.deleted_packs == 0
        assert condemned(store) == before and not packs(store)
        assert store.gc().waiting_packs == len(before)
        checkpoint = session.commit(tag="again")
    assert checkpoint.statistics.new_chunks == 0
    assert before <= packs(store), "rescued"
    assert checkpoint.read("a") == noise(MIB)
    assert not condemned(store)
    assert not store.verify().faults
    store.gc()
    assert checkpoint.read("a") == noise(MIB)


def test_a_writer_that_looks_after_the_pack_was_condemned_writes_anew(store):
    put(store, {"a": noise(MIB)}, tag="a")
    held = store.ingest()
    store.remove("a")
    store.gc()
    assert condemned(store)
    second = put(store, {"a": noise(MIB)}, tag="b")
    assert second.statistics.new_chunks == MIB // CHUNK
    held.abandon()
    store.gc()
    assert not condemned(store)
    assert second.read("a") == noise(MIB)
    assert not store.verify().faults


def test_condemned_packs_wait_for_writers_of_other_processes_until_they_are_dead(store):
    put(store, {"a": noise(MIB)}, tag="a")
    with other_process(store, lambda mine: mine.ingest()) as child:
        store.remove("a")
        for _ in range(2):
            assert store.gc().waiting_packs > 0
        # A writer that begins only now is not waited for.
        late = store.ingest()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert store.gc().deleted_packs > 0
        late.abandon()
    assert not condemned(store)
    assert not live_leases(store._folder)


def test_packs_of_a_live_writer_are_left_alone_and_those_of_a_dead_one_go(store):
    def unfinished(mine):
        session = mine.ingest()
        write(session, {f"f{number}": noise(40 * MIB, number) for number in range(4)})
        wait_for_workers(session)
        session._sealer._workers.drain()
        return session

    with other_process(store, unfinished) as child:
        living = packs(store)
        assert living, "some packs were full and sealed"
        assert store.gc().condemned_packs == 0
        assert packs(store) == living
        assert list((store.path / "tmp").iterdir())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    report = store.gc()
    assert report.deleted_packs == len(living)
    assert report.removed_leftovers >= 1
    assert not packs(store)
    assert not list((store.path / "tmp").iterdir())
    assert not list((store.path / "leases").iterdir())


def test_a_live_writers_unfinished_pack_is_never_too_old(store):
    with store.ingest() as session:
        write(session, {"f": noise(5 * MIB)})
        wait_for_workers(session)
        hours_ago = time.time() - 7 * 3600
        for path in (store.path / "tmp").iterdir():
            os.utime(path, (hours_ago, hours_ago))
        store.gc()
        assert session.commit().read("f") == noise(5 * MIB)


def test_old_leftovers_without_owner_go_and_young_ones_stay(store):
    old, young = store.path / "tmp" / "tag-0000", store.path / "tmp" / "tag-0001"
    for path in (old, young):
        path.write_text("x")
    os.utime(old, (0, 0))
    assert store.gc().removed_leftovers == 1
    assert young.exists()


def test_packs_that_are_mostly_dead_are_rewritten(store):
    shared = {"keep": noise(MIB, 1)}
    put(store, shared | {f"drop{number}": noise(3 * MIB, 2 + number) for number in range(3)}, tag="big")
    small = put(store, shared, tag="small")
    assert small.statistics.new_chunks == 0
    before = size(store)
    store.remove("big")
    report = store.gc()
    assert report.rewritten_packs >= 1
    assert size(store) < before / 4
    assert small.read("keep") == store.checkpoint("small").read("keep") == noise(MIB, 1)
    assert not store.verify().faults
    mini = MiniStore(store.path)
    assert mini.read(bytes.fromhex(small.id), "keep") == noise(MIB, 1)
    assert store.gc().rewritten_packs == 0


def test_a_chunk_found_in_a_pack_that_was_then_rewritten_is_still_there_at_commit(store):
    """The writer reuses a chunk that no checkpoint needs: the rewriting leaves it behind."""
    put(store, {"keep": noise(MIB, 1), "drop": noise(9 * MIB, 2)}, tag="big")
    put(store, {"keep": noise(MIB, 1)}, tag="small")
    with store.ingest() as session:
        write(session, {"drop": noise(9 * MIB, 2), "new": noise(MIB, 3)})
        wait_for_workers(session)
        store.remove("big")
        assert store.gc().rewritten_packs >= 1
        checkpoint = session.commit(tag="again")
    assert checkpoint.statistics.new_chunks == MIB // CHUNK
    assert checkpoint.read("drop") == noise(9 * MIB, 2)
    store.gc()
    assert checkpoint.read("drop") == noise(9 * MIB, 2)
    assert store.checkpoint("small").read("keep") == noise(MIB, 1)
    assert not store.verify().faults


def test_readers_go_on_while_gc_rewrites_under_them(store):
    files = {f"keep{number}": noise(MIB, number) for number in range(4)}
    put(store, files | {f"drop{number}": noise(4 * MIB, 50 + number) for number in range(4)}, tag="big")
    put(store, files, tag="small")
    other = gpuimg.open_store(store.path)
    checkpoint = other.checkpoint("small")
    streams = {name: checkpoint.stream(name) for name in files}
    begun = {name: bytes(next(stream)) for name, stream in streams.items()}
    store.remove("big")
    assert store.gc().rewritten_packs >= 1
    for name, stream in streams.items():
        assert begun[name] + b"".join(bytes(buffer) for buffer in stream) == files[name]
        assert checkpoint.read(name) == files[name]
    other.close()


@pytest.mark.parametrize("what", ["manifest", "recipe"])
def test_gc_that_cannot_tell_what_is_needed_removes_nothing(store, what):
    broken = put(store, {"a": noise(MIB, 1)}, tag="a")
    put(store, {"b": noise(MIB, 2)}, tag="b")
    store.remove("b")
    if what == "manifest":
        path = store.path / "manifests" / broken.id
        path.write_bytes(path.read_bytes()[:-1])
    else:
        ref = broken.files["a"].segments[0]
        path = next(path for path in (store.path / "packs").rglob("*.pack") if ref.id in path.read_bytes())
        data = path.read_bytes()
        place = data.index(b"GPRC")
        path.write_bytes(data[: place + 20] + bytes([data[place + 20] ^ 1]) + data[place + 21 :])
    before = packs(store)
    with pytest.raises(DamagedError, match="removed nothing"):
        store.gc()
    assert packs(store) == before
    store.remove(broken.id)
    assert store.gc().deleted_packs == len(before)


def test_a_damaged_object_that_is_needed_is_not_collected_with_the_pack_it_is_in(store):
    keep, drop = noise(MIB, 1), noise(9 * MIB, 2)
    put(store, {"keep": keep, "drop": drop}, tag="big")
    small = put(store, {"keep": keep}, tag="small")
    store.remove("big")
    for path in (store.path / "packs").rglob("*.pack"):
        data = path.read_bytes()
        place = data.find(keep[100:200])
        if place >= 0:
            path.write_bytes(data[:place] + b"X" + data[place + 1 :])
    for _ in range(2):
        store.gc()
        with pytest.raises(GpuimgError):
            small.read("keep")
        assert small.read("keep", 5 * CHUNK, CHUNK) == keep[5 * CHUNK : 6 * CHUNK]
        faults = store.verify().faults
        assert [(fault.kind, fault.file, fault.offset) for fault in faults] == [("damaged-chunk", "keep", 0)]


def test_a_second_gc_or_repair_is_told_to_wait(store):
    started, go = threading.Event(), threading.Event()

    def hold():
        with gc_module.only_collector(store._folder):
            started.set()
            go.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    started.wait()
    try:
        with pytest.raises(BusyError, match="another gc or repair"):
            store.gc()
        with pytest.raises(BusyError):
            gpuimg.repair_store(store.path)
    finally:
        go.set()
        holder.join()
    store.gc()


def test_a_lock_that_is_held_too_long_is_called_busy(store, monkeypatch):
    monkeypatch.setattr("gpuimg.store.lease._LOCK_SECONDS", 0.1)
    with exclusive_lock(store._folder):
        with pytest.raises(BusyError):
            put(store, {"a": b"1"}, tag="a")
        with pytest.raises(BusyError):
            gpuimg.open_store(store.path)
    assert store.checkpoints() == []
    assert put(store, {"a": b"1"}, tag="a").read("a") == b"1"


def test_checkpoints_removed_while_gc_and_listings_run_disturb_neither(store, monkeypatch):
    for number in range(3):
        put(store, {"a": noise(MIB, number)}, tag=f"t{number}")
    real = type(store._context.catalogue).ids
    gone = [store.checkpoint("t0").id, store.checkpoint("t1").id]

    def ids(self):
        found = real(self)
        if gone:
            store._context.catalogue.remove(bytes.fromhex(gone.pop()))
        return found

    monkeypatch.setattr(type(store._context.catalogue), "ids", ids)
    assert len(store.checkpoints()) == 2
    store.gc()
    assert store.checkpoint("t2").read("a") == noise(MIB, 2)
    assert not store.verify().faults


def test_a_crash_of_gc_after_it_emptied_the_index_loses_nothing(store, monkeypatch):
    """Between its steps 4 and 5: the packs are not in the index and not in the trash."""
    put(store, {"a": noise(MIB)}, tag="a")
    kept = put(store, {"b": noise(MIB, 2)}, tag="b")
    store.remove("a")

    def crash(*_arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(store.path), "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            store.gc()
    with gpuimg.open_store(store.path) as again:
        assert not again.verify().faults
        assert put(again, {"a": noise(MIB)}).statistics.new_chunks in (0, MIB // CHUNK)
        assert again.checkpoint(kept.id).read("b") == noise(MIB, 2)
        again.gc()
        assert not again.verify().faults


# Chunks that are coded against others


def trained(data: bytes, seed: int) -> bytes:
    """bf16 numbers, a tenth of which have become the next number."""
    words = np.frombuffer(data, dtype="<u2")
    return (words + (np.random.default_rng(seed).random(len(words)) < 0.1)).astype("<u2").tobytes()


@pytest.fixture
def dead_difference(store):
    """A pack that stays for the sake of `keep`, with chunks of no checkpoint, coded against chunks that are
    gone; returns what these were."""
    before, kept = floats(4 * CHUNK, 1, "bfloat16"), {"keep": noise(16 * CHUNK, 2)}
    after = trained(before, 3)
    put(store, {"weights": before}, tag="base")
    # One worker, one pack.
    with one_core(), store.ingest(parent=store.checkpoint("base")) as session:
        write(session, {"weights": after, **kept})
        assert session.commit(tag="child").statistics.delta_bytes == len(after)
    put(store, kept, tag="kept")
    store.remove("base")
    store.remove("child")
    assert store.gc().deleted_packs >= 1
    mini = MiniStore(store.path)
    assert any(item.base is not None and item.base not in mini.objects for item in mini.objects.values())
    return {"weights": after}


def test_chunks_that_are_coded_against_what_is_gone_are_no_fault_while_nobody_needs_them(
    store, dead_difference
):
    assert not store.verify().faults
    assert gpuimg.repair_store(store.path).rebuilt_packs == 0
    assert not store.verify().faults
    assert dead_difference


def test_chunks_that_are_coded_against_what_is_gone_are_stored_anew(store, dead_difference):
    checkpoint = put(store, dead_difference, tag="again")
    assert checkpoint.statistics.new_chunks == 4
    assert checkpoint.read("weights") == dead_difference["weights"]
    assert not store.verify().faults
    store.gc()
    assert checkpoint.read("weights") == dead_difference["weights"]


def test_the_copy_counts_whose_base_is_there_however_the_index_is_made(store, dead_difference):
    put(store, dead_difference, tag="again")
    store.close()
    for make in (lambda: None, lambda: gpuimg.repair_store(store.path)):
        shutil.rmtree(store.path / "index")
        make()
        with gpuimg.open_store(store.path) as opened:
            assert opened.checkpoint("again").read("weights") == dead_difference["weights"]
            assert not opened.verify().faults
            assert opened.gc().deleted_packs == 0
            assert opened.checkpoint("again").read("weights") == dead_difference["weights"]


def test_a_checkpoint_keeps_what_it_is_coded_against_alive(store):
    """Through several steps, each gone as soon as the next is there."""
    data = floats(8 * CHUNK, 1, "bfloat16")
    parent = put(store, {"weights": data}, tag="step-0")
    for step in range(1, 10):
        data = trained(data, step)
        with store.ingest(parent=parent) as session:
            write(session, {"weights": data})
            parent = session.commit(tag=f"step-{step}")
        store.remove(f"step-{step - 1}")
        store.gc()
        assert parent.read("weights") == data
        assert not store.verify().faults
    assert len(packs(store)) <= 6, "what nobody rests on any more is gone"


def test_a_writer_counts_on_the_bases_of_what_it_shares(store):
    """Between its look-up and its commit everything is removed and collected."""
    before, other = floats(4 * CHUNK, 1, "bfloat16"), noise(CHUNK, 2)
    after = trained(before, 3)
    base = put(store, {"weights": before}, tag="base")
    with store.ingest(parent=base) as session:
        write(session, {"weights": after})
        session.commit(tag="child")
    with store.ingest() as full, store.ingest(parent=store.checkpoint("child")) as incremental:
        for session in (full, incremental):
            write(session, {"weights": after, "other": other})
            wait_for_workers(session)
        store.remove("base")
        store.remove("child")
        store.gc()
        store.gc()
        assert condemned(store)
        made = [full.commit(), incremental.commit()]
    assert [each.statistics.delta_bytes for each in made] == [0, 0]
    for checkpoint in made:
        assert checkpoint.read("weights") == after
    assert not store.verify().faults
    store.gc()
    for checkpoint in made:
        assert checkpoint.read("weights") == after
