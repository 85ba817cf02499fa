"""Real processes and real criu, in both versions that `make criu` fetches."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuimg.criu.locate import Criu, find_criu

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = Path(__file__).with_name("processes")
SUITES = ("trixie", "sid")


@pytest.fixture(scope="session", params=SUITES)
def criu(request: pytest.FixtureRequest) -> Criu:
    """A criu of `make criu`; fetched here if it is missing."""
    if os.geteuid() != 0:
        pytest.skip("criu needs root, and these tests run as another user")
    launcher = ROOT / ".criu" / request.param / "bin" / "criu"
    if not launcher.exists():
        fetched = subprocess.run(
            [sys.executable, "-m", "scripts.fetch_criu", request.param],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert fetched.returncode == 0, fetched.stderr
    return find_criu(launcher)


def state(pid: int) -> str:
    """The state letter of a process; empty when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text[text.rindex(")") + 2]


def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


class Victim:
    """A test process that lies in wait to be dumped, and tells by files in `folder` how it is."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder = folder
        with (folder / "output").open("wb") as output:
            # As a service is started: no terminal, a session of its own.
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
            )
        self.pid = self._child.pid
        until(lambda: self.count() > 0, "the test process is up")
        self.pids = [self.pid, *children(self.pid)]

    def count(self) -> int:
        try:
            return int((self.folder / "count").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def reap(self) -> None:
        """Collect it if it is this process's child and dead, so that its PID is free again."""
        self._child.poll()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)

    def alive(self) -> bool:
        self.reap()
        return state(self.pid) not in ("", "Z", "X")

    def assert_runs(self) -> None:
        assert self.alive()
        before = self.count()
        until(lambda: self.count() > before, f"process {self.pid} counts on (state {state(self.pid)})")

    def assert_gone(self) -> None:
        """Wait until its PIDs can be used again: dead children of a dead parent are for init to collect."""
        until(lambda: not self.alive() and not any(map(state, self.pids)), f"process {self.pid} is gone")

    def assert_whole(self) -> None:
        """Let it compare its memory with what it put there."""
        (self.folder / "checked").unlink(missing_ok=True)
        (self.folder / "check").touch()
        until((self.folder / "checked").exists, "the process has checked its memory")
        assert (self.folder / "checked").read_text().startswith("good")

    def kill(self) -> None:
        for pid in [self.pid, *children(self.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.assert_gone()


def parent(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text[text.rindex(")") + 2 :].split()[1])


def children(pid: int) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [other for other in pids if parent(other) == pid]


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of the C counter; the Python one where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return [sys.executable, "-I", "-S", str(PROCESSES / "counter.py")]
    program = tmp_path_factory.mktemp("native") / "native"
    subprocess.run([compiler, "-O2", "-o", program, PROCESSES / "native.c"], check=True)
    return [str(program)]


Start = Callable[..., Victim]


@pytest.fixture
def start(tmp_path: Path, native: list[str]) -> Iterator[Start]:
    """Start test processes: start(), start("counter", mib=64), start("tree")."""
    started: list[Victim] = []

    def go(kind: str = "native", *, mib: int = 1) -> Victim:
        folder = tmp_path / f"process-{len(started)}"
        folder.mkdir()
        python = [sys.executable, "-I", "-S"]
        command = {
            "native": [*native, str(folder), str(mib)],
            "counter": [*python, str(PROCESSES / "counter.py"), str(folder), str(mib)],
            "tree": [*python, str(PROCESSES / "tree.py"), str(folder)],
        }[kind]
        victim = Victim(folder, command)
        started.append(victim)
        return victim

    yield go
    for victim in started:
        victim.kill()
