"""Know which processes a criu has made, so that none of them outlives a restore that failed.

criu ends its tasks itself when a restore fails. It cannot when it is killed; then what it had forked waits
forever. The tree is looked at while criu lives, since afterwards nothing ties the tasks to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from gpuimg.errors import InputOutputError

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

_END_SECONDS = 5.0


class Family:
    """The processes below one criu.

    Parameters
    ----------
    criu
        Its PID; it must be alive.
    """

    def __init__(self, criu: int) -> None:
        self._criu = criu
        self._born = _birth(criu) or 0
        self._seen: dict[int, int] = {}

    def look(self) -> None:
        """Remember who is there now. Cheap: follows the children, and reads no other process."""
        below = [pid for pid, born in self._seen.items() if _birth(pid) == born]
        if _birth(self._criu) == self._born:
            below.append(self._criu)
        while below:
            for pid in _children(below.pop()):
                born = _birth(pid)
                if born is not None and self._seen.get(pid) != born:
                    self._seen[pid] = born
                    below.append(pid)

    def end(self) -> None:
        """Kill all that are left, collect those that are children of this process, and wait for them."""
        self.look()
        deadline = time.monotonic() + _END_SECONDS
        while left := [pid for pid, born in self._seen.items() if _birth(pid) == born]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > deadline:
                # Dead, but not collected by a parent that is none of ours; or stuck in the kernel.
                return
            time.sleep(0.005)


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


def _birth(pid: int) -> int | None:
    """Return when a process was born, in clock ticks since boot: with its PID that names it for good."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may hold anything; what follows the last one is numbers.
    return int(text[text.rindex(b")") + 2 :].split()[19])


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                children.extend(map(int, Path(task.path, "children").read_bytes().split()))
    except OSError:
        return children
    return children
