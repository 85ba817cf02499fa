"""Other ports for listening TCP sockets, with every other byte of files.img untouched."""

from __future__ import annotations

import struct

import pytest

from gpuimg.errors import BadStreamError, UsageError
from gpuimg.stream import wire
from gpuimg.stream.remap import RemappedSource, remap_listen_ports
from gpuimg.stream.seams import InMemoryFile

HEADER = struct.pack("<II", 0x54564319, 0x56303138)


def inet(port: int, *, proto=6, state=10, extra=b"") -> bytes:
    numbers = [(1, 7), (2, 99), (3, 2), (4, 1), (5, proto), (6, state), (7, port), (8, 0)]
    return b"".join(wire.encode_number(*pair) for pair in numbers) + extra


def entry(isk: bytes | None, extra: bytes = b"") -> bytes:
    record = wire.encode_number(1, 4) + wire.encode_number(2, 7)
    if isk is not None:
        record += wire.encode_bytes(4, isk)
    record += extra
    return struct.pack("<I", len(record)) + record


def test_only_the_port_changes():
    unknown = wire.encode_bytes(900, b"from a later criu") + b"\x9d\x06abcd"
    before = [entry(None), entry(inet(80, extra=unknown), unknown), entry(inet(443)), entry(b"", unknown)]
    after = [entry(None), entry(inet(8080, extra=unknown), unknown), entry(inet(443)), entry(b"", unknown)]
    remapped = remap_listen_ports(HEADER + b"".join(before), [(80, 8080)])
    assert remapped == HEADER + b"".join(after)


@pytest.mark.parametrize(("old", "new"), [(1, 65535), (65535, 1), (127, 128), (16384, 16383), (5, 6)])
def test_lengths_are_kept_right_when_the_number_grows_or_shrinks(old, new):
    image = HEADER + entry(inet(old)) + entry(inet(9))
    assert remap_listen_ports(image, [(old, new)]) == HEADER + entry(inet(new)) + entry(inet(9))


def test_only_listening_tcp_sockets_count():
    image = HEADER + entry(inet(80, proto=17)) + entry(inet(80, state=1)) + entry(inet(80))
    expected = HEADER + entry(inet(80, proto=17)) + entry(inet(80, state=1)) + entry(inet(81))
    assert remap_listen_ports(image, [(80, 81)]) == expected


def test_a_pair_is_used_once_and_pairs_do_not_chain():
    image = HEADER + entry(inet(80)) + entry(inet(80)) + entry(inet(90))
    expected = HEADER + entry(inet(90)) + entry(inet(80)) + entry(inet(80))
    assert remap_listen_ports(image, [(80, 90), (90, 80)]) == expected


def test_a_pair_without_a_socket_names_the_ports_that_there_are():
    with pytest.raises(UsageError, match="of port 81; ports found: 80, 90"):
        remap_listen_ports(HEADER + entry(inet(80)) + entry(inet(90)), [(81, 82)])
    with pytest.raises(UsageError, match="ports found: none"):
        remap_listen_ports(HEADER, [(81, 82)])


@pytest.mark.parametrize(
    "image",
    [
        b"",
        b"\0" * 8,
        HEADER + b"\x01\0",
        HEADER + b"\x09\0\0\0abc",
        HEADER + b"\x02\0\0\0\x22\x50",
        HEADER + b"\x03\0\0\0\x22\x01\x08",
        HEADER + b"\x01\0\0\0\x0b",
    ],
)
def test_what_is_no_files_image_is_refused(image):
    with pytest.raises(BadStreamError):
        remap_listen_ports(image, [(80, 81)])


def test_a_source_without_files_image_cannot_be_remapped():
    class Empty:
        def lookup(self, name):
            return InMemoryFile(name.encode())

    with pytest.raises(BadStreamError, match=r"no files\.img"):
        RemappedSource(Empty(), None, [(80, 81)])
    source = RemappedSource(Empty(), HEADER + entry(inet(80)), [(80, 65000)])
    assert source.lookup("files.img").size == len(HEADER + entry(inet(65000)))
    assert source.lookup("core-1.img").size == 10
