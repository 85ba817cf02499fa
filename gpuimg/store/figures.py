"""Counting what taking a checkpoint did, by file."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields

from gpuimg.store.model import Statistics


@dataclass(slots=True)
class Counts:
    """Running statistics of one file or slab (see Statistics). Bytes, but for the numbers of chunks."""

    zero_bytes: int = 0
    unchanged_bytes: int = 0
    deduplicated_bytes: int = 0
    delta_bytes: int = 0
    coded_bytes: int = 0
    raw_stored_bytes: int = 0
    stored_bytes: int = 0
    chunks: int = 0
    new_chunks: int = 0

    def add(self, other: Counts) -> None:
        """Add what was counted elsewhere; safe from several threads."""
        with _lock:
            for item in fields(self):
                setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def statistics(self, **others: float) -> Statistics:
        """As plain data, together with figures that are counted elsewhere."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        return Statistics(**own, **others)  # type: ignore[arg-type]


_lock = threading.Lock()
