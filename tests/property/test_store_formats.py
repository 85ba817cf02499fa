"""Every format of the store: what is written is read back, and hostile bytes meet a sentence.

Hostile means: flipped, cut, lengthened, or with the checksum put right again behind the lie.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import tracemalloc
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuimg.errors import DamagedError, GpuimgError, NewerFormatError, NotAStoreError
from gpuimg.store import layout, manifest, pack, recipe
from gpuimg.store.hashing import NO_ID, checksum, identify
from gpuimg.store.model import (
    BufferObject,
    FileEntry,
    FileFigures,
    Layout,
    Process,
    SegmentRef,
    Source,
    SourceKind,
    Statistics,
)
from gpuimg.store.recipe import Entry

STORE, LEASE = bytes(range(16)), bytes(range(16, 32))
REFUSED = (DamagedError, NewerFormatError)
SMALL = 32 * 1024 * 1024

ids = st.binary(min_size=32, max_size=32)


@contextmanager
def little_memory(limit: int = SMALL):
    """The block's Python allocations stay below a limit, whatever lengths the bytes claim."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@contextmanager
def open_bytes(data: bytes):
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(data)
        yield file.fileno()


@st.composite
def mutations(draw, data: bytes) -> bytes:
    """`data`, changed in at least one bit."""
    changed = bytearray(data)
    kind = draw(st.sampled_from(["flip", "cut", "append", "overwrite"]))
    if kind == "flip":
        for _ in range(draw(st.integers(1, 4))):
            changed[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
    elif kind == "cut":
        del changed[draw(st.integers(0, len(data) - 1)) :]
    elif kind == "append":
        changed += draw(st.binary(min_size=1, max_size=100))
    else:
        start = draw(st.integers(0, len(data) - 1))
        new = draw(st.binary(min_size=1, max_size=64))
        changed[start : start + len(new)] = new
    return bytes(changed)


# Objects and packs

headers = st.integers(1, pack.MAX_RAW).flatmap(
    lambda raw: st.builds(
        pack.ObjectHeader,
        id=ids,
        codec=st.integers(0, 255),
        element_size=st.sampled_from([0, 1, 2, 4, 8]),
        flags=st.just(0),
        raw=st.just(raw),
        stored=st.integers(1, raw),
        base=st.just(NO_ID),
        checksum=st.binary(min_size=8, max_size=8),
    )
)
headers |= st.builds(
    lambda header, base: header._replace(flags=pack.HAS_BASE, base=base), headers, ids | st.just(NO_ID)
)


def pack_bytes(payloads: list[bytes], *, store: bytes = STORE) -> tuple[bytes, bytes]:
    """A pack of raw objects, and its id."""
    head = pack.encode_pack_header(store, LEASE)
    data, toc = head, b""
    for payload in payloads:
        header = pack.encode_header(
            pack.ObjectHeader(
                identify(payload), 0, 0, 0, len(payload), len(payload), NO_ID, checksum(payload)
            )
        )
        toc += pack.toc_entry(len(data), header)
        data += header + payload + bytes(-len(payload) % 8)
    tail, pack_id = pack.encode_tail(head, toc, len(data))
    return data + tail, pack_id


payloads = st.lists(st.binary(min_size=1, max_size=60), max_size=6)


@given(headers)
def test_an_object_header_comes_back(header):
    data = pack.encode_header(header)
    assert len(data) == 96
    assert pack.decode_header(data) == header


@given(headers, st.data())
def test_a_changed_object_header_is_refused(header, data):
    encoded = pack.encode_header(header)
    changed = data.draw(mutations(encoded).filter(lambda value: value[:96] != encoded))
    with pytest.raises(REFUSED):
        pack.decode_header(changed)


@given(st.binary(min_size=88, max_size=88))
def test_object_headers_that_lie_with_a_right_checksum_are_taken_only_if_possible(body):
    body = b"GPOB\x01" + body[5:]
    try:
        header = pack.decode_header(body + checksum(body))
    except REFUSED:
        return
    assert 0 < header.stored <= header.raw <= pack.MAX_RAW


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"raw": 0}, DamagedError),
        ({"raw": pack.MAX_RAW + 1}, DamagedError),
        ({"raw": 2**32 - 1, "stored": 2**32 - 1}, DamagedError),
        ({"stored": 0}, DamagedError),
        ({"stored": 11}, DamagedError),
        ({"flags": 2}, REFUSED),
        ({"base": b"b" * 32}, DamagedError),
    ],
)
def test_an_object_header_with_impossible_values_is_refused(change, error):
    header = pack.ObjectHeader(b"i" * 32, 0, 0, 0, 10, 10, NO_ID, b"c" * 8)
    with pytest.raises(error):
        pack.decode_header(pack.encode_header(header._replace(**change)))


