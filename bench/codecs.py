"""Codecs for floating-point chunks beside each other: `python -m bench.codecs`.

One thread, chunks of 256 KiB of generated weights that are in memory; each round trip is compared. Peers are
used when they can be imported, and named when not. The results go to bench/results/ as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.generate import parse_size
from bench.machine import describe
from gpuimg.store import planes_pure
from gpuimg.store.kernel_loader import kernel
from gpuimg.store.memory import keep_freed_memory
from gpuimg.store.planes import Transform

CHUNK = 256 << 10
Bytes = npt.NDArray[np.uint8]
Encode = Callable[[memoryview], bytes]
Decode = Callable[[bytes], bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Codec:
    """A contender: `encode` gives what `decode` makes the chunk of again."""

    name: str
    encode: Encode
    decode: Decode


def contenders(element_size: int) -> Iterator[Codec | str]:
    """All codecs that can be had here, and the names of those that cannot."""
    native = kernel()
    target = memoryview(bytearray(CHUNK))

    def by_kernel(payload: bytes) -> memoryview:
        assert native is not None
        native.decode_planes(payload, target, element_size, None)
        return target

    def by_numpy(payload: bytes) -> memoryview:
        planes_pure.decode(memoryview(payload), target, element_size, None)
        return target

    if native is not None:
        yield Codec(
            "gpuimg kernel", lambda data: native.encode_planes(data, element_size, 1, None) or b"", by_kernel
        )
    else:
        yield "gpuimg kernel"
    yield Codec(
        "gpuimg numpy + zstd",
        lambda data: planes_pure.encode(data, element_size, Transform.ROTATED, None) or b"",
        by_numpy,
    )
    yield from _blosc(element_size)
    yield from _blosc2(element_size)
    yield from _isal(element_size)
    yield from _zipnn(element_size)
    yield from _zstd()


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _blosc(element_size: int) -> Iterator[Codec | str]:
    blosc = _library("numcodecs.blosc")
    blosc.use_threads = False
    for name, codec, shuffle in (
        ("numcodecs bitshuffle + lz4", b"lz4", blosc.BITSHUFFLE),
        ("numcodecs shuffle + zstd-1", b"zstd", blosc.SHUFFLE),
    ):
        yield Codec(
            name,
            lambda data, codec=codec, shuffle=shuffle: blosc.compress(  # type: ignore[misc]
                np.frombuffer(data, dtype=f"u{element_size}"), codec, 1, shuffle, 0
            ),
            blosc.decompress,
        )


def _blosc2(element_size: int) -> Iterator[Codec | str]:
    blosc2 = _library("blosc2")
    if blosc2 is None:
        yield "blosc2"
        return
    blosc2.set_nthreads(1)
    for name, codec, filters in (
        ("blosc2 bitshuffle + lz4", blosc2.Codec.LZ4, blosc2.Filter.BITSHUFFLE),
        ("blosc2 shuffle + zstd-1", blosc2.Codec.ZSTD, blosc2.Filter.SHUFFLE),
    ):
        yield Codec(
            name,
            lambda data, codec=codec, filters=filters: blosc2.compress2(  # type: ignore[misc]
                data, typesize=element_size, codec=codec, clevel=1, filters=[filters], nthreads=1
            ),
            lambda payload: blosc2.decompress2(payload, nthreads=1),
        )


def _isal(element_size: int) -> Iterator[Codec | str]:
    """Deflate of the plane of exponents, the others raw: isal has no filter for elements of its own."""
    igzip = _library("isal.igzip_lib")
    if igzip is None:
        yield "isal"
        return
    top = 8 * element_size - 1

    def encode(data: memoryview) -> bytes:
        elements = np.frombuffer(data, dtype=f"u{element_size}")
        turned = elements << 1 | elements >> top
        split = turned.view(np.uint8).reshape(-1, element_size)
        low = np.ascontiguousarray(split[:, :-1]).tobytes()
        exponents: bytes = igzip.compress(np.ascontiguousarray(split[:, -1]), level=1)
        return low + exponents

    def decode(payload: bytes) -> memoryview:
        count = CHUNK // element_size
        split = np.empty((count, element_size), dtype=np.uint8)
        low = count * (element_size - 1)
        split[:, :-1] = np.frombuffer(payload, dtype=np.uint8, count=low).reshape(count, -1)
        split[:, -1] = np.frombuffer(igzip.decompress(payload[low:]), dtype=np.uint8)
        turned = split.reshape(-1).view(f"u{element_size}")
        return (turned >> 1 | turned << top).view(np.uint8).data

    yield Codec("isal deflate of the exponents", encode, decode)


def _zipnn(element_size: int) -> Iterator[Codec | str]:
    library = _library("zipnn")
    if library is None:
        yield "zipnn"
        return
    made = library.ZipNN(
        input_format="byte", bytearray_dtype={2: "bfloat16", 4: "float32"}[element_size], threads=1
    )
    yield Codec("zipnn", lambda data: made.compress(bytearray(data)), made.decompress)


def _zstd() -> Iterator[Codec | str]:
    zstandard = _library("zstandard")
    coder, decoder = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    yield Codec("zstd-1", coder.compress, decoder.decompress)


def bound(chunks: list[memoryview], element_size: int) -> float:
    """Bytes that order-0 coding of the rotated elements' byte planes needs at least."""
    top, total = 8 * element_size - 1, 0.0
    for chunk in chunks:
        elements = np.frombuffer(chunk, dtype=f"u{element_size}")
        turned = (elements << 1 | elements >> top).view(np.uint8).reshape(-1, element_size)
        for plane in turned.T:
            shares = np.bincount(plane, minlength=256) / len(plane)
            shares = shares[shares > 0]
            total -= len(plane) * float(np.dot(shares, np.log2(shares))) / 8
    return total


