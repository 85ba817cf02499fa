"""Where a file is cut into chunks (docs/store-format.md, "Recipe").

A cutter looks at a filled buffer and says which runs of it are chunks, which are zero, and how many
bytes at the end must be shown to it again together with what follows.
"""

from __future__ import annotations

import bisect
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gpuimg.store.model import Layout

PAGE = 4096
MIN_PAGES = 16
MAX_PAGES = 256
_MEAN_EXTRA_PAGES = 48
# An eighth of a page tells pages apart as well as all of it, for an eighth of the time.
_SUMMED_WORDS = 64
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_THRESHOLD = np.uint64(2**64 // _MEAN_EXTRA_PAGES)

# CRIU's page images and the raw page images of the AMD GPU plugin: long runs of 4 KiB pages in which
# pages come and go between two checkpoints.
PAGE_IMAGES = ("pages-*.img", "amdgpu-pages-*.img")

Buffer = npt.NDArray[np.uint8]


class Cut(NamedTuple):
    """A run of the buffer: a chunk, or (`zero`) a run of zero bytes."""

    offset: int
    length: int
    zero: bool


class Cutter(Protocol):
    """Cuts successive buffers of one file."""

    def cut(self, buffer: Buffer, *, last: bool) -> tuple[list[Cut], int]:
        """Cuts of the buffer from its start, and the number of bytes they cover.

        All of it is covered if `last`; otherwise the rest must come again at the start of the next
        buffer. A full slab always yields at least one cut.
        """
        ...


def layout_for(name: str) -> Layout:
    """The layout that suits a file of that name."""
    return Layout.PAGES if any(fnmatchcase(name, pattern) for pattern in PAGE_IMAGES) else Layout.FIXED


def make_cutter(layout: Layout, chunk_size: int) -> Cutter:
    return PageCutter() if layout is Layout.PAGES else FixedCutter(chunk_size)


class FixedCutter:
    """Chunks of one size, so that a position has the same name in every checkpoint."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def cut(self, buffer: Buffer, *, last: bool) -> tuple[list[Cut], int]:
        size = self.chunk_size
        end = len(buffer) if last else len(buffer) - len(buffer) % size
        cuts = []
        for offset in range(0, end, size):
            chunk = buffer[offset : min(offset + size, end)]
            cuts.append(Cut(offset, len(chunk), is_zero(chunk)))
        return cuts, end


def is_zero(data: Buffer) -> bool:
    """Whether all bytes are zero; non-zero data is nearly always recognised from a few samples."""
    return not data[::4099].any() and not data.max(initial=0)


class PageCutter:
    """Whole pages, cut behind pages whose checksum says so: inserted or removed pages shift nothing.

    The cuts depend on the file's contents only, not on how it was divided into buffers.
    """

    def __init__(self) -> None:
        self._inside_zero_run = False

    def cut(self, buffer: Buffer, *, last: bool) -> tuple[list[Cut], int]:
        pages = len(buffer) // PAGE
        words = buffer[: pages * PAGE].view(np.uint64).reshape(pages, PAGE // 8)
        sums = words[:, :_SUMMED_WORDS].sum(axis=1, dtype=np.uint64)
        low = np.flatnonzero(sums * _MULTIPLIER < _THRESHOLD)
        empty = sums[low] == 0
        marks: list[int] = (low + 1).tolist()
        runs: list[tuple[int, int]] = []
        if empty.any():
            runs = _zero_runs(words, low[empty])
            marks = (low[~empty] + 1).tolist()
        # A short run at the end may go on in the next buffer: nothing is cut behind its start yet.
        stop = pages
        if runs and runs[-1][1] == pages and not last and not self._is_long(runs[-1]):
            stop = runs.pop()[0]
        cuts: list[Cut] = []
        position = 0
        for run in runs:
            if self._is_long(run):
                _cut_span(cuts, marks, position, run[0])
                position = run[1]
                cuts.append(Cut(run[0] * PAGE, (position - run[0]) * PAGE, zero=True))
        if last:
            _cut_span(cuts, marks, position, pages, len(buffer) % PAGE)
            return cuts, len(buffer)
        covered = _cut_at_marks(cuts, marks, position, stop)
        if cuts:
            self._inside_zero_run = cuts[-1].zero and covered == pages
        return cuts, covered * PAGE

    def _is_long(self, run: tuple[int, int]) -> bool:
        return run[1] - run[0] >= MIN_PAGES or (run[0] == 0 and self._inside_zero_run)


def _zero_runs(words: npt.NDArray[np.uint64], empty: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """All runs of zero pages as (first, end); `empty` are the pages that begin with zeros."""
    found: list[tuple[int, int]] = []
    for start, stop in _runs(empty):
        zero = np.flatnonzero(words[start:stop].max(axis=1) == 0)
        found += [(start + first, start + end) for first, end in _runs(zero)]
    return found


def _runs(numbers: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """The runs of consecutive numbers in an ascending array, as (first, end)."""
    if not len(numbers):
        return []
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs]


def _cut_span(cuts: list[Cut], marks: list[int], start: int, stop: int, partial: int = 0) -> None:
    """Cut the pages [start, stop), whose end is a border, and the bytes of a partial page behind them."""
    start = _cut_at_marks(cuts, marks, start, stop)
    if start < stop or partial:
        cuts.append(Cut(start * PAGE, (stop - start) * PAGE + partial, zero=False))


def _cut_at_marks(cuts: list[Cut], marks: list[int], start: int, stop: int) -> int:
    """Cut at marks and at the maximum length; returns where the first cut that needs more pages starts."""
    while True:
        index = bisect.bisect_left(marks, start + MIN_PAGES)
        limit = start + MAX_PAGES
        end = min(marks[index], limit) if index < len(marks) else limit
        if end > stop:
            return start
        cuts.append(Cut(start * PAGE, (end - start) * PAGE, zero=False))
        start = end
