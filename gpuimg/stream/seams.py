"""The narrow protocols between criu's side of the streamer and whatever keeps the bytes.

Capture feeds a `CaptureSink`, serving asks an `ImageSource`, the reader of a shard stream feeds a
`StreamConsumer`. Shards, a directory, a spool file and the store implement them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gpuimg.stream import pipes


class FileSink(Protocol):
    """One file that arrives from criu."""

    def pump(self, fd: int) -> int:
        """Move what is readable now from the pipe `fd`; bytes moved, 0 at end of file."""
        ...

    def close(self) -> None:
        """The file is complete. Not called for a file that was cut off."""
        ...


class CaptureSink(Protocol):
    """Takes the files that criu sends."""

    def open(self, name: str) -> FileSink:
        """Begin a file; each name comes once."""
        ...


Moved = Callable[[int], None]
"""Called after every piece with its length in bytes; may raise to stop the sender."""


class ServedFile(Protocol):
    """One file that criu may ask for, any number of times."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def send(self, pipe: int, moved: Moved) -> None:
        """Write everything to the pipe, blocking; BrokenPipeError passes through."""
        ...


class InMemoryFile:
    """A `ServedFile` of a few bytes."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self._data)

    def send(self, pipe: int, moved: Moved) -> None:
        """Write everything."""
        pipes.write_all(pipe, self._data)
        moved(len(self._data))


class ImageSource(Protocol):
    """Answers the requests of a restore."""

    def lookup(self, name: str) -> ServedFile | None:
        """The file of that name; called from one thread."""
        ...


class StreamFile(Protocol):
    """One file that comes out of a shard stream."""

    def write(self, data: bytes | memoryview) -> None:
        """Take a few bytes that the reader had to buffer."""
        ...

    def fill(self, fd: int, limit: int) -> int:
        """Take at most `limit` bytes from the pipe `fd`; bytes taken, 0 at end of file."""
        ...

    def close(self) -> None:
        """The file is complete. Not called for a file that was cut off."""
        ...


class StreamConsumer(Protocol):
    """Takes the files that a shard stream holds."""

    def open(self, name: str) -> StreamFile:
        """Begin a file; BadStreamError if it came before."""
        ...