def test_an_object_of_a_later_version_is_called_newer():
    body = bytearray(pack.encode_header(pack.ObjectHeader(b"i" * 32, 0, 0, 0, 1, 1, NO_ID, b"c" * 8))[:88])
    body[4] = 2
    with pytest.raises(NewerFormatError):
        pack.decode_header(bytes(body) + checksum(bytes(body)))


@given(payloads)
def test_a_pack_comes_back(contents):
    data, pack_id = pack_bytes(contents)
    with open_bytes(data) as fd:
        info = pack.read_pack(fd, STORE, pack_id)
        assert (info.id, info.lease, info.size) == (pack_id, LEASE, len(data))
        assert len(info.toc) == len(contents)
        assert info.toc.ids() == [identify(each) for each in contents]
        assert [(entry.header.id, entry.header.raw) for entry in info.toc] == [
            (identify(each), len(each)) for each in contents
        ]
        assert [info.toc[number] for number in range(len(contents))] == list(info.toc)
        for offset, header in info.toc:
            assert pack.decode_header(data[offset : offset + 96]) == header
        assert [payload for _, _, payload in pack.scan_objects(fd)] == contents


@given(payloads, st.data())
def test_a_changed_pack_is_refused_or_unchanged_in_structure(contents, data):
    encoded, pack_id = pack_bytes(contents)
    changed = data.draw(mutations(encoded))
    with open_bytes(changed) as fd, little_memory():
        try:
            info = pack.read_pack(fd, STORE, pack_id)
        except REFUSED:
            info = None
        good = [(header, payload) for _, header, payload in pack.scan_objects(fd)]
    if info is not None:
        with open_bytes(encoded) as fd:
            assert list(info.toc) == list(pack.read_pack(fd, STORE, pack_id).toc)
    known = {identify(each): each for each in contents}
    assert all(known[header.id] == payload for header, payload in good)


@given(contents=st.lists(st.binary(min_size=1, max_size=60), min_size=2, max_size=5), cut=st.data())
def test_a_pack_without_its_end_gives_up_every_whole_object(contents, cut):
    encoded, _ = pack_bytes(contents)
    size = cut.draw(st.integers(0, len(encoded)))
    end, whole = 64, []
    for each in contents:
        if end + 96 + len(each) <= size:
            whole.append(each)
        end += pack.object_size(len(each))
    with open_bytes(encoded[:size]) as fd:
        assert [payload for _, _, payload in pack.scan_objects(fd)] == whole


@given(st.binary(max_size=96 * 3), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.data())
def test_a_trailer_that_lies_with_a_right_hash_is_refused(table, count, number, data):
    """The table is hashed, so this is a writer gone mad rather than a disk."""
    head = pack.encode_pack_header(STORE, LEASE)
    offset = data.draw(st.sampled_from([64, number, 0, 2**63]))
    size = data.draw(st.sampled_from([len(table), number, 96 * count]))
    trailer = struct.pack("<8sIIQQ32s", b"GPIPEND\n", count, 0, offset, size, identify(head + table))
    with open_bytes(head + table + trailer) as fd, little_memory():
        try:
            info = pack.read_pack(fd, STORE)
        except REFUSED:
            return
    assert len(info.toc) == count == len(table) // 96


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", 0),
        ("offset", 2**64 - 1),
        ("offset", 2**64 - 200),
        ("offset", 2**63),
        ("stored", 0),
        ("stored", 2**32 - 1),
        ("raw", 2**32 - 1),
        ("raw", 0),
        ("magic", b"XXXX"),
    ],
)
def test_a_table_with_impossible_values_is_refused_although_its_hash_is_right(field, value):
    encoded, _ = pack_bytes([b"one object", b"another"])
    head, end = encoded[:64], len(encoded) - 64 - 2 * 96
    toc = bytearray(encoded[end:-64])
    place, kind = {"offset": (0, "<Q"), "magic": (8, "4s"), "raw": (16, "<I"), "stored": (20, "<I")}[field]
    struct.pack_into(kind, toc, 96 + place, value)
    tail, pack_id = pack.encode_tail(head, bytes(toc), end)
    with open_bytes(encoded[:end] + tail) as fd, little_memory(), pytest.raises(DamagedError):
        pack.read_pack(fd, STORE, pack_id)


