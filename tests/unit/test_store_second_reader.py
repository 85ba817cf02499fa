"""docs/store-format.md is byte-exact: a reader written from it alone reads what gpuimg writes."""

from __future__ import annotations

import os
import struct

import lmdb
import pytest

import gpuimg
from tests.fixtures.mini_reader import MiniStore, scan
from tests.fixtures.store_data import MIB, counters, floats, noise, pages, text

FILES = {
    "empty": b"",
    "one": b"x",
    "inline-4096": noise(4096, 1),
    "core-1.img": text(4097, 2),
    "chunk+1": noise(65537, 3),
    "weights": floats(3 * MIB + 5, 4, "bfloat16"),
    "doubles": floats(MIB, 5, "float64"),
    "counting": counters(2 * MIB, 4),
    "log": text(2 * MIB + 77, 6),
    "zeros": bytes(3 * MIB),
    "sparse": bytes(MIB) + noise(MIB, 7) + bytes(MIB + 3),
    "pages-1.img": pages(1500, 8, ((0, 20), (100, 110), (400, 900))),
    "pages-2.img": pages(700, 8, ((0, 20), (100, 110), (400, 700))) + noise(100, 9),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    root = tmp_path_factory.mktemp("second") / "store"
    with gpuimg.init_store(root, chunk_size=65536) as store, store.ingest() as session:
        for name, data in FILES.items():
            file = session.file(name)
            file.write(data)
            file.close()
        session.commit(tag="all")
    return root


def test_a_reader_written_from_the_document_gives_back_identical_bytes(stored):
    mini = MiniStore(stored)
    (checkpoint_id,) = mini.checkpoints
    assert mini.tags == {"all": checkpoint_id}
    assert set(mini.checkpoints[checkpoint_id]) == set(FILES)
    for name, data in FILES.items():
        assert mini.read(checkpoint_id, name) == data, name


def test_every_codec_of_the_document_was_among_what_was_read(stored):
    codecs = {(item.codec, item.element_size) for item in MiniStore(stored).objects.values()}
    assert {codec for codec, _ in codecs} == {0, 1, 2}
    assert {(2, 2), (2, 4)} <= codecs


def test_an_object_is_never_larger_than_its_chunk(stored):
    assert all(len(item.payload) <= item.raw for item in MiniStore(stored).objects.values())


def test_layouts_keep_the_rules_of_the_document(stored):
    mini = MiniStore(stored)
    (files,) = mini.checkpoints.values()
    for name, file in files.items():
        entries = mini.entries(file)
        offset = 0
        for number, (length, chunk_id) in enumerate(entries):
            at_end = number + 1 == len(entries)
            zero = chunk_id is None
            data = FILES[name][offset : offset + length]
            assert not zero or not any(data)
            if name.startswith("pages-"):
                assert file.layout == 1
                assert at_end or length % 4096 == 0
                assert zero or length <= 256 * 4096
                assert zero or at_end or entries[number + 1][1] is None or length >= 16 * 4096
                assert zero or bytes(16 * 4096) not in _aligned(data)
            else:
                assert file.layout == 0
                assert offset % mini.chunk_size == 0
                assert zero or at_end or length == mini.chunk_size
                assert zero or any(data), "chunks that are all zero become zero runs"
            assert not (zero and not at_end and entries[number + 1][1] is None), "runs are merged"
            offset += length


def _aligned(data: bytes) -> list[bytes]:
    return [data[start : start + 16 * 4096] for start in range(0, len(data), 4096)]


def test_a_scanner_written_from_the_document_finds_the_objects_without_the_table(stored):
    mini = MiniStore(stored)
    for path in stored.glob("packs/*/*"):
        data = path.read_bytes()
        expected = list(mini.packs[bytes.fromhex(path.stem)].objects)
        assert scan(data[: len(data) - 64 - 96 * len(expected)]) == expected


def test_the_index_holds_what_the_document_says(stored, tmp_path):
    mini = MiniStore(stored)
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "data.mdb").write_bytes((stored / "index/data.mdb").read_bytes())
    with lmdb.open(os.fspath(folder), max_dbs=4) as env:
        meta, packs, numbers, chunks = (
            env.open_db(name, create=False) for name in (b"meta", b"packs", b"pack_numbers", b"chunks")
        )
        with env.begin() as txn:
            assert txn.get(b"store", db=meta) == mini.id
            assert txn.get(b"format", db=meta) == b"1"
            assert len(txn.get(b"epoch", db=meta)) == 16
            by_number = {key: txn.get(key, db=packs) for key, _ in txn.cursor(packs)}
            assert {value[:32] for value in by_number.values()} == set(mini.packs)
            assert struct.unpack(">I", txn.get(b"next_pack", db=meta))[0] > max(
                struct.unpack(">I", key)[0] for key in by_number
            )
            for key, value in by_number.items():
                pack_id, count, size = struct.unpack(">32sIQ", value)
                assert txn.get(pack_id, db=numbers) == key
                assert count == len(mini.packs[pack_id].objects)
                assert size == (stored / f"packs/{pack_id.hex()[:2]}/{pack_id.hex()}.pack").stat().st_size
            seen = 0
            for chunk_id, value in txn.cursor(chunks):
                number, ordinal, offset, length, raw, codec, element, flags = struct.unpack(
                    ">IIQIIBBH", value
                )
                pack = mini.packs[by_number[struct.pack(">I", number)][:32]]
                item = pack.objects[ordinal]
                assert (item.id, item.offset + 96, len(item.payload), item.raw) == (
                    chunk_id,
                    offset,
                    length,
                    raw,
                )
                assert (item.codec, item.element_size, 0) == (codec, element, flags)
                seen += 1
            assert seen == len(mini.objects)
