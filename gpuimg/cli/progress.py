"""Progress: JSON lines on a file descriptor, a bar on a terminal, otherwise silence."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from gpuimg.errors import GpuimgError

if TYPE_CHECKING:
    from rich.progress import Progress

    from gpuimg.cli.context import State

INTERVAL = 0.1


class Reporter:
    """Tells that a command runs, how far it has come where that is known, and how it ended.

    Lines: ``{"event": "start", "command": …}``; ``{"event": "progress", "done": …, "total": …}``, at most
    ten a second; ``{"event": "end", "seconds": …}`` or ``{"event": "error", "error": …}``.
    """

    def __init__(self, state: State, command: str) -> None:
        self._command = command
        self._fd = state.progress_fd
        self._bar: Progress | None = None
        self._wants_bar = self._fd is None and not state.as_json and sys.stderr.isatty()
        self._started = 0.0
        self._end = threading.Event()
        self._poller: threading.Thread | None = None

    def __enter__(self) -> Reporter:
        self._started = time.monotonic()
        self._line({"event": "start", "command": self._command})
        if self._wants_bar:
            self._bar = _make_bar()
            self._bar.start()
            self._bar.add_task(self._command, total=None)
        return self

    def watch(self, done: Callable[[], int], total: Callable[[], int]) -> None:
        """Report from now on how many of how many bytes are done; 0 if nobody knows the total."""
        if self._fd is None and self._bar is None:
            return

        def poll() -> None:
            while not self._end.wait(INTERVAL):
                self._report(done(), total())

        self._poller = threading.Thread(target=poll, name="progress", daemon=True)
        self._poller.start()

    def _report(self, done: int, total: int) -> None:
        self._line({"event": "progress", "done": done, "total": total})
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total or None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._poller is not None:
            self._poller.join()
        if self._bar is not None:
            self._bar.stop()
        if error is None:
            self._line({"event": "end", "seconds": round(time.monotonic() - self._started, 3)})
        else:
            name = error.name if isinstance(error, GpuimgError) else "error"
            self._line({"event": "error", "error": name})

    def _line(self, event: dict[str, object]) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, json.dumps(event).encode() + b"\n")
        except OSError:
            self._fd = None  # nobody reads any more: no reason to stop the work


def _make_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
