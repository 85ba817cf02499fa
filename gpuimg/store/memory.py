"""The C library's allocator, told to keep what it has.

Coded payloads are allocated and freed by the hundred thousand. glibc gives blocks of that size back to the
kernel at once and faults every page in anew: coding then takes more than twice its time (0.72 instead of
0.30 s/GB on the machine of docs/architecture.md).
"""

from __future__ import annotations

import ctypes
import functools

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP = 64 * 1024 * 1024
_LARGEST_FROM_HEAP = 32 * 1024 * 1024


@functools.cache
def keep_freed_memory() -> None:
    """Keep up to 64 MiB of freed memory for the whole process; without effect where there is no mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEEP)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
