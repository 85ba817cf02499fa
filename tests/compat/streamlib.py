"""A simulated criu and the pieces of the upstream workflow tests."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

EXECUTABLE = Path(sys.executable).with_name("gpuimg-image-streamer")


def reader(fd):
    """A binary file object on `fd` without read-ahead."""
    return os.fdopen(fd, "rb", buffering=0)


def read_line(fd) -> str:
    """One line, byte by byte, so that nothing behind it is lost; empty at end of file."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            break
        line += byte
    return line.decode().strip()


class Client:
    """What criu does on the socket. Several threads may share one."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(path))
        self.lock = threading.Lock()

    def request(self, name: str) -> None:
        encoded = name.encode()
        length = len(encoded)
        size = bytes((length,)) if length < 128 else bytes((length & 127 | 128, length >> 7))
        body = b"\x0a" + size + encoded
        self.socket.sendall(struct.pack("<I", len(body)) + body)

    def send_fd(self, fd: int) -> None:
        socket.send_fds(self.socket, [b"\0"], [fd])

    def write(self, name: str) -> int:
        """Begin a file of a dump; the write end of its pipe."""
        ours, theirs = None, None
        theirs, ours = os.pipe()
        with self.lock:
            self.request(name)
            self.send_fd(theirs)
        os.close(theirs)
        return ours

    def put(self, name: str, data: bytes, step: int | None = None) -> None:
        fd = self.write(name)
        try:
            step = step or max(len(data), 1)
            for begin in range(0, len(data), step):
                write_all(fd, data[begin : begin + step])
        finally:
            os.close(fd)

    def read(self, name: str) -> int | None:
        """Begin a file of a restore; the read end of its pipe, None if it is missing."""
        with self.lock:
            self.request(name)
            reply = recv_exactly(self.socket, 4)
            body = recv_exactly(self.socket, struct.unpack("<I", reply)[0])
            if body == b"\x08\x00":
                return None
            assert body == b"\x08\x01"
            ours, theirs = os.pipe()
            self.send_fd(theirs)
        os.close(theirs)
        return ours

    def get(self, name: str) -> bytes | None:
        fd = self.read(name)
        if fd is None:
            return None
        with reader(fd) as file:
            return file.read()

    def close(self) -> None:
        self.socket.close()


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def recv_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        assert more, "the streamer hung up"
        data += more
    return data


class Streamer:
    """One run of the executable."""

    def __init__(self, operation, images_dir, shards, *, ext_files=(), options=(), stderr=None):
        progress, theirs = os.pipe()
        self.progress = progress
        ext = [f"{name}:{fd}" for name, fd in ext_files]
        command = [
            str(EXECUTABLE),
            "--images-dir",
            str(images_dir),
            "--progress-fd",
            str(theirs),
            *(["--shard-fds", ",".join(map(str, shards))] if shards else []),
            *(["--ext-file-fds", ",".join(ext)] if ext else []),
            *options,
            operation,
        ]
        fds = [theirs, *shards, *(fd for _, fd in ext_files)]
        self.process = subprocess.Popen(command, pass_fds=fds, stderr=stderr)
        os.close(theirs)
        for fd in fds[1:]:
            os.close(fd)

    def line(self) -> str:
        return read_line(self.progress)

    def stats(self) -> list[dict]:
        return json.loads(self.line())["shards"]

    def wait(self, timeout: float = 60) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            os.close(self.progress)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self.progress)


class Workflow:
    """Capture and serve (or extract) at once, joined by shards, as upstream's tests run them.

    `relay` may put something between the two ends of a shard: it gets the index, the read end of capture's
    pipe and the write end of serve's pipe, in a thread of its own.
    """

    def __init__(self, directory, *, operation="serve", shards=4, ext_in=(), ext_out=(), relay=None):
        self.directory = directory
        ends = [os.pipe() for _ in range(shards)]
        outputs = [write for _, write in ends]
        inputs = [read for read, _ in ends]
        self.threads = []
        if relay is not None:
            for index in range(shards):
                read, write = os.pipe()
                arguments = (index, inputs[index], write)
                self.threads.append(threading.Thread(target=relay, args=arguments, daemon=True))
                inputs[index] = read
        self.capture = Streamer("capture", directory, outputs, ext_files=ext_in)
        self.consumer = Streamer(operation, directory, inputs, ext_files=ext_out)
        for thread in self.threads:
            thread.start()
        assert self.capture.line() == "socket-init"
        self.client = Client(directory / "streamer-capture.sock")

    def finish_capture(self, *, started=True) -> list[dict]:
        """Close the dump; what capture says about its shards."""
        if started:
            assert self.capture.line() == "checkpoint-start"
        self.client.close()
        stats = self.capture.stats()
        assert self.capture.wait() == 0
        assert len(self.consumer.stats()) == len(stats)
        return stats

    def connect_serve(self) -> Client:
        assert self.consumer.line() == "socket-init"
        self.client = Client(self.directory / "streamer-serve.sock")
        return self.client

    def finish(self) -> None:
        self.client.close()
        assert self.consumer.wait() == 0

    def kill(self) -> None:
        self.capture.kill()
        self.consumer.kill()


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the process has gone")


def fionread(fd: int) -> int:
    value = array.array("i", [0])
    fcntl.ioctl(fd, 0x541B, value)
    return value[0]


class MemoryFile:
    """A `StreamFile` and `FileSink` that keeps the bytes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.closed = False

    def write(self, data) -> None:
        self.data += data

    def fill(self, fd: int, limit: int = 1 << 20) -> int:
        data = os.read(fd, limit)
        self.data += data
        return len(data)

    pump = fill

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class MemoryConsumer:
    """A `StreamConsumer` and `CaptureSink`."""

    def __init__(self) -> None:
        self.files: dict[str, MemoryFile] = {}

    def open(self, name: str) -> MemoryFile:
        assert name not in self.files
        self.files[name] = MemoryFile()
        return self.files[name]

    def contents(self) -> dict[str, bytes]:
        return {name: bytes(file.data) for name, file in self.files.items()}


def read_shards(shards: list[bytes], consumer=None) -> dict[str, bytes]:
    """Read whole shards, each given as its bytes; the files."""
    from gpuimg.stream.shards import ShardReader

    consumer = consumer if consumer is not None else MemoryConsumer()
    ends = [os.pipe() for _ in shards]
    threads = [
        threading.Thread(target=_feed, args=(write, data))
        for (_, write), data in zip(ends, shards, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        ShardReader([read for read, _ in ends], consumer).run()
    finally:
        for read, _ in ends:
            os.close(read)
        for thread in threads:
            thread.join()
    return consumer.contents() if isinstance(consumer, MemoryConsumer) else {}


def _feed(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        write_all(fd, data)
    os.close(fd)
