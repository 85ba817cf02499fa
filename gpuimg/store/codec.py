"""What the codec numbers of docs/store-format.md mean: coding chunks, and decoding them.

Blosc's library-wide threads are not used: the pipeline brings its own, one chunk each. The codec libraries
are loaded when first used; what needs none of them should not wait for them.
"""

from __future__ import annotations

import enum
import functools
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuimg.errors import DamagedError, NewerFormatError
from gpuimg.store import planes
from gpuimg.store.planes import Transform

if TYPE_CHECKING:
    import zstandard

_BLOSC_HEADER = 16
_FAST_LEVEL = 1
_DENSE_LEVEL = 9
_local = threading.local()


class Codec(enum.IntEnum):
    """Codec numbers of the pack format."""

    RAW = 0
    ZSTD = 1
    BITSHUFFLE_LZ4 = 2
    FLOAT_PLANES = 3


class Coding(NamedTuple):
    """A codec with its parameters.

    `element_size` is 0 where the codec has none; `transform` matters to FLOAT_PLANES only, `dense` (more
    effort for fewer bytes) to the encoder only.
    """

    codec: Codec
    element_size: int = 0
    transform: Transform = Transform.PLAIN
    dense: bool = False

    @property
    def needs_base(self) -> bool:
        """Whether a chunk is coded against another."""
        return self.transform >= Transform.DIFFERENCE


RAW = Coding(Codec.RAW)
ZSTD = Coding(Codec.ZSTD)


@functools.cache
def _blosc() -> Any:
    from numcodecs import blosc

    blosc.use_threads = False
    return blosc


@functools.cache
def _zstandard() -> ModuleType:
    import zstandard

    return zstandard


def encode(coding: Coding, chunk: memoryview, base: memoryview | None = None) -> bytes | None:
    """The payload, or None if it would not be smaller than the chunk (then it is stored raw).

    `base` is the chunk to code against, for codings that need one.
    """
    if coding.codec is Codec.RAW:
        return None
    if coding.codec is Codec.FLOAT_PLANES:
        return planes.encode(chunk, coding.element_size, coding.transform, base, dense=coding.dense)
    payload = compress(coding, chunk)
    return payload if len(payload) < len(chunk) else None


def compress(coding: Coding, data: memoryview) -> bytes:
    """What the general codecs (ZSTD, BITSHUFFLE_LZ4) make of the data, be it longer or not."""
    if coding.codec is Codec.ZSTD:
        compressed: bytes = _compressor(_DENSE_LEVEL if coding.dense else _FAST_LEVEL).compress(data)
        return compressed
    import numpy as np

    size = coding.element_size
    # Blosc takes the element size from the buffer; a length that is no multiple of it is coded as bytes.
    typed = np.frombuffer(data, dtype=f"u{size}" if len(data) % size == 0 else "u1")
    shuffled: bytes = _blosc().compress(typed, b"lz4", 1, _blosc().BITSHUFFLE, 0)
    return shuffled


def decode(
    codec: int, payload: memoryview, target: memoryview, element_size: int, base: memoryview | None = None
) -> None:
    """Decode a payload into `target`, whose length is the raw length.

    Raises
    ------
    DamagedError
        The payload is no such coding, or decodes to another length.
    NewerFormatError
        The codec number is unknown.
    """
    if base is not None and codec != Codec.FLOAT_PLANES:
        raise DamagedError("its codec does not go with a base")
    if codec == Codec.RAW:
        if len(payload) != len(target):
            raise DamagedError("a raw payload has the wrong length")
        target[:] = payload
    elif codec == Codec.ZSTD:
        _decode_zstd(payload, target)
    elif codec == Codec.BITSHUFFLE_LZ4:
        _decode_blosc(payload, target)
    elif codec == Codec.FLOAT_PLANES:
        planes.decode(payload, target, element_size, base)
    else:
        raise NewerFormatError(f"codec {codec} is unknown to this gpuimg", remedy="use a newer gpuimg")


def _decode_zstd(payload: memoryview, target: memoryview) -> None:
    try:
        with _decompressor().stream_reader(payload, closefd=False) as reader:
            filled = 0
            while filled < len(target):
                count = reader.readinto(target[filled:])
                if not count:
                    break
                filled += count
            surplus = reader.read(1)
    except _zstandard().ZstdError as error:
        raise DamagedError(f"a zstd payload cannot be decoded ({error})") from None
    if filled != len(target) or surplus:
        raise DamagedError("a zstd payload decodes to the wrong length")


def _decode_blosc(payload: memoryview, target: memoryview) -> None:
    # Blosc believes its header: hold it against what the object says before decoding.
    if len(payload) < _BLOSC_HEADER:
        raise DamagedError("a Blosc payload is shorter than its header")
    raw_size = int.from_bytes(payload[4:8], "little")
    stored_size = int.from_bytes(payload[12:16], "little")
    if raw_size != len(target) or stored_size != len(payload):
        raise DamagedError("a Blosc payload contradicts the length of its chunk")
    try:
        _blosc().decompress(payload, target)
    except (RuntimeError, ValueError) as error:
        raise DamagedError(f"a Blosc payload cannot be decoded ({error})") from None


def _compressor(level: int) -> zstandard.ZstdCompressor:
    name = f"compressor{level}"
    if not hasattr(_local, name):
        setattr(_local, name, _zstandard().ZstdCompressor(level=level))
    compressor: zstandard.ZstdCompressor = getattr(_local, name)
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = _zstandard().ZstdDecompressor(max_window_size=1 << 27)
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor
