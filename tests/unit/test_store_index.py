"""The index is a cache: it grows, it may be deleted, and nothing that stands in it is believed blindly."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback

import lmdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuimg
from gpuimg.errors import GpuimgError, IndexBrokenError, NewerFormatError, StoredDataError, UsageError
from gpuimg.store import index as index_module
from gpuimg.store import pack
from gpuimg.store.hashing import NO_ID
from gpuimg.store.index import Index, Place
from gpuimg.store.pack import (
    HAS_BASE,
    OBJECT_HEADER_SIZE,
    ObjectHeader,
    PackInfo,
    Toc,
    encode_header,
    toc_entry,
)
from tests.fixtures.store_data import KIB, MIB, floats, noise

STORE = bytes(range(16))


def pack_of(ids: list[bytes], seed: int = 0, base: bytes = NO_ID) -> PackInfo:
    """A pack of these chunks; those of odd numbers are coded against `base` if there is one."""
    table = b""
    for number, chunk_id in enumerate(ids):
        has_base = base != NO_ID and number % 2
        header = ObjectHeader(
            chunk_id,
            codec=3,
            element_size=4,
            flags=HAS_BASE if has_base else 0,
            raw=2000 + number,
            stored=900,
            base=base if has_base else NO_ID,
            checksum=bytes(8),
        )
        table += toc_entry(64 + number * 1000, encode_header(header))
    return PackInfo(random.Random(seed).randbytes(32), bytes(16), 10**6, Toc(table))


def ids(count: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(32) for _ in range(count)]


@pytest.fixture
def index(tmp_path):
    made = Index(tmp_path / "index", STORE)
    yield made
    made.close()


def put(store, files, tag="t"):
    with store.ingest() as session:
        for name, data in files.items():
            file = session.file(name)
            file.write(data)
            file.close()
        return session.commit(tag=tag)


def test_places_come_back_as_they_were_entered(index):
    known = ids(100)
    info = pack_of(known)
    index.add_pack(info)
    (number,) = index.packs()
    assert index.packs()[number] == index.pack(number) == (info.id, 100, 10**6)
    for ordinal, place in enumerate(index.lookup(known)):
        assert place == Place(
            number, ordinal, 64 + ordinal * 1000 + OBJECT_HEADER_SIZE, 900, 2000 + ordinal, 3, 4, 0
        )
    assert index.lookup([bytes(32)]) == [None]
    assert index.contains([known[5], bytes(32)]) == [True, False]
    assert [chunk_id for chunk_id, _ in index.places()] == sorted(known)
    assert info.toc.ids() == known


def test_the_base_of_a_chunk_comes_back_with_its_place(index):
    known, base = ids(10), bytes(range(32))
    index.add_pack(pack_of(known, base=base))
    for ordinal, place in enumerate(index.lookup(known)):
        expected = (HAS_BASE, base) if ordinal % 2 else (0, b"")
        assert (place.flags, place.base) == expected
    assert [place.base for _, place in index.places()].count(base) == 5


def test_every_place_is_listed_across_batches(index, monkeypatch):
    monkeypatch.setattr(index_module, "_BATCH", 7)
    known = ids(50)
    index.add_pack(pack_of(known))
    assert [chunk_id for chunk_id, _ in index.places()] == sorted(known)


def test_a_chunk_keeps_its_first_place_unless_a_collector_moves_it(index):
    known = ids(10)
    index.add_pack(pack_of(known, 1))
    (first,) = index.packs()
    index.add_pack(pack_of(known, 2))
    assert {place.pack for place in index.lookup(known)} == {first}
    index.add_pack(pack_of(known[:3], 3), moves=True)
    assert [place.pack == first for place in index.lookup(known)] == [False] * 3 + [True] * 7


def test_of_two_copies_the_one_counts_whose_base_is_there_in_whatever_order_they_come(tmp_path):
    copied, base = ids(2, 1), ids(1, 2)
    lost = pack_of(copied, 1, base=bytes(range(32)))
    found = pack_of(copied, 2, base=base[0])
    bases = pack_of(base, 3)
    for number, order in enumerate(itertools.permutations([lost, found, bases])):
        for way in ("rebuilt", "settled"):
            index = Index(tmp_path / f"{number}-{way}", STORE)
            if way == "rebuilt":
                index.rebuild(order)
            else:
                for info in order:
                    index.add_pack(info)
                index.settle(list(order))
            place = index.lookup(copied)[1]
            assert index.pack(place.pack).id == found.id
            assert place.base == base[0]
            assert index.contains_whole([*copied, *base]) == [True] * 3
            index.close()


def test_a_chunk_is_whole_only_with_all_that_it_is_coded_against(index):
    chain = ids(pack.MAX_CHAIN + 2)
    for number, chunk_id in enumerate(chain[:-1]):
        index.add_pack(pack_of([ids(1, 50 + number)[0], chunk_id], number, base=chain[number + 1]))
    assert index.contains(chain) == [True] * (len(chain) - 1) + [False]
    assert index.contains_whole(chain) == [False] * len(chain), "the last base is not there"
    index.add_pack(pack_of(chain[-1:], 99))
    assert index.contains_whole(chain) == [False] + [True] * (len(chain) - 1), "too long a chain"


def test_removing_packs_forgets_their_chunks_renews_the_epoch_and_uses_no_number_twice(index):
    a, b = ids(5, 1), ids(5, 2)
    index.add_pack(pack_of(a, 1))
    index.add_pack(pack_of(b + a[:1], 2))
    epoch, packs = index.epoch(), index.packs()
    number = next(n for n, entry in packs.items() if entry.id == pack_of(a, 1).id)
    index.remove_packs({number: packs[number]}, {number: a})
    assert index.epoch() != epoch
    assert index.contains(a + b) == [False] * 5 + [True] * 5
    index.add_pack(pack_of(a, 3))
    assert number not in index.packs()
    assert max(index.packs()) > max(packs)


def test_forgetting_lost_packs_places_their_chunks_where_else_they_are(index):
    both, only = ids(4, 1), ids(4, 2)
    lost, other = pack_of(both + only, 1), pack_of(both, 2)
    index.add_pack(lost)
    index.add_pack(other)
    gone = {number: entry for number, entry in index.packs().items() if entry.id == lost.id}
    epoch = index.epoch()
    index.forget_lost(gone, [other])
    assert [entry.id for entry in index.packs().values()] == [other.id]
    assert index.contains(both + only) == [True] * 4 + [False] * 4
    assert index.epoch() != epoch


@pytest.mark.parametrize("size", [1, 47, 1000])
def test_the_map_grows_under_readers_when_it_is_full(tmp_path, size):
    index = Index(tmp_path / "index", STORE, map_size=64 * KIB)
    known = ids(200)
    index.add_pack(pack_of(known))
    stop = threading.Event()
    failed: list[BaseException] = []

    def read():
        try:
            while not stop.is_set():
                assert all(index.contains(known))
                assert all(index.lookup(known[:50]))
                time.sleep(0.001)
        except BaseException as error:
            failed.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(20):
        index.add_pack(pack_of(ids(size, 10 + number), 10 + number))
    stop.set()
    for reader in readers:
        reader.join()
    assert not failed
    assert index.chunk_count() == 200 + 20 * size
    index.close()


def test_an_index_that_another_handle_has_grown_is_read_on(tmp_path):
    """As another process would grow it: a child."""
    index = Index(tmp_path / "index", STORE, map_size=64 * KIB)
    index.add_pack(pack_of(ids(10)))
    index.close()
    child = os.fork()
    if not child:
        status = 1
        try:
            mine = Index(tmp_path / "index", STORE, map_size=64 * KIB)
            mine.add_pack(pack_of(ids(5000, 5), 5))
            mine.close()
            status = 0
        finally:
            os._exit(status)
    index = Index(tmp_path / "index", STORE, map_size=64 * KIB)
    assert os.waitpid(child, 0)[1] == 0
    assert all(index.contains(ids(5000, 5)))
    index.add_pack(pack_of(ids(5, 6), 6))
    assert all(index.contains(ids(5, 6)))
    index.close()


@given(st.binary(max_size=80))
def test_no_value_of_the_table_of_chunks_is_believed_unless_possible(value):
    try:
        place = index_module._parse_place(value)
    except (struct.error, ValueError):
        return
    assert 0 < place.stored <= place.raw <= 2 * MIB
    assert len(place.base) == (32 if place.flags & HAS_BASE else 0)


HOSTILE = {
    "giant raw": struct.pack(">IIQIIBBH", 1, 0, 160, 100, 2**32 - 1, 0, 0, 0),
    "giant stored": struct.pack(">IIQIIBBH", 1, 0, 160, 2**32 - 1, 2**32 - 1, 1, 0, 0),
    "stored above raw": struct.pack(">IIQIIBBH", 1, 0, 160, 2 * MIB, 64 * KIB, 1, 0, 0),
    "giant offset": struct.pack(">IIQIIBBH", 1, 0, 2**64 - 1, 100, 64 * KIB, 1, 0, 0),
    "behind the end": struct.pack(">IIQIIBBH", 1, 0, 2**40, 100, 64 * KIB, 1, 0, 0),
    "raw behind the end": struct.pack(">IIQIIBBH", 1, 0, 2**40, 64 * KIB, 64 * KIB, 0, 0, 0),
    "no such pack": struct.pack(">IIQIIBBH", 99, 0, 160, 100, 64 * KIB, 1, 0, 0),
    "another object": struct.pack(">IIQIIBBH", 1, 0, 160, 64 * KIB, 64 * KIB, 0, 0, 0),
    "unknown codec": struct.pack(">IIQIIBBH", 1, 0, 160, 64 * KIB, 64 * KIB, 9, 0, 0),
    "unknown flags": struct.pack(">IIQIIBBH", 1, 0, 160, 100, 64 * KIB, 1, 0, 2),
    "a flag without its base": struct.pack(">IIQIIBBH", 1, 0, 160, 100, 64 * KIB, 3, 4, HAS_BASE),
    "a base that is cut off": struct.pack(">IIQIIBBH", 1, 0, 160, 100, 64 * KIB, 3, 4, HAS_BASE) + bytes(31),
    "a base nobody has": struct.pack(">IIQIIBBH", 1, 0, 160, 100, 64 * KIB, 3, 4, HAS_BASE) + b"b" * 32,
    "a base without its flag": struct.pack(">IIQIIBBH", 1, 0, 160, 64 * KIB, 64 * KIB, 0, 0, 0) + bytes(32),
    "its own base": struct.pack(">IIQIIBBH", 1, 0, 160, 100, 64 * KIB, 3, 4, HAS_BASE) + b"itself",
    "short": b"123",
    "empty": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_entry_is_met_with_a_sentence_found_by_verify_and_cured_by_repair(tmp_path, name):
    data = noise(MIB)
    with gpuimg.init_store(tmp_path / "store", chunk_size=64 * KIB) as store:
        put(store, {"f": data})
    with lmdb.open(os.fspath(tmp_path / "store/index"), max_dbs=4) as env:
        chunks, packs = env.open_db(b"chunks", create=False), env.open_db(b"packs", create=False)
        with env.begin(write=True) as txn:
            (number,) = [struct.unpack(">I", key)[0] for key, _ in txn.cursor(packs)]
            keys = [
                key
                for key, value in txn.cursor(chunks)
                if struct.unpack_from(">IIQIIBBH", value)[4] == 64 * KIB
            ]
            value = HOSTILE[name]
            if struct.pack(">I", 1) == value[:4]:
                value = struct.pack(">I", number) + value[4:]
            # The object at the pack's start is one of them; it keeps its place.
            victim = keys[3]
            txn.put(victim, value.replace(b"itself", victim), db=chunks)
    with gpuimg.open_store(tmp_path / "store") as store:
        checkpoint = store.checkpoint("t")
        with pytest.raises(GpuimgError) as caught:
            checkpoint.read("f")
        assert isinstance(caught.value, StoredDataError | IndexBrokenError) or "newer" in caught.value.name
        assert caught.value.remedy
        with contextlib.suppress(IndexBrokenError):
            assert store.verify().faults
    gpuimg.repair_store(tmp_path / "store")
    with gpuimg.open_store(tmp_path / "store") as store:
        assert store.checkpoint("t").read("f") == data
        assert not store.verify().faults


def trained(data: bytes, seed: int) -> bytes:
    """bf16 numbers of which some have changed a little."""
    words = np.frombuffer(data, dtype="<u2")
    return (words + (np.random.default_rng(seed).random(len(words)) < 0.1)).astype("<u2").tobytes()


def put_series(store) -> dict[str, bytes]:
    """Three checkpoints, each coded against the one before."""
    parent, data, made = None, floats(MIB, 1, "bfloat16"), {}
    for number in range(3):
        with store.ingest(parent=parent) as session:
            file = session.file("weights")
            file.write(data)
            file.close()
            parent = session.commit(tag=f"step-{number}")
        assert not number or parent.statistics.delta_bytes == MIB
        made[f"step-{number}"] = data
        data = trained(data, number)
    return made


def survives(action) -> bool:
    """Whether a child lives through what must succeed, or LMDB has it end on a file that it maps."""
    child = os.fork()
    if not child:
        status = 1
        try:
            faulthandler.disable()
            action()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, -signal.SIGBUS, -signal.SIGSEGV)
    return ended == 0


def test_every_kind_of_broken_index_file_is_cured_by_repair(tmp_path):
    """Whole pages of noise or zeros, cut files, flipped bytes: open or repair must come through.

    LMDB follows some of the flipped bytes out of its file, which ends the process; an index may be deleted
    at any time, so that nothing is lost by that either.
    """
    root, data = tmp_path / "store", noise(4 * MIB)
    with gpuimg.init_store(root, chunk_size=64 * KIB) as store:
        put(store, {"f": data})
        for number in range(40):
            put(store, {"g": noise(100_000, number)}, tag=f"t{number}")

    def read():
        try:
            with gpuimg.open_store(root) as store:
                assert store.checkpoint("t").read("f") == data
        except (IndexBrokenError, StoredDataError, NewerFormatError) as error:
            assert error.remedy

    def repair():
        report = gpuimg.repair_store(root)
        assert (report.hurt, report.set_aside, report.rebuilt_packs) == ((), (), 0), "the packs are whole"

    path = root / "index/data.mdb"
    whole = path.read_bytes()
    ended = 0
    for seed in range(36):
        rng = random.Random(seed)
        broken = bytearray(whole)
        page = rng.randrange(len(whole) // 4096) * 4096
        if seed % 4 == 0:
            broken[page : page + 4096] = rng.randbytes(4096)
        elif seed % 4 == 1:
            broken[page : page + 4096] = bytes(4096)
        elif seed % 4 == 2:
            for _ in range(30):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
        else:
            del broken[rng.randrange(len(broken)) :]
        path.write_bytes(broken)
        if not (survives(read) and survives(repair)):
            assert seed % 4 == 2
            ended += 1
            shutil.rmtree(root / "index")
        with gpuimg.open_store(root) as store:
            assert store.checkpoint("t").read("f") == data
            assert store.verify().faults == ()
    assert ended <= 3


def test_differences_are_whole_to_a_repair_that_must_make_the_index_anew(tmp_path):
    root = tmp_path / "store"
    with gpuimg.init_store(root, chunk_size=64 * KIB) as store:
        series = put_series(store)
    packs = {path.name for path in root.glob("packs/*/*")}
    path = root / "index/data.mdb"
    whole = path.read_bytes()
    for broken in (None, noise(100_000), whole[:8192] + bytes(len(whole) - 8192), whole[:20_000]):
        path.unlink() if broken is None else path.write_bytes(broken)
        report = gpuimg.repair_store(root)
        assert (report.hurt, report.set_aside, report.rebuilt_packs) == ((), (), 0)
        assert {path.name for path in root.glob("packs/*/*")} == packs
        with gpuimg.open_store(root) as store:
            for tag, weights in series.items():
                assert store.checkpoint(tag).read("weights") == weights


def test_a_deleted_index_is_made_anew_from_the_packs(tmp_path):
    with gpuimg.init_store(tmp_path / "store", chunk_size=64 * KIB) as store:
        put(store, {"f": noise(MIB)})
    for path in (tmp_path / "store/index").iterdir():
        path.unlink()
    with gpuimg.open_store(tmp_path / "store") as store:
        assert store.checkpoint("t").read("f") == noise(MIB)
        assert put(store, {"f": noise(MIB)}, tag="u").statistics.new_chunks == 0
        assert not store.verify().faults


def test_an_index_kept_from_before_a_gc_is_brought_up_to_date(tmp_path):
    """As a backup of the folder `index` would be: it names packs that are gone, and lacks others."""
    root = tmp_path / "store"
    with gpuimg.init_store(root, chunk_size=64 * KIB) as store:
        put(store, {"f": noise(MIB, 1)}, tag="old")
    kept = (root / "index/data.mdb").read_bytes()
    with gpuimg.open_store(root) as store:
        put(store, {"f": noise(MIB, 2)}, tag="new")
        store.remove("old")
        assert store.gc().deleted_packs == 1
    (root / "index/data.mdb").write_bytes(kept)
    with gpuimg.open_store(root) as store:
        assert store.checkpoint("new").read("f") == noise(MIB, 2)
        again = put(store, {"f": noise(MIB, 1)}, tag="old")
        assert again.statistics.new_chunks == 16, "what gc deleted is not taken for known"
        assert again.read("f") == noise(MIB, 1)
        assert not store.verify().faults


def test_what_a_lost_pack_held_is_stored_again(tmp_path):
    root = tmp_path / "store"
    with gpuimg.init_store(root, chunk_size=64 * KIB) as store:
        put(store, {"f": noise(MIB)})
    (lost,) = root.glob("packs/*/*.pack")
    lost.unlink()
    with gpuimg.open_store(root) as store:
        with pytest.raises(StoredDataError):
            store.checkpoint("t").read("f")
        assert put(store, {"f": noise(MIB)}, tag="u").read("f") == noise(MIB)
        assert store.checkpoint("t").read("f") == noise(MIB), "which cures the hurt checkpoint too"
        assert not store.verify().faults


def test_a_store_inherited_by_a_fork_says_so_instead_of_hanging(tmp_path):
    with gpuimg.init_store(tmp_path / "store") as store:
        checkpoint = put(store, {"f": noise(MIB)})
        child = os.fork()
        if not child:
            status = 1
            try:
                for call in (lambda: checkpoint.read("f"), store.ingest, store.verify):
                    with pytest.raises(UsageError, match="fork"):
                        call()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert checkpoint.read("f") == noise(MIB)


def test_a_session_whose_index_was_made_anew_by_another_process_does_not_commit(tmp_path):
    path = tmp_path / "store"
    with gpuimg.init_store(path) as store:
        session = store.ingest()
        file = session.file("a")
        file.write(os.urandom(100_000))
        file.close()
        for name in ("data.mdb", "lock.mdb"):
            (path / "index" / name).unlink()
        subprocess.run(
            [sys.executable, "-c", "import gpuimg, sys; gpuimg.open_store(sys.argv[1]).close()", str(path)],
            check=True,
        )
        with pytest.raises(IndexBrokenError, match="made anew"):
            session.commit(tag="t")
    with gpuimg.open_store(path) as store:
        assert not store.checkpoints()
        assert not store.tags()
