"""The compiled kernel: gpuimg/store/kernel/module.c. Buffers are contiguous; lengths are in bytes."""

from _typeshed import ReadableBuffer, WriteableBuffer

def encode_planes(
    data: ReadableBuffer, element_size: int, transform: int, base: ReadableBuffer | None, /
) -> bytes | None:
    """The payload of codec 3, or None if it would not be smaller. `base` is as long as `data`."""

def decode_planes(
    payload: ReadableBuffer, target: WriteableBuffer, element_size: int, base: ReadableBuffer | None, /
) -> bool:
    """Whether `target` was decoded; if not, the payload is damaged or holds frames for the zstd library."""

def estimate_planes(
    data: ReadableBuffer, element_size: int, transform: int, base: ReadableBuffer | None, /
) -> float:
    """About what the payload's length would be, in bytes."""

def is_zero(data: ReadableBuffer, /) -> bool:
    """Whether all bytes are zero."""

def cut_pages(
    data: ReadableBuffer, last: bool, inside_zero_run: bool, /
) -> tuple[list[tuple[int, int, bool]], int, bool]:
    """Cuts (offset, length, zeros), the bytes covered, and whether a run of zeros goes on behind them."""

def repeats(data: ReadableBuffer, /) -> float:
    """The share of positions, 0 to 1, whose next six bytes stood in the data before."""

def looks_random(data: ReadableBuffer, /) -> bool:
    """Whether bytes are as evenly spread as random ones."""
