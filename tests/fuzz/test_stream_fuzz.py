"""Hostile bytes: every parser of the streamer answers with a GpuimgError or a result, and comes to an end."""

from __future__ import annotations

import contextlib
import socket

from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuimg._proto import streamer_pb2
from gpuimg.errors import BadStreamError
from gpuimg.stream import markers, protocol
from gpuimg.stream.markers import Kind, Marker
from gpuimg.stream.remap import remap_listen_ports
from tests.compat.streamlib import read_shards

WHOLE = b"".join(
    [
        markers.encode(Marker(0, Kind.FILENAME, name="a.img")),
        markers.encode(Marker(1, Kind.FILE_DATA, size=5)) + b"12345",
        markers.encode(Marker(2, Kind.FILENAME, name="b.img")),
        markers.encode(Marker(3, Kind.FILE_EOF)),
        markers.encode(Marker(4, Kind.FILENAME, name="a.img")),
        markers.encode(Marker(5, Kind.FILE_EOF)),
        markers.encode(Marker(6, Kind.IMAGE_EOF)),
    ]
)
# Bytes that look like messages: short fields with small numbers, among them all that mean something.
key = st.sampled_from([0x08, 0x0A, 0x12, 0x18, 0x20, 0x28, 0x22, 0x38, 0x0D, 0x09, 0x0B, 0x3A])
piece = st.builds(lambda first, rest: bytes((first,)) + rest, key, st.binary(max_size=4))
messages = st.lists(st.one_of(st.binary(max_size=6), piece), max_size=6).map(b"".join)


@settings(max_examples=500)
@given(messages)
def test_markers_are_taken_as_protobuf_takes_them(body):
    message = streamer_pb2.Marker()
    try:
        marker = markers.decode(body)
    except BadStreamError:
        with contextlib.suppress(DecodeError, UnicodeDecodeError):
            message.ParseFromString(body)
            # What protobuf takes and we do not: nothing said, sizes that it would cut to 32 bits, groups.
            odd = message.WhichOneof("body") is None or b"\x0b" in body or any(byte & 0x80 for byte in body)
            assert odd or any(byte & 7 == 3 for byte in body)
        return
    message.ParseFromString(body)
    assert message.seq == marker.seq
    assert message.WhichOneof("body") == marker.kind.name.lower()
    if marker.kind is Kind.FILENAME:
        assert message.filename == marker.name
    elif marker.kind is Kind.FILE_DATA:
        assert message.file_data == marker.size


@settings(max_examples=500)
@given(messages)
def test_requests_are_names_or_errors(body):
    with contextlib.suppress(BadStreamError):
        name = protocol.decode_request(body)
        assert protocol.check_name(name) == name
        message = streamer_pb2.FileRequest()
        message.ParseFromString(body)
        assert message.filename == name


@settings(max_examples=300)
@given(messages)
def test_replies_are_answers_or_errors(body):
    with contextlib.suppress(BadStreamError):
        assert protocol.decode_reply(body) in (True, False)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=3))
def test_noise_is_no_image(shards):
    with contextlib.suppress(BadStreamError):
        read_shards(shards)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_damaged_stream_ends_with_an_error_or_names_and_sizes_that_it_says(data):
    stream = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(stream) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "double"]))
        if kind == "flip":
            stream[place] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del stream[place : place + data.draw(st.integers(1, 9))]
            stream = stream or bytearray(b"\0")
        elif kind == "insert":
            stream[place:place] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            stream[place:place] = stream[max(0, place - 9) : place]
    with contextlib.suppress(BadStreamError):
        files = read_shards([bytes(stream)])
        assert sum(map(len, files.values())) <= len(stream)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80))
def test_a_hostile_peer_on_the_socket_gets_an_error(sent):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with contextlib.suppress(BadStreamError):
            while protocol.receive_request(ours) is not None:
                protocol.receive_pipe(ours, writable=False)


@settings(max_examples=300)
@given(st.lists(messages, max_size=4))
def test_a_hostile_files_image_is_remapped_or_refused(records):
    image = bytes.fromhex("19435654 38313056".replace(" ", ""))
    for record in records:
        image += len(record).to_bytes(4, "little") + record
    with contextlib.suppress(BadStreamError):
        assert remap_listen_ports(image, []) is not None
