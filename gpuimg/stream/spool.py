"""A whole image held for serving, in memory that does not grow with it.

Files of up to a page stay in memory, the rest goes to one unlinked temporary file. A `StreamConsumer` while
the shards are read, an `ImageSource` afterwards.
"""

from __future__ import annotations

import errno
import os
import tempfile
from array import array
from pathlib import Path

from gpuimg.errors import BadStreamError, GpuimgError, InputOutputError, NoSpaceError
from gpuimg.stream import pipes
from gpuimg.stream.protocol import check_name
from gpuimg.stream.seams import InMemoryFile, Moved, ServedFile

SMALL = 4096
"""Bytes up to which a file is kept in memory."""
FIRST_REGION = 64 * 1024
LAST_REGION = 8 * pipes.MIB


def _open_unnamed(directory: Path) -> int:
    """A file without a name, readable by nobody else, in `directory` or else where temporary files go."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


class Spool:
    """The files of one image by name.

    Parameters
    ----------
    directory
        Where the temporary file is made if any file is larger than a page.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[bytes, bytes | _Extents] = {}
        self._fd = -1
        self._end = 0

    def __len__(self) -> int:
        return len(self._files)

    def open(self, name: str) -> _SpoolFile:
        """Begin a file."""
        key = check_name(name).encode()
        if key in self._files:
            raise BadStreamError(f"{name} is in the stream twice")
        self._files[key] = b""
        return _SpoolFile(self, key)

    def lookup(self, name: str) -> ServedFile | None:
        """The file, or None."""
        content = self._files.get(name.encode())
        if content is None:
            return None
        return InMemoryFile(content) if isinstance(content, bytes) else _LargeFile(self._fd, content)

    def read(self, name: str) -> bytes | None:
        """The whole content, or None if there is no such file."""
        content = self._files.get(name.encode())
        if content is None or isinstance(content, bytes):
            return content
        return b"".join(os.pread(self._fd, length, offset) for offset, length in content.pieces())

    def close(self) -> None:
        """Give the space back."""
        self._files.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def finish(self, key: bytes, content: bytes | _Extents) -> None:
        """Take over a complete file."""
        self._files[key] = content

    def reserve(self, length: int) -> tuple[int, int]:
        """The temporary file and the offset of a region of `length` bytes in it."""
        if self._fd < 0:
            try:
                self._fd = _open_unnamed(self._directory)
            except OSError as error:
                raise InputOutputError(f"cannot make a temporary file: {error.strerror}") from error
        offset = self._end
        self._end += length
        return self._fd, offset

    def failure(self, error: OSError) -> GpuimgError:
        """What a failed write to the temporary file means."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return NoSpaceError(
                f"no space left for the image in {self._directory}",
                remedy="use an images directory on a larger disk",
            )
        return InputOutputError(f"cannot write the temporary file in {self._directory}: {error.strerror}")


class _Extents:
    """Where the pieces of a large file lie: offset and length, alternating."""

    __slots__ = ("places", "size")

    def __init__(self) -> None:
        self.places = array("q")
        self.size = 0

    def add(self, offset: int, length: int) -> None:
        places = self.places
        if places and places[-2] + places[-1] == offset:
            places[-1] += length
        else:
            places.extend((offset, length))
        self.size += length

    def pieces(self) -> list[tuple[int, int]]:
        return list(zip(self.places[::2], self.places[1::2], strict=True))


class _SpoolFile:
    """One file on its way into the spool; a `StreamFile`."""

    __slots__ = ("_extents", "_fd", "_key", "_offset", "_region", "_room", "_small", "_spool")

    def __init__(self, spool: Spool, key: bytes) -> None:
        self._spool = spool
        self._key = key
        self._small = b""
        self._extents: _Extents | None = None
        self._fd = -1
        self._offset = 0
        self._room = 0
        self._region = FIRST_REGION

    def write(self, data: bytes | memoryview) -> None:
        if self._extents is None and len(self._small) + len(data) <= SMALL:
            self._small += data
            return
        self._move_small()
        while data:
            piece = data[: self._make_room()]
            try:
                pipes.write_at(self._fd, piece, self._offset)
            except OSError as error:
                raise self._spool.failure(error) from error
            self._advance(len(piece))
            data = data[len(piece) :]

    def fill(self, fd: int, limit: int) -> int:
        self._move_small()
        limit = min(limit, self._make_room())
        try:
            count = pipes.splice_to_file(fd, self._fd, limit, self._offset)
        except OSError as error:
            raise self._spool.failure(error) from error
        self._advance(count)
        return count

    def close(self) -> None:
        self._spool.finish(self._key, self._small if self._extents is None else self._extents)

    def _move_small(self) -> None:
        """From here on the file is a large one."""
        if self._extents is None:
            self._extents = _Extents()
            small, self._small = self._small, b""
            self.write(small)

    def _make_room(self) -> int:
        """Bytes that may be written at the current offset; regions keep interleaved files in long runs."""
        if self._room == 0:
            self._fd, self._offset = self._spool.reserve(self._region)
            self._room = self._region
            self._region = min(self._region * 2, LAST_REGION)
        return self._room

    def _advance(self, count: int) -> None:
        assert self._extents is not None
        if count:
            self._extents.add(self._offset, count)
            self._offset += count
            self._room -= count


class _LargeFile:
    """A `ServedFile` in the temporary file. Its pages are lent to the pipe and never written again."""

    __slots__ = ("_extents", "_fd")

    def __init__(self, fd: int, extents: _Extents) -> None:
        self._fd = fd
        self._extents = extents

    @property
    def size(self) -> int:
        return self._extents.size

    def send(self, pipe: int, moved: Moved) -> None:
        for start, length in self._extents.pieces():
            offset, end = start, start + length
            while offset < end:
                count = pipes.splice_from_file(self._fd, pipe, end - offset, offset)
                if count == 0:
                    raise InputOutputError("the temporary file of the image is shorter than what was written")
                offset += count
                moved(count)
