"""Codec 3, float planes (docs/store-format.md): chunks as byte planes of transformed elements.

The compiled kernel does the work where there is one; without it, or with the environment variable
GPUIMG_KERNEL=off, `planes_pure` does the same in numpy and the zstd library. Payloads differ between the two,
what they decode to does not. Neither is loaded before it is needed.

Buffers may be anything contiguous with the buffer protocol: bytes, memoryviews, numpy arrays.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from gpuimg.errors import DamagedError
from gpuimg.store.kernel_loader import kernel

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

ELEMENT_SIZES = (1, 2, 4, 8)
# The longest chunk of the format, in bytes.
MAX_CHUNK = 2 * 1024 * 1024


class Transform(enum.IntEnum):
    """What is done to an element before it is divided into planes; the last two take a base."""

    PLAIN = 0
    ROTATED = 1
    DIFFERENCE = 2
    EXCLUSIVE = 3

    @property
    def needs_base(self) -> bool:
        """Whether elements are coded against those of a base."""
        return self >= Transform.DIFFERENCE


def kernel_available() -> bool:
    """Whether the compiled kernel does the work."""
    return kernel() is not None


def encode(
    data: ReadableBuffer,
    element_size: int,
    transform: Transform,
    base: ReadableBuffer | None = None,
    *,
    dense: bool = False,
) -> bytes | None:
    """The payload of a chunk of at most 2 MiB, or None if it would not be smaller than the chunk.

    A base of another length is cut off, or filled up with zero bytes. With `dense` every plane is also given
    to zstd, which finds what repeats in it, at many times the cost.

    Raises
    ------
    ValueError
        The element size is not 1, 2, 4 or 8, the chunk is too long, or transform and base do not go together.
    """
    chunk, fitted = _prepare(data, element_size, transform, base)
    compiled = kernel()
    payload: bytes | None = None
    if compiled is not None:
        payload = compiled.encode_planes(chunk, element_size, int(transform), fitted)
        if not dense:
            return payload
    from gpuimg.store import planes_pure

    other = planes_pure.encode(chunk, element_size, transform, fitted, dense=dense)
    return min((made for made in (payload, other) if made is not None), key=len, default=None)


def estimate(
    data: ReadableBuffer, element_size: int, transform: Transform, base: ReadableBuffer | None = None
) -> float:
    """About how long, in bytes, the payload of `data` would be; for a sample of a chunk, that of the sample.

    Raises
    ------
    ValueError
        As `encode` does.
    """
    chunk, fitted = _prepare(data, element_size, transform, base)
    compiled = kernel()
    if compiled is not None:
        size: float = compiled.estimate_planes(chunk, element_size, int(transform), fitted)
        return size
    from gpuimg.store import planes_pure

    return planes_pure.estimate(chunk, element_size, transform, fitted)


def decode(
    payload: ReadableBuffer, target: WriteableBuffer, element_size: int, base: ReadableBuffer | None = None
) -> None:
    """Decode into `target`, whose length is the raw length. A base is fitted to it as in `encode`.

    What `target` holds after an error is not said.

    Raises
    ------
    DamagedError
        The payload is no such coding of `len(target)` bytes, or it needs a base and has none, or the reverse.
    """
    if element_size not in ELEMENT_SIZES:
        raise DamagedError(f"a chunk of float planes claims elements of {element_size} bytes")
    coded, chunk = _flat(payload), _flat(target)
    fitted = None if base is None else _fit(_flat(base), len(chunk))
    compiled = kernel()
    # The kernel reads frames of nothing but Huffman-coded literals; other frames and damage are left to zstd.
    if compiled is None or not compiled.decode_planes(coded, chunk, element_size, fitted):
        from gpuimg.store import planes_pure

        planes_pure.decode(coded, chunk, element_size, fitted)


def _prepare(
    data: ReadableBuffer, element_size: int, transform: Transform, base: ReadableBuffer | None
) -> tuple[memoryview, memoryview | None]:
    chunk = _flat(data)
    if element_size not in ELEMENT_SIZES:
        raise ValueError(f"an element has 1, 2, 4 or 8 bytes, not {element_size}")
    if len(chunk) > MAX_CHUNK:
        raise ValueError(f"a chunk has at most {MAX_CHUNK} bytes, not {len(chunk)}")
    if Transform(transform).needs_base != (base is not None):
        raise ValueError(f"transform {transform} and base do not go together")
    return chunk, None if base is None else _fit(_flat(base), len(chunk))


def _flat(data: ReadableBuffer) -> memoryview:
    view = memoryview(data)
    # An empty view cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _fit(base: memoryview, length: int) -> memoryview:
    if len(base) >= length:
        return base[:length]
    padded = bytearray(length)
    padded[: len(base)] = base
    return memoryview(padded)
