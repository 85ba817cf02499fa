"""Real processes and real criu, in both versions that `make criu` fetches."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuimg.criu.locate import Criu, find_criu

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = Path(__file__).with_name("processes")
SUITES = ("trixie", "sid")
PR_SET_CHILD_SUBREAPER = 36
NOBODY = 65534


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
    adopt_orphans()
    return find_criu(launcher)


_collected: set[int] = set()


def adopt_orphans() -> None:
    """Do here what init does: collect restored processes, and the children of killed ones, as they die.

    Some inits take seconds for it, and some never do; until then their PIDs are taken.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def body() -> None:
        while True:
            for pid in list(_collected):
                collect(pid)
            time.sleep(0.01)

    if not any(thread.name == "init" for thread in threading.enumerate()):
        threading.Thread(target=body, name="init", daemon=True).start()


def collect(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def state(pid: int) -> str:
    """The state letter of a process; empty when there is none."""
    collect(pid)
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
        self.pids = descendants(self.pid)
        _collected.update(self.pids)

    def count(self) -> int:
        try:
            return int((self.folder / "count").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def alive(self) -> bool:
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
        told = (self.folder / "checked").read_text()
        assert told.startswith("good"), told

    def remember_files(self) -> None:
        """Once it is dumped: criu wants the files that were open as they were."""
        self._files = {path: path.read_bytes() for path in self.folder.iterdir() if path.is_file()}

    def put_files_back(self) -> None:
        """Before it is restored once more."""
        for path in self.folder.iterdir():
            if path.is_file() and path not in self._files:
                path.unlink()
        for path, data in self._files.items():
            path.write_bytes(data)

    def kill(self) -> None:
        ours = {os.getpid(), *self.pids}
        for pid in {*descendants(self.pid), *(pid for pid in self.pids if parent(pid) in ours)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.assert_gone()
        self._child.wait()


def parent(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text[text.rindex(")") + 2 :].split()[1])


def children(pid: int) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [other for other in pids if parent(other) == pid]


def descendants(pid: int) -> list[int]:
    """The process itself first."""
    return [pid, *(below for child in children(pid) for below in descendants(child))]


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
    """Start test processes: start(), start("counter", mib=64), start("tree"), start("world")."""
    started: list[Victim] = []

    def go(kind: str = "native", *, mib: int = 1) -> Victim:
        folder = tmp_path / f"process-{len(started)}"
        folder.mkdir()
        python = [sys.executable, "-I", "-S"]
        command = {
            "native": [*native, str(folder), str(mib)],
            "counter": [*python, str(PROCESSES / "counter.py"), str(folder), str(mib)],
            "tree": [*python, str(PROCESSES / "tree.py"), str(folder)],
            "world": [*python, str(PROCESSES / "world.py"), str(folder)],
        }[kind]
        victim = Victim(folder, command)
        started.append(victim)
        return victim

    yield go
    for victim in started:
        victim.kill()
        _collected.difference_update(victim.pids)


class Gpuimg:
    """The executable, with a store and a place for work folders of its own.

    Attributes
    ----------
    store
        Its store, made already.
    runtime
        Where its work folders are while a command runs.
    environment
        What it is started with.
    """

    executable = Path(sys.executable).with_name("gpuimg")
    streamer = Path(sys.executable).with_name("gpuimg-image-streamer")

    def __init__(self, folder: Path, runtime: Path, criu: Criu | None = None) -> None:
        self.store = folder / "store"
        self.runtime = runtime
        self.environment = {
            **os.environ,
            "GPUIMG_STORE": str(self.store),
            "XDG_RUNTIME_DIR": str(runtime),
            "GPUIMG_CRIU": str(criu.path) if criu else "",
        }
        self("init")

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        """Start a command; standard output and error are pipes unless `options` say otherwise."""
        command = [str(self.executable), *map(str, arguments)]
        fixed = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, **{"env": self.environment, "text": True} | fixed | options)

    def finish(self, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        out, err = process.communicate(timeout=120)
        assert "Traceback" not in (err or ""), err
        return subprocess.CompletedProcess(process.args, process.returncode, out or "", err or "")

    def run(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.finish(self.start(*arguments, **options))

    def __call__(self, *arguments: object, **options: Any) -> str:
        """Run a command that succeeds and has nothing to complain about; return what it prints."""
        done = self.run(*arguments, **options)
        assert (done.returncode, done.stderr) == (0, ""), (done.returncode, done.stderr, done.stdout)
        return done.stdout

    def json(self, *arguments: object, **options: Any) -> Any:
        return json.loads(self("--json", *arguments, **options))

    def refuses(self, status: int, *arguments: object, **options: Any) -> str:
        """Run a command that fails with `status` and one sentence; return the sentence."""
        done = self.run(*arguments, **options)
        assert done.returncode == status, (done.returncode, done.stderr, done.stdout)
        assert done.stderr.startswith("gpuimg: ") and done.stderr.count("\n") == 1, done.stderr
        return done.stderr


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A short path for work folders, in which nothing is left behind."""
    folder = Path(tempfile.mkdtemp(prefix="gpuimg-test-", dir="/tmp"))
    yield folder
    left = [str(path) for path in folder.rglob("*")]
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture
def gpuimg(tmp_path: Path, runtime: Path, criu: Criu) -> Gpuimg:
    """gpuimg with an empty store and the criu under test."""
    return Gpuimg(tmp_path, runtime, criu)


def as_nobody() -> list[str]:
    """The start of a command that runs as nobody; with a capability to read, where Python is root's own."""
    command = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    if subprocess.run([*command, Gpuimg.executable, "--version"], capture_output=True).returncode:
        command += ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    return command