def test_a_pack_of_another_store_a_later_version_or_another_name_is_refused():
    encoded, pack_id = pack_bytes([b"payload"])
    with open_bytes(encoded) as fd:
        with pytest.raises(DamagedError, match="another store"):
            pack.read_pack(fd, bytes(16))
        with pytest.raises(DamagedError, match="name"):
            pack.read_pack(fd, STORE, bytes(32))
    head = bytearray(encoded[:56])
    head[8] = 2
    newer = bytes(head) + checksum(bytes(head)) + encoded[64:]
    with open_bytes(newer) as fd, pytest.raises(NewerFormatError):
        pack.read_pack(fd, STORE, pack_id)


@pytest.mark.timeout(60)
def test_scanning_takes_time_in_proportion_to_the_pack():
    """Every multiple of 8 looks like an object, and many small objects follow each other."""
    objects = [struct.pack("<I", number) * 4 for number in range(20_000)]
    encoded, _ = pack_bytes(objects)
    with open_bytes(b"GPOBXXXX" * 400_000 + encoded[64:]) as fd:
        assert [payload for _, _, payload in pack.scan_objects(fd)] == objects


def test_scanning_finds_objects_across_its_windows():
    objects = [os.urandom(2 * 1024 * 1024 - number) for number in range(9)]
    encoded, _ = pack_bytes(objects)
    for shift in (0, 8, 8 * 1024 * 1024 - 64 - 48, 8 * 1024 * 1024 - 64 - 96):
        with open_bytes(bytes(shift) + encoded) as fd:
            assert [payload for _, _, payload in pack.scan_objects(fd)] == objects


# Recipe segments


def lists_of_entries(fingerprints):
    lengths = st.integers(1, pack.MAX_RAW)
    chunks = st.builds(Entry, lengths, ids, fingerprints)
    return st.lists(
        chunks | st.builds(Entry, st.integers(1, 2**48), st.none(), st.just(b"")), min_size=1, max_size=40
    )


marks = st.binary(min_size=16, max_size=16)
entries = lists_of_entries(st.just(b"")) | lists_of_entries(marks)


def size_of(listed):
    return sum(entry.length for entry in listed)


@given(entries)
def test_a_recipe_segment_comes_back(listed):
    data = recipe.encode_segment(listed)
    chunks = [entry for entry in listed if entry.id is not None]
    marked = all(entry.fingerprint for entry in chunks)
    assert len(data) == 16 + 8 * len(listed) + (48 if marked else 32) * len(chunks)
    segment = recipe.decode_segment(data, size_of(listed))
    assert list(segment.entries()) == listed
    assert segment.chunk_ids() == [entry.id for entry in chunks]


@given(lists_of_entries(marks | st.just(b"")))
def test_fingerprints_are_kept_if_all_chunks_of_a_segment_have_one(listed):
    segment = recipe.decode_segment(recipe.encode_segment(listed), size_of(listed))
    if all(entry.fingerprint for entry in listed if entry.id is not None):
        assert list(segment.entries()) == listed
    else:
        assert [tuple(entry[:2]) for entry in segment.entries()] == [tuple(entry[:2]) for entry in listed]
        assert segment.fingerprints == b""


