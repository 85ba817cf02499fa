"""docs/store-format.md is byte-exact: a reader written from it alone reads what gpuimg writes."""

from __future__ import annotations

import os
import struct

import lmdb
import numpy as np
import pytest

import gpuimg
from gpuimg.store import chunking, looks, planes
from gpuimg.store.bases import DEPTH_LIMIT
from gpuimg.store.model import BufferObject
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


def trained(data: bytes, dtype: str, seed: int) -> bytes:
    """Numbers, some of which have become the next number."""
    words = np.frombuffer(data[: len(data) // 8 * 8], dtype=dtype)
    steps = (np.random.default_rng(seed).random(len(words)) < 0.2).astype(dtype)
    return (words + steps).tobytes() + data[len(data) // 8 * 8 :]


STEPS = [
    FILES,
    {
        **FILES,
        "weights": trained(FILES["weights"], "<u2", 1),
        "doubles": trained(FILES["doubles"], "<u8", 1),
        "chunk+1": FILES["chunk+1"][:-1] + b"!",
        "zeros": bytes(MIB) + noise(MIB, 11) + bytes(MIB),
        "sparse": bytes(2 * MIB) + noise(MIB, 7),
        "pages-1.img": FILES["pages-1.img"][: 300 * 4096] + pages(3, 12) + FILES["pages-1.img"][300 * 4096 :],
    },
]
for number in range(2, 8):
    STEPS.append(STEPS[-1] | {"weights": trained(STEPS[-1]["weights"], "<u2", number)})


@pytest.fixture(scope="module", params=["kernel", "pure"])
def stored(request, tmp_path_factory):
    """Seven steps of a training, with the kernel that is there and without."""
    root = tmp_path_factory.mktemp("second") / "store"
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pure":
            for module in (chunking, looks, planes):
                patch.setattr(module, "kernel", lambda: None)
        with gpuimg.init_store(root, chunk_size=65536) as store:
            parent = None
            for step, files in enumerate(STEPS):
                with store.ingest(parent=parent) as session:
                    for name, data in files.items():
                        bo = BufferObject(1, 2, 3, len(data), 4) if name == "weights" else None
                        file = session.file(name, bo=bo)
                        file.write(data)
                        file.close()
                    parent = session.commit(tag=f"step-{step}")
    return root


def test_a_reader_written_from_the_document_gives_back_identical_bytes(stored):
    mini = MiniStore(stored)
    assert mini.tags.keys() == {f"step-{step}" for step in range(len(STEPS))}
    assert set(mini.tags.values()) == set(mini.checkpoints)
    parent = b""
    for step, files in enumerate(STEPS):
        checkpoint_id = mini.tags[f"step-{step}"]
        manifest = mini.manifests[checkpoint_id]
        assert manifest.parent == parent
        assert set(manifest.files) == set(files)
        assert manifest.files["weights"].bo == (1, 2, 3, len(files["weights"]), 4)
        assert set(manifest.figures) == {name for name, data in files.items() if len(data) > 4096}
        # bf16 numbers may be as short as words of two or four of them.
        assert manifest.figures["weights"] in (2, 4, 8)
        for name, data in files.items():
            assert mini.read(checkpoint_id, name) == data, (step, name)
        parent = checkpoint_id


def test_every_codec_and_chains_of_bases_were_among_what_was_read(stored):
    mini = MiniStore(stored)
    codecs = {(item.codec, item.element_size) for item in mini.objects.values()}
    assert {codec for codec, _ in codecs} == {0, 1, 2, 3}
    assert {(2, 4), (3, 2), (3, 8)} <= codecs
    transforms = {item.payload[0] for item in mini.objects.values() if item.codec == 3}
    assert {1, 2} <= transforms
    chains = {len(mini.chain(chunk_id)) - 1 for chunk_id in mini.objects}
    assert chains == set(range(DEPTH_LIMIT + 1)), "differences of differences, as deep as writers go"


def test_an_object_is_never_larger_than_its_chunk(stored):
    assert all(len(item.payload) <= item.raw for item in MiniStore(stored).objects.values())


def test_layouts_of_a_full_checkpoint_keep_the_rules_of_the_document(stored):
    mini = MiniStore(stored)
    files = mini.checkpoints[mini.tags["step-0"]]
    for name, file in files.items():
        entries = mini.entries(file)
        offset = 0
        for number, entry in enumerate(entries):
            length = entry.length
            at_end = number + 1 == len(entries)
            zero = entry.id is None
            assert zero or entry.fingerprint is not None
            data = FILES[name][offset : offset + length]
            assert not zero or not any(data)
            if name.startswith("pages-"):
                assert file.layout == 1
                assert at_end or length % 4096 == 0
                assert zero or length <= 256 * 4096
                assert zero or at_end or entries[number + 1].id is None or length >= 16 * 4096
                assert zero or bytes(16 * 4096) not in _aligned(data)
            else:
                assert file.layout == 0
                assert offset % mini.chunk_size == 0
                assert zero or at_end or length == mini.chunk_size
                assert zero or any(data), "chunks that are all zero become zero runs"
            assert not (zero and not at_end and entries[number + 1].id is None), "runs are merged"
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
            assert txn.get(b"format", db=meta) == b"2"
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
                number, ordinal, offset, length, raw, codec, element, flags = struct.unpack_from(
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
                assert (item.codec, item.element_size) == (codec, element)
                assert (flags, value[28:]) == ((1, item.base) if item.base else (0, b""))
                seen += 1
            assert seen == len(mini.objects)
