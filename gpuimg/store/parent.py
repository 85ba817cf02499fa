"""The parent's side of an incremental checkpoint: which of its files is which, where they were cut, and
where their contents are now."""

from __future__ import annotations

import itertools
import re
import threading
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

from gpuimg.errors import InputOutputError, NewerFormatError, PermissionDeniedError, StoredDataError
from gpuimg.store.chunking import PAGE, Cut, Cutter, PageCutter, is_zero, make_cutter
from gpuimg.store.hashing import ID_SIZE, fingerprint, identify
from gpuimg.store.index import Index
from gpuimg.store.model import BufferObject, FileEntry, Layout, Piece, Run
from gpuimg.store.pool import SLAB_SIZE
from gpuimg.store.reader import ChunkReader, file_runs
from gpuimg.store.recipe import Segment

UNREADABLE = (StoredDataError, NewerFormatError, InputOutputError, PermissionDeniedError)
"""Errors of reading what is in the store that are no reason to fail a new checkpoint."""
# Hexadecimal ones are ids of GPUs.
_NUMBERS = re.compile(r"(?<=-)[0-9a-f]+(?=\.)|[0-9]+")
# How much is to be seen behind a change before it is asked whether contents moved: the longest chunk.
_SIGHT = SLAB_SIZE // 2
# In a row of changes that is asked at the 1st, 2nd, 4th, ... and at every 128th: the answer costs time.
_ASK_EVERY = 128
# Chunks that are looked for then, and slab by slab as long as nothing lines up.
_PROBED = 8
_PROBED_AGAIN = 2
# How many of them must be elsewhere in the store for that to be no accident.
_FOUND = 2
# Which of the parent's next pieces are looked for by how they begin, and at how many places each.
_ANCHORS = (0, 1, 2, 4, 7)
_PLACES = 8
# Segments of a parent's file that are kept for finding chunks.
_SEGMENTS_KEPT = 3


