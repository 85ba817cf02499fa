"""Recipe segments (docs/store-format.md, "Recipe"): which chunks and zero runs make a file."""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpuimg.errors import DamagedError, NewerFormatError
from gpuimg.store.hashing import ID_SIZE
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
_ZERO_RUN = np.uint64(1 << 63)
_LENGTH = np.uint64((1 << 63) - 1)


# A chunk (length, id) or a zero run (length, None).
Entry = tuple[int, bytes | None]


@dataclass(frozen=True, slots=True)
class Segment:
    """A parsed segment.

    `lengths` (n, uint64), `zero` (n, bool); `ids` are the k chunk ids in order, as one run of bytes.
    """

    lengths: npt.NDArray[np.uint64]
    zero: npt.NDArray[np.bool_]
    ids: bytes

    @property
    def size(self) -> int:
        """Bytes of the file that the segment describes."""
        return int(self.lengths.sum())

    def chunk_ids(self) -> list[bytes]:
        return [self.ids[i : i + ID_SIZE] for i in range(0, len(self.ids), ID_SIZE)]


def encode_segment(entries: list[Entry]) -> bytes:
    """Serialize (length, chunk id or None for a zero run) entries."""
    ids = [chunk_id for _, chunk_id in entries if chunk_id is not None]
    lengths = np.array([length for length, _ in entries], dtype=np.uint64)
    lengths[[chunk_id is None for _, chunk_id in entries]] |= _ZERO_RUN
    head = _HEAD.pack(MAGIC, VERSION, 0, 0, len(entries), len(ids))
    return b"".join((head, lengths.astype("<u8").tobytes(), *ids))


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
    fingerprints = 16 * chunks if flags & HAS_FINGERPRINTS else 0
    if (
        not 0 < count <= _MAX_ENTRIES
        or chunks > count
        or len(data) != _HEAD.size + 8 * count + ID_SIZE * chunks + fingerprints
    ):
        raise DamagedError("a recipe segment has impossible lengths")
    words = np.frombuffer(data, dtype="<u8", count=count, offset=_HEAD.size)
    zero = (words & _ZERO_RUN) != 0
    lengths = (words & _LENGTH).astype(np.uint64)
    ids_start = _HEAD.size + 8 * count
    segment = Segment(lengths, zero, data[ids_start : ids_start + ID_SIZE * chunks])
    # Zero runs may be long: summing Python integers cannot wrap around.
    total = sum(lengths.tolist())
    if (
        int(count - zero.sum()) != chunks
        or not lengths.all()
        or bool((lengths[~zero] > MAX_RAW).any())
        or total != size
    ):
        raise DamagedError("a recipe segment contradicts itself or its manifest")
    return segment


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
        for length, chunk_id in entries:
            if chunk_id is None and self._entries and self._entries[-1][1] is None:
                self._entries[-1] = (self._entries[-1][0] + length, None)
            else:
                self._entries.append((length, chunk_id))

    def _take_segment(self) -> tuple[int, list[Entry]]:
        number = self._next_segment
        self._next_segment += 1
        taken, self._entries = self._entries[:SEGMENT_ENTRIES], self._entries[SEGMENT_ENTRIES:]
        return number, taken
