"""The one error family of gpuimg.

Every failure a user can meet is a :class:`GpuimgError`: one sentence that says what
happened and to which object, a remedy, and an exit status of its own. The table in
``docs/operations.md`` lists them; a test holds the two equal.

This module knows nothing of the rest of the package.
"""

from __future__ import annotations

from typing import ClassVar


class GpuimgError(Exception):
    """A failure with a remedy.

    Parameters
    ----------
    what
        One sentence without a full stop: what happened, to which object.
    remedy
        One sentence without a full stop: what to do about it.
    """

    exit_status: ClassVar[int] = 1
    name: ClassVar[str] = "error"

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


class UsageError(GpuimgError):
    """The command line makes no sense."""

    exit_status = 2
    name = "usage"


class NotAStoreError(GpuimgError):
    """The path is no gpuimg store, or there is nothing there."""

    exit_status = 3
    name = "not-a-store"


class StoreExistsError(GpuimgError):
    """`init` where something is already."""

    exit_status = 4
    name = "store-exists"


class NewerFormatError(GpuimgError):
    """The store, pack or manifest was written by a newer gpuimg."""

    exit_status = 5
    name = "newer-format"


class UnknownReferenceError(GpuimgError):
    """No checkpoint or tag of that name."""

    exit_status = 6
    name = "unknown-reference"


class AmbiguousReferenceError(GpuimgError):
    """An id prefix that fits several checkpoints."""

    exit_status = 7
    name = "ambiguous-reference"


class BadNameError(GpuimgError):
    """A tag or file name that is not allowed (for instance with "/" or "..")."""

    exit_status = 8
    name = "bad-name"


class StoredDataError(GpuimgError):
    """Stored data that cannot be had. `offset` is where in the file it is missing, if that is known."""

    offset: int | None = None


class DamagedError(StoredDataError):
    """Stored bytes are not what they were: chunk, pack, recipe or manifest."""

    exit_status = 9
    name = "damaged"


class MissingObjectError(StoredDataError):
    """A chunk or pack that a checkpoint needs is not in the store."""

    exit_status = 10
    name = "missing-object"


class IndexBrokenError(GpuimgError):
    """The index is unreadable or belongs to another store; packs and manifests are untouched."""

    exit_status = 11
    name = "index-broken"


class NoSpaceError(GpuimgError):
    """The disk, or a quota, is full."""

    exit_status = 12
    name = "no-space"


class PermissionDeniedError(GpuimgError):
    """The operating system refused access."""

    exit_status = 13
    name = "permission-denied"


class BusyError(GpuimgError):
    """Another process holds what is needed, and did not let go in time."""

    exit_status = 14
    name = "busy"


class BadStreamError(GpuimgError):
    """A shard stream or a request of the streamer protocol that is malformed or cut short."""

    exit_status = 15
    name = "bad-stream"


class IncompleteDumpError(GpuimgError):
    """criu went away, or the stream ended, before the image was complete."""

    exit_status = 16
    name = "incomplete-dump"


class SocketPathError(GpuimgError):
    """A socket path that the kernel cannot hold (over 107 bytes)."""

    exit_status = 17
    name = "socket-path"


class ImagesDirectoryError(GpuimgError):
    """An images directory that cannot be read, written or understood."""

    exit_status = 18
    name = "images-directory"


class NoCriuError(GpuimgError):
    """No criu that starts was found."""

    exit_status = 19
    name = "no-criu"


class OldCriuError(GpuimgError):
    """criu is too old for image streaming."""

    exit_status = 20
    name = "old-criu"


class CriuFailedError(GpuimgError):
    """criu ended with an error of its own."""

    exit_status = 21
    name = "criu-failed"


class NoSuchProcessError(GpuimgError):
    """No process has that PID."""

    exit_status = 22
    name = "no-such-process"


class StalledError(GpuimgError):
    """The other side made no progress for the time allowed."""

    exit_status = 23
    name = "stalled"


class VerifyFailedError(GpuimgError):
    """`verify` found faults; each was reported."""

    exit_status = 24
    name = "verify-failed"


class InputOutputError(GpuimgError):
    """A read or write that the operating system failed."""

    exit_status = 25
    name = "input-output"
