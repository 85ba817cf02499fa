"""The shard stream: which shard gets what, and what a reader refuses."""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path

import pytest

from gpuimg.errors import BadStreamError, ImagesDirectoryError, InputOutputError, PermissionDeniedError
from gpuimg.stream import markers, pipes
from gpuimg.stream.directory import DirectoryConsumer
from gpuimg.stream.markers import Kind, Marker
from gpuimg.stream.shards import ShardReader, ShardWriter
from gpuimg.stream.spool import Spool
from tests.compat.streamlib import MemoryConsumer, read_shards, write_all


def stream(*items, start: int = 0) -> bytes:
    """Markers from (kind, argument) in order; data are given as bytes."""
    out = b""
    for seq, (kind, *argument) in enumerate(items, start):
        if kind is Kind.FILENAME:
            out += markers.encode(Marker(seq, kind, name=argument[0]))
        elif kind is Kind.FILE_DATA:
            out += markers.encode(Marker(seq, kind, size=len(argument[0]))) + argument[0]
        else:
            out += markers.encode(Marker(seq, kind))
    return out


NAME, DATA, EOF, END = Kind.FILENAME, Kind.FILE_DATA, Kind.FILE_EOF, Kind.IMAGE_EOF
WHOLE = stream((NAME, "a"), (DATA, b"12345"), (EOF,), (END,))


def test_a_whole_stream_is_read():
    assert read_shards([WHOLE]) == {"a": b"12345"}
    assert read_shards([stream((END,))]) == {}
    assert read_shards([b"", WHOLE, b""]) == {"a": b"12345"}


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([], "No shards to read from"),
        ([b""], "No shards to read from"),
        ([stream((NAME, "a"), (DATA, b"1"), (EOF,))], "No shards to read from"),
        ([stream((END,), start=1)], "No shards to read from"),
        ([stream((NAME, "a")), stream((EOF,), (END,), start=2)], "No shards to read from"),
        ([WHOLE[:-1]], "EOF unexpectedly reached"),
        ([WHOLE[: len(stream((NAME, "a"))) + 10]], "EOF unexpectedly reached"),
        ([b"\x04\0"], "EOF unexpectedly reached"),
        ([WHOLE + b"x"], "Unexpected data after image EOF"),
        ([WHOLE, b"x"], "Unexpected data after image EOF"),
        ([WHOLE, stream((EOF,), start=2)], "comes twice|Unexpected data"),
        ([stream((NAME, "a"), (EOF,)), stream((NAME, "b"))], "comes twice"),
        (
            [stream((NAME, "a"), (EOF,), (END,)), stream((EOF,), start=9)],
            "Image EOF marker came unexpectedly|Unexpected data",
        ),
        (
            [stream((NAME, "a"), (DATA, b"1"), (END,))],
            "came unexpectedly: a is not finished",
        ),
        (
            [stream((NAME, "a"), (NAME, "b"), (EOF,), (END,))],
            "Image EOF marker came unexpectedly|Unexpected data",
        ),
        ([stream((DATA, b"1"))], "Unexpected FileData marker"),
        ([stream((NAME, "a"), (EOF,), (DATA, b"1"))], "Unexpected FileData marker"),
        ([stream((EOF,))], "Unexpected FileEof marker"),
        ([stream((NAME, "a"), (EOF,), (EOF,))], "Unexpected FileEof marker"),
        ([b"\0\0\0\0"], "Malformed image marker"),
        ([struct.pack("<I", 10 * 1024) + bytes(10 * 1024)], "Malformed image marker"),
        ([b"\xff\xff\xff\xff"], "Malformed image marker"),
        ([b"\x02\0\0\0\x08\x01"], "Malformed image marker"),
        ([b"\x03\0\0\0\x12\x01\xff"], "Malformed image marker"),
        ([b"\x06\0\0\0\x18\x80\x80\x80\x80\x10"], "Malformed image marker"),
    ],
)
def test_what_is_no_whole_image_is_refused(shards, message):
    with pytest.raises(BadStreamError, match=message):
        read_shards(shards)


