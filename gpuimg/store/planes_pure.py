"""Float planes without the compiled kernel: the same format in numpy and the zstd library.

Its frames hold matches too, where the library finds any; the kernel leaves such frames to `decode` here.
"""

from __future__ import annotations

import struct
import threading
from math import log, log2
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from gpuimg.errors import DamagedError
from gpuimg.store.planes import Transform

Bytes = npt.NDArray[np.uint8]
Elements = npt.NDArray[Any]

_HEAD = struct.Struct("<BBH")
# The mode and the three zero bytes behind it, then the stored length.
_ENTRY = struct.Struct("<II")
_COUNTS = struct.Struct("<II")
_RAW, _CONSTANT, _ZSTD, _SPARSE, _MASKED = range(5)
_TYPES = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}

# The next three are the kernel's as well.
# A plane coded to more than this part of itself stays raw: reading it then costs nothing.
_WORTHWHILE = 0.95
# From this share of zeros on, a mask of them beats a code for each.
_MASKED_ZEROS = 0.5
# From this share on, listing the gaps between what is not zero beats the mask.
_SPARSE_ZEROS = 0.9
_LONGEST_GAP = 255
_SAMPLE = 4096
_SAMPLES = 16

# Little more than Huffman coding: in planes there is next to nothing to match.
_WINDOW_LOG, _HASH_LOG, _MIN_MATCH = 18, 6, 7
# With matches wherever there are any, for dense payloads.
_THOROUGH_LEVEL = 9
# What any decoder must be able to do (RFC 8878), and more than a chunk can use.
_MAX_WINDOW = 8 * 1024 * 1024

_local = threading.local()


def encode(
    data: memoryview,
    element_size: int,
    transform: Transform,
    base: memoryview | None,
    *,
    dense: bool = False,
) -> bytes | None:
    """See `planes.encode`; `base` is as long as `data`."""
    if len(data) < element_size:
        return None
    entries, stored = [_HEAD.pack(transform, element_size, 0)], []
    for plane in _split(data, element_size, transform, base):
        mode, coded = _encode_plane(plane)
        if dense:
            thorough = _thorough_compressor().compress(plane.data)
            if len(thorough) < len(coded):
                mode, coded = _ZSTD, thorough
        entries.append(_ENTRY.pack(mode, len(coded)))
        stored.append(coded)
    tail = data[len(data) - len(data) % element_size :]
    payload = b"".join([*entries, *stored, tail])
    return payload if len(payload) < len(data) else None


def estimate(data: memoryview, element_size: int, transform: Transform, base: memoryview | None) -> float:
    """See `planes.estimate`; `base` is as long as `data`."""
    if len(data) < element_size:
        return float(len(data))
    size = float(_HEAD.size + _ENTRY.size * element_size + len(data) % element_size)
    for plane in _split(data, element_size, transform, base):
        ratio, _ = _look(plane)
        size += len(plane) * (ratio if ratio < _WORTHWHILE else 1)
    return size


def decode(payload: memoryview, target: memoryview, element_size: int, base: memoryview | None) -> None:
    """See `planes.decode`; `base` is as long as `target`."""
    count, tail = divmod(len(target), element_size)
    position = _HEAD.size + _ENTRY.size * element_size
    if not count or len(payload) < position:
        raise DamagedError("a payload of float planes is shorter than its head")
    number, size, zero = _HEAD.unpack_from(payload)
    if number not in iter(Transform) or size != element_size or zero:
        raise DamagedError("a payload of float planes has a wrong head")
    transform = Transform(number)
    if transform.needs_base != (base is not None):
        raise DamagedError("a payload of float planes contradicts its object about the base")
    planes = []
    for mode, length in _entries(payload[_HEAD.size : position]):
        stored = payload[position : position + length]
        planes.append(_decode_plane(mode, stored, count))
        position += length
    if len(payload) - position != tail:
        raise DamagedError("a payload of float planes has the wrong length")
    _merge(planes, transform, target, base)
    target[len(target) - tail :] = payload[position:]


