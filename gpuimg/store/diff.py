"""What differs between two checkpoints, and how the difference is stored; from recipes and index alone."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator

from gpuimg.store.checkpoint import Checkpoint
from gpuimg.store.context import Context
from gpuimg.store.explain import LOST, Chains
from gpuimg.store.index import Place
from gpuimg.store.model import FileEntry, Piece
from gpuimg.store.parent import Matcher
from gpuimg.store.reader import file_runs
from gpuimg.store.reports import Change, FileDiff

_BATCH = 4096


def diff(context: Context, old: Checkpoint, new: Checkpoint) -> list[FileDiff]:
    """One entry per file of either checkpoint, sorted by name. Files of BOs are matched by the BO's identity,
    others by name."""
    pairs = list(_pairs(old, new))
    matched = {before.name for before, _ in pairs if before is not None}
    gone = [entry for entry in old.files.values() if entry.name not in matched]
    found = [
        *(_file_diff(context, before, after) for before, after in pairs),
        *(FileDiff(entry.name, Change.REMOVED, entry.size, 0, 0, 0, bo=entry.bo) for entry in gone),
    ]
    return sorted(found, key=lambda item: item.name)


def _pairs(old: Checkpoint, new: Checkpoint) -> Iterable[tuple[FileEntry | None, FileEntry]]:
    matcher = Matcher(entry for entry in old.files.values() if entry.bo is not None)
    for entry in new.files.values():
        if entry.bo is not None:
            yield matcher.match(entry.name, entry.bo), entry
        else:
            before = old.files.get(entry.name)
            yield (before if before is not None and before.bo is None else None), entry


def _file_diff(context: Context, old: FileEntry | None, new: FileEntry) -> FileDiff:
    whole = ((0, new.size),) if new.size else ()
    size_a = old.size if old is not None else 0
    name_a = old.name if old is not None and old.name != new.name else ""
    if old is not None and (old.size, old.data, old.segments) == (new.size, new.data, new.segments):
        return FileDiff(new.name, Change.EQUAL, size_a, new.size, 0, 0, bo=new.bo, name_a=name_a)
    if not new.segments:
        return FileDiff(
            new.name,
            Change.CHANGED if old is not None else Change.ADDED,
            size_a,
            new.size,
            new.size,
            new.size,
            whole,
            alone_bytes=new.size,
            stored_bytes=new.size,
            bo=new.bo,
            name_a=name_a,
        )
    comparison = _Comparison(context, old, new)
    changed = comparison.changed_bytes
    change = Change.CHANGED if changed or size_a != new.size else Change.EQUAL
    is_whole = old is None or not old.segments
    return FileDiff(
        new.name,
        Change.ADDED if old is None else change,
        size_a,
        new.size,
        changed,
        changed if is_whole else comparison.new_bytes,
        whole if is_whole else tuple(comparison.ranges),
        bo=new.bo,
        name_a=name_a,
        **comparison.kinds,
        stored_bytes=comparison.stored_bytes,
    )


class _Comparison:
    """A file with chunks, held against an older version of it."""

    def __init__(self, context: Context, old: FileEntry | None, new: FileEntry) -> None:
        self.changed_bytes = 0
        self.new_bytes = 0
        self.ranges: list[tuple[int, int]] = []
        self.kinds: Counter[str] = Counter()
        self.stored_bytes = 0
        self._context = context
        self._chains = Chains(context.index)
        self._zeros = _Zeros()
        self._old: set[bytes] = set()
        self._rests_on: set[bytes] | None = None
        self._seen: set[bytes] = set()
        places: set[tuple[int, bytes]] = set()
        for piece in _pieces(context, old) if old is not None else ():
            if piece.id is None:
                self._zeros.add(piece.offset, piece.offset + piece.length)
            else:
                places.add((piece.offset, piece.id))
                self._old.add(piece.id)
        fresh: list[Piece] = []
        for piece in _pieces(context, new):
            if piece.id is None:
                for start, end in self._zeros.others(piece.offset, piece.offset + piece.length):
                    self._add(start, end - start, "zero_bytes")
            elif (piece.offset, piece.id) in places:
                continue
            elif piece.id in self._old:
                self._add(piece.offset, piece.length, "moved_bytes")
            else:
                self._add(piece.offset, piece.length)
                self.new_bytes += piece.length
                fresh.append(piece)
        for start in range(0, len(fresh), _BATCH):
            self._classify(fresh[start : start + _BATCH])

    def _add(self, offset: int, length: int, kind: str = "") -> None:
        self.changed_bytes += length
        if kind:
            self.kinds[kind] += length
        if self.ranges and sum(self.ranges[-1]) == offset:
            self.ranges[-1] = (self.ranges[-1][0], self.ranges[-1][1] + length)
        else:
            self.ranges.append((offset, length))

    def _classify(self, pieces: list[Piece]) -> None:
        """Say of chunks that the older version lacks how they are stored."""
        ids = [piece.id or b"" for piece in pieces]
        places = self._context.index.lookup(ids)
        for piece, chunk_id, place, depth in zip(
            pieces, ids, places, self._chains.depths(places), strict=True
        ):
            if place is None or depth == LOST:
                continue
            if not place.base:
                kind = "alone_bytes"
            else:
                kind = "delta_bytes" if place.base in self._known_to_old(place) else "other_delta_bytes"
            self.kinds[kind] += piece.length
            if chunk_id not in self._seen:
                self._seen.add(chunk_id)
                self.stored_bytes += place.stored

    def _known_to_old(self, place: Place) -> set[bytes]:
        """The chunks of the older version and, where that does not settle it, what they rest on."""
        if place.base in self._old:
            return self._old
        if self._rests_on is None:
            chains = Chains(self._context.index)
            ids = list(self._old)
            for start in range(0, len(ids), _BATCH):
                chains.depths(self._context.index.lookup(ids[start : start + _BATCH]))
            self._rests_on = set(chains.bases)
        return self._rests_on


class _Zeros:
    """Where a file has zeros: recipes may divide the same zeros in different ways."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._starts: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add [start, end), which lies behind all that was added before."""
        if self._ends and self._ends[-1] == start:
            self._ends[-1] = end
        else:
            self._starts.append(start)
            self._ends.append(end)

    def others(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """What of [start, end) is outside."""
        for number in range(bisect_right(self._ends, start), len(self._ends)):
            if self._starts[number] >= end:
                break
            if start < self._starts[number]:
                yield start, self._starts[number]
            start = self._ends[number]
        if start < end:
            yield start, end


def _pieces(context: Context, entry: FileEntry) -> Iterator[Piece]:
    for run in file_runs(context.reader, entry):
        yield from run.pieces
