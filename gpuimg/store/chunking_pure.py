"""Cutting without the compiled kernel: the same cuts, in numpy (docs/store-format.md, "Recipe")."""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt

from gpuimg.store.chunking import MAX_PAGES, MIN_PAGES, PAGE

_MEAN_EXTRA_PAGES = 48
# An eighth of a page tells pages apart as well as all of it, for an eighth of the time.
_SUMMED_WORDS = 64
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_THRESHOLD = np.uint64(2**64 // _MEAN_EXTRA_PAGES)

# Offset, length, and whether it is a run of zeros.
Cut = tuple[int, int, bool]


def is_zero(data: memoryview) -> bool:
    """Whether all bytes are zero; non-zero data is nearly always recognised from a few samples."""
    array = np.frombuffer(data, dtype=np.uint8)
    return not array[::4099].any() and not array.max(initial=0)


def cut_pages(buffer: memoryview, last: bool, inside_zero_run: bool) -> tuple[list[Cut], int, bool]:
    """See `gpuimg.store.chunking.cut_pages`."""
    pages = len(buffer) // PAGE
    words = np.frombuffer(buffer, dtype=np.uint64, count=pages * PAGE // 8).reshape(pages, PAGE // 8)
    sums = words[:, :_SUMMED_WORDS].sum(axis=1, dtype=np.uint64)
    low = np.flatnonzero(sums * _MULTIPLIER < _THRESHOLD)
    empty = sums[low] == 0
    marks: list[int] = (low[~empty] + 1).tolist()
    runs = _zero_runs(words, low[empty])
    # A short run at the end may go on in the next buffer: nothing is cut behind its start yet.
    stop = pages

    def is_long(run: tuple[int, int]) -> bool:
        return run[1] - run[0] >= MIN_PAGES or (run[0] == 0 and inside_zero_run)

    if runs and runs[-1][1] == pages and not last and not is_long(runs[-1]):
        stop = runs.pop()[0]
    cuts: list[Cut] = []
    position = 0
    for run in runs:
        if is_long(run):
            _cut_span(cuts, marks, position, run[0])
            position = run[1]
            cuts.append((run[0] * PAGE, (position - run[0]) * PAGE, True))
    if last:
        _cut_span(cuts, marks, position, pages, len(buffer) % PAGE)
        return cuts, len(buffer), inside_zero_run
    covered = _cut_at_marks(cuts, marks, position, stop)
    if cuts:
        inside_zero_run = cuts[-1][2] and covered == pages
    return cuts, covered * PAGE, inside_zero_run


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
        cuts.append((start * PAGE, (stop - start) * PAGE + partial, False))


def _cut_at_marks(cuts: list[Cut], marks: list[int], start: int, stop: int) -> int:
    """Cut at marks and at the maximum length; returns where the first cut that needs more pages starts."""
    while True:
        index = bisect.bisect_left(marks, start + MIN_PAGES)
        limit = start + MAX_PAGES
        end = min(marks[index], limit) if index < len(marks) else limit
        if end > stop:
            return start
        cuts.append((start * PAGE, (end - start) * PAGE, False))
        start = end
