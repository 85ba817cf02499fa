"""Where files are cut: the same places however the bytes arrive, and a slow twin says the same."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuimg.store import chunking, chunking_pure, kernel_loader
from gpuimg.store.chunking import Cutter, FixedCutter, PageCutter, layout_for, make_cutter
from gpuimg.store.model import Layout
from tests.fixtures.store_data import PAGE, noise, pages


class Contents(bytes):
    """Bytes that a failing test does not print."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


Run = tuple[int, int, bool]
ZERO_PAGE = bytes(PAGE)
GOLDEN_RATIO = 0x9E3779B97F4A7C15


KERNEL = kernel_loader.kernel()
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="the compiled kernel is not built (no C compiler?)")


@pytest.fixture(params=[pytest.param("kernel", marks=needs_kernel), "pure"], scope="module")
def cutting(request):
    """Cutting by the kernel, and without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "kernel", lambda: KERNEL if request.param == "kernel" else None)
        yield


def slow_cuts(data: bytes) -> list[Run]:
    """Layout PAGES as docs/store-format.md has it, page by page: (offset, length, zero)."""
    cut_pages = [data[start : start + PAGE] for start in range(0, len(data), PAGE)]
    zero = [page == ZERO_PAGE for page in cut_pages]
    in_run = [False] * len(cut_pages)
    start = 0
    while start < len(cut_pages):
        end = start
        while end < len(cut_pages) and zero[end]:
            end += 1
        if end - start >= 16:
            in_run[start:end] = [True] * (end - start)
        start = max(end, start + 1)
    runs: list[Run] = []
    begin = 0
    for number, page in enumerate(cut_pages):
        last = number + 1 == len(cut_pages)
        end = (number + 1) * PAGE if not last else len(data)
        if in_run[number]:
            if last or not in_run[number + 1]:
                runs.append((begin, end - begin, True))
                begin = end
            continue
        count = -(-(end - begin) // PAGE)
        border = last or in_run[number + 1] or count == 256
        if border or (count >= 16 and is_mark(page)):
            runs.append((begin, end - begin, False))
            begin = end
    return runs


def is_mark(page: bytes) -> bool:
    if len(page) < PAGE:
        return False
    total = sum(struct.unpack_from("<64Q", page)) % 2**64
    return total != 0 and total * GOLDEN_RATIO % 2**64 < 2**64 // 48


def fast_cuts(cutter: Cutter, data: bytes, sizes: list[int]) -> list[Run]:
    """Cut `data` in buffers to which the given numbers of bytes are added; adjoining zero runs merged."""
    runs: list[Run] = []
    done = end = 0
    steps = iter(sizes)
    while True:
        end = min(len(data), end + next(steps, len(data)))
        last = end == len(data)
        buffer = memoryview(data)[done:end]
        cuts, covered = cutter.cut(buffer, last=last)
        expected = 0
        for cut in cuts:
            assert cut.before is None
            offset, length, zero = cut[:3]
            assert offset == expected and length > 0, "cuts follow each other without a gap"
            expected += length
            if zero and runs and runs[-1][2]:
                runs[-1] = (runs[-1][0], runs[-1][1] + length, True)
            else:
                runs.append((done + offset, length, zero))
        assert covered == expected
        if len(buffer) >= 2 << 20:
            assert cuts, "a full slab always yields"
        done += covered
        if last:
            assert done == len(data)
            return runs


@st.composite
def page_files(draw) -> Contents:
    """Pages that are noise, zero, marks, or zero in sum only; a partial page at the end."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    parts: list[bytes] = []
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["noise", "zero", "tricky", "same"]))
        count = draw(st.sampled_from([1, 2, 15, 16, 17, 40, 255, 256, 257, 300]))
        if kind == "noise":
            parts.append(rng.bytes(count * PAGE))
        elif kind == "zero":
            parts.append(bytes(count * PAGE))
        elif kind == "tricky":
            # The words of this page add up to zero, and it is not zero.
            words = np.zeros(PAGE // 8, dtype=np.uint64)
            words[:2] = (5, 2**64 - 5)
            parts.append(words.tobytes() * count)
        else:
            parts.append(rng.bytes(PAGE) * count)
    parts.append(draw(st.sampled_from([b"", b"x", bytes(100), rng.bytes(PAGE - 1)])))
    return Contents(b"".join(parts))


splits = st.lists(
    st.sampled_from([1, 7, PAGE, PAGE + 1, 5 * PAGE, 16 * PAGE, 100 * PAGE, 64 * 1024, 1 << 20, 2 << 20]),
    max_size=12,
)


@pytest.mark.usefixtures("cutting")
@settings(max_examples=80, deadline=None)
@given(page_files(), splits)
@example(Contents(noise(300 * PAGE, 3) + b"tail"), [1 << 20])
def test_pages_are_cut_as_the_slow_twin_cuts_them_however_they_arrive(data, sizes):
    expected = slow_cuts(data)
    assert fast_cuts(PageCutter(), data, []) == expected
    assert fast_cuts(PageCutter(), data, sizes) == expected


@pytest.mark.usefixtures("cutting")
@pytest.mark.parametrize("seed", range(20))
def test_a_partial_page_after_a_border_is_cut_alike_from_any_buffers(seed):
    data = noise(400 * PAGE, seed)
    border = slow_cuts(data)[0][1]
    data = data[:border] + b"the rest"
    expected = slow_cuts(data)
    for sizes in ([], [border], [border, 3], [PAGE] * 400):
        assert fast_cuts(PageCutter(), data, sizes) == expected


@pytest.mark.usefixtures("cutting")
@settings(max_examples=40, deadline=None)
@given(page_files())
def test_chunks_of_pages_keep_their_limits(data):
    runs = fast_cuts(PageCutter(), data, [])
    for number, (offset, length, zero) in enumerate(runs):
        at_end = number + 1 == len(runs)
        assert offset % PAGE == 0
        assert at_end or length % PAGE == 0
        if zero:
            assert not any(data[offset : offset + length]) and length >= 16 * PAGE
        else:
            assert length <= 256 * PAGE
            assert length >= 16 * PAGE or at_end or runs[number + 1][2]


@pytest.mark.usefixtures("cutting")
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 200_000)), max_size=6),
    st.integers(0, 2**32),
    st.lists(st.integers(1, 300_000), max_size=8),
)
def test_fixed_chunks_start_at_multiples_however_the_bytes_arrive(parts, seed, sizes):
    size = 65536
    data = b"".join(bytes(length) if zero else noise(length, seed) for zero, length in parts)
    expected: list[Run] = []
    for offset in range(0, len(data), size):
        piece = data[offset : offset + size]
        if not any(piece) and expected and expected[-1][2]:
            expected[-1] = (expected[-1][0], expected[-1][1] + len(piece), True)
        else:
            expected.append((offset, len(piece), not any(piece)))
    assert fast_cuts(FixedCutter(size), data, sizes) == expected


