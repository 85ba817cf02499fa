"""Capture and serve as `gpuimg dump` and `gpuimg restore` use them: threads that keep their errors."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from gpuimg.errors import BadStreamError, DamagedError, IncompleteDumpError, NoSpaceError, StalledError
from gpuimg.stream.capture import Capture
from gpuimg.stream.seams import InMemoryFile
from gpuimg.stream.serve import Serve
from tests.compat.streamlib import Client, MemoryConsumer, write_all


def threads() -> int:
    return threading.active_count()


def eventually(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def open_fds() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


class Dump:
    """A capture in a thread and a client on it."""

    def __init__(self, directory, sink=None, **options):
        self.sink = sink or MemoryConsumer()
        self.capture = Capture(directory, self.sink, **options)
        self.capture.start()
        self.client = Client(directory / "streamer-capture.sock")


def test_complete_means_inventory_whole_and_every_pipe_at_its_end(tmp_path):
    dump = Dump(tmp_path)
    pages = dump.client.write("pages-1.img")
    dump.client.put("inventory.img", b"inventory")
    eventually(lambda: dump.sink.files.get("inventory.img") and dump.sink.files["inventory.img"].closed)
    assert not dump.capture.complete
    with pytest.raises(StalledError):
        dump.capture.wait_complete(0.1)
    write_all(pages, b"pages")
    os.close(pages)
    dump.capture.wait_complete(5)
    assert dump.sink.contents() == {"pages-1.img": b"pages", "inventory.img": b"inventory"}
    assert dump.capture.bytes_moved == 14
    assert dump.capture.files == 2
    assert not dump.capture.ended
    dump.client.close()
    dump.capture.wait(5)
    assert dump.capture.ended


def test_progress_keeps_the_wait_alive(tmp_path):
    dump = Dump(tmp_path)
    pages = dump.client.write("pages-1.img")

    def trickle():
        for _ in range(20):
            write_all(pages, b"x" * 100)
            time.sleep(0.1)
        os.close(pages)
        dump.client.put("inventory.img", b"inventory")

    thread = threading.Thread(target=trickle)
    thread.start()
    dump.capture.wait_complete(1.2)
    thread.join()
    dump.client.close()
    dump.capture.wait(5)


def test_criu_going_away_before_the_inventory_is_an_incomplete_dump(tmp_path):
    dump = Dump(tmp_path)
    dump.client.put("core-1.img", b"core")
    dump.client.close()
    with pytest.raises(IncompleteDumpError, match=r"inventory\.img"):
        dump.capture.wait_complete(5)
    dump.capture.wait(5)
    with pytest.raises(IncompleteDumpError):
        dump.capture.require_inventory()
    with pytest.raises(IncompleteDumpError):
        dump.capture.require_sound()


def test_images_of_no_dump_need_no_inventory(tmp_path):
    dump = Dump(tmp_path)
    dump.client.put("cpuinfo.img", b"cpu")
    dump.client.close()
    dump.capture.wait(5)
    dump.capture.require_sound()


class FullSink(MemoryConsumer):
    """The disk is full at the first byte."""

    def open(self, name):
        file = super().open(name)

        def pump(_fd):
            raise NoSpaceError("full")

        file.pump = pump
        return file


def test_an_error_of_the_sink_reaches_the_caller_and_criu(tmp_path):
    dump = Dump(tmp_path, FullSink())
    pages = dump.client.write("pages-1.img")
    with pytest.raises(BrokenPipeError):
        while True:
            os.write(pages, b"x" * 65536)
    os.close(pages)
    with pytest.raises(NoSpaceError):
        dump.capture.wait_complete(5)
    with pytest.raises(NoSpaceError):
        dump.capture.wait(5)
    assert dump.client.socket.recv(1) == b""


def test_a_name_twice_is_an_error(tmp_path):
    dump = Dump(tmp_path)
    dump.client.put("a.img", b"1")
    dump.client.request("a.img")
    read, write = os.pipe()
    dump.client.send_fd(read)
    os.close(read)
    with pytest.raises(BadStreamError, match=r"a\.img was sent twice"):
        dump.capture.wait(5)
    with pytest.raises(BrokenPipeError):
        os.write(write, b"x")
    os.close(write)


def test_abort_before_and_after_criu_has_come(tmp_path):
    before = threads()
    capture = Capture(tmp_path, MemoryConsumer())
    capture.start()
    capture.abort()
    capture.wait(5)
    capture = Capture(tmp_path, MemoryConsumer())
    capture.start()
    capture.close()
    assert capture.ended
    capture.close()
    Capture(tmp_path, MemoryConsumer()).close()
    assert not (tmp_path / "streamer-capture.sock").exists()
    dump = Dump(tmp_path)
    pages = dump.client.write("pages-1.img")
    dump.client.socket.sendall(b"\x0f")  # half a request: the thread is blocked in it
    time.sleep(0.05)
    dump.capture.abort()
    with pytest.raises(IncompleteDumpError):
        dump.capture.wait_complete(5)
    dump.capture.wait(5)
    with pytest.raises(BrokenPipeError):
        os.write(pages, b"x")
    os.close(pages)
    eventually(lambda: threads() == before)


def test_nothing_is_left_open(tmp_path):
    before = open_fds()
    dump = Dump(tmp_path)
    for number in range(20):
        dump.client.put(f"file-{number}.img", b"x" * number)
    dump.client.put("inventory.img", b"")
    dump.capture.wait_complete(5)
    dump.client.close()
    dump.capture.wait(5)
    assert open_fds() == before


class Files:
    """A source of what it is given."""

    def __init__(self, **files):
        self.files = files

    def lookup(self, name):
        return self.files.get(name)


class BadFile:
    """Gives some bytes, then fails."""

    def __init__(self, good: bytes, size: int):
        self.good = good
        self.size = size

    def send(self, pipe, moved):
        write_all(pipe, self.good)
        moved(len(self.good))
        raise DamagedError("the chunk is damaged")


class Restore:
    """A server in a thread and a client on it."""

    def __init__(self, directory, **files):
        self.serve = Serve(directory, Files(**files))
        self.serve.start()
        self.client = Client(directory / "streamer-serve.sock")


@pytest.mark.parametrize("size", [10, 10_000_000])
def test_a_source_that_fails_fails_the_restore(tmp_path, size):
    """criu takes a short file for a whole one: the failure must be known before criu sees its end."""
    restore = Restore(tmp_path, bad=BadFile(b"12345", size), good=InMemoryFile(b"good"))
    assert restore.client.get("good") == b"good"
    assert restore.client.get("bad") == b"12345"
    with pytest.raises(DamagedError):
        restore.serve.wait_delivered(5)
    assert restore.client.socket.recv(1) == b""
    with pytest.raises(DamagedError):
        restore.serve.wait(5)


def test_every_request_is_accounted_for(tmp_path):
    large = os.urandom(3_000_000)
    restore = Restore(tmp_path, large=InMemoryFile(large), small=InMemoryFile(b"small"))
    assert restore.client.get("none") is None
    assert restore.client.get("small") == b"small"
    assert restore.client.get("large") == large
    os.close(restore.client.read("large"))
    restore.serve.wait_delivered(5)
    assert (restore.serve.delivered, restore.serve.closed_early, restore.serve.missing) == (2, 1, 1)
    restore.client.close()
    restore.serve.wait(5)


def test_a_reader_that_stands_still_is_told(tmp_path):
    restore = Restore(tmp_path, large=InMemoryFile(bytes(3_000_000)))
    fd = restore.client.read("large")
    with pytest.raises(StalledError):
        restore.serve.wait_delivered(0.2)
    os.close(fd)
    restore.serve.wait_delivered(5)
    restore.client.close()
    restore.serve.wait(5)


def test_a_slow_reader_delays_nobody(tmp_path):
    data = os.urandom(3_000_000)
    restore = Restore(tmp_path, pagemap=InMemoryFile(data), pages=InMemoryFile(data))
    slow = restore.client.read("pagemap")
    assert os.read(slow, 10) == data[:10]
    assert restore.client.get("pages") == data
    with os.fdopen(slow, "rb") as file:
        assert file.read() == data[10:]
    restore.client.close()
    restore.serve.wait(5)


def test_abort_hangs_up(tmp_path):
    restore = Restore(tmp_path, large=InMemoryFile(bytes(3_000_000)))
    fd = restore.client.read("large")
    restore.serve.abort()
    restore.serve.wait(5)
    assert restore.client.socket.recv(1) == b""
    os.close(fd)


def test_a_request_that_makes_no_sense_ends_the_session(tmp_path):
    restore = Restore(tmp_path)
    restore.client.socket.sendall(b"\x04\0\0\0junk")
    with pytest.raises(BadStreamError):
        restore.serve.wait(5)
