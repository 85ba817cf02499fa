"""The hashes of the store: BLAKE3-256 names content, XXH3 finds accidents."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from blake3 import blake3
from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

ID_SIZE = 32
NO_ID = bytes(ID_SIZE)


def identify(data: Buffer) -> bytes:
    """BLAKE3-256 of the data, on the calling thread alone."""
    return blake3(data).digest()


def checksum(data: Buffer) -> bytes:
    """XXH3-64 (seed 0), little endian."""
    return struct.pack("<Q", xxh3_64_intdigest(data))