@given(entries, st.data())
def test_a_changed_recipe_segment_is_refused_or_still_describes_that_many_bytes(listed, data):
    size = size_of(listed)
    changed = data.draw(mutations(recipe.encode_segment(listed)))
    with little_memory():
        try:
            segment = recipe.decode_segment(changed, size)
        except REFUSED:
            return
    back = list(segment.entries())
    assert size_of(back) == size
    assert [entry.id for entry in back if entry.id is not None] == segment.chunk_ids()
    assert {len(entry.fingerprint) for entry in back} <= {0, 16}


@given(st.binary(max_size=200), st.integers(0, 2**64))
def test_no_bytes_make_the_recipe_parser_fail_otherwise(data, size):
    for start in (b"", b"GPRC\x01\x00\x00\x00"):
        with suppress(REFUSED):
            recipe.decode_segment(start + data, size)


@pytest.mark.parametrize(
    ("count", "chunks", "words"),
    [
        (0, 0, []),
        (2**32 - 1, 0, [1 << 63 | 1]),
        (1, 2**32 - 1, [1]),
        (1, 2, [1]),
        (16385, 0, [1 << 63 | 1] * 16385),
        (1, 0, [1 << 63]),
        (1, 1, [pack.MAX_RAW + 1]),
        (2, 0, [(1 << 63) | (1 << 62), (1 << 63) | (1 << 62)]),
    ],
)
def test_recipe_segments_with_impossible_numbers_are_refused(count, chunks, words):
    data = struct.pack("<4sBBHII", b"GPRC", 1, 0, 0, count, chunks)
    data += struct.pack(f"<{len(words)}Q", *words) + bytes(32 * min(chunks, 4))
    with little_memory(), pytest.raises(DamagedError):
        recipe.decode_segment(data, sum(word & (1 << 63) - 1 for word in words) % 2**63)


def test_a_segment_with_fingerprints_is_read_and_unknown_flags_are_called_newer():
    data = bytearray(recipe.encode_segment([Entry(5, b"i" * 32), Entry(7, None)]))
    assert data[5] == 0
    data[5] = 1
    marked = bytes(data) + b"f" * 16
    assert list(recipe.decode_segment(marked, 12).entries()) == [
        Entry(5, b"i" * 32, b"f" * 16),
        Entry(7, None),
    ]
    assert recipe.encode_segment([Entry(5, b"i" * 32, b"f" * 16), Entry(7, None)]) == marked
    for place, value in ((5, 2), (4, 2)):
        changed = bytearray(marked)
        changed[place] = value
        with pytest.raises(NewerFormatError):
            recipe.decode_segment(bytes(changed), 12)
    with pytest.raises(DamagedError):
        recipe.decode_segment(marked[:-1], 12)


# Manifests

names = (
    st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=60)
    .filter(lambda name: name not in {".", ".."})
    .filter(lambda name: len(name.encode()) <= 255)
)
segments = st.lists(st.builds(SegmentRef, ids, st.integers(1, 2**50)), min_size=1, max_size=4)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
buffer_objects = st.none() | st.builds(BufferObject, u32, u32, u64, u64, u32)
file_entries = st.one_of(
    st.builds(
        lambda name, kind, data: FileEntry(name, len(data), kind, data, ()),
        names,
        st.sampled_from(Layout),
        st.binary(max_size=100),
    ),
    st.builds(
        lambda name, kind, refs, bo: FileEntry(
            name, sum(ref.size for ref in refs), kind, b"", tuple(refs), bo
        ),
        names,
        st.sampled_from(Layout),
        segments,
        buffer_objects,
    ),
)
sources = st.builds(
    Source,
    kind=st.sampled_from(SourceKind),
    hostname=st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
    kernel=st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
    processes=st.lists(st.builds(Process, u32, u32, u32, st.just("comm")), max_size=3).map(tuple),
)
statistics = st.builds(
    Statistics,
    **{name: u64 for name in Statistics.__dataclass_fields__ if name != "seconds"},
    seconds=st.floats(0, 1e9),
)
figures_by_file = st.dictionaries(
    names, st.builds(FileFigures, statistics, st.sampled_from([0, 1, 2, 4, 8])), max_size=4
)


def encode(files, source=None, statistics=None, parent=b"", figures=None):
    return manifest.encode(
        store_id=STORE,
        created=1,
        nonce=bytes(16),
        source=source or Source(),
        statistics=statistics or Statistics(),
        files=files,
        parent=parent,
        figures=figures,
    )


