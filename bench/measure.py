"""Running whole processes and what they cost."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LAUNCHER = Path(__file__).with_name("launch.py")
TIMEOUT = 3600.0


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, where and how it runs."""

    argv: list[str]
    cwd: Path | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cost:
    """One run: wall-clock and CPU seconds, peak resident bytes."""

    seconds: float
    cpu: float
    rss: int


class CommandFailedError(Exception):
    """A measured command ended with an error."""


class Running:
    """A command that runs; `wait` says what it cost."""

    def __init__(self, command: Command, *, stdin: int | None = subprocess.DEVNULL) -> None:
        self._command = command
        self._result, report = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(LAUNCHER), str(report), *command.argv],
            cwd=command.cwd,
            env=os.environ | command.env,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[report],
        )
        os.close(report)

    def ended(self) -> bool:
        """Whether the command has ended."""
        return self._process.poll() is not None

    def wait(self) -> Cost:
        """The cost; CommandFailedError with the end of its output if it failed."""
        try:
            output, _ = self._process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise CommandFailedError(f"{self._command.argv[0]} took over an hour") from None
        with os.fdopen(self._result) as stream:
            report = json.loads(stream.read() or '{"status": "lost"}')
        if report.pop("status") != 0:
            text = output.decode(errors="replace").strip().splitlines()
            raise CommandFailedError(
                f"`{' '.join(self._command.argv[:4])} …` failed: {' | '.join(text[-3:])}"
            )
        return Cost(**report)


def run(command: Command) -> Cost:
    """Run a command to its end."""
    return Running(command).wait()


def sync_tree(path: Path) -> float:
    """fsync every file and folder below `path`; seconds. For programs that do not do it themselves."""
    started = time.monotonic()
    for folder, _, files in os.walk(path):
        for name in [*files, "."]:
            fd = os.open(Path(folder) / name, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    return time.monotonic() - started


def tree_size(path: Path) -> int:
    """Bytes that the files below `path` take (allocated, so holes do not count)."""
    found = [item.lstat() for item in path.rglob("*") if item.is_file() and not item.is_symlink()]
    return sum(min(item.st_size, item.st_blocks * 512) for item in found)


@dataclass
class Series:
    """Repeated runs of the same thing."""

    costs: list[Cost] = field(default_factory=list)

    def median(self, what: str = "seconds") -> float:
        return float(statistics.median(getattr(cost, what) for cost in self.costs))

    def spread(self, what: str = "seconds") -> tuple[float, float]:
        values = [getattr(cost, what) for cost in self.costs]
        return min(values), max(values)

    def report(self) -> dict[str, Any]:
        return {
            "median_seconds": self.median(),
            "min_seconds": self.spread()[0],
            "max_seconds": self.spread()[1],
            "median_cpu": self.median("cpu"),
            "max_rss": int(self.spread("rss")[1]),
            "runs": [asdict(cost) for cost in self.costs],
        }