def _entries(data: memoryview) -> list[tuple[int, ...]]:
    """The modes and stored lengths that stand there.

    As a list: CPython 3.11 may crash when it collects an error that holds an iterator over a view.
    """
    return list(_ENTRY.iter_unpack(data))


def _split(data: memoryview, element_size: int, transform: Transform, base: memoryview | None) -> list[Bytes]:
    kind, count, top = _TYPES[element_size], len(data) // element_size, 8 * element_size - 1
    elements: Elements = np.frombuffer(data, dtype=kind, count=count)
    if transform is Transform.ROTATED:
        elements = elements << 1 | elements >> top
    elif base is not None:
        others: Elements = np.frombuffer(base, dtype=kind, count=count)
        if transform is Transform.DIFFERENCE:
            change = elements - others
            elements = change << 1 ^ -(change >> top)
        else:
            elements = elements ^ others
    return [(elements >> 8 * p if p else elements).astype(np.uint8) for p in range(element_size)]


def _merge(planes: list[Bytes], transform: Transform, target: memoryview, base: memoryview | None) -> None:
    element_size, count = len(planes), len(planes[0])
    kind, top = _TYPES[element_size], 8 * element_size - 1
    elements: Elements = planes[0].astype(kind)
    for p, plane in enumerate(planes[1:], 1):
        elements |= plane.astype(kind) << 8 * p
    if transform is Transform.ROTATED:
        elements = elements >> 1 | elements << top
    elif base is not None:
        others: Elements = np.frombuffer(base, dtype=kind, count=count)
        if transform is Transform.DIFFERENCE:
            elements = others + (elements >> 1 ^ -(elements & 1))
        else:
            elements ^= others
    np.frombuffer(target, dtype=kind, count=count)[:] = elements


def _look(plane: Bytes) -> tuple[float, float]:
    """The ratio coded/raw as far as the entropy of some bytes tells, and the share of zeros among them."""
    sample = plane
    if len(plane) > _SAMPLE:
        piece = _SAMPLE // _SAMPLES
        step = (len(plane) - piece) // (_SAMPLES - 1)
        sample = np.lib.stride_tricks.as_strided(plane, (_SAMPLES, piece), (step, 1)).reshape(-1)
    counts = np.bincount(sample, minlength=256)
    zeros = float(counts[0]) / len(sample)
    shares = counts[counts > 0] / len(sample)
    bits = -float(np.dot(shares, np.log2(shares)))
    # Few samples of many kinds look less random than they are (Miller and Madow's correction).
    bits += (len(shares) - 1) / (2 * log(2) * len(sample))
    # The most frequent byte takes a whole bit, however little it says.
    share = float(shares.max())
    if zeros < _MASKED_ZEROS and 0.5 < share < 1:
        bits += 1 + share * log2(share) + (1 - share) * log2(1 - share)
    return min(bits / 8, 1.0), zeros


def _encode_plane(plane: Bytes) -> tuple[int, bytes | memoryview]:
    """The mode and the stored bytes."""
    zeros = 0.0 if _is_constant(plane) else _look(plane)[1]
    if zeros >= _MASKED_ZEROS:
        sparse = zeros >= _SPARSE_ZEROS
        stored = _encode_sparse(plane) if sparse else _encode_masked(plane)
        if len(stored) < len(plane):
            return _SPARSE if sparse else _MASKED, stored
    return _encode_list(plane)


def _encode_list(data: Bytes) -> tuple[int, bytes | memoryview]:
    if len(data) and _is_constant(data):
        return _CONSTANT, data[:1].tobytes()
    if len(data) and _look(data)[0] < _WORTHWHILE:
        frame: bytes = _compressor().compress(data.data)
        if len(frame) < _WORTHWHILE * len(data):
            return _ZSTD, frame
    return _RAW, data.data


def _is_constant(data: Bytes) -> bool:
    return data[0] == data[-1] and bool((data == data[0]).all())


