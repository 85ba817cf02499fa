"""Fuzz targets of the store's parsers: any bytes meet DamagedError or NewerFormatError, and little memory.

`GPUIMG_FUZZ_EXAMPLES=100000 python -m pytest tests/fuzz` runs them for longer. A target is a function of
bytes, so that another fuzzer can drive it: `TARGETS`.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuimg.errors import DamagedError, NewerFormatError, NotAStoreError
from gpuimg.store import layout, manifest, pack, planes, recipe
from gpuimg.store.catalogue import Catalogue
from gpuimg.store.codec import decode
from gpuimg.store.hashing import NO_ID, checksum, identify
from gpuimg.store.index import _parse_place
from gpuimg.store.model import BufferObject, FileEntry, FileFigures, Layout, SegmentRef, Source, Statistics
from gpuimg.store.planes import Transform
from gpuimg.store.recipe import Entry
from tests.fixtures.store_data import floats

EXAMPLES = int(os.environ.get("GPUIMG_FUZZ_EXAMPLES", "400"))
MEMORY = 16 * 1024 * 1024
STORE = bytes(16)
REFUSED = (DamagedError, NewerFormatError)

longer = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def fuzz_pack(data: bytes) -> None:
    """A whole pack file."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(data)
        try:
            info = pack.read_pack(file.fileno(), STORE)
            for offset, header in info.toc:
                assert 64 <= offset < len(data)
                assert 0 < header.stored <= header.raw <= pack.MAX_RAW
            assert [header.id for _, header in info.toc] == info.toc.ids()
        except REFUSED:
            pass
        end = 0
        for offset, header, payload in pack.scan_objects(file.fileno()):
            assert offset >= end and offset % 8 == 0
            end = offset + pack.object_size(header.stored)
            assert len(payload) == header.stored and checksum(payload) == header.checksum


def fuzz_object_header(data: bytes) -> None:
    header = pack.decode_header(data)
    assert 0 < header.stored <= header.raw <= pack.MAX_RAW
    assert pack.encode_header(header) == data[:96]


def fuzz_payload(data: bytes) -> None:
    """One byte that chooses the codec, then a zstd payload or one without a coding."""
    if data:
        codec = 1 if data[0] % 2 else data[0] * 2 + 4
        decode(codec, memoryview(data)[1:], memoryview(bytearray(4096)), 0)


def fuzz_planes(data: bytes) -> None:
    """The element size and whether there is a base, then a payload of float planes.

    It is decoded by the kernel, if there is one, and without: both say the same of it.
    """
    if len(data) < 2:
        return
    base = memoryview(BASE)[: data[1] * 16] if data[1] % 4 else None
    payload = memoryview(data)[2:]
    found = []
    compiled = planes.kernel
    for kernel in (compiled, lambda: None):
        target = bytearray(4096)
        planes.kernel = kernel
        try:
            decode(3, payload, memoryview(target), data[0], base)
            found.append(bytes(target))
        except DamagedError:
            found.append(None)
        finally:
            planes.kernel = compiled
    assert found[0] == found[1]
    if found[0] is None:
        raise DamagedError("both refuse it")


def fuzz_recipe(data: bytes) -> None:
    """The size that the manifest gives, then a segment."""
    if len(data) < 8:
        return
    size = struct.unpack_from("<Q", data)[0]
    segment = recipe.decode_segment(data[8:], size)
    entries = list(segment.entries())
    assert sum(entry.length for entry in entries) == size
    assert [entry.id for entry in entries if entry.id is not None] == segment.chunk_ids()
    assert {len(entry.fingerprint) for entry in entries} <= {0, 16}


def fuzz_manifest(data: bytes) -> None:
    """A manifest file whose hash is right, or it would be refused before it is parsed."""
    digest = identify(data)
    found = manifest.decode(data + digest, store_id=STORE, checkpoint_id=digest)
    for entry in found.files:
        manifest.check_name(entry.name)


def fuzz_manifest_contents(data: bytes) -> None:
    """The files of a manifest, with every hash around them right."""
    from gpuimg._proto import store_pb2

    message = store_pb2.Manifest(store_id=STORE, contents=data, root=identify(data))
    body = message.SerializeToString()
    fuzz_manifest(struct.pack("<8sHHI", b"GPIMANI\n", 1, 0, len(body)) + body)