def test_a_stream_of_another_order_of_shards_is_the_same():
    parts = [stream((NAME, "a")), stream((DATA, b"12"), start=1), stream((EOF,), (END,), start=2)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        assert read_shards([parts[index] for index in order]) == {"a": b"12"}


def test_the_largest_data_size_is_only_a_promise():
    """4 GiB announced and nothing there: an error, without allocating anything."""
    with pytest.raises(BadStreamError, match="EOF unexpectedly reached"):
        read_shards([stream((NAME, "a")) + markers.encode(Marker(1, DATA, size=2**32 - 1)) + b"some"])


@pytest.mark.parametrize("consumer", ["spool", "directory"])
@pytest.mark.parametrize("name", ["../x", "/etc/x", "..", ".", "", "a\0b", "n" * 5000])
def test_hostile_names_do_not_escape(tmp_path, consumer, name):
    inside = tmp_path / "inside"
    inside.mkdir()
    target = Spool(inside) if consumer == "spool" else DirectoryConsumer(inside)
    with pytest.raises(BadStreamError):
        read_shards([stream((NAME, name), (DATA, b"x"), (EOF,), (END,))], target)
    target.close()
    assert list(tmp_path.iterdir()) == [inside]
    assert list(inside.iterdir()) == []


@pytest.mark.parametrize("consumer", [Spool, DirectoryConsumer])
def test_a_file_twice_is_refused(tmp_path, consumer):
    target = consumer(tmp_path)
    with pytest.raises(BadStreamError, match="a is in the stream twice"):
        read_shards([stream((NAME, "a"), (EOF,), (NAME, "a"), (EOF,), (END,))], target)
    target.close()


class TestDirectory:
    """Extraction."""

    def test_replaces_files_privately_and_follows_no_links(self, tmp_path):
        (tmp_path / "a").write_bytes(b"old and longer")
        (tmp_path / "b").symlink_to(tmp_path / "elsewhere")
        consumer = DirectoryConsumer(tmp_path)
        read_shards([WHOLE], consumer)
        consumer.close()
        assert (tmp_path / "a").read_bytes() == b"12345"
        consumer = DirectoryConsumer(tmp_path)
        with pytest.raises((InputOutputError, ImagesDirectoryError)):
            consumer.open("b")
        consumer.close()
        assert not (tmp_path / "elsewhere").exists()

    def test_a_new_file_is_private(self, tmp_path):
        consumer = DirectoryConsumer(tmp_path)
        consumer.open("a").close()
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600

    def test_removes_what_was_cut_off(self, tmp_path):
        consumer = DirectoryConsumer(tmp_path)
        items = ((NAME, "a"), (DATA, b"1"), (EOF,), (NAME, "b"), (DATA, b"2"))
        with pytest.raises(BadStreamError):
            read_shards([stream(*items)], consumer)
        consumer.close()
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_a_fifo_or_directory_in_the_way_is_told(self, tmp_path):
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "folder").mkdir()
        consumer = DirectoryConsumer(tmp_path)
        for name in ("fifo", "folder"):
            with pytest.raises((InputOutputError, ImagesDirectoryError, PermissionDeniedError)):
                consumer.open(name)
        consumer.close()
        with pytest.raises(ImagesDirectoryError):
            DirectoryConsumer(tmp_path / "none")

    def test_a_full_disk_is_told(self, tmp_path):
        (tmp_path / "x").touch()
        consumer = DirectoryConsumer(tmp_path)
        file = consumer.open("x")
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, file._fd)
        os.close(full)
        with pytest.raises(Exception, match="No space left"):
            file.write(b"x")


class TestSpool:
    """The image that is held for serving."""

    @pytest.mark.parametrize("size", [0, 1, 4096, 4097, 65536, 65537, 300_000, 20_000_000])
    def test_gives_back_what_it_took(self, tmp_path, size):
        data = os.urandom(size)
        spool = Spool(tmp_path)
        items = [(NAME, "a")]
        items += [(DATA, data[begin : begin + 258_048]) for begin in range(0, size, 258_048)]
        read_shards([stream(*items, (EOF,), (END,))], spool)
        file = spool.lookup("a")
        assert file.size == size
        assert spool.read("a") == data
        read, write = os.pipe()
        moved = []

        def send():
            file.send(write, moved.append)
            os.close(write)

        thread = threading.Thread(target=send)
        thread.start()
        with os.fdopen(read, "rb") as pipe:
            assert pipe.read() == data
        thread.join()
        assert sum(moved) == size
        assert spool.lookup("b") is None
        assert spool.read("b") is None
        spool.close()
        assert list(tmp_path.iterdir()) == []

    def test_interleaved_files_stay_in_long_runs(self, tmp_path):
        spool = Spool(tmp_path)
        files = {name: spool.open(name) for name in ("a", "b", "c")}
        for step in range(3000):
            for name, file in files.items():
                file.write((name * 1000).encode() + bytes((step % 256,)))
        for file in files.values():
            file.close()
        for name in files:
            expected = b"".join((name * 1000).encode() + bytes((step % 256,)) for step in range(3000))
            assert spool.read(name) == expected
            assert len(spool.lookup(name)._extents.pieces()) <= 7
        spool.close()

    def test_falls_back_to_the_temporary_folder(self, tmp_path):
        spool = Spool(tmp_path / "none")
        file = spool.open("a")
        file.write(b"x" * 10_000)
        file.close()
        assert spool.read("a") == b"x" * 10_000
        spool.close()


