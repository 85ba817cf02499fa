"""Generated images that look like what GPU jobs hold, for `gpuimg bench`, bench/ and tests.

Equal arguments give equal bytes on every machine with the same numpy: each block of a file has a random
generator of its own, seeded with seed, set, file and block, so blocks can be made on all cores in any order.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

BLOCK = 4 << 20
"""Files are generated in blocks of this size; also the granularity of a set's size."""

_CHANNELS = 1024
"""Values of one token in one layer of the KV cache: 8 heads of 128."""


def _to_bf16(values: npt.NDArray[np.float32]) -> Bytes:
    """Rounded to nearest even, as the upper half of each float32."""
    bits = values.view(np.uint32)
    bits += ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    return (bits >> np.uint32(16)).astype(np.uint16).view(np.uint8)


def _weights_bf16(rng: np.random.Generator, size: int, part: float) -> Bytes:
    del part
    return _to_bf16(rng.standard_normal(size // 2, dtype=np.float32) * np.float32(0.02))


def _kv_cache(rng: np.random.Generator, size: int, part: float) -> Bytes:
    """Sequences of 1024 tokens, the first half filled with activations whose channels differ in scale."""
    del part
    scales = np.exp(np.random.default_rng(0).standard_normal(_CHANNELS)).astype(np.float32)
    tokens = size // (2 * _CHANNELS)
    values = np.zeros((tokens // 1024, 1024, _CHANNELS), dtype=np.float32)
    half = (tokens // 1024, 512, _CHANNELS)
    values[:, :512] = rng.standard_normal(half, dtype=np.float32) * scales
    return _to_bf16(values.reshape(-1))


def _training_fp32(rng: np.random.Generator, size: int, part: float) -> Bytes:
    """First third weights, second third Adam's first moment, last third its second moment."""
    values = rng.standard_normal(size // 4, dtype=np.float32)
    if part < 1 / 3:
        values *= np.float32(0.02)
    elif part < 2 / 3:
        values *= np.float32(1e-4)
    else:
        values *= values
        values *= np.float32(1e-8)
    return values.view(np.uint8)


def _noise(rng: np.random.Generator, size: int, part: float) -> Bytes:
    del part
    return np.frombuffer(rng.bytes(size), dtype=np.uint8)


Maker = Callable[[np.random.Generator, int, float], Bytes]

SETS: dict[str, Maker] = {
    "weights-bf16": _weights_bf16,
    "kv-cache": _kv_cache,
    "training-fp32": _training_fp32,
    "noise": _noise,
}
"""Name to maker: (random generator, bytes, place in the file from 0 to 1) to contents."""

DEFAULT_SETS = ("weights-bf16", "kv-cache", "training-fp32")

PAGE_FILES = ("amdgpu-pages-100-1a2b.img", "amdgpu-pages-100-3c4d.img")
"""The large files of a set; they share its size equally (two GPUs, as CRIU's amdgpu plugin names them)."""

_SMALL_FILES = (
    "core-100.img",
    "fdinfo-2.img",
    "files.img",
    "ids-100.img",
    "mm-100.img",
    "pagemap-100.img",
    "pstree.img",
)


def blocks(name: str, file: str, size: int, seed: int = 1) -> Iterator[Callable[[], Bytes]]:
    """The contents of one file of a set, as functions that make its blocks in order."""
    maker = SETS[name]
    count = -(-size // BLOCK)
    identity = [seed, zlib.crc32(name.encode()), zlib.crc32(file.encode())]

    def make(index: int) -> Bytes:
        rng = np.random.Generator(np.random.SFC64([*identity, index]))
        return maker(rng, BLOCK, index / count)[: size - index * BLOCK]

    for index in range(count):
        yield lambda index=index: make(index)  # type: ignore[misc]


def write_set(name: str, directory: Path, size: int, seed: int = 1) -> int:
    """Write a directory of images with `size` bytes in its page files; returns the bytes of all files."""
    directory.mkdir(parents=True)
    total = 0
    workers = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(workers) as pool:
        for index, file in enumerate(PAGE_FILES):
            share = size // len(PAGE_FILES) + (size % len(PAGE_FILES) if index == 0 else 0)
            with (directory / file).open("wb") as stream:
                made: list[Callable[[], Bytes]] = list(blocks(name, file, share, seed))
                for start in range(0, len(made), 2 * workers):
                    for block in pool.map(lambda make: make(), made[start : start + 2 * workers]):
                        stream.write(block.data)
            total += share
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    for number, file in enumerate((*_SMALL_FILES, "inventory.img")):
        contents = rng.integers(0, 64, 200 + 700 * number, dtype=np.uint8).tobytes()
        (directory / file).write_bytes(contents)
        total += len(contents)
    return total
