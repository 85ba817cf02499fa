"""What differs between two checkpoints, from their recipes alone."""

from __future__ import annotations

from gpuimg.store.checkpoint import Checkpoint
from gpuimg.store.context import Context
from gpuimg.store.model import Change, FileDiff, FileEntry, Piece
from gpuimg.store.reader import file_runs


def diff(context: Context, old: Checkpoint, new: Checkpoint) -> list[FileDiff]:
    """One entry per file of either checkpoint, sorted by name."""
    names = sorted(old.files.keys() | new.files.keys())
    return [_file_diff(context, name, old.files.get(name), new.files.get(name)) for name in names]


def _file_diff(context: Context, name: str, old: FileEntry | None, new: FileEntry | None) -> FileDiff:
    if new is None:
        assert old is not None
        return FileDiff(name, Change.REMOVED, old.size, 0, 0, 0)
    if old is None:
        return FileDiff(name, Change.ADDED, 0, new.size, new.size, new.size, ((0, new.size),))
    if (old.size, old.data, old.segments) == (new.size, new.data, new.segments):
        return FileDiff(name, Change.EQUAL, old.size, new.size, 0, 0)
    if not old.segments or not new.segments:
        whole = ((0, new.size),) if new.size else ()
        return FileDiff(name, Change.CHANGED, old.size, new.size, new.size, new.size, whole)
    places, ids = _index_pieces(context, old)
    changed = new_bytes = 0
    ranges: list[tuple[int, int]] = []
    for piece in _pieces(context, new):
        if (piece.offset, piece.length, piece.id) in places:
            continue
        changed += piece.length
        new_bytes += piece.length if piece.id is not None and piece.id not in ids else 0
        if ranges and sum(ranges[-1]) == piece.offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + piece.length)
        else:
            ranges.append((piece.offset, piece.length))
    change = Change.CHANGED if changed or old.size != new.size else Change.EQUAL
    return FileDiff(name, change, old.size, new.size, changed, new_bytes, tuple(ranges))


def _index_pieces(
    context: Context, entry: FileEntry
) -> tuple[set[tuple[int, int, bytes | None]], set[bytes]]:
    places: set[tuple[int, int, bytes | None]] = set()
    ids: set[bytes] = set()
    for piece in _pieces(context, entry):
        places.add((piece.offset, piece.length, piece.id))
        if piece.id is not None:
            ids.add(piece.id)
    return places, ids


def _pieces(context: Context, entry: FileEntry) -> list[Piece]:
    return [piece for run in file_runs(context.reader, entry) for piece in run.pieces]
