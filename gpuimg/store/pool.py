"""The fixed pool of slabs through which all bulk data moves.

A slab is 2 MiB of anonymous memory. The free list is last-in first-out, so that a small working
set stays in the caches and untouched slabs never become resident.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections import deque

from gpuimg.errors import StalledError

SLAB_SIZE = 2 * 1024 * 1024
SLABS = 48
_STALL_SECONDS = 600.0


class Slab:
    """One buffer of the pool: `view` is SLAB_SIZE bytes of page-aligned memory.

    A slab is one huge page where the kernel has one to give: reading into it, hashing and coding it then miss
    the TLB less.
    """

    __slots__ = ("view",)

    def __init__(self) -> None:
        # Twice the size holds an aligned slab for certain; what is not touched takes no memory.
        memory = mmap.mmap(-1, 2 * SLAB_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % SLAB_SIZE
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, start, SLAB_SIZE)
        self.view = memoryview(memory)[start : start + SLAB_SIZE]


class Pool:
    """At most `slabs` slabs, made when first needed."""

    def __init__(self, slabs: int = SLABS) -> None:
        self.size = slabs
        self._left = slabs
        self._added = 0
        self._free: deque[Slab] = deque()
        self._condition = threading.Condition()

    def acquire(self) -> Slab:
        """A free slab; waits for one. Its contents are arbitrary."""
        with self._condition:
            while not self._free and not self._left:
                if not self._condition.wait(_STALL_SECONDS):
                    raise StalledError(
                        f"no buffer became free for {_STALL_SECONDS:.0f} seconds",
                        remedy="check that the disk and the program at the other end still make progress",
                    )
            return self._take()

    def try_acquire(self) -> Slab | None:
        """A free slab as long as more than half of the pool is free or not yet made, else None."""
        with self._condition:
            return self._take() if len(self._free) + self._left > self.size // 2 else None

    def acquire_or_add(self) -> Slab:
        """A free slab or, when there is none, one beyond the pool that goes when it is released.

        For consumers that may all stand still while the one that matters needs a buffer.
        """
        with self._condition:
            if self._free or self._left:
                return self._take()
            self._added += 1
            return Slab()

    def release(self, slab: Slab) -> None:
        with self._condition:
            if self._added:
                self._added -= 1
                return
            self._free.append(slab)
            self._condition.notify()

    def _take(self) -> Slab:
        if self._free:
            return self._free.pop()
        self._left -= 1
        return Slab()
