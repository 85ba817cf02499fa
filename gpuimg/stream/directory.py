"""A shard stream extracted into a directory, one file per image."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from gpuimg.errors import (
    BadStreamError,
    GpuimgError,
    ImagesDirectoryError,
    InputOutputError,
    NoSpaceError,
    PermissionDeniedError,
)
from gpuimg.stream import pipes
from gpuimg.stream.protocol import check_name


class DirectoryConsumer:
    """A `StreamConsumer` that writes files into `path`, replacing what is there.

    Files are readable by their owner only: they hold the memory of a process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[bytes] = set()
        self._unfinished: set[str] = set()
        try:
            self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ImagesDirectoryError(f"cannot open images directory {path}: {error.strerror}") from error

    def open(self, name: str) -> _DirectoryFile:
        """Begin a file."""
        key = check_name(name).encode()
        if key in self._seen:
            raise BadStreamError(f"{name} is in the stream twice")
        self._seen.add(key)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self._directory)
        except OSError as error:
            raise self.failure(name, error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ImagesDirectoryError(f"{self._path / name} is in the way and no regular file")
        os.ftruncate(fd, 0)
        self._unfinished.add(name)
        return _DirectoryFile(self, name, fd)

    def close(self) -> None:
        """Remove the files that were cut off, so that nobody takes them for whole ones."""
        for name in self._unfinished:
            os.unlink(name, dir_fd=self._directory)
        self._unfinished.clear()
        os.close(self._directory)

    def finished(self, name: str) -> None:
        """A file is complete."""
        self._unfinished.discard(name)

    def failure(self, name: str, error: OSError) -> GpuimgError:
        """What a failed open or write means."""
        what = f"cannot write {self._path / name}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return NoSpaceError(what, remedy="extract to a larger disk")
        if isinstance(error, PermissionError):
            return PermissionDeniedError(what)
        return InputOutputError(what)


class _DirectoryFile:
    """One file being extracted; a `StreamFile`."""

    __slots__ = ("_consumer", "_fd", "_name", "_offset")

    def __init__(self, consumer: DirectoryConsumer, name: str, fd: int) -> None:
        self._consumer = consumer
        self._name = name
        self._fd = fd
        self._offset = 0

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def write(self, data: bytes | memoryview) -> None:
        try:
            pipes.write_at(self._fd, data, self._offset)
        except OSError as error:
            raise self._consumer.failure(self._name, error) from error
        self._offset += len(data)

    def fill(self, fd: int, limit: int) -> int:
        try:
            count = pipes.splice_to_file(fd, self._fd, limit, self._offset)
        except OSError as error:
            raise self._consumer.failure(self._name, error) from error
        self._offset += count
        return count

    def close(self) -> None:
        try:
            os.close(self._fd)
        except OSError as error:
            raise self._consumer.failure(self._name, error) from error
        finally:
            self._fd = -1
        self._consumer.finished(self._name)
