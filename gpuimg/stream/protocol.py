"""The socket protocol between criu and an image streamer.

criu connects once per run and sends, for every image file, a request with the name; on restore it gets a
reply that says whether the file exists; then it sends one byte that carries one end of a pipe. Every
message is preceded by its length as u32, little endian. All calls here block.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import struct
from pathlib import Path

from gpuimg.errors import (
    BadStreamError,
    ImagesDirectoryError,
    InputOutputError,
    PermissionDeniedError,
    SocketPathError,
)
from gpuimg.stream import wire
from gpuimg.stream.pipes import require_pipe

CAPTURE_SOCKET = "streamer-capture.sock"
SERVE_SOCKET = "streamer-serve.sock"
MAX_SOCKET_PATH = 107
"""Bytes of a UNIX socket path that the kernel (and criu, silently) keeps."""
MAX_NAME = 4096
MAX_REQUEST = MAX_NAME + 1024
"""A request is a name and a few bytes; the surplus is for fields of a later criu."""

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")


def check_name(name: str) -> str:
    """Return `name` if it can be the name of an image file; BadStreamError otherwise."""
    if not name:
        raise BadStreamError("a file without a name")
    if len(name.encode()) > MAX_NAME:
        raise BadStreamError(f"a file name of more than {MAX_NAME} bytes: {name[:40]!r}...")
    if "/" in name or "\0" in name or name in (".", ".."):
        raise BadStreamError(f"{name!r} is no name of an image file")
    return name


def encode_request(name: str) -> bytes:
    """What criu sends for one file, prefix included."""
    body = wire.encode_bytes(1, name.encode())
    return _LENGTH.pack(len(body)) + body


def decode_request(body: bytes) -> str:
    """The checked name in a request without its prefix."""
    name: bytes | None = None
    try:
        for number, kind, value, _, end in wire.fields(body):
            if number == 1 and kind == wire.BYTES:
                name = body[value:end]
        if name is None:
            raise BadStreamError("malformed request: it names no file")
        return check_name(name.decode())
    except (wire.WireError, UnicodeDecodeError) as error:
        raise BadStreamError(f"malformed request: {error}") from error


def encode_reply(exists: bool) -> bytes:
    """The answer of a restore, prefix included; `exists` is on the wire even when false."""
    body = wire.encode_number(1, int(exists))
    return _LENGTH.pack(len(body)) + body


def decode_reply(body: bytes) -> bool:
    """Whether the file exists, from a reply without its prefix."""
    exists: bool | None = None
    try:
        for number, kind, value, _, _ in wire.fields(body):
            if number == 1 and kind == wire.VARINT:
                exists = bool(value)
    except wire.WireError as error:
        raise BadStreamError(f"malformed reply: {error}") from error
    if exists is None:
        raise BadStreamError("malformed reply: it says nothing")
    return exists


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    """`count` bytes, or fewer at end of file. Reading further would swallow the byte that carries the
    pipe.
    """
    data = connection.recv(count)
    while data and len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            break
        data += more
    return data


def receive_message(connection: socket.socket, limit: int = MAX_REQUEST) -> bytes | None:
    """One message without its prefix, None at end of file; BadStreamError if cut short or over `limit`
    bytes.
    """
    try:
        prefix = _read_exactly(connection, _LENGTH.size)
        if not prefix:
            return None
        if len(prefix) < _LENGTH.size:
            raise BadStreamError("EOF unexpectedly reached within a request")
        (length,) = _LENGTH.unpack(prefix)
        if length > limit:
            raise BadStreamError(f"a request of {length} bytes; no file name is that long")
        body = _read_exactly(connection, length) if length else b""
    except ConnectionResetError:
        return None
    if len(body) < length:
        raise BadStreamError("EOF unexpectedly reached within a request")
    return body


def receive_request(connection: socket.socket) -> str | None:
    """The name in the next request, None when criu has gone."""
    body = receive_message(connection)
    return None if body is None else decode_request(body)


def send_reply(connection: socket.socket, exists: bool) -> None:
    """Answer a request of a restore."""
    connection.sendall(encode_reply(exists))


def receive_pipe(connection: socket.socket, *, writable: bool) -> int:
    """Take exactly one byte and the pipe end that comes with it."""
    room = socket.CMSG_SPACE(_LENGTH.size)
    data, ancillary, flags, _ = connection.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(payload) - len(payload) % 4
            fds += [int.from_bytes(payload[i : i + 4], "little") for i in range(0, whole, 4)]
    try:
        if not data:
            raise BadStreamError("EOF unexpectedly reached where criu should send a pipe")
        if len(fds) != 1 or flags & socket.MSG_CTRUNC:
            raise BadStreamError(f"criu should send one pipe and sent {len(fds)} descriptors")
        require_pipe(fds[0], writable=writable)
    except BadStreamError:
        for fd in fds:
            os.close(fd)
        raise
    return fds[0]


def prepare_directory(path: Path) -> None:
    """Make the images directory if it is missing, readable by nobody else."""
    try:
        if path.is_dir():
            return
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot make images directory {path}: {error.strerror}") from error
    except OSError as error:
        raise ImagesDirectoryError(f"cannot make images directory {path}: {error.strerror}") from error


class Listener:
    """A listening socket for one connection, made the moment the object is.

    Only root and the user that runs this process may connect, whatever the umask and the directory allow:
    the image is the memory of a process.
    """

    def __init__(self, path: Path) -> None:
        encoded = os.fsencode(path)
        if len(encoded) > MAX_SOCKET_PATH:
            raise SocketPathError(
                f"socket path {path} has {len(encoded)} bytes and the kernel takes {MAX_SOCKET_PATH}",
                remedy="use a shorter images directory",
            )
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(path.lstat().st_mode):
                    raise ImagesDirectoryError(f"{path} is in the way and no socket", remedy="remove it")
                path.unlink()
            self._socket.bind(encoded)
            # Nobody can connect before listen(), so there is no moment with wider permissions.
            path.chmod(0o600)
            self._inode = path.lstat().st_ino
            self._socket.listen(1)
        except PermissionError as error:
            self._socket.close()
            raise PermissionDeniedError(f"cannot listen on {path}: {error.strerror}") from error
        except OSError as error:
            self._socket.close()
            raise InputOutputError(f"cannot listen on {path}: {error.strerror}") from error
        except ImagesDirectoryError:
            self._socket.close()
            raise

    def accept(self, wake: int) -> socket.socket | None:
        """The one connection, and the end of listening; None if `wake` becomes readable first.

        Other users are turned away and do not count.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if wake in ready:
                return None
            connection, _ = self._socket.accept()
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(credentials)
            if uid in (0, os.geteuid()):
                self.close()
                return connection
            connection.close()

    def close(self) -> None:
        """Stop listening and remove the socket file, unless another streamer has put its own there."""
        if self._socket.fileno() < 0:
            return
        self._socket.close()
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()
