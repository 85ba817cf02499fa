"""What criu or a shard stream sends, into an ingest session of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuimg.errors import BadStreamError
from gpuimg.stream.protocol import check_name

if TYPE_CHECKING:
    from gpuimg.store.incoming import FileIngest
    from gpuimg.store.ingest import Session


class _CapturedFile:
    """A `FileSink`: reads from criu's pipe straight into the store's slab."""

    __slots__ = ("_file",)

    def __init__(self, file: FileIngest) -> None:
        self._file = file

    def pump(self, fd: int) -> int:
        return self._file.fill(fd)

    def close(self) -> None:
        self._file.close()


class StoreSink:
    """A `CaptureSink`. All files of a capture are driven by its one thread.

    Parameters
    ----------
    session
        Stays the caller's to commit, once the capture is complete.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def open(self, name: str) -> _CapturedFile:
        """Begin a file."""
        return _CapturedFile(self._session.file(name))


class StoreConsumer:
    """A `StreamConsumer`: the files of a shard stream become files of the session.

    Parameters
    ----------
    session
        Stays the caller's to commit, once the stream has ended well.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names: set[str] = set()

    def open(self, name: str) -> FileIngest:
        """Begin a file."""
        if check_name(name) in self._names:
            raise BadStreamError(f"{name} is in the stream twice")
        self._names.add(name)
        return self._session.file(name)

    @property
    def names(self) -> set[str]:
        """What came so far."""
        return self._names
