"""Markers of the shard stream: what each says, and its bytes.

A marker is a protobuf message (``gpuimg.streamer.Marker``) behind its length as u32, little endian. After a
file_data marker that many raw bytes follow.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from gpuimg.errors import BadStreamError
from gpuimg.stream import wire

LENGTH = struct.Struct("<I")
MAX_MARKER = 10 * 1024
"""Markers are shorter than this, in bytes without the prefix."""
MAX_DATA = 2**32 - 1


class Kind(enum.IntEnum):
    """What a marker says; the values are the field numbers."""

    FILENAME = 2
    FILE_DATA = 3
    FILE_EOF = 4
    IMAGE_EOF = 5


_KINDS = {int(kind): kind for kind in Kind}


class Marker(NamedTuple):
    """One marker. `name` is set for FILENAME, `size` (bytes) for FILE_DATA."""

    seq: int
    kind: Kind
    name: str = ""
    size: int = 0


def encode(marker: Marker) -> bytes:
    """The marker behind its length prefix."""
    body = wire.encode_number(1, marker.seq) if marker.seq else b""
    if marker.kind is Kind.FILENAME:
        body += wire.encode_bytes(Kind.FILENAME, marker.name.encode())
    elif marker.kind is Kind.FILE_DATA:
        body += wire.encode_number(Kind.FILE_DATA, marker.size)
    else:
        body += wire.encode_number(marker.kind, 1)
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Marker:
    """A marker without its prefix; BadStreamError if it is none.

    As in every protobuf message the last of several occurrences counts and unknown fields are skipped.
    """
    seq = 0
    kind: Kind | None = None
    name, size = "", 0
    try:
        for number, wire_type, value, _, end in wire.fields(body):
            if number == 1 and wire_type == wire.VARINT:
                seq = value
            elif number == Kind.FILENAME and wire_type == wire.BYTES:
                kind, name = Kind.FILENAME, body[value:end].decode()
            elif 3 <= number <= 5 and wire_type == wire.VARINT:
                kind, size = _KINDS[number], value
    except (wire.WireError, UnicodeDecodeError) as error:
        raise BadStreamError(f"Malformed image marker: {error}") from error
    if kind is None:
        raise BadStreamError("Malformed image marker: it says nothing")
    if kind is Kind.FILENAME:
        return Marker(seq, kind, name=name)
    if kind is Kind.FILE_DATA:
        if size > MAX_DATA:
            raise BadStreamError(f"Malformed image marker: {size} bytes of data in one piece")
        return Marker(seq, kind, size=size)
    return Marker(seq, kind)
