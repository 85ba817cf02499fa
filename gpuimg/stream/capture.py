"""Capture: takes an image from `criu dump --stream` and hands it to a sink.

One thread and one poll loop drain the socket and all pipes, because criu writes many files alternately and
the memory of the frozen process must flow whichever of them it fills.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuimg.errors import BadStreamError, IncompleteDumpError
from gpuimg.stream import pipes, protocol
from gpuimg.stream.seams import CaptureSink, FileSink
from gpuimg.stream.session import Session

PIPE_CAPACITY = 4 * pipes.MIB
BULK = 32 * 1024
"""A pipe that gives this many bytes at once is made larger. Most never do, and what all pipes of a user may
hold together is limited: whoever takes too much leaves criu with pipes of two pages."""
INVENTORY = "inventory.img"
CPU_INFO = "cpuinfo.img"
_TASK_IMAGE = re.compile(r"(?:(?:core|ids|fdinfo|mm|pagemap|pages|fs)-\d+|pstree|files|seccomp)\.img")
"""Images that only a dump of tasks has; with one of them and no inventory, the dump failed."""


@dataclass(slots=True)
class _Incoming:
    """A file on its way, and whether its pipe has been made larger."""

    name: str
    sink: FileSink
    enlarged: bool = False


class Capture(Session):
    """One dump, pre-dump or cpuinfo dump.

    Under ``gpuimg dump``: `start`, run criu, `wait_complete` at its post-dump stage, commit, `wait`.
    Standalone: `run`, then `require_inventory`.

    Parameters
    ----------
    images_dir
        Where criu looks for the socket.
    sink
        Takes the files; called from the thread that runs the session. Its errors end the session.
    ext_files
        Names and read ends of pipes whose contents become files of the image; closed at their end.
    on_start
        Called when the first image of a checkpoint arrives.
    """

    def __init__(
        self,
        images_dir: Path,
        sink: CaptureSink,
        *,
        ext_files: Sequence[tuple[str, int]] = (),
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self._sink = sink
        self._ext_files = ext_files
        self._on_start = on_start
        self._names: set[str] = set()
        self._open: dict[int, _Incoming] = {}
        self._inventory = False
        self._task_images = False
        super().__init__(images_dir, protocol.CAPTURE_SOCKET)

    @property
    def files(self) -> int:
        """Number of files that have arrived or begun to."""
        return len(self._names)

    @property
    def complete(self) -> bool:
        """Whether inventory.img, criu's last image, arrived whole and no file is unfinished."""
        return self._inventory and not self._open

    def wait_complete(self, timeout: float) -> None:
        """Wait until the image is `complete`; every error of the session so far is raised here.

        IncompleteDumpError if criu goes away first, StalledError after `timeout` seconds without progress.
        """
        self._wait_until(lambda: self.complete, timeout)
        if not self.complete or self._aborted:
            self.require_inventory()
            raise IncompleteDumpError("the capture was aborted before the image was complete")

    def require_inventory(self) -> None:
        """IncompleteDumpError unless inventory.img arrived whole."""
        if not self._inventory:
            raise IncompleteDumpError(
                f"criu went away before it sent {INVENTORY}, the image is incomplete",
                remedy="see criu's log for why the dump failed",
            )

    def require_sound(self) -> None:
        """IncompleteDumpError if tasks were dumped and inventory.img is missing; other images may do
        without.
        """
        if self._task_images:
            self.require_inventory()

    def _converse(self, connection: socket.socket) -> None:
        try:
            with select.epoll() as epoll:
                epoll.register(self._wake, select.EPOLLIN)
                epoll.register(connection, select.EPOLLIN)
                for name, fd in self._ext_files:
                    self._begin(epoll, name, fd)
                self._loop(epoll, connection)
        finally:
            for fd in self._open:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _loop(self, epoll: select.epoll, connection: socket.socket) -> None:
        connected = True
        while connected or self._open:
            for fd, _ in epoll.poll():
                if fd in self._open:
                    self._pump(epoll, fd)
                elif fd == self._wake:
                    return
                elif not self._take_request(epoll, connection):
                    epoll.unregister(connection)
                    connected = False

    def _take_request(self, epoll: select.epoll, connection: socket.socket) -> bool:
        """Take one request and its pipe; False when criu has hung up."""
        name = protocol.receive_request(connection)
        if name is None:
            return False
        if self._on_start is not None and name != CPU_INFO:
            self._on_start()
            self._on_start = None
        pipe = protocol.receive_pipe(connection, writable=False)
        self._task_images = self._task_images or _TASK_IMAGE.fullmatch(name) is not None
        self._begin(epoll, name, pipe)
        return True

    def _begin(self, epoll: select.epoll, name: str, fd: int) -> None:
        try:
            protocol.check_name(name)
            if name in self._names:
                raise BadStreamError(f"{name} was sent twice in one dump")
            sink = self._sink.open(name)
        except BaseException:
            os.close(fd)
            raise
        self._names.add(name)
        self._open[fd] = _Incoming(name, sink)
        epoll.register(fd, select.EPOLLIN)

    def _pump(self, epoll: select.epoll, fd: int) -> None:
        file = self._open[fd]
        try:
            count = file.sink.pump(fd)
        except BlockingIOError:
            return
        if count:
            self.bytes_moved += count
            if count >= BULK and not file.enlarged:
                pipes.try_capacity(fd, PIPE_CAPACITY)
                file.enlarged = True
            return
        file.sink.close()
        epoll.unregister(fd)
        os.close(fd)
        with self._changed:
            del self._open[fd]
            if file.name == INVENTORY:
                self._inventory = True
            if self.complete:
                self._changed.notify_all()
