"""Chunks to code others against: chosen so that chains stay short, read into slabs and verified."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from gpuimg.errors import GpuimgError
from gpuimg.store.index import Index, Place
from gpuimg.store.pack import MAX_CHAIN
from gpuimg.store.pool import SLAB_SIZE, Pool
from gpuimg.store.reader import ChunkReader

DEPTH_LIMIT = 2
"""How many differences away from a chunk that stands alone another may be (docs/architecture.md says why)."""


class Bases:
    """Gives the bases of chunks of one store."""

    def __init__(self, index: Index, reader: ChunkReader, pool: Pool, depth_limit: int = DEPTH_LIMIT) -> None:
        self._index = index
        self._reader = reader
        self._pool = pool
        self._limit = depth_limit

    @contextlib.contextmanager
    def read(self, chunk_ids: Sequence[bytes]) -> Iterator[list[tuple[bytes, memoryview] | None]]:
        """For each chunk of the parent the id and bytes of the base to code its successor against.

        None where there is none: the store lacks it, it is damaged, or the slab is full. The bytes are valid
        inside the block only.
        """
        chosen = self._choose(chunk_ids)
        slab = self._pool.acquire_or_add()
        try:
            yield list(self._fill(chosen, slab.view))
        finally:
            self._pool.release(slab)

    def _fill(
        self, chosen: list[tuple[bytes, Place] | None], view: memoryview
    ) -> Iterator[tuple[bytes, memoryview] | None]:
        placed: dict[bytes, memoryview | None] = {}
        wanted: list[tuple[bytes, Place, int]] = []
        end = 0
        for item in chosen:
            if item is not None and item[0] not in placed:
                chunk_id, place = item
                fits = end + place.raw <= SLAB_SIZE
                placed[chunk_id] = view[end : end + place.raw] if fits else None
                if fits:
                    wanted.append((chunk_id, place, end))
                    end += place.raw
        try:
            self._reader.read_placed(wanted, view)
        except GpuimgError:
            self._fill_singly(wanted, view, placed)
        for item in chosen:
            data = placed[item[0]] if item is not None else None
            yield (item[0], data) if item is not None and data is not None else None

    def _fill_singly(
        self, wanted: list[tuple[bytes, Place, int]], view: memoryview, placed: dict[bytes, memoryview | None]
    ) -> None:
        """Find out which of them cannot be read."""
        for item in wanted:
            try:
                self._reader.read_placed([item], view)
            except GpuimgError:
                placed[item[0]] = None

    def _choose(self, chunk_ids: Sequence[bytes]) -> list[tuple[bytes, Place] | None]:
        """For each chunk itself, or what it is coded against if its chain is at the limit."""
        chains: list[list[tuple[bytes, Place]]] = [[] for _ in chunk_ids]
        ends = list(enumerate(chunk_ids))
        while ends:
            places = self._index.lookup([chunk_id for _, chunk_id in ends])
            further = []
            for (number, chunk_id), place in zip(ends, places, strict=True):
                if place is None or len(chains[number]) > MAX_CHAIN:
                    # Something that it rests on is lost.
                    chains[number] = []
                    continue
                chains[number].append((chunk_id, place))
                if place.base:
                    further.append((number, place.base))
            ends = further
        # The first of a chain is the chunk, the last stands alone; a base may be at most at depth limit - 1.
        return [chain[max(0, len(chain) - self._limit)] if chain else None for chain in chains]
