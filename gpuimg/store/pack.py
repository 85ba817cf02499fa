"""The pack file format (docs/store-format.md, "Object" and "Pack"): encoding, parsing, scanning.

Pure format: where packs lie, who writes them and what their chunks mean is decided elsewhere.
Every length is checked before it is used.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpuimg.errors import DamagedError, NewerFormatError
from gpuimg.store.files import pread_exactly
from gpuimg.store.hashing import ID_SIZE, NO_ID, checksum, identify

OBJECT_MAGIC = b"GPOB"
PACK_MAGIC = b"GPIPACK\n"
TRAILER_MAGIC = b"GPIPEND\n"
VERSION = 1
ALIGNMENT = 8
HEADER_SIZE = 64
OBJECT_HEADER_SIZE = 96
TRAILER_SIZE = 64
TARGET_SIZE = 64 * 1024 * 1024
MAX_RAW = 2 * 1024 * 1024
MAX_OBJECTS = 1 << 20
HAS_BASE = 1
MAX_CHAIN = 8
"""How many bases a chunk may rest on, one on the other (docs/store-format.md, "Float planes")."""
# Where an entry of the table has the chunk's id.
_ID_IN_ENTRY = 24
_SCAN_WINDOW = 8 * 1024 * 1024

_OBJECT = struct.Struct("<4sBBBBII32s32s8s")
_TOC_ENTRY = struct.Struct("<Q4sBBBBII32s32s8s")
_PACK = struct.Struct("<8sHHI16s16s8x")
_TRAILER = struct.Struct("<8sIIQQ32s")


class ObjectHeader(NamedTuple):
    """What an object says of itself; lengths in bytes."""

    id: bytes
    codec: int
    element_size: int
    flags: int
    raw: int
    stored: int
    base: bytes
    checksum: bytes


class TocEntry(NamedTuple):
    """One object of a pack: the offset of its header in the file, and what that says."""

    offset: int
    header: ObjectHeader


class Toc:
    """A pack's table of contents, parsed entry by entry: 96 bytes each."""

    __slots__ = ("_table",)

    def __init__(self, table: bytes) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table) // _TOC_ENTRY.size

    def __iter__(self) -> Iterator[TocEntry]:
        for fields in _TOC_ENTRY.iter_unpack(self._table):
            yield _entry(fields)

    def __getitem__(self, ordinal: int) -> TocEntry:
        return _entry(_TOC_ENTRY.unpack_from(self._table, ordinal * _TOC_ENTRY.size))

    def ids(self) -> list[bytes]:
        """The chunk ids, in order."""
        table, size = self._table, _TOC_ENTRY.size
        return [table[start : start + ID_SIZE] for start in range(_ID_IN_ENTRY, len(table), size)]


def _entry(fields: tuple[Any, ...]) -> TocEntry:
    offset, _, _, codec, element_size, flags, raw, stored, chunk_id, base, total = fields
    return TocEntry(offset, ObjectHeader(chunk_id, codec, element_size, flags, raw, stored, base, total))


@dataclass(frozen=True, slots=True)
class PackInfo:
    """A pack's structure: its id, its writer's lease, its file's size and its table of contents."""

    id: bytes
    lease: bytes
    size: int
    toc: Toc


def object_size(stored: int) -> int:
    """Bytes that an object with a payload of that length takes in a pack."""
    return OBJECT_HEADER_SIZE + stored + -stored % ALIGNMENT


def encode_header(header: ObjectHeader) -> bytes:
    body = _OBJECT.pack(
        OBJECT_MAGIC,
        VERSION,
        header.codec,
        header.element_size,
        header.flags,
        header.raw,
        header.stored,
        header.id,
        header.base,
        header.checksum,
    )
    return body + checksum(body)


def decode_header(data: bytes | memoryview) -> ObjectHeader:
    """Parse 96 bytes.

    Raises
    ------
    DamagedError, NewerFormatError
    """
    if len(data) < OBJECT_HEADER_SIZE or bytes(data[:4]) != OBJECT_MAGIC:
        raise DamagedError("there is no object here")
    body = bytes(data[: _OBJECT.size])
    if checksum(body) != bytes(data[_OBJECT.size : OBJECT_HEADER_SIZE]):
        raise DamagedError("the checksum of an object header is wrong")
    _, version, codec, element_size, flags, raw, stored, chunk_id, base, total = _OBJECT.unpack(body)
    if version > VERSION:
        raise NewerFormatError(f"an object has version {version}", remedy="use a newer gpuimg")
    header = ObjectHeader(chunk_id, codec, element_size, flags, raw, stored, base, total)
    if not _plausible(header):
        raise DamagedError("an object header has impossible lengths")
    return header


def _plausible(header: ObjectHeader) -> bool:
    return (
        0 < header.stored <= header.raw <= MAX_RAW
        and not header.flags & ~HAS_BASE
        and (bool(header.flags & HAS_BASE) or header.base == NO_ID)
    )


def encode_pack_header(store_id: bytes, lease: bytes) -> bytes:
    body = _PACK.pack(PACK_MAGIC, VERSION, 0, 0, store_id, lease)
    return body + checksum(body)


