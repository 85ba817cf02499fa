"""Know which processes a criu has made, so that none of them outlives a restore that failed.

criu ends its tasks itself when a restore fails. It cannot when it is killed; then what it had forked waits
forever. The tree is looked at while criu lives, since afterwards only a mark in the environment of the
youngest ties the tasks to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from gpuimg.errors import InputOutputError

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

_END_SECONDS = 5.0

# Every criu that this process has started and not yet waited for.
_running: set[int] = set()


class Family:
    """The processes below one criu.

    Parameters
    ----------
    criu
        Its PID; it must be alive.
    mark
        A `NAME=value` that is in criu's environment and in no other's. What criu forks carries it until it
        has got the memory of the task that it becomes.
    """

    def __init__(self, criu: int, mark: str) -> None:
        self._criu = criu
        self._mark = os.fsencode(mark)
        self._born = _birth(criu) or 0
        self._names: set[bytes] = set()
        self._seen: dict[int, int] = {}
        _running.add(criu)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _running.discard(self._criu)

    def look(self) -> None:
        """Remember who is there now. Cheap: follows the children, and reads no other process."""
        below = [pid for pid, born in self._seen.items() if _birth(pid) == born]
        criu = _stat(self._criu)
        if criu and int(criu[20]) == self._born:
            self._names.add(criu[0])
            below.append(self._criu)
        while below:
            for pid in _children(below.pop()):
                born = _birth(pid)
                if born is not None and self._seen.get(pid) != born:
                    self._seen[pid] = born
                    below.append(pid)

    def end(self) -> None:
        """When criu is gone: kill all that are left and wait for them."""
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            # Stopped first, and looked at again: what is stopped cannot fork behind our back.
            before = len(self._seen)
            self.look()
            self._look_for_mark()
            self._look_for_orphans()
            left = [pid for pid, born in self._seen.items() if _birth(pid) == born]
            if not left:
                return
            settled = len(self._seen) == before
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL if settled else signal.SIGSTOP)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if settled:
                time.sleep(0.005)

    def _look_for_mark(self) -> None:
        """Find those that were forked after the last look: at worst all of them, if criu died just then."""
        for entry in os.scandir("/proc"):
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                if self._mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    born = _birth(int(entry.name))
                    if born is not None and born >= self._born:
                        self._seen[int(entry.name)] = born

    def _look_for_orphans(self) -> None:
        """Find what fell to this process as a subreaper: dead or dying, and so without an environment.

        Such a one still has the name of the criu that it was forked from. Another criu of this process has
        it as well, and is left alone.
        """
        for pid in _children(os.getpid()):
            fields = _stat(pid)
            if fields and fields[0] in self._names and int(fields[20]) >= self._born and pid not in _running:
                self._seen[pid] = int(fields[20])


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Make this process inherit the orphans among its descendants, in place of init."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise InputOutputError(
            f"this process cannot become a subreaper: {os.strerror(ctypes.get_errno())}",
            remedy="restore detached instead",
        )
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _stat(pid: int) -> list[bytes]:
    """Return name and numbers of /proc/PID/stat, without the PID; empty when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    # The name, in parentheses, may hold anything, parentheses included.
    begin, end = text.index(b"(") + 1, text.rindex(b")")
    return [text[begin:end], *text[end + 2 :].split()]


def _birth(pid: int) -> int | None:
    """Return when a process was born, in clock ticks since boot: with its PID that names it for good."""
    fields = _stat(pid)
    return int(fields[20]) if fields else None


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                children.extend(map(int, Path(task.path, "children").read_bytes().split()))
    except OSError:
        return children
    return children
