"""Pipes: capacity, fill level, and moving bytes without copying them.

Knows nothing of images. All functions handle both blocking and non-blocking file descriptors: a shard is
often inherited and its flags belong to somebody else too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import stat
import struct
import termios

from gpuimg.errors import BadStreamError, InputOutputError

PAGE = 4096
MIB = 1024 * 1024

_INT = struct.Struct("i")
_ZERO_INT = bytes(_INT.size)


def is_pipe(fd: int) -> bool:
    """Whether `fd` is open and a pipe or FIFO."""
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def require_pipe(fd: int, *, writable: bool | None = None) -> None:
    """Raise BadStreamError unless `fd` is a pipe, and one of that direction if `writable` is given."""
    if not is_pipe(fd):
        raise BadStreamError(f"fd {fd} is not a pipe")
    if writable is None:
        return
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    if mode not in (os.O_RDWR, os.O_WRONLY if writable else os.O_RDONLY):
        raise BadStreamError(f"fd {fd} is the wrong end of a pipe")


def readable_bytes(fd: int) -> int:
    """Bytes that lie in the pipe now."""
    return int(_INT.unpack(fcntl.ioctl(fd, termios.FIONREAD, _ZERO_INT))[0])


def capacity(fd: int) -> int:
    """Capacity of the pipe in bytes."""
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)


def try_capacity(fd: int, wanted: int) -> None:
    """Ask for a capacity of `wanted` bytes or the largest half, quarter ... of it that is allowed.

    Not even root gets more than `pipe-max-size` without CAP_SYS_RESOURCE, as in many containers. Being
    refused costs speed only.
    """
    while wanted >= PAGE:
        try:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, wanted)
        except PermissionError:
            wanted //= 2
            if wanted > capacity(fd):
                continue
        except OSError:
            pass
        return


def equal_capacity(fds: list[int], wanted: int) -> int:
    """Give all pipes the same capacity, the largest power-of-two fraction of `wanted` that is allowed.

    The kernel answers EPERM beyond `pipe-max-size` and beyond the user's page quota, EBUSY when the pipe
    holds more than the new capacity.
    """
    while wanted >= PAGE:
        try:
            for fd in fds:
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, wanted)
        except PermissionError:
            wanted //= 2
            continue
        except OSError as error:
            raise InputOutputError(f"cannot set the capacity of a shard pipe: {error.strerror}") from error
        return wanted
    raise InputOutputError(
        "cannot give a shard pipe even one page",
        remedy="raise /proc/sys/fs/pipe-user-pages-hard or close other pipes of this user",
    )


def wait_for(fd: int, events: int) -> None:
    """Block until `fd` is ready for `events` (or has failed, which the next call will tell)."""
    poll = select.poll()
    poll.register(fd, events)
    poll.poll()


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write everything; BrokenPipeError passes through."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            wait_for(fd, select.POLLOUT)


def read_some(fd: int, limit: int) -> bytes:
    """Read at most `limit` bytes as soon as there are any; empty at end of file."""
    while True:
        try:
            return os.read(fd, limit)
        except BlockingIOError:
            wait_for(fd, select.POLLIN)


def splice_pipes(source: int, target: int, count: int) -> int:
    """Move at most `count` bytes from pipe to pipe; 0 at end of file."""
    while True:
        try:
            return os.splice(source, target, count, flags=os.SPLICE_F_MORE)
        except BlockingIOError:
            wait_for(source, select.POLLIN)
            wait_for(target, select.POLLOUT)


def splice_to_file(pipe: int, file: int, count: int, offset: int) -> int:
    """Move at most `count` bytes from a pipe to `offset` of a regular file; 0 at end of file.

    File systems without splice support answer EINVAL; for them the bytes are copied.
    """
    while True:
        try:
            return os.splice(pipe, file, count, offset_dst=offset)
        except BlockingIOError:
            wait_for(pipe, select.POLLIN)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            data = read_some(pipe, min(count, 64 * 1024))
            write_at(file, data, offset)
            return len(data)


def splice_from_file(file: int, pipe: int, count: int, offset: int) -> int:
    """Move at most `count` bytes from `offset` of a regular file to a pipe; 0 at end of file."""
    while True:
        try:
            return os.splice(file, pipe, count, offset_src=offset)
        except BlockingIOError:
            wait_for(pipe, select.POLLOUT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            data = os.pread(file, min(count, 64 * 1024), offset)
            write_all(pipe, data)
            return len(data)


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write everything at `offset` of a regular file."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view = view[written:]
        offset += written


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.vmsplice.argtypes = (ctypes.c_int, ctypes.POINTER(_IoVec), ctypes.c_ulong, ctypes.c_uint)
_libc.vmsplice.restype = ctypes.c_ssize_t


def vmsplice(pipe: int, address: int, length: int) -> int:
    """Put the pages of memory [`address`, `address` + `length`) into a pipe without copying; bytes taken.

    The memory must not change until the reader has taken the bytes out by copying.
    """
    vector = _IoVec(address, length)
    while True:
        taken = int(_libc.vmsplice(pipe, ctypes.byref(vector), 1, 0))
        if taken >= 0:
            return taken
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code == errno.EAGAIN:
            wait_for(pipe, select.POLLOUT)
            continue
        raise OSError(code, os.strerror(code))
