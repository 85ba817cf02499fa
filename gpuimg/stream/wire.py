"""The two protobuf wire types that streamer messages use, by hand.

The protobuf runtime takes longer to import than a whole small capture takes to run. Tests hold this module
equal to the code generated from ``proto/streamer.proto``.
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT = 0
FIXED64 = 1
BYTES = 2
FIXED32 = 5


class WireError(ValueError):
    """Not a protobuf message."""


def encode_varint(value: int) -> bytes:
    """The shortest encoding of 0 <= value < 2**64."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(data: bytes, position: int) -> tuple[int, int]:
    """The value at `position` and the position after it; longer encodings than needed are legal."""
    value = shift = 0
    while True:
        if position >= len(data):
            raise WireError("cut short in a varint")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= 1 << 64:
                raise WireError("varint over 64 bits")
            return value, position
        shift += 7
        if shift >= 70:
            raise WireError("varint over ten bytes")


def encode_bytes(field: int, value: bytes) -> bytes:
    """A length-delimited field."""
    return encode_varint(field << 3 | BYTES) + encode_varint(len(value)) + value


def encode_number(field: int, value: int) -> bytes:
    """A varint field."""
    return encode_varint(field << 3 | VARINT) + encode_varint(value)


def fields(data: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Walk a message: (field number, wire type, value, start, end).

    `value` is the number of a varint field, and where the payload of a length-delimited field begins (it
    ends at `end`); `start` and `end` enclose the whole field with its key. Groups, which no message here
    uses, are errors.
    """
    position = 0
    while position < len(data):
        start = position
        key, position = decode_varint(data, position)
        number, kind = key >> 3, key & 7
        if not 0 < number < 1 << 29:
            raise WireError("bad field number")
        value = position
        if kind == VARINT:
            value, position = decode_varint(data, position)
        elif kind == BYTES:
            length, value = decode_varint(data, position)
            position = value + length
        elif kind == FIXED64:
            position += 8
        elif kind == FIXED32:
            position += 4
        else:
            raise WireError("bad wire type")
        if position > len(data):
            raise WireError("cut short in a field")
        yield number, kind, value, start, position
