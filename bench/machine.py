"""What machine this is, and its own limits: memory copy, disk and tmpfs writes."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

COPY = 256 << 20
PIECE = 1 << 20


def describe() -> dict[str, Any]:
    """Processor, cores, memory, kernel, Python."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    info = {key.strip(): value.strip() for key, _, value in lines}
    flags = info.get("flags", "").split()
    return {
        "cpu": info.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "avx512": "avx512f" in flags,
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def limits(disk: Path, tmpfs: Path, size: int) -> dict[str, Any]:
    """Bytes per second: median and spread of five runs (disk: three)."""
    source = np.ones(COPY, dtype=np.uint8)
    target = np.zeros(COPY, dtype=np.uint8)
    return {
        "memcpy": _rates(COPY, 5, lambda: np.copyto(target, source)),
        "disk_write_fsync": _rates(size, 3, lambda: _write(disk / "limit", size)),
        "tmpfs_write": _rates(size, 5, lambda: _write(tmpfs / "limit", size)),
    }


def warm(folder: Path, size: int) -> None:
    """Touch `size` bytes of memory behind files in `folder` once: a virtual machine's first touch is slow."""
    _write(folder / "warm", size)


def _write(path: Path, size: int) -> None:
    piece = np.random.default_rng(1).bytes(PIECE)
    try:
        with path.open("wb", buffering=0) as stream:
            for _ in range(size // PIECE):
                stream.write(piece)
            os.fsync(stream.fileno())
    finally:
        path.unlink()


def _rates(size: int, runs: int, action: Callable[[], object]) -> dict[str, float]:
    rates = []
    for _ in range(runs):
        started = time.monotonic()
        action()
        rates.append(size / (time.monotonic() - started))
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}
