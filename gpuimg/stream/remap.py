"""Other ports for listening TCP sockets: changes `src_port` in files.img and nothing else.

Records are patched on the wire level, so fields that a later criu adds survive.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from gpuimg.errors import BadStreamError, UsageError
from gpuimg.stream import wire
from gpuimg.stream.seams import ImageSource, InMemoryFile, ServedFile

FILES_IMAGE = "files.img"
_HEADER = struct.pack("<II", 0x54564319, 0x56303138)
_LENGTH = struct.Struct("<I")
_ISK = 4
_PROTO, _STATE, _SRC_PORT = 5, 6, 7
_TCP, _LISTEN = 6, 10


class _Ports:
    """The pairs that were asked for; each is used once, for the first socket that fits."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.unused = list(pairs)
        self.seen: list[int] = []

    def take(self, port: int) -> int | None:
        self.seen.append(port)
        for index, (old, new) in enumerate(self.unused):
            if old == port:
                del self.unused[index]
                return new
        return None


def remap_listen_ports(image: bytes, pairs: Sequence[tuple[int, int]]) -> bytes:
    """Return files.img with the ports of listening TCP sockets replaced, old → new.

    UsageError if a pair fits no socket, BadStreamError if `image` is no files.img.
    """
    if image[:8] != _HEADER:
        raise BadStreamError(f"{FILES_IMAGE} has the wrong magic number")
    ports = _Ports(pairs)
    out = bytearray(_HEADER)
    position = len(_HEADER)
    while position < len(image):
        if position + 4 > len(image):
            raise BadStreamError(f"{FILES_IMAGE} ends within a record")
        (length,) = _LENGTH.unpack_from(image, position)
        position += 4
        record = image[position : position + length]
        if len(record) < length:
            raise BadStreamError(f"{FILES_IMAGE} ends within a record")
        position += length
        try:
            record = _patch_entry(record, ports)
        except wire.WireError as error:
            raise BadStreamError(f"{FILES_IMAGE} has a malformed record: {error}") from error
        out += _LENGTH.pack(len(record)) + record
    if ports.unused:
        unused = ", ".join(str(old) for old, _ in ports.unused)
        seen = ", ".join(map(str, ports.seen)) or "none"
        raise UsageError(
            f"no listening TCP socket for --tcp-listen-remap of port {unused}; ports found: {seen}"
        )
    return bytes(out)


def _patch_entry(record: bytes, ports: _Ports) -> bytes:
    """One file_entry, with its inet socket patched if it has one that fits."""
    out = bytearray()
    for number, kind, value, start, end in wire.fields(record):
        if number == _ISK and kind == wire.BYTES:
            out += wire.encode_bytes(_ISK, _patch_socket(record[value:end], ports))
        else:
            out += record[start:end]
    return bytes(out)


def _patch_socket(socket: bytes, ports: _Ports) -> bytes:
    found = {number: value for number, kind, value, _, _ in wire.fields(socket) if kind == wire.VARINT}
    if found.get(_PROTO) != _TCP or found.get(_STATE) != _LISTEN or _SRC_PORT not in found:
        return socket
    new = ports.take(found[_SRC_PORT])
    if new is None:
        return socket
    out = bytearray()
    for number, kind, _, start, end in wire.fields(socket):
        if number == _SRC_PORT and kind == wire.VARINT:
            out += wire.encode_number(_SRC_PORT, new)
        else:
            out += socket[start:end]
    return bytes(out)


class RemappedSource:
    """An `ImageSource` with another files.img.

    Parameters
    ----------
    source
        Where everything else comes from.
    files_image
        Its files.img.
    pairs
        Ports, old → new.
    """

    def __init__(
        self, source: ImageSource, files_image: bytes | None, pairs: Sequence[tuple[int, int]]
    ) -> None:
        if files_image is None:
            raise BadStreamError(f"the image has no {FILES_IMAGE} in which ports could be remapped")
        self._source = source
        self._files = InMemoryFile(remap_listen_ports(files_image, pairs))

    def lookup(self, name: str) -> ServedFile | None:
        """The file of that name."""
        return self._files if name == FILES_IMAGE else self._source.lookup(name)