@given(
    st.lists(file_entries, max_size=6, unique_by=lambda entry: entry.name),
    sources,
    statistics,
    ids | st.just(b""),
    figures_by_file,
)
def test_a_manifest_comes_back(files, source, total, parent, figures):
    data, checkpoint_id = encode(files, source, total, parent, figures)
    back = manifest.decode(data, store_id=STORE, checkpoint_id=checkpoint_id)
    assert back.files == tuple(sorted(files, key=lambda entry: entry.name.encode()))
    assert (back.source, back.statistics, back.created) == (source, total, 1)
    assert (back.parent, back.figures) == (parent, figures)


@given(st.lists(file_entries, max_size=4, unique_by=lambda entry: entry.name), st.data())
def test_a_changed_manifest_is_refused(files, data):
    encoded, checkpoint_id = encode(files)
    changed = data.draw(mutations(encoded).filter(lambda value: value != encoded))
    with little_memory(), pytest.raises(REFUSED):
        manifest.decode(changed, store_id=STORE, checkpoint_id=checkpoint_id)


def sealed(body: bytes, *, head: bytes | None = None) -> tuple[bytes, bytes]:
    """A manifest file around any body, with a right hash."""
    data = (head or struct.pack("<8sHHI", b"GPIMANI\n", 1, 0, len(body))) + body
    return data + identify(data), identify(data)


@given(st.binary(max_size=300))
def test_a_manifest_with_a_right_hash_and_any_body_is_refused(body):
    data, checkpoint_id = sealed(body)
    with pytest.raises(REFUSED):
        manifest.decode(data, store_id=STORE, checkpoint_id=checkpoint_id)


@given(st.data())
def test_a_lying_body_behind_right_hashes_is_refused_or_consistent(data):
    """The contents are mutated and every hash around them put right."""
    from gpuimg._proto import store_pb2

    files = data.draw(st.lists(file_entries, min_size=1, max_size=3, unique_by=lambda entry: entry.name))
    encoded, _ = encode(files)
    message = store_pb2.Manifest.FromString(encoded[16:-32])
    message.contents = data.draw(mutations(message.contents))
    message.root = identify(message.contents)
    changed, checkpoint_id = sealed(message.SerializeToString())
    try:
        back = manifest.decode(changed, store_id=STORE, checkpoint_id=checkpoint_id)
    except REFUSED:
        return
    for entry in back.files:
        manifest.check_name(entry.name)
        assert entry.size == (sum(ref.size for ref in entry.segments) if entry.segments else len(entry.data))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "../x", "a\0b", "n" * 256, "é" * 128])
def test_a_manifest_with_a_name_that_leaves_the_directory_is_refused(name):
    data, checkpoint_id = encode([FileEntry(name, 1, Layout.FIXED, b"x", ())])
    with pytest.raises(DamagedError):
        manifest.decode(data, store_id=STORE, checkpoint_id=checkpoint_id)


def test_a_manifest_with_one_name_twice_is_refused():
    entry = FileEntry("name", 1, Layout.FIXED, b"x", ())
    data, checkpoint_id = encode([entry, entry])
    with pytest.raises(DamagedError):
        manifest.decode(data, store_id=STORE, checkpoint_id=checkpoint_id)


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (struct.pack("<8sHHI", b"GPIMANI\n", 2, 0, 4), NewerFormatError),
        (struct.pack("<8sHHI", b"GPIMANI\n", 1, 1, 4), NewerFormatError),
        (struct.pack("<8sHHI", b"GPIMANI\n", 1, 0, 2**32 - 1), DamagedError),
        (struct.pack("<8sHHI", b"GPIMANX\n", 1, 0, 4), DamagedError),
    ],
)
def test_a_manifest_head_that_is_not_ours_is_refused(head, error):
    data, checkpoint_id = sealed(b"body", head=head)
    with pytest.raises(error):
        manifest.decode(data, store_id=STORE, checkpoint_id=checkpoint_id)


