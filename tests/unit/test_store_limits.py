"""Where the store meets limits: the index's map, its readers, slots and slabs; names; border sizes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import gpuimg
from gpuimg.errors import BadNameError
from gpuimg.store import pack
from gpuimg.store import store as store_module
from gpuimg.store.hashing import NO_ID
from gpuimg.store.index import Index
from gpuimg.store.pack import ObjectHeader, PackInfo, Toc, encode_header, toc_entry
from gpuimg.store.store import Store

STORE_ID = bytes(range(16))
TINY_MAP = 64 * 1024


def pack_info(number: int, chunks: int) -> PackInfo:
    rng = np.random.default_rng(number)
    table = b""
    for at in range(chunks):
        header = encode_header(ObjectHeader(rng.bytes(32), 0, 0, 0, 900, 800, NO_ID, bytes(8)))
        table += toc_entry(64 + at * 1000, header)
    return PackInfo(rng.bytes(32), bytes(16), 64 + chunks * 1000, Toc(table))


CHILD = """
import sys
from pathlib import Path
from tests.unit.test_store_limits import *
index = Index(Path(sys.argv[1]), STORE_ID, map_size=TINY_MAP)
print("open", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Other:
    """Another process that has the index open and does what it is told."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )
        self.expect("open")

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def do(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        self.expect("done")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "index"
    path.mkdir()
    return path


@pytest.fixture
def index(folder: Path) -> Iterator[Index]:
    index = Index(folder, STORE_ID, map_size=TINY_MAP)
    yield index
    index.close()


@pytest.fixture
def other(index: Index, folder: Path) -> Iterator[Other]:
    assert index.folder == folder
    other = Other(folder)
    yield other
    other.kill()


# The map


def test_the_map_grows_while_another_process_has_it_open(index: Index, other: Other) -> None:
    """Each in turn outgrows what the other knows of."""
    for number in range(0, 40, 2):
        index.add_pack(pack_info(number, 200))
        other.do(f"assert all(index.contains(ids(pack_info({number}, 200))))")
        other.do(f"index.add_pack(pack_info({number + 1}, 200))")
        assert all(index.contains(ids(pack_info(number + 1, 200))))
    assert index.chunk_count() == 40 * 200
    other.do("assert index.chunk_count() == 40 * 200")


def ids(info: PackInfo) -> list[bytes]:
    return info.toc.ids()


def test_entries_are_listed_while_another_process_grows_the_map(index: Index, other: Other) -> None:
    index.add_pack(pack_info(0, 300))
    listed = index.places()
    first = [next(listed) for _ in range(10)]
    for number in range(1, 20):
        other.do(f"index.add_pack(pack_info({number}, 200))")
    found = dict([*first, *listed])
    assert set(ids(pack_info(0, 300))) <= set(found)


def test_a_store_outgrows_its_index_while_others_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TinyIndex(Index):
        def __init__(self, folder: Path, store_id: bytes) -> None:
            super().__init__(folder, store_id, map_size=TINY_MAP)

    monkeypatch.setattr(store_module, "Index", TinyIndex)
    monkeypatch.setattr(pack, "TARGET_SIZE", 256 * 1024)
    data = np.random.default_rng(0).bytes(48 << 20)
    with gpuimg.init_store(tmp_path / "store", chunk_size=64 * 1024) as store:
        with store.ingest() as session:
            file = session.file("buffer.bin")
            file.write(data)
            file.close()
            checkpoint = session.commit()
        assert checkpoint.read("buffer.bin") == data
        assert store._context.index._env.info()["map_size"] > TINY_MAP
        assert not store.verify(quick=True).faults


# Readers


def test_readers_that_were_killed_hold_no_slot_and_no_space(folder: Path) -> None:
    """Many more processes die while they read than there are slots in a page of the table of readers."""
    reading = "txn = index._env.begin(); txn.get(b'x', db=index._chunks)"
    for number in range(3):
        others = [Other(folder) for _ in range(4)]
        for other in others:
            other.do(reading)
        for other in others:
            other.kill()
        index = Index(folder, STORE_ID)
        index.add_pack(pack_info(number, 100))
        # The table shows the living only: the reader that this process has just been, if any.
        slots = [line for line in index._env.readers().splitlines()[1:] if line.strip()]
        assert all(str(os.getpid()) in line for line in slots), slots
        index.close()


def test_a_killed_reader_does_not_let_the_index_grow_without_end(folder: Path) -> None:
    other = Other(folder)
    other.do("txn = index._env.begin(); txn.get(b'x', db=index._chunks)")
    other.kill()
    index = Index(folder, STORE_ID)
    for _ in range(60):
        packs = index.packs()
        index.remove_packs(packs, {number: ids(pack_info(0, 500)) for number in packs})
        index.add_pack(pack_info(0, 500))
    assert (folder / "data.mdb").stat().st_size < 4 << 20
    index.close()


def test_a_writer_killed_within_a_transaction_leaves_the_one_before(index: Index, other: Other) -> None:
    index.add_pack(pack_info(0, 100))
    other.do("txn = index._env.begin(write=True); txn.drop(index._chunks, delete=False)")
    other.kill()
    assert index.chunk_count() == 100
    index.add_pack(pack_info(1, 100))
    assert index.chunk_count() == 200


# Names and sizes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with gpuimg.init_store(tmp_path / "store", chunk_size=64 * 1024) as store:
        yield store


def test_a_tag_that_is_not_allowed_is_refused_before_anything_is_stored(store: Store, tmp_path: Path) -> None:
    from gpuimg.store.directory import import_directory

    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.img").write_bytes(bytes(range(256)) * 64)
    for tag in ("../x", "a/b", "", ".x", "-x", "x" * 129, "ä"):
        with pytest.raises(BadNameError):
            import_directory(store, tmp_path / "images", tag=tag)
        with pytest.raises(BadNameError), store.ingest() as session:
            session.add_path("a.img", tmp_path / "images" / "a.img")
            session.commit(tag=tag)
    assert store.checkpoints() == []
    assert not store.verify().faults


BORDERS = [
    0,
    1,
    4095,
    4096,
    4097,
    65535,
    65536,
    65537,
    (2 << 20) - 1,
    2 << 20,
    (2 << 20) + 1,
    (4 << 20) + 4097,
]


@pytest.mark.parametrize("name", ["pages-1.img", "buffer.bin"])
def test_files_of_every_border_size_come_back(store: Store, name: str) -> None:
    noise = np.random.default_rng(1).bytes(max(BORDERS))
    for kind in (noise, bytes(max(BORDERS)), bytes(1 << 20) + noise):
        for size in BORDERS:
            with store.ingest() as session:
                file = session.file(name)
                file.write(kind[:size])
                file.close()
                checkpoint = session.commit()
            assert checkpoint.entry(name).size == size
            assert checkpoint.read(name) == kind[:size]
            assert b"".join(bytes(part) for part in checkpoint.stream(name)) == kind[:size]
    assert not store.verify().faults


def test_more_files_than_slabs_may_be_open_at_once(store: Store) -> None:
    data = [np.random.default_rng(number).bytes(5000 + number) for number in range(300)]
    with store.ingest() as session:
        open_files = [session.file(f"pages-{number}.img") for number in range(300)]
        for start in range(0, 6000, 1500):
            for file, text in zip(open_files, data, strict=True):
                file.write(text[start : start + 1500])
        for file in open_files:
            file.close()
        checkpoint = session.commit()
    for number, text in enumerate(data):
        assert checkpoint.read(f"pages-{number}.img") == text
