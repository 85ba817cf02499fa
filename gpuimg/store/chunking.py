"""Where a file is cut into chunks (docs/store-format.md, "Recipe").

A cutter looks at a filled buffer and says which runs of it are chunks, which are zero, and how many
bytes at the end must be shown to it again together with what follows.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

from gpuimg.store.kernel_loader import kernel
from gpuimg.store.model import Layout, Piece

PAGE = 4096
MIN_PAGES = 16
MAX_PAGES = 256

# CRIU's page images and the raw page images of the AMD GPU plugin: long runs of 4 KiB pages in which
# pages come and go between two checkpoints.
PAGE_IMAGES = ("pages-*.img", "amdgpu-pages-*.img")


class Cut(NamedTuple):
    """A run of the buffer: a chunk, or (`zero`) a run of zero bytes.

    `before` is what the parent had at this place and in this length; whether a chunk is zero is then unknown.
    `fingerprint` is the chunk's if it was taken already, else empty.
    """

    offset: int
    length: int
    zero: bool
    before: Piece | None = None
    fingerprint: bytes = b""


class Cutter(Protocol):
    """Cuts successive buffers of one file."""

    def cut(self, buffer: memoryview, *, last: bool) -> tuple[list[Cut], int]:
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

    def cut(self, buffer: memoryview, *, last: bool) -> tuple[list[Cut], int]:
        size = self.chunk_size
        end = len(buffer) if last else len(buffer) - len(buffer) % size
        cuts = []
        for offset in range(0, end, size):
            chunk = buffer[offset : min(offset + size, end)]
            cuts.append(Cut(offset, len(chunk), is_zero(chunk)))
        return cuts, end


def is_zero(data: memoryview) -> bool:
    """Whether all bytes are zero."""
    native = kernel()
    if native is not None:
        found: bool = native.is_zero(data)
        return found
    from gpuimg.store.chunking_pure import is_zero as pure

    return pure(data)


class PageCutter:
    """Whole pages, cut behind pages whose checksum says so: inserted or removed pages shift nothing.

    The cuts depend on the file's contents only, not on how it was divided into buffers.
    """

    def __init__(self) -> None:
        self._inside_zero_run = False

    def cut(self, buffer: memoryview, *, last: bool) -> tuple[list[Cut], int]:
        cuts, covered, self._inside_zero_run = cut_pages(buffer, last, self._inside_zero_run)
        return [Cut(*cut) for cut in cuts], covered


def cut_pages(
    buffer: memoryview, last: bool, inside_zero_run: bool
) -> tuple[list[tuple[int, int, bool]], int, bool]:
    """Cuts as (offset, length, zero), the bytes they cover, and whether they end inside a long zero run."""
    native = kernel()
    if native is not None:
        made: tuple[list[tuple[int, int, bool]], int, bool] = native.cut_pages(buffer, last, inside_zero_run)
        return made
    from gpuimg.store.chunking_pure import cut_pages as pure

    return pure(buffer, last, inside_zero_run)
