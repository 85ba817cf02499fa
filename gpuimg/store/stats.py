"""What a store holds, in figures."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from pathlib import Path

from gpuimg.errors import UnknownReferenceError
from gpuimg.store import files
from gpuimg.store.codec import Codec
from gpuimg.store.context import Context
from gpuimg.store.model import CheckpointStats, CodecStats, StoreStats


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
        segments: set[bytes] = set()
        for checkpoint_id in context.catalogue.ids():
            try:
                manifest = context.catalogue.load(checkpoint_id)
            except UnknownReferenceError:
                # Removed since it was listed.
                continue
            segments |= {ref.id for entry in manifest.files for ref in entry.segments}
            checkpoints.append(
                CheckpointStats(
                    id=checkpoint_id.hex(),
                    tags=tuple(tag for tag, target in tags.items() if target == checkpoint_id),
                    created=manifest.created / 1e9,
                    files=len(manifest.files),
                    raw_bytes=manifest.statistics.raw_bytes,
                    new_bytes=manifest.statistics.new_bytes,
                )
            )
        checkpoints.sort(key=lambda item: item.created)
        folder = context.folder
        packs = [folder.pack(pack_id) for pack_id in folder.list_packs()]
        trash = list(folder.trash.glob("*.pack"))
        manifests = list(folder.manifests.iterdir())
        return StoreStats(
            raw_bytes=sum(item.raw_bytes for item in checkpoints),
            stored_bytes=_size(packs) + _size(trash) + _size(manifests),
            unique_chunks=context.index.chunk_count() - sum(context.index.contains(segments)),
            packs=len(packs),
            condemned_packs=len(trash),
            index_bytes=_size(list(folder.index.iterdir())),
            codecs=_codecs(context),
            checkpoints=tuple(checkpoints),
        )


def _size(paths: list[Path]) -> int:
    total = 0
    for path in paths:
        # A collector may have taken it since it was listed.
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _codecs(context: Context) -> dict[str, CodecStats]:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for _, place in context.index.places():
        name = Codec(place.codec).name.lower() if place.codec in set(Codec) else str(place.codec)
        if place.element_size:
            name += f"/{place.element_size}"
        entry = sums[name]
        entry[0] += 1
        entry[1] += place.raw
        entry[2] += place.stored
    return {name: CodecStats(*entry) for name, entry in sorted(sums.items())}