def encode_tail(pack_header: bytes, toc: bytes, toc_offset: int) -> tuple[bytes, bytes]:
    """Table of contents and trailer as one run of bytes, and the pack's id."""
    pack_id = identify(pack_header + toc)
    count = len(toc) // OBJECT_HEADER_SIZE
    return toc + _TRAILER.pack(TRAILER_MAGIC, count, 0, toc_offset, len(toc), pack_id), pack_id


def toc_entry(offset: int, header: bytes) -> bytes:
    """The table's entry for an object whose encoded header lies at `offset`."""
    return struct.pack("<Q", offset) + header[: _OBJECT.size]


def read_pack_header(fd: int, store_id: bytes) -> bytes:
    """The 64 bytes of the pack's header, checked; returns them.

    Raises
    ------
    DamagedError, NewerFormatError
    """
    data = pread_exactly(fd, HEADER_SIZE, 0)
    if len(data) < HEADER_SIZE or data[:8] != PACK_MAGIC:
        raise DamagedError("it does not begin like a pack")
    if checksum(data[:-8]) != data[-8:]:
        raise DamagedError("the checksum of its header is wrong")
    _, version, flags, _, owner, _ = _PACK.unpack(data[:-8])
    if version > VERSION or flags:
        raise NewerFormatError(f"it has pack format {version}.{flags}", remedy="use a newer gpuimg")
    if owner != store_id:
        raise DamagedError("it belongs to another store")
    return data


def read_pack(fd: int, store_id: bytes, expected_id: bytes | None = None) -> PackInfo:
    """Read header, trailer and table of contents of an open pack file.

    Raises
    ------
    DamagedError, NewerFormatError
        The message says what is wrong with "it", the pack; the caller names it.
    """
    header = read_pack_header(fd, store_id)
    size = os.fstat(fd).st_size
    if size < HEADER_SIZE + TRAILER_SIZE:
        raise DamagedError("it is cut short")
    trailer = pread_exactly(fd, TRAILER_SIZE, size - TRAILER_SIZE)
    magic, count, _, toc_offset, toc_size, pack_id = _TRAILER.unpack(trailer)
    if magic != TRAILER_MAGIC:
        raise DamagedError("it is cut short or its trailer is overwritten")
    if (
        count > MAX_OBJECTS
        or toc_size != count * OBJECT_HEADER_SIZE
        or toc_offset != size - TRAILER_SIZE - toc_size
        or toc_offset < HEADER_SIZE
    ):
        raise DamagedError("its trailer has impossible values")
    table = pread_exactly(fd, toc_size, toc_offset)
    if identify(header + table) != pack_id:
        raise DamagedError("its table of contents does not match its hash")
    if expected_id is not None and pack_id != expected_id:
        raise DamagedError("its name is not its hash")
    _check_toc(table, toc_offset)
    return PackInfo(pack_id, header[32:48], size, Toc(table))


def _check_toc(table: bytes, toc_offset: int) -> None:
    for offset, magic, _, _, _, _, raw, stored, _, _, _ in _TOC_ENTRY.iter_unpack(table):
        if (
            magic != OBJECT_MAGIC
            or not 0 < stored <= raw <= MAX_RAW
            or offset < HEADER_SIZE
            or offset + OBJECT_HEADER_SIZE + stored > toc_offset
        ):
            raise DamagedError("its table of contents has impossible values")


def scan_objects(fd: int) -> Iterator[tuple[int, ObjectHeader, bytes]]:
    """Find whole objects in a damaged pack without its table: (offset, header, payload).

    Only objects whose header and payload have the right checksums are yielded.
    """
    size = os.fstat(fd).st_size
    offset = start = 0
    data = b""
    while offset + OBJECT_HEADER_SIZE <= size:
        if offset + OBJECT_HEADER_SIZE > start + len(data):
            start, data = offset, pread_exactly(fd, _SCAN_WINDOW, offset)
            if len(data) < OBJECT_HEADER_SIZE:
                return
        found = _next_aligned_magic(data, offset - start)
        if found < 0:
            offset = start + (len(data) & ~(ALIGNMENT - 1))
            continue
        offset = start + found
        if found + OBJECT_HEADER_SIZE > len(data):
            # The header straddles the end of the window.
            continue
        header = _try_header(data[found : found + OBJECT_HEADER_SIZE])
        payload = _payload(fd, header.stored, offset + OBJECT_HEADER_SIZE, start, data) if header else b""
        if header and len(payload) == header.stored and checksum(payload) == header.checksum:
            yield offset, header, payload
            offset += object_size(header.stored)
        else:
            offset += ALIGNMENT


def _payload(fd: int, size: int, offset: int, start: int, data: bytes) -> bytes:
    """Bytes of a file of which `data` is what lies at `start`."""
    if offset + size <= start + len(data):
        return data[offset - start : offset - start + size]
    return pread_exactly(fd, size, offset)


def _next_aligned_magic(data: bytes, start: int) -> int:
    found = data.find(OBJECT_MAGIC, start)
    while found >= 0 and found % ALIGNMENT:
        found = data.find(OBJECT_MAGIC, found + 1)
    return found


def _try_header(data: bytes) -> ObjectHeader | None:
    try:
        return decode_header(data)
    except (DamagedError, NewerFormatError):
        return None
