"""Coding of chunks: what the codec numbers of docs/store-format.md mean, and which one suits a chunk.

Blosc's library-wide threads are not used: the pipeline brings its own, one chunk each. The codec
libraries are loaded when first used; a checkpoint that adds nothing needs none.
"""

from __future__ import annotations

import enum
import functools
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpuimg.errors import DamagedError, NewerFormatError

if TYPE_CHECKING:
    import zstandard

Buffer = npt.NDArray[np.uint8]

_BLOSC_HEADER = 16
_ZSTD_LEVEL = 1
_ELEMENT_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# A codec that is not this much smaller than raw is not worth its decoding.
_WORTHWHILE = 0.97
# zstd costs about four times the time of bitshuffle+LZ4: it must win clearly.
_ZSTD_ADVANTAGE = 0.90
_SAMPLE = 4096
_SAMPLES = 4
_LOOK_EVERY = 16
_SURPRISE = 0.10
# Chi-square of 256 classes: 255 is expected of random bytes, and 400 is six deviations above.
_RANDOM = 400


class Codec(enum.IntEnum):
    """Codec numbers of the pack format."""

    RAW = 0
    ZSTD = 1
    BITSHUFFLE_LZ4 = 2


class Coding(NamedTuple):
    """A codec with its parameter."""

    codec: Codec
    element_size: int


RAW = Coding(Codec.RAW, 0)
ZSTD = Coding(Codec.ZSTD, 0)
_SHUFFLED = [Coding(Codec.BITSHUFFLE_LZ4, size) for size in (1, 2, 4, 8)]

_local = threading.local()


@functools.cache
def _blosc() -> Any:
    from numcodecs import blosc

    blosc.use_threads = False
    return blosc


@functools.cache
def _zstandard() -> ModuleType:
    import zstandard

    return zstandard


def encode(coding: Coding, chunk: Buffer) -> bytes | None:
    """The payload, or None if it would not be smaller than the chunk (then it is stored raw)."""
    if coding.codec is Codec.RAW:
        return None
    payload = _compress(coding, chunk)
    return payload if len(payload) < len(chunk) else None


def _compress(coding: Coding, data: Buffer) -> bytes:
    if coding.codec is Codec.ZSTD:
        compressed: bytes = _compressor().compress(data.data)
        return compressed
    size = coding.element_size
    # Blosc takes the element size from the buffer; a length that is no multiple of it is coded as bytes.
    typed = data.view(_ELEMENT_TYPES[size]) if len(data) % size == 0 else data
    shuffled: bytes = _blosc().compress(typed, b"lz4", 1, _blosc().BITSHUFFLE, 0)
    return shuffled


def decode(codec: int, payload: memoryview, target: Buffer) -> None:
    """Decode a payload into `target`, whose length is the raw length.

    Raises
    ------
    DamagedError
        The payload is no such coding, or decodes to another length.
    NewerFormatError
        The codec number is unknown.
    """
    if codec == Codec.RAW:
        if len(payload) != len(target):
            raise DamagedError("a raw payload has the wrong length")
        target[:] = np.frombuffer(payload, dtype=np.uint8)
    elif codec == Codec.ZSTD:
        _decode_zstd(payload, target)
    elif codec == Codec.BITSHUFFLE_LZ4:
        _decode_blosc(payload, target)
    else:
        raise NewerFormatError(f"codec {codec} is unknown to this gpuimg", remedy="use a newer gpuimg")


def _decode_zstd(payload: memoryview, target: Buffer) -> None:
    try:
        with _decompressor().stream_reader(payload, closefd=False) as reader:
            filled = 0
            view = target.data
            while filled < len(target):
                count = reader.readinto(view[filled:])
                if not count:
                    break
                filled += count
            surplus = reader.read(1)
    except _zstandard().ZstdError as error:
        raise DamagedError(f"a zstd payload cannot be decoded ({error})") from None
    if filled != len(target) or surplus:
        raise DamagedError("a zstd payload decodes to the wrong length")


def _decode_blosc(payload: memoryview, target: Buffer) -> None:
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


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        _local.compressor = _zstandard().ZstdCompressor(level=_ZSTD_LEVEL)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = _zstandard().ZstdDecompressor(max_window_size=1 << 27)
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor


def look(chunk: Buffer) -> tuple[Coding, float]:
    """The coding that suits a chunk, from a few samples of it, and the ratio stored/raw it promises."""
    sample = _sample(chunk)
    sizes = {coding: len(_compress(coding, sample)) for coding in (*_SHUFFLED, ZSTD)}
    best = min(_SHUFFLED, key=sizes.__getitem__)
    if sizes[ZSTD] < sizes[best] * _ZSTD_ADVANTAGE:
        best = ZSTD
    ratio = sizes[best] / len(sample)
    return (best, ratio) if ratio < _WORTHWHILE else (RAW, 1.0)


def looks_random(chunk: Buffer) -> bool:
    """Whether the bytes in the middle of a chunk are as evenly spread as random ones (chi-square)."""
    start = max(0, len(chunk) // 2 - _SAMPLE // 2)
    counts = np.bincount(chunk[start : start + _SAMPLE], minlength=256)
    size = int(counts.sum())
    return int(np.dot(counts, counts)) * 256 / size - size < _RANDOM


def _sample(chunk: Buffer) -> Buffer:
    if len(chunk) <= _SAMPLE * _SAMPLES:
        return chunk
    starts = np.linspace(0, len(chunk) - _SAMPLE, _SAMPLES).astype(np.int64) & ~np.int64(7)
    return np.concatenate([chunk[start : start + _SAMPLE] for start in starts])


class Chooser:
    """Chooses the coding of the chunks of one file, with a memory of what won on it before.

    A full look is taken at every 16th chunk, and whenever a chunk is not what the last look promised: a
    coded one by its ratio, one that was to be stored raw by a glance at its bytes.
    """

    def __init__(self) -> None:
        self._coding = RAW
        self._promise = 1.0
        self._until_look = 0

    def encode(self, chunk: Buffer) -> tuple[Coding, bytes | None]:
        """The chosen coding and the payload (None: store it raw)."""
        looked = self._until_look <= 0 or (self._coding is RAW and not looks_random(chunk))
        if looked:
            self._look(chunk)
        coding, promise = self._coding, self._promise
        self._until_look -= 1
        payload = encode(coding, chunk)
        ratio = len(payload) / len(chunk) if payload else 1.0
        if not looked and abs(ratio - promise) > _SURPRISE:
            self._look(chunk)
            if self._coding != coding:
                coding, payload = self._coding, encode(self._coding, chunk)
        elif coding is not RAW:
            # The whole chunk knows its ratio better than its samples did.
            self._promise = ratio
        return (coding, payload) if payload is not None else (RAW, None)

    def _look(self, chunk: Buffer) -> None:
        self._coding, self._promise = look(chunk)
        self._until_look = _LOOK_EVERY
