"""A stand-in for criu at the streamer's sockets: sends files (capture) or asks for them (serve).

The protocol is written out here, not imported from gpuimg, so that both sides cannot be wrong together.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

PIECE = 1 << 20
_EXISTS = b"\x08\x01"


def connect(path: Path, alive: Callable[[], bool], timeout: float = 60) -> socket.socket:
    """Connect as soon as the socket listens; ConnectionError if `alive` turns false before."""
    end = time.monotonic() + timeout
    while True:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.connect(str(path))
            return made
        except OSError as error:
            made.close()
            if not alive() or time.monotonic() > end:
                raise ConnectionError(f"nobody listens on {path}") from error
        time.sleep(0.002)


def _request(server: socket.socket, name: str) -> None:
    encoded = name.encode()
    body = b"\x0a" + bytes([len(encoded)]) + encoded
    server.sendall(struct.pack("<I", len(body)) + body)


def send_files(server: socket.socket, files: list[Path]) -> int:
    """Send files as a dump does, the two largest at once and `inventory.img` last; bytes sent.

    Pages go into the pipe by splice, as criu's go by vmsplice.
    """
    large = sorted(files, key=lambda path: path.stat().st_size)[-2:]
    last = [path for path in files if path.name == "inventory.img"]
    total = 0
    threads = []
    for path in [*large, *(path for path in files if path not in large and path not in last), *last]:
        reader, writer = os.pipe()
        _request(server, path.name)
        socket.send_fds(server, [b"\0"], [reader])
        os.close(reader)
        total += path.stat().st_size
        if path in large:
            threads.append(threading.Thread(target=_push, args=(path, writer)))
            threads[-1].start()
            continue
        if path in last:
            for thread in threads:
                thread.join()
        _push(path, writer)
    server.close()
    return total


def _push(path: Path, pipe: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        while os.splice(fd, pipe, PIECE):
            pass
    except BrokenPipeError:
        pass  # the streamer gave up; its exit status says so
    finally:
        os.close(fd)
        os.close(pipe)


def read_files(server: socket.socket, names: list[str], at_once: int = 4) -> dict[str, int]:
    """Ask for the files in this order, reading `at_once` of them in turns; bytes of each, -1 if missing."""
    sizes = dict.fromkeys(names, -1)
    waiting = list(reversed(names))
    pipes: dict[int, str] = {}
    poll = select.poll()
    buffer = bytearray(PIECE)
    try:
        while waiting or pipes:
            while waiting and len(pipes) < at_once:
                name = waiting.pop()
                reader = _ask(server, name)
                if reader is not None:
                    sizes[name] = 0
                    pipes[reader] = name
                    poll.register(reader, select.POLLIN | select.POLLHUP)
            for fd, _ in poll.poll():
                count = os.readv(fd, [buffer])
                sizes[pipes[fd]] += count
                if not count:
                    poll.unregister(fd)
                    os.close(fd)
                    del pipes[fd]
    finally:
        server.close()
    return sizes


def _ask(server: socket.socket, name: str) -> int | None:
    _request(server, name)
    (length,) = struct.unpack("<I", _exactly(server, 4))
    if _exactly(server, length) != _EXISTS:
        return None
    reader, writer = os.pipe()
    socket.send_fds(server, [b"\0"], [writer])
    os.close(writer)
    return reader


def _exactly(server: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = server.recv(count - len(data))
        if not piece:
            raise ConnectionError("the streamer closed the socket")
        data += piece
    return data