def measure(codec: Codec, chunks: list[memoryview], runs: int) -> dict[str, Any]:
    """Speeds in bytes/s of raw data (median, least and greatest of the runs) and stored bytes."""
    encoding, decoding = [], []
    raw = sum(map(len, chunks))
    coded = [codec.encode(chunk) for chunk in chunks]
    for chunk, payload in zip(chunks, coded, strict=True):
        if bytes(codec.decode(payload)) != bytes(chunk):
            raise ValueError(f"{codec.name} does not give back what it was given")
    for _ in range(runs):
        started = time.perf_counter()
        for chunk in chunks:
            codec.encode(chunk)
        ended = time.perf_counter()
        for payload in coded:
            codec.decode(payload)
        encoding.append(raw / (ended - started))
        decoding.append(raw / (time.perf_counter() - ended))
    return {
        "stored": sum(map(len, coded)),
        "encode": [statistics.median(encoding), min(encoding), max(encoding)],
        "decode": [statistics.median(decoding), min(decoding), max(decoding)],
    }


def weights(element_size: int, size: int) -> list[memoryview]:
    """Chunks of normally distributed weights: bf16 or fp32."""
    values = np.random.default_rng(1).standard_normal(size // element_size, dtype=np.float32)
    values *= np.float32(0.02)
    bits = values.view(np.uint32)
    data = bits if element_size == 4 else ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    view = data.view(np.uint8).data
    return [view[start : start + CHUNK] for start in range(0, len(view) - CHUNK + 1, CHUNK)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.codecs", description=__doc__)
    parser.add_argument("--size", type=parse_size, default=64 << 20, help="bytes of each kind of weights")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--results", type=Path, default=Path("bench/results"))
    given = parser.parse_args()
    keep_freed_memory()
    results: dict[str, Any] = {"machine": describe(), "command": sys.argv, "kinds": {}}
    for kind, element_size in (("bf16", 2), ("fp32", 4)):
        chunks = weights(element_size, given.size)
        raw, least = sum(map(len, chunks)), bound(chunks, element_size)
        print(f"{kind} weights, one thread; the entropy bound is {raw / least:.3f}")
        print(f"  {'':32} {'ratio':>6} {'of bound':>9} {'encode GB/s':>18} {'decode GB/s':>18}")
        rows: dict[str, Any] = {"raw": raw, "bound": least, "codecs": {}}
        results["kinds"][kind] = rows
        for codec in contenders(element_size):
            if isinstance(codec, str):
                print(f"  {codec:32} not installed")
                continue
            made = rows["codecs"][codec.name] = measure(codec, chunks, given.runs)
            speeds = "  ".join(
                f"{made[step][0] / 1e9:6.2f} ({made[step][1] / 1e9:.2f}–{made[step][2] / 1e9:.2f})"
                for step in ("encode", "decode")
            )
            print(f"  {codec.name:32} {raw / made['stored']:6.3f} {least / made['stored']:9.3f}  {speeds}")
    given.results.mkdir(parents=True, exist_ok=True)
    path = given.results / time.strftime("codecs-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(results, indent=1))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
