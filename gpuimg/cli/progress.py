"""Progress: JSON lines on a file descriptor, a bar on a terminal, otherwise silence."""

from __future__ import annotations

import json
import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from gpuimg.errors import GpuimgError

if TYPE_CHECKING:
    from rich.progress import Progress

    from gpuimg.cli.context import State

INTERVAL = 0.1


class Reporter:
    """Tells how far a command has come; call it with bytes done and bytes in all (0 if unknown).

    Lines: ``{"event": "start", "command": …}``; ``{"event": "progress", "done": …, "total": …}``, at most
    ten a second; ``{"event": "end", "seconds": …}`` or ``{"event": "error", "error": …}``.
    """

    def __init__(self, state: State, command: str) -> None:
        self._command = command
        self._fd = state.progress_fd
        self._bar: Progress | None = None
        self._wants_bar = self._fd is None and not state.as_json and sys.stderr.isatty()
        self._next = 0.0
        self._started = 0.0

    def __enter__(self) -> Reporter:
        self._started = time.monotonic()
        self._line({"event": "start", "command": self._command})
        if self._wants_bar:
            self._bar = _make_bar()
            self._bar.start()
            self._bar.add_task(self._command, total=None)
        return self

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next and done != total:
            return
        self._next = now + INTERVAL
        self._line({"event": "progress", "done": done, "total": total})
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total or None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
