"""Know which processes a criu has made, so that none of them outlives a restore that failed.

criu ends its tasks itself when a restore fails. It cannot when it is killed; then what it had forked waits
forever. The tree is looked at while criu lives, since afterwards nothing ties the tasks to it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_END_SECONDS = 5.0


class Family:
    """The processes below one criu.

    Parameters
    ----------
    criu
        Its PID.
    pidfile
        Where criu writes the root task's PID; the root need not be a child of criu.
    """

    def __init__(self, criu: int, pidfile: Path) -> None:
        self._criu = criu
        self._pidfile = pidfile
        self._seen: set[tuple[int, int]] = set()

    def look(self) -> None:
        """Remember who is there now."""
        table = _processes()
        children: dict[int, list[int]] = {}
        for pid, (parent, _) in table.items():
            children.setdefault(parent, []).append(pid)
        with contextlib.suppress(OSError, ValueError):
            root = int(self._pidfile.read_text())
            # A PID that criu wrote is a task of it only if it was born after criu.
            if root in table and self._criu in table and table[root][1] >= table[self._criu][1]:
                self._seen.add((root, table[root][1]))
        below = [self._criu, *(pid for pid, born in self._seen if table.get(pid, (0, -1))[1] == born)]
        while below:
            for pid in children.get(below.pop(), ()):
                if (pid, table[pid][1]) not in self._seen:
                    self._seen.add((pid, table[pid][1]))
                    below.append(pid)

    def alive(self) -> set[int]:
        """Return those that were seen and still are there; the birth time tells a PID used again."""
        table = _processes()
        return {pid for pid, born in self._seen if pid in table and table[pid][1] == born}

    def end(self) -> None:
        """Kill all that are left, and wait until they are gone."""
        deadline = time.monotonic() + _END_SECONDS
        while (left := self.alive()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)


def _processes() -> dict[int, tuple[int, int]]:
    """Return parent and birth time (clock ticks since boot) of every process."""
    table: dict[int, tuple[int, int]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            text = Path(entry.path, "stat").read_bytes()
        except OSError:
            continue
        # The name, in parentheses, may hold anything; what follows the last one is numbers.
        fields = text[text.rindex(b")") + 2 :].split()
        table[int(entry.name)] = (int(fields[1]), int(fields[19]))
    return table
