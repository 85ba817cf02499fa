"""Shard streams written byte for byte from the format's description, in both directions."""

from __future__ import annotations

import os
from pathlib import Path

from gpuimg.stream.shards import ShardWriter
from tests.compat.streamlib import MemoryConsumer, read_shards

GOLDEN = Path(__file__).with_name("golden")
FILES = {"file.img": b"hello world", "empty.img": b"", "a.img": b"aaaA", "b.img": b"bb"}


def load(name: str) -> bytes:
    lines = (GOLDEN / f"{name}.hex").read_text().splitlines()
    return b"".join(bytes.fromhex(line.partition("#")[0]) for line in lines)


def test_one_shard_is_read():
    assert read_shards([load("one-shard")]) == FILES


def test_one_shard_is_written():
    read, write = os.pipe()
    writer = ShardWriter([write])
    for name in ("file.img", "empty.img"):
        file = writer.open(name)
        if FILES[name]:
            file.write(FILES[name])
        file.close()
    first, second = writer.open("a.img"), writer.open("b.img")
    first.write(b"aaa")
    second.write(b"bb")
    first.write(b"A")
    first.close()
    second.close()
    writer.finish()
    os.close(write)
    assert os.read(read, 1 << 16) == load("one-shard")
    assert writer.sizes == [len(load("one-shard"))]
    os.close(read)


def test_two_shards_are_merged_in_either_order():
    shards = [load("two-shards.0"), load("two-shards.1")]
    expected = {"x-1.img": b"abcdef" + b"z" * 128}
    assert read_shards(shards) == read_shards(shards[::-1]) == expected


def test_a_consumer_sees_only_complete_files_closed():
    consumer = MemoryConsumer()
    read_shards([load("one-shard")], consumer)
    assert all(file.closed for file in consumer.files.values())
