"""Reading chunks: from recipe entries to verified bytes in a buffer.

Nothing leaves here whose BLAKE3 is not the id that the recipe names.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpuimg.errors import DamagedError, GpuimgError, MissingObjectError, StoredDataError
from gpuimg.store import codec, pack
from gpuimg.store.files import os_errors, pread_exactly
from gpuimg.store.hashing import identify
from gpuimg.store.index import Index, Place
from gpuimg.store.model import FileEntry, SegmentRef
from gpuimg.store.packfiles import PackFiles
from gpuimg.store.pool import SLAB_SIZE
from gpuimg.store.recipe import Segment, decode_segment

Buffer = npt.NDArray[np.uint8]

# Objects closer together than this are read with one read.
_GAP = 16 * 1024
_SCRATCH_SIZE = 4 * 1024 * 1024
# With a gap before each, well below the number of parts that one preadv takes (IOV_MAX, 1024).
_GROUP = 256
_local = threading.local()


class Piece(NamedTuple):
    """A run of a file: a chunk, or (`id` None) zeros. `offset` is its place in the file."""

    offset: int
    length: int
    id: bytes | None


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pieces that fit into one slab; `offset` and `length` in the file."""

    offset: int
    length: int
    pieces: tuple[Piece, ...]


class _Wanted(NamedTuple):
    """A chunk, its place, and where its bytes belong in the target buffer."""

    id: bytes
    place: Place
    start: int


class ChunkReader:
    """Reads chunks of one store. Safe for use from several threads."""

    def __init__(self, index: Index, packs: PackFiles) -> None:
        self._index = index
        self._packs = packs

    def segment(self, ref: SegmentRef) -> Segment:
        """Load a recipe segment.

        Raises
        ------
        DamagedError, MissingObjectError, NewerFormatError
        """
        return decode_segment(self.chunk(ref.id), ref.size)

    def chunk(self, chunk_id: bytes) -> bytes:
        """One chunk's bytes."""
        place = self._places([chunk_id])[0]
        target = np.empty(place.raw, dtype=np.uint8)
        self._read_group_anew([_Wanted(chunk_id, place, 0)], target)
        return target.tobytes()

    def read_run(self, run: Run, target: Buffer) -> None:
        """Fill `target` (its length is the run's) with the run's bytes.

        Raises
        ------
        DamagedError, MissingObjectError
            `error.offset` is set to the offset in the file of the chunk concerned.
        """
        chunks = [piece for piece in run.pieces if piece.id is not None]
        for piece in run.pieces:
            if piece.id is None:
                start = piece.offset - run.offset
                target[start : start + piece.length] = 0
        ids = [piece.id for piece in chunks if piece.id is not None]
        places = self._places(ids, chunks)
        wanted = []
        for piece, chunk_id, place in zip(chunks, ids, places, strict=True):
            if place.raw != piece.length:
                raise _at(
                    DamagedError("the index and the recipe contradict each other", remedy=REMEDY),
                    piece.offset,
                )
            wanted.append(_Wanted(chunk_id, place, piece.offset - run.offset))
        for group in _groups(wanted):
            try:
                self._read_group_anew(group, target)
            except StoredDataError as error:
                error.offset = run.offset + (group[0].start if error.offset is None else error.offset)
                raise

    def _places(self, ids: list[bytes], pieces: Sequence[Piece] = ()) -> list[Place]:
        places = []
        for number, place in enumerate(self._index.lookup(ids)):
            if place is None:
                error = MissingObjectError(
                    f"the chunk {ids[number].hex()[:16]} is not in the store", remedy=REMEDY
                )
                raise _at(error, pieces[number].offset) if pieces else error
            places.append(place)
        return places

    def _read_group_anew(self, group: list[_Wanted], target: Buffer) -> None:
        """Read a group; if its pack is gone, look once whether a collector has moved the chunks."""
        try:
            self._read_group(group, target)
        except MissingObjectError:
            places = self._index.lookup([item.id for item in group])
            moved = [
                item._replace(place=place)
                for item, place in zip(group, places, strict=True)
                if place is not None
            ]
            if len(moved) < len(group) or moved == group:
                raise
            for regrouped in _groups(moved):
                self._read_group(regrouped, target)

    def _read_group(self, group: list[_Wanted], target: Buffer) -> None:
        """Read objects that lie close together in one pack, decode and verify each."""
        if _is_raw(group[0].place):
            self._read_raw(group, target)
        else:
            self._read_coded(group, target)

    def _read_raw(self, group: list[_Wanted], target: Buffer) -> None:
        """Raw chunks go straight to their places."""
        first = group[0].place.offset
        parts: list[memoryview] = []
        end = first
        for item in group:
            if item.place.offset > end:
                parts.append(_scratch(item.place.offset - end))
            parts.append(target[item.start : item.start + item.place.raw].data)
            end = item.place.offset + item.place.raw
        count = self._fetch(group[0].place.pack, parts, first)
        for item in group:
            if item.place.offset + item.place.raw > first + count:
                raise _at(self._damaged(item, "its pack is cut short"), item.start)
            self._check(item, target[item.start : item.start + item.place.raw])

    def _read_coded(self, group: list[_Wanted], target: Buffer) -> None:
        first, last = group[0].place, group[-1].place
        scratch = _scratch(last.offset + last.stored - first.offset)
        count = self._fetch(first.pack, [scratch], first.offset)
        for item in group:
            start = item.place.offset - first.offset
            if start + item.place.stored > count:
                raise _at(self._damaged(item, "its pack is cut short"), item.start)
            payload = scratch[start : start + item.place.stored]
            out = target[item.start : item.start + item.place.raw]
            try:
                if item.place.flags:
                    raise DamagedError("it is coded in a way unknown to this gpuimg")
                codec.decode(item.place.codec, payload, out)
            except DamagedError as error:
                raise _at(self._damaged(item, error.what), item.start) from None
            self._check(item, out)

    def _fetch(self, number: int, parts: list[memoryview], offset: int) -> int:
        """Fill the parts from a pack; returns the bytes read, fewer only at the pack's end."""
        with self._packs.open(number) as fd, os_errors("reading a pack"):
            total = count = os.preadv(fd, parts, offset)
            while count and total < sum(map(len, parts)):
                count = os.preadv(fd, _skip(parts, total), offset + total)
                total += count
            return total

    def _check(self, item: _Wanted, data: Buffer) -> None:
        if identify(data.data) != item.id:
            raise _at(self._damaged(item, "its bytes do not match its hash"), item.start)

    def _damaged(self, item: _Wanted, why: str) -> DamagedError:
        entry = self._index.pack(item.place.pack)
        where = f"pack {entry.id.hex()[:16]}, offset {item.place.offset}" if entry else "an unknown pack"
        if entry and not self._is_where_index_says(item):
            why = "the index does not match the packs"
        return DamagedError(f"the chunk {item.id.hex()[:16]} ({where}) is damaged: {why}", remedy=REMEDY)

    def _is_where_index_says(self, item: _Wanted) -> bool:
        try:
            with self._packs.open(item.place.pack) as fd:
                raw = pread_exactly(fd, pack.OBJECT_HEADER_SIZE, item.place.offset - pack.OBJECT_HEADER_SIZE)
            return pack.decode_header(raw).id == item.id
        except (GpuimgError, OSError):
            # An unreadable header is damage of the pack, not of the index.
            return True


