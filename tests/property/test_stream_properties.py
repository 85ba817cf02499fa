"""Promises of the streamer's formats that hold for all inputs."""

from __future__ import annotations

import os
import struct
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuimg._proto import streamer_pb2
from gpuimg.stream import markers, protocol, wire
from gpuimg.stream.markers import Kind, Marker
from gpuimg.stream.remap import remap_listen_ports
from gpuimg.stream.shards import ShardReader, ShardWriter
from gpuimg.stream.spool import Spool
from tests.compat.streamlib import MemoryConsumer

names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=40)
names = names.filter(lambda name: name not in (".", ".."))
sequence = st.integers(0, 2**64 - 1)
any_marker = st.one_of(
    st.builds(Marker, sequence, st.just(Kind.FILENAME), names, st.just(0)),
    st.builds(Marker, sequence, st.just(Kind.FILE_DATA), st.just(""), st.integers(0, 2**32 - 1)),
    st.builds(Marker, sequence, st.sampled_from([Kind.FILE_EOF, Kind.IMAGE_EOF]), st.just(""), st.just(0)),
)


def as_message(marker: Marker) -> streamer_pb2.Marker:
    message = streamer_pb2.Marker()
    if marker.seq:
        message.seq = marker.seq
    if marker.kind is Kind.FILENAME:
        message.filename = marker.name
    elif marker.kind is Kind.FILE_DATA:
        message.file_data = marker.size
    elif marker.kind is Kind.FILE_EOF:
        message.file_eof = True
    else:
        message.image_eof = True
    return message


@given(any_marker)
def test_a_marker_is_what_protobuf_makes_of_it(marker):
    encoded = markers.encode(marker)
    body = as_message(marker).SerializeToString()
    assert encoded == struct.pack("<I", len(body)) + body
    assert markers.decode(body) == marker


@given(names)
def test_a_request_is_what_protobuf_makes_of_it(name):
    body = streamer_pb2.FileRequest(filename=name).SerializeToString()
    assert protocol.encode_request(name) == struct.pack("<I", len(body)) + body
    assert protocol.decode_request(body) == name


@given(st.booleans())
def test_a_reply_is_what_protobuf_makes_of_it(exists):
    body = streamer_pb2.FileReply(exists=exists).SerializeToString()
    assert protocol.encode_reply(exists) == struct.pack("<I", len(body)) + body
    assert protocol.decode_reply(body) is exists


@given(st.integers(0, 2**64 - 1), st.binary(max_size=5))
def test_varints_round_trip(value, rest):
    encoded = wire.encode_varint(value)
    assert wire.decode_varint(encoded + rest, 0) == (value, len(encoded))


steps = st.lists(
    st.tuples(st.integers(0, 4), st.one_of(st.integers(0, 40), st.integers(4000, 70_000))), max_size=25
)


@settings(max_examples=60, deadline=None)
@given(steps=steps, shards=st.integers(1, 4), to_spool=st.booleans(), piped=st.booleans())
def test_what_goes_into_shards_comes_out(tmp_path_factory, steps, shards, to_spool, piped):
    """Files written alternately, spliced or copied, over any number of shards that run at the same time."""
    ends = [os.pipe() for _ in range(shards)]
    expected: dict[str, bytes] = {}
    failures = []

    def write() -> None:
        try:
            writer = ShardWriter([end for _, end in ends])
            files = {}
            source, sink = os.pipe()
            for number, size in steps:
                name = f"file-{number}.img"
                if name not in files:
                    files[name], expected[name] = writer.open(name), b""
                data = os.urandom(size)
                expected[name] += data
                if piped and 0 < size <= 65536:
                    os.write(sink, data)
                    assert files[name].pump(source) == size
                else:
                    files[name].write(data)
            for file in files.values():
                file.close()
            writer.finish()
            os.close(source)
            os.close(sink)
        except BaseException as error:
            failures.append(error)
        for _, end in ends:
            os.close(end)

    thread = threading.Thread(target=write)
    thread.start()
    consumer = Spool(tmp_path_factory.getbasetemp()) if to_spool else MemoryConsumer()
    ShardReader([end for end, _ in ends], consumer).run()
    thread.join()
    for end, _ in ends:
        os.close(end)
    assert failures == []
    if to_spool:
        assert {name: consumer.read(name) for name in expected} == expected
        consumer.close()
    else:
        assert consumer.contents() == expected


field = st.one_of(
    st.builds(wire.encode_number, st.integers(8, 2000), st.integers(0, 2**64 - 1)),
    st.builds(wire.encode_bytes, st.integers(8, 2000), st.binary(max_size=30)),
)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 65535), st.booleans(), st.lists(field, max_size=3), st.lists(field, max_size=3)
        ),
        max_size=6,
    ),
    st.integers(0, 65535),
)
def test_a_remap_changes_one_port_and_nothing_else(entries, new):
    def image(ports):
        out = struct.pack("<II", 0x54564319, 0x56303138)
        for port, (_, listening, inner, outer) in zip(ports, entries, strict=True):
            socket = wire.encode_number(5, 6) + wire.encode_number(6, 10 if listening else 1)
            socket += wire.encode_number(7, port) + b"".join(inner)
            record = wire.encode_bytes(4, socket) + b"".join(outer)
            out += struct.pack("<I", len(record)) + record
        return out

    ports = [port for port, *_ in entries]
    first = next((index for index, item in enumerate(entries) if item[1]), None)
    if first is None:
        assert remap_listen_ports(image(ports), []) == image(ports)
        return
    changed = [new if index == first else port for index, port in enumerate(ports)]
    assert remap_listen_ports(image(ports), [(ports[first], new)]) == image(changed)
