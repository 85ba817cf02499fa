"""The smallest image streamer there can be: every file in memory, a thread per pipe.

It stands in for the real one where the running of criu is under test, and shows that criu is content with
the bare protocol.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from pathlib import Path

from gpuimg._proto import streamer_pb2 as pb


class _Streamer:
    def __init__(self, path: Path) -> None:
        self.progress = 0
        self.names: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.fspath(path))
        self._listener.listen(1)
        self._connection: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._main = threading.Thread(target=self._run, daemon=True)
        self._main.start()

    def abort(self) -> None:
        for end in (self._listener, self._connection):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        self.abort()
        self._main.join(10)

    def _run(self) -> None:
        try:
            self._connection, _ = self._listener.accept()
        except OSError:
            return
        with self._connection as connection:
            while True:
                head = self._exactly(connection, 4)
                if head is None:
                    return
                body = self._exactly(connection, struct.unpack("<I", head)[0])
                if body is None:
                    return
                request = pb.FileRequest.FromString(body)
                self.names.append(request.filename)
                try:
                    self.take(connection, request.filename)
                except (OSError, IndexError):
                    # criu went away in the midst of a request.
                    return

    @staticmethod
    def _exactly(connection: socket.socket, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            try:
                more = connection.recv(size - len(data))
            except OSError:
                return None
            if not more:
                return None
            data += more
        return data

    @staticmethod
    def _fd(connection: socket.socket) -> int:
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        return fds[0]

    def _spawn(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        with self._lock:
            self._threads.append(thread)
            thread.start()

    def take(self, connection: socket.socket, name: str) -> None:
        raise NotImplementedError


class MemoryCapture(_Streamer):
    """Takes a dump; `slow` seconds are waited before each read."""

    def __init__(self, folder: Path, *, slow: float = 0.0) -> None:
        self.files: dict[str, bytes] = {}
        self._slow = slow
        self._pause = threading.Event()
        super().__init__(folder / "streamer-capture.sock")

    def take(self, connection: socket.socket, name: str) -> None:
        self._spawn(self._drain, self._fd(connection), name)

    def _drain(self, fd: int, name: str) -> None:
        parts = []
        with open(fd, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 20):
                parts.append(data)
                self.progress += len(data)
                if self._slow and self._pause.wait(self._slow):
                    return
        self.files[name] = b"".join(parts)

    def abort(self) -> None:
        self._pause.set()
        super().abort()

    def complete(self) -> dict[str, bytes]:
        """Wait until all pipes have ended; return the files.

        When criu asks for the verdict its last requests may still lie in the socket. inventory.img is the
        last of all, so once it is here every other file has been announced.
        """
        deadline = time.monotonic() + 60
        while "inventory.img" not in self.files and time.monotonic() < deadline:
            time.sleep(0.001)
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(60)
        assert "inventory.img" in self.files, sorted(self.files)
        return self.files


class MemoryServe(_Streamer):
    """Serves a dump, as often as is asked; nothing of the file `hold` comes before `abort`."""

    def __init__(self, folder: Path, files: dict[str, bytes]) -> None:
        self.files = files
        self.hold = ""
        self._released = threading.Event()
        super().__init__(folder / "streamer-serve.sock")

    def take(self, connection: socket.socket, name: str) -> None:
        exists = name in self.files
        reply = pb.FileReply(exists=exists).SerializeToString()
        connection.sendall(struct.pack("<I", len(reply)) + reply)
        if exists:
            self._spawn(self._send, self._fd(connection), name)

    def abort(self) -> None:
        self._released.set()
        super().abort()

    def _send(self, fd: int, name: str) -> None:
        view = memoryview(self.files[name])
        with open(fd, "wb", buffering=0) as pipe:
            if name == self.hold:
                self._released.wait()
                return
            while view:
                try:
                    sent = pipe.write(view[: 1 << 20])
                except BrokenPipeError:
                    return
                self.progress += sent
                view = view[sent:]