REMEDY = "run `gpuimg verify` to see all that is hurt and `gpuimg repair` to save what can be saved"


def _at(error: StoredDataError, offset: int) -> StoredDataError:
    error.offset = offset
    return error


def _groups(wanted: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Split into groups that one read fetches: same pack, ascending, close together, bounded."""
    group: list[_Wanted] = []
    for item in wanted:
        if group:
            before = group[-1].place
            gap = item.place.offset - (before.offset + before.stored)
            span = item.place.offset + item.place.stored - group[0].place.offset
            if (
                item.place.pack != before.pack
                or not 0 <= gap <= _GAP
                or span > _SCRATCH_SIZE
                or len(group) == _GROUP
                or _is_raw(item.place) != _is_raw(before)
            ):
                yield group
                group = []
        group.append(item)
    if group:
        yield group


def _is_raw(place: Place) -> bool:
    """Whether the object's payload is the chunk itself."""
    return place.codec == codec.Codec.RAW and not place.flags and place.stored == place.raw


def _skip(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the parts behind their first `count` bytes."""
    left = []
    for part in parts:
        if count < len(part):
            left.append(part[count:])
        count = max(0, count - len(part))
    return left


def _scratch(size: int) -> memoryview:
    """`size` bytes of the calling thread's buffer."""
    if size > _SCRATCH_SIZE:
        return memoryview(bytearray(size))
    if not hasattr(_local, "scratch"):
        _local.scratch = memoryview(bytearray(_SCRATCH_SIZE))
    scratch: memoryview = _local.scratch
    return scratch[:size]


def file_runs(
    reader: ChunkReader, entry: FileEntry, start: int = 0, stop: int | None = None
) -> Iterator[Run]:
    """The runs of a file that cover [start, stop), each at most a slab long; chunks are not split.

    Segments are loaded one at a time.
    """
    stop = entry.size if stop is None else min(stop, entry.size)
    offset = 0
    pieces: list[Piece] = []
    for ref in entry.segments:
        if offset >= stop:
            break
        if offset + ref.size <= start:
            offset += ref.size
            continue
        try:
            segment = reader.segment(ref)
        except StoredDataError as error:
            # Without its recipe the file is lost from where the recipe begins.
            raise _at(error, offset) from None
        for piece in _pieces(segment, offset):
            if piece.offset + piece.length <= start or piece.offset >= stop:
                continue
            if pieces and piece.offset + piece.length - pieces[0].offset > SLAB_SIZE:
                yield _run(pieces)
                pieces = []
            pieces.append(piece)
        offset += ref.size
    if pieces:
        yield _run(pieces)


def _pieces(segment: Segment, offset: int) -> Iterator[Piece]:
    """The pieces of a segment that starts at `offset`; long zero runs in parts."""
    ids = iter(segment.chunk_ids())
    for length, zero in zip(segment.lengths.tolist(), segment.zero.tolist(), strict=True):
        if not zero:
            yield Piece(offset, length, next(ids))
            offset += length
            continue
        end = offset + length
        while offset < end:
            part = min(end - offset, SLAB_SIZE)
            yield Piece(offset, part, None)
            offset += part


def _run(pieces: list[Piece]) -> Run:
    last = pieces[-1]
    return Run(pieces[0].offset, last.offset + last.length - pieces[0].offset, tuple(pieces))
