"""What a store holds, in figures."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from pathlib import Path

from gpuimg.errors import UnknownReferenceError
from gpuimg.store import files
from gpuimg.store.context import Context
from gpuimg.store.explain import coding_name
from gpuimg.store.index import Index
from gpuimg.store.pack import MAX_CHAIN
from gpuimg.store.reports import CheckpointStats, CodecStats, DepthStats, StoreStats


def stats(context: Context) -> StoreStats:
    """Figures of the whole store.

    Raises
    ------
    DamagedError
        A manifest cannot be read.
    """
    with files.os_errors("measuring the store"):
        tags = context.catalogue.tags()
        checkpoints = []
        recipes: set[bytes] = set()
        for checkpoint_id in context.catalogue.ids():
            try:
                manifest = context.catalogue.load(checkpoint_id)
            except UnknownReferenceError:
                # Removed since it was listed.
                continue
            recipes |= {ref.id for entry in manifest.files for ref in entry.segments}
            checkpoints.append(
                CheckpointStats(
                    id=checkpoint_id.hex(),
                    tags=tuple(tag for tag, target in tags.items() if target == checkpoint_id),
                    created=manifest.created / 1e9,
                    files=len(manifest.files),
                    parent=manifest.parent.hex(),
                    statistics=manifest.statistics,
                )
            )
        checkpoints.sort(key=lambda item: item.created)
        folder = context.folder
        packs = [folder.pack(pack_id) for pack_id in folder.list_packs()]
        trash = list(folder.trash.glob("*.pack"))
        manifests = list(folder.manifests.iterdir())
        sums = _Sums(context.index, recipes)
        return StoreStats(
            raw_bytes=sum(item.raw_bytes for item in checkpoints),
            stored_bytes=_size(packs) + _size(trash) + _size(manifests),
            unique_chunks=sum(codec.chunks for codec in sums.codecs.values()),
            packs=len(packs),
            condemned_packs=len(trash),
            index_bytes=_size(list(folder.index.iterdir())),
            codecs=sums.codecs,
            recipes=sums.recipes,
            depths=sums.depths,
            checkpoints=tuple(checkpoints),
        )


def _size(paths: list[Path]) -> int:
    total = 0
    for path in paths:
        # A collector may have taken it since it was listed.
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


class _Sums:
    """What the index tells of all chunks, and of those that are recipes."""

    def __init__(self, index: Index, recipes: set[bytes]) -> None:
        by_codec: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        of_recipes = [0, 0, 0]
        self._deltas: dict[bytes, bytes] = {}
        delta_sizes: list[tuple[bytes, int, int]] = []
        alone = [0, 0, 0]
        for chunk_id, place in index.places():
            if chunk_id in recipes:
                _add(of_recipes, place.raw, place.stored)
                continue
            _add(by_codec[coding_name(place)], place.raw, place.stored)
            if place.base:
                self._deltas[chunk_id] = place.base
                delta_sizes.append((chunk_id, place.raw, place.stored))
            else:
                _add(alone, place.raw, place.stored)
        by_depth: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        if alone[0]:
            by_depth[0] = alone
        for chunk_id, raw, stored in delta_sizes:
            _add(by_depth[self._depth(chunk_id)], raw, stored)
        self.codecs = {name: CodecStats(*sums) for name, sums in sorted(by_codec.items())}
        self.recipes = CodecStats(*of_recipes)
        self.depths = tuple(DepthStats(depth, *sums) for depth, sums in sorted(by_depth.items()))

    def _depth(self, chunk_id: bytes) -> int:
        """How many differences lie between a chunk and one that stands alone (or is lost)."""
        depth = 0
        while depth <= MAX_CHAIN and (base := self._deltas.get(chunk_id)) is not None:
            depth += 1
            chunk_id = base
        return depth


def _add(sums: list[int], raw: int, stored: int) -> None:
    sums[0] += 1
    sums[1] += raw
    sums[2] += stored