class TestWriter:
    """The choice of shards and sizes."""

    @pytest.fixture
    def shards(self):
        ends = [os.pipe() for _ in range(3)]
        yield [read for read, _ in ends], [write for _, write in ends]
        for pair in ends:
            for fd in pair:
                os.close(fd)

    def test_raises_capacities_and_takes_the_emptiest_shard_with_the_largest_fd(self, shards):
        reads, writes = shards
        writer = ShardWriter(writes)
        assert {pipes.capacity(fd) for fd in writes} == {1 << 20}
        file = writer.open("a")
        file.write(b"x" * 100_000)
        assert [pipes.readable_bytes(fd) > 0 for fd in reads] == [False, False, True]
        file.write(b"x" * 100_000)
        assert [pipes.readable_bytes(fd) > 0 for fd in reads] == [False, True, True]

    def test_chunks_are_a_quarter_of_the_capacity(self, shards):
        reads, writes = shards
        writer = ShardWriter(writes[:1])
        source, sink = os.pipe()
        pipes.try_capacity(sink, 1 << 20)
        write_all(sink, b"x" * 600_000)
        assert writer.open("a").pump(source) == 600_000
        data = os.read(reads[0], 1 << 20)
        assert data.startswith(stream((NAME, "a")) + markers.encode(Marker(1, DATA, size=258_048)))
        assert len(data) == sum(writer.sizes)
        os.close(source)
        os.close(sink)

    def test_non_blocking_shards_are_waited_for(self, shards):
        reads, writes = shards
        for fd in (*reads, *writes):
            os.set_blocking(fd, False)
        consumer = MemoryConsumer()
        writer = ShardWriter(writes)

        def write():
            file = writer.open("a")
            for _ in range(100):
                file.write(b"x" * 100_000)
            source, sink = os.pipe()
            pipes.try_capacity(sink, 1 << 20)
            for _ in range(10):
                write_all(sink, b"y" * 1_000_000)
                file.pump(source)
            os.close(source)
            os.close(sink)
            file.close()
            writer.finish()
            for fd in writes:
                os.dup2(gone, fd)

        gone = os.open("/dev/null", os.O_WRONLY)
        thread = threading.Thread(target=write)
        thread.start()
        ShardReader(reads, consumer).run()
        thread.join()
        os.close(gone)
        assert consumer.contents() == {"a": b"x" * 10_000_000 + b"y" * 10_000_000}

    def test_a_reader_that_left_is_told(self, shards):
        reads, writes = shards
        writer = ShardWriter(writes[:1])
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, reads[0])
        os.close(null)
        with pytest.raises(InputOutputError, match=f"cannot write to shard fd {writes[0]}"):
            writer.open("a").write(b"x")

    def test_a_shard_twice_or_no_pipe_is_refused(self, shards, tmp_path):
        _, writes = shards
        with pytest.raises(BadStreamError, match="twice"):
            ShardWriter([writes[0], writes[0]])
        with (tmp_path / "x").open("wb") as file, pytest.raises(BadStreamError, match="is not a pipe"):
            ShardWriter([file.fileno()])


def test_a_capacity_that_is_refused_is_halved_until_it_is_not():
    """Root without CAP_SYS_RESOURCE gets `pipe-max-size`; asking for more must not mean 64 KiB."""
    largest = int(Path("/proc/sys/fs/pipe-max-size").read_text())
    read, write = os.pipe()
    pipes.try_capacity(write, largest * 4)
    assert pipes.capacity(write) >= largest
    pipes.try_capacity(write, 4096)
    assert pipes.capacity(write) == 4096
    os.close(read)
    os.close(write)
