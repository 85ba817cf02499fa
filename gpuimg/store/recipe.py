"""Recipe segments (docs/store-format.md, "Recipe"): which chunks and zero runs make a file."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gpuimg.errors import DamagedError, NewerFormatError
from gpuimg.store.hashing import FINGERPRINT_SIZE, ID_SIZE
from gpuimg.store.model import SegmentRef
from gpuimg.store.pack import MAX_RAW

MAGIC = b"GPRC"
VERSION = 1
HAS_FINGERPRINTS = 1
SEGMENT_ENTRIES = 4096
# Files up to this size stand in the manifest and have no recipe.
INLINE_LIMIT = 4096
_MAX_ENTRIES = 16384
_HEAD = struct.Struct("<4sBBHII")
_ZERO_RUN = 1 << 63
_LENGTH = (1 << 63) - 1


class Entry(NamedTuple):
    """A chunk, or (`id` None) a zero run. `fingerprint` is empty where none was taken."""

    length: int
    id: bytes | None
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True)
class Segment:
    """A parsed segment.

    `lengths` and `zero` have n items; `ids` are the k chunk ids in order, `fingerprints` (16 bytes each, or
    nothing at all) theirs, each as one run of bytes.
    """

    lengths: tuple[int, ...]
    zero: tuple[bool, ...]
    ids: bytes
    fingerprints: bytes

    def chunk_ids(self) -> list[bytes]:
        return [self.ids[i : i + ID_SIZE] for i in range(0, len(self.ids), ID_SIZE)]

    def entries(self) -> Iterator[Entry]:
        """The entries, in order."""
        number = 0
        for length, zero in zip(self.lengths, self.zero, strict=True):
            if zero:
                yield Entry(length, None)
                continue
            yield Entry(
                length,
                self.ids[number * ID_SIZE : (number + 1) * ID_SIZE],
                self.fingerprints[number * FINGERPRINT_SIZE : (number + 1) * FINGERPRINT_SIZE],
            )
            number += 1


def encode_segment(entries: list[Entry]) -> bytes:
    """Serialize entries; with fingerprints if all chunks have them."""
    chunks = [entry for entry in entries if entry.id is not None]
    words = [entry.length if entry.id is not None else entry.length | _ZERO_RUN for entry in entries]
    marked = all(entry.fingerprint for entry in chunks)
    head = _HEAD.pack(MAGIC, VERSION, HAS_FINGERPRINTS if marked else 0, 0, len(entries), len(chunks))
    ids = [entry.id for entry in chunks if entry.id is not None]
    fingerprints = [entry.fingerprint for entry in chunks] if marked else []
    return b"".join((head, struct.pack(f"<{len(words)}Q", *words), *ids, *fingerprints))


def decode_segment(data: bytes, size: int) -> Segment:
    """Parse a segment that describes `size` bytes.

    Raises
    ------
    DamagedError, NewerFormatError
    """
    if len(data) < _HEAD.size:
        raise DamagedError("a recipe segment is cut short")
    magic, version, flags, _, count, chunks = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise DamagedError("a recipe segment does not begin like one")
    if version > VERSION or flags & ~HAS_FINGERPRINTS:
        raise NewerFormatError(f"a recipe segment has version {version}.{flags}", remedy="use a newer gpuimg")
    fingerprints = FINGERPRINT_SIZE * chunks if flags & HAS_FINGERPRINTS else 0
    if (
        not 0 < count <= _MAX_ENTRIES
        or chunks > count
        or len(data) != _HEAD.size + 8 * count + ID_SIZE * chunks + fingerprints
    ):
        raise DamagedError("a recipe segment has impossible lengths")
    words = struct.unpack_from(f"<{count}Q", data, _HEAD.size)
    zero = tuple(word >= _ZERO_RUN for word in words)
    lengths = tuple(word & _LENGTH for word in words)
    if (
        count - sum(zero) != chunks
        or not all(lengths)
        or any(not empty and length > MAX_RAW for length, empty in zip(lengths, zero, strict=True))
        or sum(lengths) != size
    ):
        raise DamagedError("a recipe segment contradicts itself or its manifest")
    ids = _HEAD.size + 8 * count
    marks = ids + ID_SIZE * chunks
    return Segment(lengths, zero, data[ids:marks], data[marks:])


class RecipeBuilder:
    """Puts the parts of one file, finished in any order, into recipe segments."""

    def __init__(self) -> None:
        self.segments: dict[int, SegmentRef] = {}
        self._lock = threading.Lock()
        self._parts: dict[int, list[Entry]] = {}
        self._next_part = 0
        self._next_segment = 0
        self._entries: list[Entry] = []

    def add(self, part: int, entries: list[Entry]) -> list[tuple[int, list[Entry]]]:
        """Take part number `part`; returns the segments (number, entries) that are complete now."""
        with self._lock:
            self._parts[part] = entries
            while (found := self._parts.pop(self._next_part, None)) is not None:
                self._next_part += 1
                self._append(found)
            complete = []
            while len(self._entries) > SEGMENT_ENTRIES:
                complete.append(self._take_segment())
            return complete

    def finish(self) -> list[tuple[int, list[Entry]]]:
        """The last segment, if any; all parts must have been added."""
        with self._lock:
            return [self._take_segment()] if self._entries else []

    def _append(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.id is None and self._entries and self._entries[-1].id is None:
                self._entries[-1] = Entry(self._entries[-1].length + entry.length, None)
            else:
                self._entries.append(entry)

    def _take_segment(self) -> tuple[int, list[Entry]]:
        number = self._next_segment
        self._next_segment += 1
        taken, self._entries = self._entries[:SEGMENT_ENTRIES], self._entries[SEGMENT_ENTRIES:]
        return number, taken