class ParentFile:
    """A file of the parent, as what it was cut into. Safe for use from several threads.

    Where its recipe cannot be read it ends: a checkpoint does not fail for what an older one lacks. Pieces
    that the store does not have any more, or cannot decode, come without fingerprints.
    """

    def __init__(
        self, reader: ChunkReader, index: Index, entry: FileEntry, element_size: int, seed: int
    ) -> None:
        self.entry = entry
        self.size = entry.size
        self.element_size = element_size
        self.seed = seed
        self.changes = 0
        """How many chunks in a row were not what it had; all that cut one new file by it count together."""
        self._reader = reader
        self._index = index
        self._starts = list(itertools.accumulate((ref.size for ref in entry.segments), initial=0))
        self._lock = threading.Lock()
        self._segments: dict[int, Segment | None] = {}

    def runs(self, start: int = 0) -> Iterator[Run]:
        """Its runs in order, from the piece at `start` on (see `gpuimg.store.reader.file_runs`)."""
        try:
            for run in file_runs(self._reader, self.entry, start):
                yield replace(run, pieces=self._marked(run.pieces))
        except UNREADABLE:
            return

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        """Its pieces in order, from the one at `start` on, none longer than a slab."""
        for run in self.runs(start):
            yield from run.pieces

    def _marked(self, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """The pieces, without fingerprints where they must be stored again.

        Only what a writer has looked up stays until it commits: the parent may have been removed meanwhile.
        """
        ids = [piece.id for piece in pieces if piece.id is not None]
        known = self._index.contains_whole(ids)
        if all(known):
            return pieces
        lost = {chunk_id for chunk_id, found in zip(ids, known, strict=True) if not found}
        return tuple(piece._replace(fingerprint=b"") if piece.id in lost else piece for piece in pieces)

    def find(self, chunk_id: bytes, length: int, near: int) -> Piece | None:
        """The piece with that chunk, the nearest to offset `near`; None if the store lacks it.

        Only the segments around `near` are searched.
        """
        here = min(bisect_right(self._starts, near), len(self.entry.segments)) - 1
        numbers = (here, here + 1, here - 1)
        found = [piece for number in numbers for piece in self._search(number, chunk_id, length)]
        if not found:
            return None
        nearest = min(found, key=lambda piece: abs(piece.offset - near))
        return nearest if self._marked((nearest,))[0].fingerprint else None

    def _search(self, number: int, chunk_id: bytes, length: int) -> list[Piece]:
        """All pieces of a segment with that chunk."""
        segment = self._segment(number)
        if segment is None or not _has(segment.ids, chunk_id):
            return []
        found = []
        offset = self._starts[number]
        for entry in segment.entries():
            if entry.id == chunk_id and entry.length == length:
                found.append(Piece(offset, *entry))
            offset += entry.length
        return found

    def _segment(self, number: int) -> Segment | None:
        """The segment of that number; None if there is none, or none that can be read."""
        if not 0 <= number < len(self.entry.segments):
            return None
        with self._lock:
            if number not in self._segments:
                while len(self._segments) >= _SEGMENTS_KEPT:
                    del self._segments[next(iter(self._segments))]
                try:
                    self._segments[number] = self._reader.segment(self.entry.segments[number])
                except UNREADABLE:
                    self._segments[number] = None
            return self._segments[number]

    def beginning(self, piece: Piece) -> bytes:
        """The first page of a piece, or nothing if the store cannot give it."""
        if piece.id is None or not piece.fingerprint:
            return b""
        try:
            return self._reader.chunk(piece.id)[:PAGE]
        except UNREADABLE:
            return b""

    def are_elsewhere(self, chunk_ids: set[bytes]) -> bool:
        """Whether the store has so many of these chunks, wherever they are from, that it is no accident."""
        return sum(self._index.contains_whole(chunk_ids)) >= _FOUND


def _has(ids: bytes, chunk_id: bytes) -> bool:
    at = ids.find(chunk_id)
    while at > 0 and at % ID_SIZE:
        at = ids.find(chunk_id, at + 1)
    return at >= 0


class ParentCutter:
    """Cuts where the parent was cut, as long as that lines up.

    Fingerprints compare and differences line up only between chunks of the same place and length, which
    cutting by content would not give after every page has changed a little. What does not line up is cut as
    without a parent. Pages of page images come and go: where a chunk of one has changed, the contents behind
    it are looked for in the parent, and where they are found cutting goes on as the parent was cut there.
    """

    def __init__(self, parent: ParentFile, layout: Layout, chunk_size: int, pieces: Iterator[Piece]) -> None:
        """`pieces` are the parent's from the place on at which the first buffer begins."""
        self.moved = False
        """Whether contents were found that are not where the parent had them."""
        self.misses = 0
        """How many chunks in a row (slabs, as long as nothing lines up) were not as the parent had them."""
        self._parent = parent
        self._layout = layout
        self._chunk_size = chunk_size
        self._unit = PAGE if layout is Layout.PAGES else chunk_size
        self._pieces = pieces
        self._next: Piece | None = None
        self._ahead: deque[Piece] = deque()
        # Nothing is read of the parent before the first bytes are there.
        self._begun = False
        # Cuts what does not line up; None while it does.
        self._own: Cutter | None = None
        # How many slabs in a row did not line up.
        self.misses = 0

    def cut(self, buffer: memoryview, *, last: bool) -> tuple[list[Cut], int]:
        if not self._begun:
            self._begun = True
            self._step()
        cuts: list[Cut] = []
        offset = 0
        while True:
            if self._own is None:
                offset = self._follow(buffer, offset, cuts, last=last)
            if self._own is None:
                return cuts, offset
            found, covered = self._own.cut(buffer[offset:], last=last)
            met = self._meet(buffer[offset:], found)
            if met is None:
                cuts += _shifted(found, offset)
                return cuts, offset + covered
            offset = self._go_on(offset, cuts, *met)

    def _follow(self, buffer: memoryview, offset: int, cuts: list[Cut], *, last: bool) -> int:
        """Cut where the parent was; returns where bytes (then `_own` is None) or matching pieces end."""
        while (piece := self._next) is not None:
            end = offset + piece.length
            if end > len(buffer):
                if not last:
                    return offset
                break
            if piece.length % self._unit and not (last and end == len(buffer)):
                # It ended the parent's file.
                if end == len(buffer):
                    return offset
                break
            cut, changed = self._compare(piece, offset, buffer[offset:end])
            if changed and _is_due(self._parent.changes + 1):
                if not last and len(buffer) - offset < _SIGHT:
                    return offset
                found = self._look_ahead(buffer[offset:], piece, last=last)
                if self._own is not None:
                    return offset
                if found is not None:
                    offset = self._go_on(offset, cuts, *found)
                    continue
            self._parent.changes = self._parent.changes + 1 if changed else 0
            cuts.append(cut)
            offset = end
            self._step()
        self._leave()
        return offset

    def _step(self) -> None:
        self._next = self._ahead.popleft() if self._ahead else next(self._pieces, None)

    def _compare(self, piece: Piece, offset: int, data: memoryview) -> tuple[Cut, bool]:
        """The cut at a piece, and whether contents may have moved there."""
        cut = Cut(offset, piece.length, zero=False, before=piece)
        if self._layout is not Layout.PAGES:
            return cut, False
        if piece.id is not None:
            cut = cut._replace(fingerprint=fingerprint(data, self._parent.seed))
            if cut.fingerprint == piece.fingerprint:
                return cut, False
        if is_zero(data):
            return Cut(offset, piece.length, zero=True), False
        return cut, True

    def _look_ahead(
        self, view: memoryview, piece: Piece, *, last: bool
    ) -> tuple[list[Cut], int, Piece] | None:
        """Look in the parent for what is in view now where it had `piece`.

        Returns cuts by content, the number of the one whose contents moved, and the piece that it was; None
        if nothing moved, or (`_own` is set) it came from elsewhere.
        """
        found, _ = PageCutter().cut(view, last=True)
        ids = set()
        # The last one ends with the view only.
        for number, cut in enumerate((found if last else found[:-1])[:_PROBED]):
            if cut.zero:
                continue
            chunk_id = identify(view[cut.offset : cut.offset + cut.length])
            there = self._parent.find(chunk_id, cut.length, piece.offset + cut.offset)
            if there is not None:
                return None if there.offset == piece.offset + cut.offset else (found, number, there)
            ids.add(chunk_id)
        anchored = self._anchor(view, piece)
        if anchored is None and self._parent.are_elsewhere(ids):
            self._leave()
            self.moved = True
        return anchored

    def _anchor(self, view: memoryview, piece: Piece) -> tuple[list[Cut], int, Piece] | None:
        """Look in view for the parent's next pieces, `piece` the first, which no cut by content may separate.

        So it is where all numbers had changed in place before: their chunks end where others once did.
        """
        self._ahead.extend(itertools.islice(self._pieces, max(0, _ANCHORS[-1] - len(self._ahead))))
        pieces = [piece, *self._ahead]
        words = view[: len(view) & -PAGE].cast("Q")
        for there in [pieces[number] for number in _ANCHORS if number < len(pieces)]:
            page = self._parent.beginning(there)
            if len(page) < PAGE or not any(page):
                continue
            word, value = next((i, value) for i, value in enumerate(memoryview(page).cast("Q")) if value)
            places = [i * PAGE for i, found in enumerate(words[word :: PAGE // 8].tolist()) if found == value]
            for place in places[:_PLACES]:
                if view[place : place + PAGE] != page or place + there.length > len(view):
                    continue
                if fingerprint(view[place : place + there.length], self._parent.seed) != there.fingerprint:
                    continue
                if there.offset == piece.offset + place:
                    return None
                found, _ = PageCutter().cut(view[:place], last=True)
                return [*found, Cut(place, there.length, zero=False)], len(found), there
        return None

    def _leave(self) -> None:
        self._own = make_cutter(self._layout, self._chunk_size)
        self.misses = 0

    def _meet(self, view: memoryview, found: list[Cut]) -> tuple[list[Cut], int, Piece] | None:
        """Look whether what was cut without the parent lines up with it again."""
        self.misses += 1
        if self._layout is not Layout.PAGES or not _is_due(self.misses):
            return None
        near = self._next.offset if self._next is not None else self._parent.size
        chunks = ((number, cut) for number, cut in enumerate(found) if not cut.zero)
        for number, cut in itertools.islice(chunks, _PROBED_AGAIN):
            chunk_id = identify(view[cut.offset : cut.offset + cut.length])
            there = self._parent.find(chunk_id, cut.length, near)
            if there is not None:
                return found, number, there
        return None

    def _go_on(self, offset: int, cuts: list[Cut], found: list[Cut], number: int, there: Piece) -> int:
        """Take the found cuts before one that the parent has as `there`, and that; returns where it ends."""
        cuts += _shifted(found[:number], offset)
        start = offset + found[number].offset
        cuts.append(Cut(start, there.length, zero=False, before=there, fingerprint=there.fingerprint))
        self._pieces = self._parent.pieces(there.offset + there.length)
        self._ahead.clear()
        self._step()
        self._own = None
        self._parent.changes = 0
        self.moved = True
        return start + there.length


def _is_due(misses: int) -> bool:
    return misses & (misses - 1) == 0 or misses % _ASK_EVERY == 0


def _shifted(cuts: list[Cut], offset: int) -> list[Cut]:
    return [cut._replace(offset=cut.offset + offset) for cut in cuts]


class Matcher:
    """Finds for every file of a new checkpoint the file of the parent that it was.

    A BO is known by its identity; a handle or an address that moved is made up for by what is left of it.
    Other files are known by their names; where the numbers in a name have changed (PIDs, ids), by the rest of
    the name. Files come in any order, so that one may be given to a guess before its namesake comes: it is
    given again then, to whoever has a surer reason, but never twice for the same one.
    """

    def __init__(self, files: Iterable[FileEntry]) -> None:
        self._files = {entry.name: entry for entry in files if entry.segments}
        self._by_key: dict[Hashable, list[str]] = defaultdict(list)
        for entry in self._files.values():
            for key in dict.fromkeys(_keys(entry.name, entry.bo)):
                self._by_key[key].append(entry.name)
        # How sure the reason was for which a file was given: the place of its key.
        self._given: dict[str, int] = {}

    def match(self, name: str, bo: BufferObject | None = None) -> FileEntry | None:
        """The parent's file for a new file, or None."""
        keys = _keys(name, bo)
        for place, key in enumerate(keys):
            for candidate in self._by_key.get(key, ()):
                if self._given.get(candidate, len(keys)) > place:
                    self._given[candidate] = place
                    return self._files[candidate]
        return None


def _keys(name: str, bo: BufferObject | None) -> list[Hashable]:
    """What a file may be found by, the surest first."""
    if bo is not None:
        return [
            bo,
            ("address", bo.gpu_id, bo.address, bo.size, bo.flags),
            ("handle", bo.gpu_id, bo.handle, bo.size, bo.flags),
            ("size", bo.gpu_id, bo.size, bo.flags),
            ("any gpu", bo.size, bo.flags),
        ]
    numbers = list(_NUMBERS.finditer(name))
    first, last = (numbers[0], numbers[-1]) if numbers else (None, None)
    return [
        ("name", name),
        ("first", _without(name, first)),
        ("last", _without(name, last)),
        ("kind", _NUMBERS.sub("#", name)),
    ]


def _without(name: str, number: re.Match[str] | None) -> str:
    """The name with a number of it left open."""
    return f"{name[: number.start()]}#{name[number.end() :]}" if number else name
