"""A checkpoint's memory as a map: how each chunk of each file is stored, in order.

Computed from recipes and the index; chunks are not read.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gpuimg.errors import DamagedError, NewerFormatError, StoredDataError, UnknownReferenceError
from gpuimg.store.checkpoint import Checkpoint
from gpuimg.store.codec import Codec
from gpuimg.store.context import Context
from gpuimg.store.explain import LOST, Chains, coding_name
from gpuimg.store.index import Place
from gpuimg.store.model import BufferObject, FileEntry, Layout, Manifest, Piece
from gpuimg.store.parent import Matcher
from gpuimg.store.reader import file_runs

if TYPE_CHECKING:
    from gpuimg.store.store import Store

MAX_CELLS = 20_000
"""A map with more chunks than this has cells that stand for several."""
_MAX_BLOCKS = 160
_BATCH = 4096
# Marks pieces of which a recipe should tell that cannot be read.
_UNREADABLE = b"unreadable"

_Unchanged = Callable[[Piece], bool]


class Kind(enum.StrEnum):
    """How a chunk is stored; the first that holds."""

    ZERO = "zero"
    LOST = "lost"
    UNCHANGED = "unchanged"
    KNOWN = "known"
    DELTA = "delta"
    CODED = "coded"
    RAW = "raw"


class Cell(NamedTuple):
    """Consecutive chunks of a file (one, in maps that are not too large), or part of a run of zeros.

    `kind` and `coding` are those of most of its bytes; `share` (0 to 1) is how much of it is of that kind.
    `stored` is the sum of the payloads, `depth` the greatest depth; `length` the bytes of the file.
    """

    length: int
    kind: Kind
    share: float
    chunks: int
    coding: str
    depth: int
    stored: int


@dataclass(frozen=True, slots=True)
class Block:
    """The cells of one file, or (`files` greater than 1) of several small ones.

    `stored_bytes` is what its chunks take, each counted once.
    """

    name: str
    bo: BufferObject | None
    files: int
    size: int
    stored_bytes: int
    max_depth: int
    cells: tuple[Cell, ...]


@dataclass(slots=True)
class KindTotal:
    """All that is stored in one way; `stored_bytes` are payloads of chunks that came with this checkpoint."""

    raw_bytes: int = 0
    stored_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """The map of a checkpoint.

    `chunks_per_cell` is 1 unless the checkpoint has more than MAX_CELLS chunks. `is_parent_gone` says that it
    was compared with a checkpoint that is no longer there: what was unchanged cannot be told any more.
    """

    blocks: tuple[Block, ...]
    totals: dict[Kind, KindTotal]
    chunks_per_cell: int
    inline_files: int
    inline_bytes: int
    is_parent_gone: bool


def memory_map(store: Store, checkpoint: Checkpoint, *, max_cells: int = MAX_CELLS) -> MemoryMap:
    """Draw up the map of a checkpoint of the store."""
    return _Mapper(store._context, checkpoint, max_cells).map()


class _Mapper:
    def __init__(self, context: Context, checkpoint: Checkpoint, max_cells: int) -> None:
        self._context = context
        self._checkpoint = checkpoint
        self._zero_step = context.config.chunk_size
        self._chains = Chains(context.index)
        self._entries = [entry for entry in checkpoint.files.values() if entry.segments]
        self._parent = self._load(bytes.fromhex(checkpoint.parent)) if checkpoint.parent else None
        self._before = self._match_parent()
        total, self._known = self._survey()
        self._per_cell = max(1, -(-total // max_cells))
        self._seen: set[bytes] = set()
        self.totals: dict[Kind, KindTotal] = defaultdict(KindTotal)

    def map(self) -> MemoryMap:
        inline = [entry for entry in self._checkpoint.files.values() if not entry.segments]
        return MemoryMap(
            blocks=tuple(self._blocks()),
            totals={kind: self.totals[kind] for kind in Kind if kind in self.totals},
            chunks_per_cell=self._per_cell,
            inline_files=len(inline),
            inline_bytes=sum(entry.size for entry in inline),
            is_parent_gone=bool(self._checkpoint.parent) and self._parent is None,
        )

    # What there was before

    def _load(self, checkpoint_id: bytes) -> Manifest | None:
        try:
            return self._context.catalogue.load(checkpoint_id)
        except (UnknownReferenceError, DamagedError, NewerFormatError):
            return None

    def _match_parent(self) -> dict[str, FileEntry]:
        """The parent's file for each file that has one."""
        matcher = Matcher(self._parent.files if self._parent is not None else ())
        matches = ((entry.name, matcher.match(entry.name, entry.bo)) for entry in self._entries)
        return {name: before for name, before in matches if before is not None}

    def _unchanged(self, entry: FileEntry) -> _Unchanged:
        """What the parent's version of a file has."""
        before = self._before.get(entry.name)
        pieces = self._pieces(before) if before is not None else ()
        found = {(_place(entry, piece), piece.id) for piece in pieces if piece.id is not None}
        return lambda piece: (_place(entry, piece), piece.id) in found

    def _survey(self) -> tuple[int, set[bytes]]:
        """The number of cells without aggregation, and the chunks that older checkpoints had already."""
        total = 0
        # By chunk: its length, and the bytes of all places where it is not as the parent had it.
        candidates: dict[bytes, tuple[int, int]] = {}
        wanted = 0
        for entry in self._entries:
            found = self._found_in_the_store(entry)
            is_unchanged = self._unchanged(entry)
            wanted += found
            for piece in self._pieces(entry):
                total += 1
                if found and piece.id is not None and not is_unchanged(piece):
                    _, everywhere = candidates.get(piece.id, (0, 0))
                    candidates[piece.id] = (piece.length, everywhere + piece.length)
        return total, self._find_known(candidates, wanted) if wanted else set()

    def _found_in_the_store(self, entry: FileEntry) -> int:
        """How many bytes of a file were there already, those aside that the parent still shows."""
        figures = self._checkpoint.figures.get(entry.name)
        if figures is None:
            return entry.size
        stats = figures.statistics
        return stats.deduplicated_bytes + (stats.unchanged_bytes if self._parent is None else 0)

    def _find_known(self, candidates: dict[bytes, tuple[int, int]], wanted: int) -> set[bytes]:
        """Those of the chunks that older checkpoints have; the search ends when `wanted` bytes are explained.

        A chunk that is nowhere else explains all its places but one.
        """
        known: set[bytes] = set()
        explained = sum(everywhere - length for length, everywhere in candidates.values())
        searched: set[bytes] = set()
        for manifest in self._older():
            for ref in (ref for entry in manifest.files for ref in entry.segments):
                if explained >= wanted:
                    return known
                if ref.id in searched:
                    continue
                searched.add(ref.id)
                try:
                    ids = self._context.reader.segment(ref).chunk_ids()
                except (StoredDataError, NewerFormatError):
                    continue
                found = {chunk_id for chunk_id in ids if chunk_id in candidates} - known
                known |= found
                explained += sum(candidates[chunk_id][0] for chunk_id in found)
        return known

    def _older(self) -> list[Manifest]:
        """The checkpoints that are older, newest first."""
        found = []
        for checkpoint_id in self._context.catalogue.ids():
            manifest = self._load(checkpoint_id)
            if manifest is not None and manifest.created / 1e9 < self._checkpoint.created:
                found.append(manifest)
        return sorted(found, key=lambda manifest: manifest.created, reverse=True)

    # What there is

    def _blocks(self) -> Iterator[Block]:
        by_size = sorted(self._entries, key=lambda entry: entry.size, reverse=True)
        own = {entry.name for entry in by_size[:_MAX_BLOCKS]}
        rest = _BlockBuilder(self._per_cell)
        joined = [entry for entry in self._entries if entry.name not in own]
        for entry in self._entries:
            builder = _BlockBuilder(self._per_cell) if entry.name in own else rest
            for piece, kind, place, depth in self._classify(entry):
                builder.add(piece, kind, place, depth)
            builder.end_file()
            if entry.name in own:
                yield builder.block(entry.name, entry.bo, 1, entry.size)
        if joined:
            size = sum(entry.size for entry in joined)
            yield rest.block(f"{len(joined)} smaller files", None, len(joined), size)

    def _classify(self, entry: FileEntry) -> Iterator[tuple[Piece, Kind, Place | None, int]]:
        is_unchanged = self._unchanged(entry)
        batch: list[Piece] = []
        for piece in self._pieces(entry):
            batch.append(piece)
            if len(batch) == _BATCH:
                yield from self._classify_batch(batch, is_unchanged)
                batch = []
        yield from self._classify_batch(batch, is_unchanged)

    def _classify_batch(
        self, pieces: list[Piece], is_unchanged: _Unchanged
    ) -> Iterator[tuple[Piece, Kind, Place | None, int]]:
        ids = [piece.id for piece in pieces if piece.id is not None]
        places = self._context.index.lookup(ids)
        found = dict(zip(ids, zip(places, self._chains.depths(places), strict=True), strict=True))
        for piece in pieces:
            place, depth = found[piece.id] if piece.id is not None else (None, 0)
            kind = self._kind(piece, place, depth, is_unchanged)
            total = self.totals[kind]
            total.raw_bytes += piece.length
            if place is not None and kind in (Kind.DELTA, Kind.CODED, Kind.RAW):
                total.stored_bytes += place.stored
            yield piece, kind, place, depth

    def _kind(self, piece: Piece, place: Place | None, depth: int, is_unchanged: _Unchanged) -> Kind:
        if piece.id is None:
            return Kind.ZERO if piece.fingerprint != _UNREADABLE else Kind.LOST
        is_repeated = piece.id in self._seen
        self._seen.add(piece.id)
        if place is None or depth == LOST:
            return Kind.LOST
        if is_unchanged(piece):
            return Kind.UNCHANGED
        if is_repeated or piece.id in self._known:
            return Kind.KNOWN
        if place.base:
            return Kind.DELTA
        return Kind.RAW if place.codec == Codec.RAW else Kind.CODED

    def _pieces(self, entry: FileEntry) -> Iterator[Piece]:
        """The pieces of a file; runs of zeros in parts as long as chunks, like the rest of a file from where
        its recipe cannot be read (marked by its fingerprint)."""
        offset = 0
        try:
            for run in file_runs(self._context.reader, entry):
                for piece in run.pieces:
                    if piece.id is None:
                        yield from self._in_parts(piece.offset, piece.offset + piece.length)
                    else:
                        yield piece
                    offset = piece.offset + piece.length
        except (StoredDataError, NewerFormatError):
            yield from self._in_parts(offset, entry.size, _UNREADABLE)

    def _in_parts(self, start: int, end: int, mark: bytes = b"") -> Iterator[Piece]:
        while start < end:
            stop = min(end, start - start % self._zero_step + self._zero_step)
            yield Piece(start, stop - start, None, mark)
            start = stop