@needs_kernel
@settings(max_examples=150, deadline=None)
@given(page_files(), st.booleans(), st.booleans(), st.integers(0, 3 * PAGE))
@example(Contents(bytes(15 * PAGE)), False, True, 0)
@example(Contents(bytes(15 * PAGE)), True, True, 0)
@example(Contents(bytes(16 * PAGE)), False, False, 0)
@example(Contents(noise(20 * PAGE) + bytes(15 * PAGE)), False, False, 0)
@example(Contents(bytes(300 * PAGE) + b"x"), False, True, 0)
@example(Contents(b""), True, False, 0)
@example(Contents(b""), False, True, 0)
def test_the_kernel_cuts_any_buffer_in_any_state_as_the_fallback_does(data, last, inside_zero_run, shift):
    """`shift` bytes in front: pages need not lie at the borders of pages or words of the memory."""
    buffer = memoryview(bytes(shift) + data)[shift:]
    expected = chunking_pure.cut_pages(buffer, last, inside_zero_run)
    assert KERNEL.cut_pages(buffer, last, inside_zero_run) == expected
    cuts, covered, inside_after = expected
    assert covered == sum(length for _, length, _ in cuts)
    assert covered == len(buffer) or not last
    assert not (inside_after and cuts) or last or cuts[-1][2]


@needs_kernel
@settings(max_examples=80, deadline=None)
@given(page_files(), splits)
def test_the_kernel_and_the_fallback_take_turns_on_one_file(data, sizes):
    """The state between two buffers means the same to both."""
    expected = slow_cuts(data)

    class Turns(PageCutter):
        number = 0

        def cut(self, buffer, *, last):
            self.number += 1
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(chunking, "kernel", lambda: KERNEL if self.number % 2 else None)
                return super().cut(buffer, last=last)

    assert fast_cuts(Turns(), data, sizes) == expected


@needs_kernel
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 70_000), st.lists(st.tuples(st.integers(0, 70_000), st.integers(1, 255)), max_size=3))
@example(0, [])
@example(65536, [(65535, 1)])
def test_the_kernel_and_the_fallback_agree_on_what_is_zero(length, bytes_set):
    data = bytearray(length)
    for place, value in bytes_set:
        if place < length:
            data[place] = value
    for start in (0, 1, 7, 8, 31):
        view = memoryview(data)[start:]
        assert KERNEL.is_zero(view) == chunking_pure.is_zero(view) == (not any(view))


@pytest.mark.usefixtures("cutting")
@pytest.mark.parametrize("position", [0, 1, 7, 8, 31, 32, 63, 64, 4098, 4099, 32768, 65528, 65535])
def test_one_byte_anywhere_makes_a_chunk_that_is_not_zero(position):
    data = bytearray(65536)
    data[position] = 1
    assert fast_cuts(FixedCutter(65536), bytes(data), []) == [(0, 65536, False)]


@pytest.mark.usefixtures("cutting")
@pytest.mark.parametrize("place", [0, 1, 500, 1999])
@pytest.mark.parametrize("count", [1, 3, 50])
def test_pages_that_come_or_go_leave_nearly_all_chunks_as_they_were(place, count):
    before = pages(2000, 5)
    added = before[: place * PAGE] + noise(count * PAGE, 6) + before[place * PAGE :]
    removed = before[: place * PAGE] + before[(place + count) * PAGE :]

    def chunks(data: bytes) -> set[bytes]:
        return {data[offset : offset + length] for offset, length, _ in fast_cuts(PageCutter(), data, [])}

    known = chunks(before)
    assert len(known) > 20
    for after in (added, removed):
        assert len(chunks(after) - known) <= 4


def test_only_images_of_pages_are_cut_by_content():
    for name in ("pages-1.img", "pages-12.img", "amdgpu-pages-3-00ff.img"):
        assert layout_for(name) is Layout.PAGES
        assert isinstance(make_cutter(layout_for(name), 65536), PageCutter)
    for name in ("pagemap-1.img", "pages-1.img.gz", "core-1.img", "amdgpu-kfd-1.img", "xpages-1.img"):
        assert layout_for(name) is Layout.FIXED
