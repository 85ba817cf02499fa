"""File-system primitives: private creation, durable writes, and OSErrors as sentences.

Everything the store creates goes through here, so that modes do not depend on the umask and no
rename happens before the bytes are durable.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from gpuimg.errors import (
    GpuimgError,
    InputOutputError,
    NoSpaceError,
    PermissionDeniedError,
)

# <linux/fs.h>
_SYNC_FILE_RANGE_WRITE = 2
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}


def describe_os_error(error: OSError, action: str) -> GpuimgError:
    """The sentence for an OSError met while doing `action` (for instance "writing the pack X")."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    what = f"{action} failed: {reason}"
    if error.errno in _NO_SPACE:
        return NoSpaceError(what, remedy="free some space (for instance with `gpuimg gc`) and try again")
    if error.errno in _NO_PERMISSION:
        return PermissionDeniedError(what, remedy="run as the owner of these files or as root")
    return InputOutputError(what, remedy="check the disk and the kernel log, then try again")


@contextlib.contextmanager
def os_errors(action: str) -> Iterator[None]:
    """Turn every OSError of the block into a GpuimgError that names `action`."""
    try:
        yield
    except OSError as error:
        raise describe_os_error(error, action) from error


def make_folder(path: Path) -> None:
    """Create a folder as 0700 whatever the umask; an existing one is left as it is."""
    try:
        path.mkdir()
    except FileExistsError:
        return
    path.chmod(0o700)


def create_private(path: Path) -> int:
    """Create a new file as 0600 whatever the umask and return its descriptor (read and write)."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)
    return fd


def sync_folder(path: Path) -> None:
    """Make renames and unlinks in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def begin_write_back(fd: int, offset: int, length: int) -> None:
    """Have the kernel begin to write a part of a file to the disk; it says nothing of success, fsync will."""
    call = _sync_file_range()
    if call is not None:
        call(fd, offset, length, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


def write_all(fd: int, data: bytes | memoryview) -> None:
    """write(2) until everything is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_durably(target: Path, data: bytes, temporary: Path) -> None:
    """Write `data` under a temporary name, fsync, rename to `target`, fsync the folder."""
    fd = create_private(temporary)
    try:
        write_all(fd, data)
        os.fsync(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)
    temporary.rename(target)
    sync_folder(target.parent)


def pread_exactly(fd: int, size: int, offset: int) -> bytes:
    """Read exactly `size` bytes, or fewer if the file ends before."""
    parts = []
    while size > 0:
        part = os.pread(fd, size, offset)
        if not part:
            break
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
