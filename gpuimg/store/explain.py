"""How a checkpoint is stored: as it was taken (its own figures) and as it is now (from the index)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from gpuimg.errors import NewerFormatError, StoredDataError
from gpuimg.store.checkpoint import Checkpoint
from gpuimg.store.codec import Codec
from gpuimg.store.context import Context
from gpuimg.store.index import Index, Place
from gpuimg.store.model import FileEntry
from gpuimg.store.pack import MAX_CHAIN
from gpuimg.store.reports import CheckpointReport, CodecStats, DepthStats, FileReport, StoredNow

if TYPE_CHECKING:
    from gpuimg.store.store import Store

LOST = -1
"""The depth of a chunk that is not in the store, or rests on one that is not."""


def coding_name(place: Place) -> str:
    """A chunk's codec as reports name it: "zstd", "float_planes/2", "float_planes/4+base"."""
    name = Codec(place.codec).name.lower() if place.codec in set(Codec) else str(place.codec)
    if place.element_size:
        name += f"/{place.element_size}"
    return f"{name}+base" if place.base else name


class Chains:
    """Tells how many differences lie between chunks and ones that stand alone.

    `bases` has every chunk that was found to be another's base, so far, with its place.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self.bases: dict[bytes, Place | None] = {}

    def depths(self, places: Iterable[Place | None]) -> list[int]:
        """The depth of chunks at these places: 0 for those that stand alone, LOST for those that are lost."""
        listed = list(places)
        self._find({place.base for place in listed if place is not None and place.base})
        return [self._depth(place) for place in listed]

    def _find(self, wanted: set[bytes]) -> None:
        """Look up bases, and theirs."""
        for _ in range(MAX_CHAIN):
            unknown = [base for base in wanted if base not in self.bases]
            if not unknown:
                return
            found = self._index.lookup(unknown)
            self.bases.update(zip(unknown, found, strict=True))
            wanted = {place.base for place in found if place is not None and place.base}

    def _depth(self, place: Place | None) -> int:
        for depth in range(MAX_CHAIN + 1):
            if place is None:
                break
            if not place.base:
                return depth
            place = self.bases.get(place.base)
        return LOST


class _Tally:
    """Adds up how chunks are stored, each of them once."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self._codecs: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        self._depths: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        self._lost = 0

    def add(self, chunk_id: bytes, place: Place | None, depth: int) -> None:
        if chunk_id in self.seen:
            return
        self.seen.add(chunk_id)
        if place is None or depth == LOST:
            self._lost += 1
            return
        for sums in (self._codecs[coding_name(place)], self._depths[depth]):
            sums[0] += 1
            sums[1] += place.raw
            sums[2] += place.stored

    def result(self, size: int, inline: int = 0) -> StoredNow:
        """The sums; `size` are all bytes of the file or checkpoint, `inline` those in the manifest."""
        depths = tuple(DepthStats(depth, *sums) for depth, sums in sorted(self._depths.items()))
        raw = sum(item.raw_bytes for item in depths)
        stored = sum(item.stored_bytes for item in depths)
        return StoredNow(
            chunks=sum(item.chunks for item in depths),
            raw_bytes=raw,
            stored_bytes=stored,
            ratio=size / (stored + inline) if stored + inline else 0.0,
            codecs={name: CodecStats(*sums) for name, sums in sorted(self._codecs.items())},
            depths=depths,
            max_depth=max((item.depth for item in depths), default=0),
            mean_depth=sum(item.depth * item.raw_bytes for item in depths) / raw if raw else 0.0,
            lost_chunks=self._lost,
        )


def explain(store: Store, checkpoint: Checkpoint) -> CheckpointReport:
    """Say how a checkpoint of the store is stored, by file.

    Reads its recipes and looks every chunk up; the chunks themselves are not read.
    """
    return _Explainer(store._context, checkpoint).report()


class _Explainer:
    def __init__(self, context: Context, checkpoint: Checkpoint) -> None:
        self._context = context
        self._checkpoint = checkpoint
        self._chains = Chains(context.index)
        self._all = _Tally()

    def report(self) -> CheckpointReport:
        entries = self._checkpoint.files.values()
        files = tuple(self._file(entry) for entry in entries if entry.segments)
        others = [
            place
            for base, place in self._chains.bases.items()
            if place is not None and base not in self._all.seen
        ]
        return CheckpointReport(
            now=self._all.result(self._checkpoint.raw_bytes, sum(len(entry.data) for entry in entries)),
            base_chunks=len(others),
            base_bytes=sum(place.stored for place in others),
            files=files,
        )

    def _file(self, entry: FileEntry) -> FileReport:
        taken = self._checkpoint.figures.get(entry.name)
        tally = _Tally()
        try:
            for chunk_ids in self._chunk_ids(entry):
                places = self._context.index.lookup(chunk_ids)
                for chunk_id, place, depth in zip(
                    chunk_ids, places, self._chains.depths(places), strict=True
                ):
                    tally.add(chunk_id, place, depth)
                    self._all.add(chunk_id, place, depth)
        except (StoredDataError, NewerFormatError):
            return FileReport(entry, taken, None)
        return FileReport(entry, taken, tally.result(entry.size))

    def _chunk_ids(self, entry: FileEntry) -> Iterator[Sequence[bytes]]:
        for ref in entry.segments:
            yield list(dict.fromkeys(self._context.reader.segment(ref).chunk_ids()))
