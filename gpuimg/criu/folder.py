"""A private work folder for one run of criu.

criu finds the streamer by a socket in its images directory, and gpuimg hears from criu's action script by
another; so the folder must be short enough for socket paths, closed to other users, and allow execution.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gpuimg.errors import PermissionDeniedError, SocketPathError

SOCKET_PATH_MAX = 107
"""Bytes of a path that fit into a socket address, the closing zero not counted."""

_LONGEST_NAME = "streamer-capture.sock"
_PREFIX = "gpuimg-"
_LOCK = "lock"
_YOUNG_SECONDS = 60.0
_REMEDY = "set XDG_RUNTIME_DIR to a short path of your own that is not mounted noexec"


@contextmanager
def work_folder(*, environment: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Make a folder (0700) for sockets, log and statistics; it is gone when the block is left.

    Raises
    ------
    SocketPathError
        Nowhere is the path short enough.
    PermissionDeniedError
        Nowhere may a folder be made from which the kernel executes files.
    """
    folder = _make(os.environ if environment is None else environment)
    with (folder / _LOCK).open("wb") as lock:
        os.fchmod(lock.fileno(), 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        _sweep(folder.parent)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def check_socket_path(path: Path) -> None:
    """Raise SocketPathError if no socket can have this path."""
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_MAX:
        raise SocketPathError(
            f"the socket path {path} has {size} bytes and the kernel takes {SOCKET_PATH_MAX}",
            remedy="use a folder with a shorter path",
        )


def _sweep(place: Path) -> None:
    """Remove the folders of runs that were killed: theirs is a lock that nobody holds.

    A criu that still has such a folder finds no action script any more, which it takes for a refusal.
    """
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            facts = folder.lstat()
            # A young one may be about to take its lock.
            if facts.st_uid != os.geteuid() or time.time() - facts.st_mtime < _YOUNG_SECONDS:
                continue
            with (folder / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


def _make(environment: Mapping[str, str]) -> Path:
    refused: list[str] = []
    too_long: SocketPathError | None = None
    for place in dict.fromkeys((environment.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp")):
        if not place.startswith("/"):
            continue
        try:
            # criu runs the action script by its path, which a mount can forbid.
            if os.statvfs(place).f_flag & os.ST_NOEXEC:
                refused.append(f"{place} is mounted noexec")
                continue
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        except OSError as error:
            refused.append(f"{place}: {error.strerror or error}")
            continue
        try:
            check_socket_path(folder / _LONGEST_NAME)
        except SocketPathError as error:
            folder.rmdir()
            too_long = error
            continue
        return folder
    if too_long is not None:
        raise SocketPathError(too_long.what, remedy=_REMEDY)
    raise PermissionDeniedError(f"no place for a work folder ({'; '.join(refused)})", remedy=_REMEDY)