def _place(entry: FileEntry, piece: Piece) -> int:
    """Where a chunk must be to be unchanged; in page images pages come and go, so that it may have moved."""
    return 0 if entry.layout is Layout.PAGES else piece.offset


class _BlockBuilder:
    """Makes cells of chunks, `per_cell` at a time; a cell never spans two files."""

    def __init__(self, per_cell: int) -> None:
        self._per_cell = per_cell
        self._cells: list[Cell] = []
        self._seen: set[bytes] = set()
        self._stored = 0
        self._max_depth = 0
        self._reset()

    def _reset(self) -> None:
        self._count = self._cell_stored = self._cell_depth = 0
        self._kinds: Counter[Kind] = Counter()
        self._codings: Counter[str] = Counter()

    def add(self, piece: Piece, kind: Kind, place: Place | None, depth: int) -> None:
        self._count += 1
        self._kinds[kind] += piece.length
        if place is not None:
            self._codings[coding_name(place)] += piece.length
            self._cell_stored += place.stored
            self._cell_depth = max(self._cell_depth, depth)
            if piece.id is not None and piece.id not in self._seen:
                self._seen.add(piece.id)
                self._stored += place.stored
        if self._count == self._per_cell:
            self.end_file()

    def end_file(self) -> None:
        """End the cell that is being made, if any."""
        if not self._count:
            return
        length = self._kinds.total()
        kind, most = self._kinds.most_common(1)[0]
        coding = self._codings.most_common(1)[0][0] if self._codings else ""
        self._cells.append(
            Cell(length, kind, most / length, self._count, coding, self._cell_depth, self._cell_stored)
        )
        self._max_depth = max(self._max_depth, self._cell_depth)
        self._reset()

    def block(self, name: str, bo: BufferObject | None, files: int, size: int) -> Block:
        return Block(name, bo, files, size, self._stored, self._max_depth, tuple(self._cells))