def _encode_sparse(plane: Bytes) -> bytes:
    places = np.flatnonzero(plane != 0)
    zeros = places.copy()
    zeros[1:] -= places[:-1] + 1
    if zeros.max() < _LONGEST_GAP:
        gaps = zeros.astype(np.uint8)
    else:
        long, rest = np.divmod(zeros, _LONGEST_GAP)
        gaps = np.full(len(places) + int(long.sum()), _LONGEST_GAP, dtype=np.uint8)
        gaps[np.cumsum(long + 1) - 1] = rest
    return _encode_lists(gaps, plane[places], len(gaps))


def _encode_masked(plane: Bytes) -> bytes:
    mask = plane != 0
    # Numpy selects by numbers several times faster than by a mask.
    return _encode_lists(np.packbits(mask, bitorder="little"), plane[np.flatnonzero(mask)], 0)


def _encode_lists(first: Bytes, values: Bytes, number: int) -> bytes:
    coded = [_encode_list(first), _encode_list(values)]
    entries = [_ENTRY.pack(mode, len(stored)) for mode, stored in coded]
    return b"".join([_COUNTS.pack(len(values), number), *entries, *(stored for _, stored in coded)])


def _decode_plane(mode: int, stored: memoryview, length: int) -> Bytes:
    if mode not in (_SPARSE, _MASKED):
        return _decode_list(mode, stored, length)
    position = _COUNTS.size + 2 * _ENTRY.size
    if len(stored) < position:
        raise DamagedError("a plane with few values is shorter than its head")
    count, number = _COUNTS.unpack_from(stored)
    if mode == _SPARSE:
        fits, members = count <= number <= count + length // _LONGEST_GAP, number
    else:
        fits, members = number == 0, (length + 7) // 8
    if count > length or not fits:
        raise DamagedError("a plane has more values than places")
    lists = []
    entries = _entries(stored[_COUNTS.size : position])
    for (kind, size), list_length in zip(entries, (members, count), strict=True):
        lists.append(_decode_list(kind, stored[position : position + size], list_length))
        position += size
    if position != len(stored):
        raise DamagedError("a plane with few values has the wrong length")
    places = _places_by_gaps(lists[0]) if mode == _SPARSE else _places_by_mask(lists[0])
    if len(places) != count or (count and places[-1] >= length):
        raise DamagedError("the places of a plane's values do not fit them")
    plane = np.zeros(length, dtype=np.uint8)
    plane[places] = lists[1]
    return plane


def _places_by_gaps(gaps: Bytes) -> npt.NDArray[np.int64]:
    ends = np.cumsum(gaps, dtype=np.int64)[gaps < _LONGEST_GAP]
    return ends + np.arange(len(ends))


def _places_by_mask(mask: Bytes) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little").view(bool))


def _decode_list(mode: int, stored: memoryview, length: int) -> Bytes:
    if mode == _ZSTD:
        return np.frombuffer(_decode_frame(stored, length), dtype=np.uint8)
    if mode not in (_RAW, _CONSTANT) or len(stored) != (length if mode == _RAW else 1):
        raise DamagedError("a plane has an unknown mode or the wrong length")
    data = np.frombuffer(stored, dtype=np.uint8)
    return data if mode == _RAW else np.repeat(data, length)


def _decode_frame(frame: memoryview, length: int) -> bytes:
    try:
        # The library allocates what the frame promises.
        promised = zstandard.get_frame_parameters(frame).content_size
        data = _decompressor().decompress(frame, allow_extra_data=False) if promised == length else b""
    except zstandard.ZstdError as error:
        raise DamagedError(f"a plane cannot be decoded ({error})") from None
    # A frame to be skipped has a content size, but nothing comes out of it.
    if promised != length or len(data) != length:
        raise DamagedError("a plane decodes to the wrong length")
    return data


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=_WINDOW_LOG,
            hash_log=_HASH_LOG,
            min_match=_MIN_MATCH,
            target_length=0,
            write_content_size=1,
            write_checksum=0,
        )
        _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _thorough_compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "thorough"):
        _local.thorough = zstandard.ZstdCompressor(level=_THOROUGH_LEVEL)
    compressor: zstandard.ZstdCompressor = _local.thorough
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor
