"""The parent's side of an incremental checkpoint: which of its files is which, and where they were cut."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator

from gpuimg.errors import NewerFormatError, StoredDataError
from gpuimg.store.chunking import Cut, Cutter
from gpuimg.store.model import BufferObject, FileEntry, Piece, Run
from gpuimg.store.reader import ChunkReader, file_runs

_NUMBERS = re.compile(r"[0-9]+|(?<=-)[0-9a-f]+(?=\.)")


class ParentFile:
    """A file of the parent, as what it was cut into.

    Where its recipe cannot be read it ends: a checkpoint does not fail for what an older one lacks.
    """

    def __init__(self, reader: ChunkReader, entry: FileEntry, element_size: int) -> None:
        self.entry = entry
        self.size = entry.size
        self.element_size = element_size
        self._reader = reader

    def runs(self) -> Iterator[Run]:
        """Its runs in order (see `gpuimg.store.reader.file_runs`)."""
        try:
            yield from file_runs(self._reader, self.entry)
        except (StoredDataError, NewerFormatError):
            return

    def pieces(self) -> Iterator[Piece]:
        """Its pieces in order, none longer than a slab."""
        for run in self.runs():
            yield from run.pieces


class ParentCutter:
    """Cuts where the parent was cut, as long as that lines up; then as `fallback` does.

    Fingerprints compare and differences line up only between chunks of the same place and length, which
    cutting by content would not give after every page has changed a little.
    """

    def __init__(self, parent: ParentFile, fallback: Cutter) -> None:
        self.aligned = True
        self._pieces = parent.pieces()
        self._next: Piece | None = None
        self._fallback = fallback

    def cut(self, buffer: memoryview, *, last: bool) -> tuple[list[Cut], int]:
        cuts: list[Cut] = []
        offset = 0
        while self.aligned:
            piece = self._next or next(self._pieces, None)
            if piece is None or (last and offset + piece.length > len(buffer)):
                self.aligned = False
            elif offset + piece.length > len(buffer):
                self._next = piece
                return cuts, offset
            else:
                cuts.append(Cut(offset, piece.length, zero=False, before=piece))
                offset += piece.length
                self._next = None
        found, covered = self._fallback.cut(buffer[offset:], last=last)
        cuts += [cut._replace(offset=cut.offset + offset) for cut in found]
        return cuts, offset + covered


class Matcher:
    """Finds for every file of a new checkpoint the file of the parent that it was.

    A BO is known by its identity; a handle or an address that moved is made up for by what is left of it.
    Other files are known by their names; where the numbers in a name have changed (PIDs, ids), by the rest of
    the name. No file of the parent is given twice.
    """

    def __init__(self, files: Iterable[FileEntry]) -> None:
        self._free = {entry.name: entry for entry in files if entry.segments}
        self._by_key: dict[Hashable, list[str]] = defaultdict(list)
        for entry in self._free.values():
            for key in _keys(entry.name, entry.bo):
                self._by_key[key].append(entry.name)

    def match(self, name: str, bo: BufferObject | None = None) -> FileEntry | None:
        """The parent's file for a new file, or None. Ask for files whose names match exactly first."""
        for key in _keys(name, bo):
            for candidate in self._by_key.get(key, ()):
                entry = self._free.pop(candidate, None)
                if entry is not None:
                    return entry
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
    return [("name", name), ("kind", _NUMBERS.sub("#", name))]