def test_equal_contents_have_equal_roots_and_the_order_of_files_does_not_matter():
    files = [FileEntry(name, 1, Layout.FIXED, b"x", ()) for name in ("b", "a", "ü")]
    roots = set()
    figures = {"a": FileFigures(Statistics(chunks=1), 4)}
    for order, parent in ((files, b""), (files[::-1], b"p" * 32)):
        data, checkpoint_id = encode(order, parent=parent, figures=figures if parent else None)
        roots.add(manifest.decode(data, store_id=STORE, checkpoint_id=checkpoint_id).root)
    assert len(roots) == 1


# The configuration


@contextmanager
def config_file(data: bytes):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config").write_bytes(data)
        yield Path(folder)


GOOD = {"format": 1, "id": "ab" * 16, "chunk_size": 65536, "fingerprint_seed": 7, "requires": []}


@given(st.sampled_from([1 << shift for shift in range(16, 21)]), st.integers(0, 2**64 - 1), st.text())
def test_a_configuration_comes_back_and_unknown_keys_are_ignored(chunk_size, seed, extra):
    text = {**GOOD, "chunk_size": chunk_size, "fingerprint_seed": seed, f"x{extra}": extra}
    with config_file(json.dumps(text).encode()) as root:
        assert layout.load(root) == layout.Config(b"\xab" * 16, chunk_size, seed)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(GOOD)), json_values)
def test_a_configuration_with_any_value_in_a_field_is_refused_or_sound(key, value):
    with config_file(json.dumps({**GOOD, key: value}).encode()) as root:
        try:
            config = layout.load(root)
        except REFUSED:
            return
    assert len(config.id) == 16 and type(config.chunk_size) is int and type(config.fingerprint_seed) is int


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format": 2}, NewerFormatError),
        ({"requires": ["deltas"]}, NewerFormatError),
        ({"format": 2, "id": 5, "chunk_size": {}}, NewerFormatError),
        ({"format": 0}, DamagedError),
        ({"format": -1}, DamagedError),
        ({"format": True}, DamagedError),
        ({"format": "1"}, DamagedError),
        ({"fingerprint_seed": True}, DamagedError),
        ({"fingerprint_seed": 2**64}, DamagedError),
        ({"chunk_size": 100_000}, DamagedError),
        ({"chunk_size": 2**30}, DamagedError),
        ({"id": "ab"}, DamagedError),
        ({"id": "zz" * 16}, DamagedError),
        ({"requires": "deltas"}, DamagedError),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(change, error):
    with config_file(json.dumps({**GOOD, **change}).encode()) as root, pytest.raises(error):
        layout.load(root)


@given(st.binary(max_size=200))
def test_no_bytes_make_the_configuration_parser_fail_otherwise(data):
    with config_file(data) as root, suppress(REFUSED):
        layout.load(root)


@pytest.mark.parametrize("data", [b"[" * 60_000, b"9" * 60_000, b"{" * 200_000, b"\xff\xfe", b"null", b"[]"])
def test_a_configuration_of_deep_long_or_foreign_text_is_refused(data):
    with config_file(data) as root, little_memory(), pytest.raises(DamagedError):
        layout.load(root)


def test_a_folder_without_configuration_is_no_store(tmp_path):
    for place in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NotAStoreError):
            layout.load(place)
    (tmp_path / "config").mkdir()
    with pytest.raises(NotAStoreError):
        layout.load(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotAStoreError):
        layout.load(tmp_path / "file")


# Names of files


@settings(max_examples=300)
@given(
    st.text(st.sampled_from("0123456789abcdefABCDEFgx.- \n"), max_size=70)
    | st.text(st.sampled_from("0123456789abcdefA \t"), min_size=64, max_size=64)
)
def test_only_lower_case_hexadecimal_names_an_id(name):
    found = layout.parse_id(name)
    assert found is None or found.hex() == name
    found = layout.parse_id(name + ".pack", ".pack")
    assert found is None or found.hex() == name


@given(names)
def test_every_allowed_name_is_allowed_and_what_is_refused_says_why(name):
    manifest.check_name(name)
    for bad in (f"{name}/{name}", f"\0{name}", name * 256):
        with pytest.raises(GpuimgError) as caught:
            manifest.check_name(bad)
        assert caught.value.remedy
