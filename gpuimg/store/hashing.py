"""The hashes of the store: BLAKE3-256 names content, XXH3 finds accidents."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from blake3 import blake3
from xxhash import xxh3_64_intdigest, xxh3_128_digest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

ID_SIZE = 32
FINGERPRINT_SIZE = 16
NO_ID = bytes(ID_SIZE)


def identify(data: Buffer) -> bytes:
    """BLAKE3-256 of the data, on the calling thread alone."""
    return blake3(data).digest()


def checksum(data: Buffer) -> bytes:
    """XXH3-64 (seed 0), little endian."""
    return struct.pack("<Q", xxh3_64_intdigest(data))


def fingerprint(data: Buffer, seed: int) -> bytes:
    """XXH3-128 with the store's secret seed, in canonical (big-endian) form."""
    return xxh3_128_digest(data, seed)