def fuzz_config(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config").write_bytes(data)
        found = layout.load(Path(folder))
        assert len(found.id) == 16 and 0 <= found.fingerprint_seed < 2**64


def fuzz_tag(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tags").mkdir()
        (Path(folder) / "tags" / "t").write_bytes(data)
        catalogue = Catalogue(layout.StoreFolder(Path(folder)), layout.Config(STORE, 65536, 0))
        for target in catalogue.tags().values():
            assert len(target) == 32


def fuzz_place(data: bytes) -> None:
    try:
        place = _parse_place(data)
    except (struct.error, ValueError):
        return
    assert 0 < place.stored <= place.raw <= pack.MAX_RAW
    assert len(place.base) == (32 if place.flags & pack.HAS_BASE else 0)


def _seed_pack() -> bytes:
    head = pack.encode_pack_header(STORE, STORE)
    data, toc = head, b""
    for payload, base in ((b"one", NO_ID), (b"another object", b"b" * 32), (bytes(100), NO_ID)):
        flags = pack.HAS_BASE if base != NO_ID else 0
        header = pack.encode_header(
            pack.ObjectHeader(
                identify(payload),
                3 * flags,
                2 * flags,
                flags,
                len(payload),
                len(payload),
                base,
                checksum(payload),
            )
        )
        toc += pack.toc_entry(len(data), header)
        data += header + payload + bytes(-len(payload) % 8)
    return data + pack.encode_tail(head, toc, len(data))[0]


def _seed_manifest() -> bytes:
    files = [
        FileEntry("inline", 3, Layout.FIXED, b"abc", ()),
        FileEntry("pages-1.img", 9000, Layout.PAGES, b"", (SegmentRef(bytes(32), 9000),)),
        FileEntry(
            "weights", 9000, Layout.FIXED, b"", (SegmentRef(bytes(32), 9000),), BufferObject(1, 2, 3, 9000, 4)
        ),
    ]
    data, _ = manifest.encode(
        store_id=STORE,
        created=1,
        nonce=STORE,
        source=Source(),
        statistics=Statistics(chunks=2, delta_bytes=9000),
        files=files,
        parent=bytes(range(32)),
        figures={"weights": FileFigures(Statistics(chunks=1), 2)},
    )
    return data[:-32]


def _contents(data: bytes) -> bytes:
    from gpuimg._proto import store_pb2

    contents: bytes = store_pb2.Manifest.FromString(data[16:]).contents
    return contents


def _seed_planes() -> bytes:
    """A difference of bf16 numbers, with planes of several modes."""
    words = bytearray(BASE)
    for at in range(0, len(words), 34):
        words[at] ^= 1
    payload = planes.encode(words, 2, Transform.DIFFERENCE, BASE)
    assert payload is not None
    return b"\x02\xff" + payload


BASE = floats(4096, 1, "bfloat16")
SEGMENT = recipe.encode_segment(
    [Entry(65536, bytes(32), bytes(16)), Entry(9000, None), Entry(1, bytes(32), b"f" * 16)]
)
CONFIG = {"format": 1, "id": "00" * 16, "chunk_size": 65536, "fingerprint_seed": 1, "requires": []}

TARGETS: dict[str, tuple[Callable[[bytes], None], bytes]] = {
    "pack": (fuzz_pack, _seed_pack()),
    "object header": (fuzz_object_header, _seed_pack()[64:160]),
    "payload": (fuzz_payload, b"\x01\x28\xb5\x2f\xfd\x60\x00\x0f\x03\x80\x00a"),
    "float planes": (fuzz_planes, _seed_planes()),
    "floats alone": (
        fuzz_planes,
        b"\x02\x00" + (planes.encode(BASE, 2, Transform.ROTATED) or b""),
    ),
    "recipe": (fuzz_recipe, struct.pack("<Q", 65536 + 9001) + SEGMENT),
    "manifest": (fuzz_manifest, _seed_manifest()),
    "manifest contents": (fuzz_manifest_contents, _contents(_seed_manifest())),
    "config": (fuzz_config, json.dumps(CONFIG).encode()),
    "tag": (fuzz_tag, b"ab" * 32 + b"\n"),
    "place": (fuzz_place, struct.pack(">IIQIIBBH", 1, 2, 160, 100, 200, 1, 0, 0)),
    "place with base": (fuzz_place, struct.pack(">IIQIIBBH", 1, 2, 160, 100, 200, 3, 2, 1) + bytes(32)),
}

INTERESTING = [0, 1, 0x7F, 0x80, 0xFF]


@st.composite
def around(draw: st.DrawFn, seed: bytes) -> bytes:
    """Any bytes, or the seed with pieces overwritten, removed, doubled and numbers made extreme."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=2 * len(seed)))
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 5))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            data[at] = draw(st.integers(0, 255))
        elif kind == 1:
            width = draw(st.sampled_from([1, 2, 4, 8]))
            data[at : at + width] = bytes([draw(st.sampled_from(INTERESTING))]) * width
        elif kind == 2:
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == 3:
            data[at:at] = data[max(0, at - draw(st.integers(1, 40))) : at]
        else:
            data[at:at] = draw(st.binary(max_size=20))
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_meet_a_sentence_and_little_memory(name):
    target, seed = TARGETS[name]
    target(seed)

    @longer
    @given(around(seed))
    def run(data: bytes) -> None:
        tracemalloc.start()
        try:
            target(data)
        except REFUSED as error:
            assert str(error)
        except NotAStoreError:
            raise AssertionError("there is a configuration") from None
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < MEMORY + 16 * len(data)

    run()
