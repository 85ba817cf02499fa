"""Reading chunks: from recipe entries to verified bytes in a buffer.

Nothing leaves here whose BLAKE3 is not the id that the recipe names.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpuimg.errors import DamagedError, GpuimgError, MissingObjectError, StoredDataError
from gpuimg.store import codec, pack
from gpuimg.store.files import os_errors, pread_exactly
from gpuimg.store.hashing import identify
from gpuimg.store.index import Index, Place
from gpuimg.store.model import FileEntry, Piece, Run, SegmentRef
from gpuimg.store.packfiles import PackFiles
from gpuimg.store.pool import SLAB_SIZE
from gpuimg.store.recipe import Segment, decode_segment

# Objects closer together than this are read with one read.
_GAP = 16 * 1024
_SCRATCH_SIZE = 4 * 1024 * 1024
# Differences are tied to bases that take memory as well; few are worked on at a time.
_GROUP_OF_DELTAS = 1024 * 1024
# With a gap before each, well below the number of parts that one preadv takes (IOV_MAX, 1024).
_GROUP = 256
# The longest run of zeros that a run of pieces holds.
_ZEROS = memoryview(mmap.mmap(-1, SLAB_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
_local = threading.local()


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
        target = bytearray(place.raw)
        self.read_placed([(chunk_id, place, 0)], memoryview(target))
        return bytes(target)

    def read_placed(self, chunks: Sequence[tuple[bytes, Place, int]], target: memoryview) -> None:
        """Read chunks (id, place, where its bytes belong in `target`); see `read_run` for errors."""
        for group in _groups([_Wanted(*chunk) for chunk in chunks]):
            self._read_group_anew(group, target)

    def read_run(self, run: Run, target: memoryview) -> None:
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
                target[start : start + piece.length] = _ZEROS[: piece.length]
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

    def _read_group_anew(self, group: list[_Wanted], target: memoryview, depth: int = 0) -> None:
        """Read a group; if its pack is gone, look once whether a collector has moved the chunks."""
        try:
            self._read_group(group, target, depth)
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
                self._read_group(regrouped, target, depth)

    def _read_group(self, group: list[_Wanted], target: memoryview, depth: int) -> None:
        """Read objects that lie close together in one pack, decode and verify each.

        `depth` counts the differences between these chunks and those that are wanted in the end. Only the
        latter are verified: that their hashes are right proves all that they rest on.
        """
        if _is_raw(group[0].place):
            self._read_raw(group, target, depth)
        else:
            self._read_coded(group, target, depth)

    def _read_raw(self, group: list[_Wanted], target: memoryview, depth: int) -> None:
        """Raw chunks go straight to their places."""
        first = group[0].place.offset
        parts: list[memoryview] = []
        end = first
        for item in group:
            if item.place.offset > end:
                parts.append(_scratch(item.place.offset - end))
            parts.append(target[item.start : item.start + item.place.raw])
            end = item.place.offset + item.place.raw
        count = self._fetch(group[0].place.pack, parts, first)
        for item in group:
            if item.place.offset + item.place.raw > first + count:
                raise _at(self._damaged(item, "its pack is cut short"), item.start)
            self._check(item, target[item.start : item.start + item.place.raw], depth)

    def _read_coded(self, group: list[_Wanted], target: memoryview, depth: int) -> None:
        # Before the scratch memory is filled, which bases go through as well.
        bases = self._read_bases(group, depth)
        if bases is None:
            half = len(group) // 2
            self._read_coded(group[:half], target, depth)
            self._read_coded(group[half:], target, depth)
            return
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
                if item.place.flags & ~pack.HAS_BASE:
                    raise DamagedError("it is coded in a way unknown to this gpuimg")
                codec.decode(
                    item.place.codec, payload, out, item.place.element_size, bases.get(item.place.base)
                )
            except DamagedError as error:
                raise _at(self._damaged(item, error.what), item.start) from None
            self._check(item, out, depth)

    def _read_bases(self, group: list[_Wanted], depth: int) -> dict[bytes, memoryview] | None:
        """The bytes of the bases of a group, each decoded once; None if the group is too large for that."""
        ids = list(dict.fromkeys(item.place.base for item in group if item.place.base))
        if not ids:
            return {}
        if depth == pack.MAX_CHAIN:
            raise _at(self._damaged(group[0], "its chain of bases does not end"), group[0].start)
        wanted = []
        end = 0
        for base, place in zip(ids, self._index.lookup(ids), strict=True):
            if place is None:
                item = next(item for item in group if item.place.base == base)
                raise _at(
                    MissingObjectError(
                        f"the chunk {base.hex()[:16]}, against which the chunk {item.id.hex()[:16]} is "
                        "coded, is not in the store",
                        remedy=REMEDY,
                    ),
                    item.start,
                )
            wanted.append(_Wanted(base, place, end))
            end += place.raw
        if end > _SCRATCH_SIZE and len(group) > 1:
            return None
        memory = _base_memory(end, depth)
        for bases in _groups(wanted):
            try:
                self._read_group_anew(bases, memory, depth + 1)
            except StoredDataError as error:
                item = next(item for item in group if item.place.base == bases[0].id)
                what = f"the chunk {item.id.hex()[:16]} is coded against another, and {error.what}"
                raise _at(type(error)(what, remedy=REMEDY), item.start) from error
        return {item.id: memory[item.start : item.start + item.place.raw] for item in wanted}

    def _fetch(self, number: int, parts: list[memoryview], offset: int) -> int:
        """Fill the parts from a pack; returns the bytes read, fewer only at the pack's end."""
        with self._packs.open(number) as fd, os_errors("reading a pack"):
            total = count = os.preadv(fd, parts, offset)
            while count and total < sum(map(len, parts)):
                count = os.preadv(fd, _skip(parts, total), offset + total)
                total += count
            return total

    def _check(self, item: _Wanted, data: memoryview, depth: int) -> None:
        if depth or identify(data) == item.id:
            return
        why = "its bytes do not match its hash"
        if item.place.base:
            try:
                self.chunk(item.place.base)
            except StoredDataError as error:
                why = f"it is coded against another, and {error.what}"
        raise _at(self._damaged(item, why), item.start)

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
                or (item.place.base and sum(other.place.raw for other in group) > _GROUP_OF_DELTAS)
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


def _base_memory(size: int, depth: int) -> memoryview:
    """`size` bytes of the calling thread for the bases of chunks at `depth`."""
    if size > _SCRATCH_SIZE:
        return memoryview(bytearray(size))
    name = f"bases{depth}"
    if not hasattr(_local, name):
        setattr(_local, name, memoryview(bytearray(_SCRATCH_SIZE)))
    memory: memoryview = getattr(_local, name)
    return memory[:size]


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
    for length, chunk_id, mark in segment.entries():
        if chunk_id is not None:
            yield Piece(offset, length, chunk_id, mark)
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
