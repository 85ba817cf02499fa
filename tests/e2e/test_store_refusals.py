"""What cannot be done ends with a status of its own and one sentence, and hurts no process and no store."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import NOBODY, ROOT, Gpuimg, Start, as_nobody, state, until
from .test_criu_failures import Holder

pytestmark = pytest.mark.root

with_one_criu = pytest.mark.parametrize("criu", ["trixie"], indirect=True)

PTRACE_SEIZE = 0x4206


def assert_untouched(gpuimg: Gpuimg) -> None:
    assert gpuimg.json("ls") == {"checkpoints": []}
    assert gpuimg("verify").startswith("clean: 0 checkpoints")


@with_one_criu
def test_what_is_no_process_of_its_own(gpuimg: Gpuimg, start: Start) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    told = gpuimg.refuses(22, "dump", "-t", ended.pid, "--tag", "t")
    assert f"there is no process {ended.pid};" in told
    assert "thread of the kernel" in gpuimg.refuses(22, "dump", "-t", 2, "--tag", "t")
    victim = start("tree")
    [worker] = victim.pids[1:]
    thread = max(int(task.name) for task in Path(f"/proc/{worker}/task").iterdir())
    told = gpuimg.refuses(22, "dump", "-t", thread, "--tag", "t")
    assert f"{thread} is a thread of process {worker};" in told
    assert "gpuimg itself" in gpuimg.refuses(2, "dump", "-t", os.getpid(), "--tag", "t")
    dead = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    assert "there is no process" in gpuimg.refuses(22, "dump", "-t", dead.pid, "--tag", "t")
    dead.wait()
    victim.assert_runs()
    assert_untouched(gpuimg)


def test_a_process_that_a_debugger_holds(gpuimg: Gpuimg, start: Start) -> None:
    victim = start()
    assert ctypes.CDLL(None).ptrace(PTRACE_SEIZE, victim.pid, None, None) == 0
    told = gpuimg.refuses(21, "dump", "-t", victim.pid, "--tag", "t")
    assert "another program traces it" in told
    victim.assert_runs()
    assert_untouched(gpuimg)


@with_one_criu
def test_no_criu_anywhere(gpuimg: Gpuimg, start: Start, tmp_path: Path) -> None:
    """As on a machine without it: the checkout's folder is empty, and so are PATH and the system's places."""
    victim = start()
    empty = tmp_path / "empty"
    empty.mkdir()
    hide = [f"mount --bind {shlex.quote(str(empty))} {shlex.quote(str(ROOT / '.criu'))}"]
    for place in ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/bin"):
        if os.access(f"{place}/criu", os.F_OK):
            hide.append(f"mount --bind /dev/null {place}/criu")
    for arguments in (f"dump -t {victim.pid} --tag t", "restore t"):
        if arguments == "restore t":
            gpuimg("dump", "-t", victim.pid, "--tag", "t", "--leave-running")
        script = "; ".join(["set -e", *hide, f"PATH=/nowhere HOME=/ exec {gpuimg.executable} {arguments}"])
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script],
            env=gpuimg.environment | {"GPUIMG_CRIU": ""},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 19, done.stderr
        assert done.stderr.startswith("gpuimg: no criu that starts was found")
        assert "make criu" in done.stderr and done.stderr.count("\n") == 1
    victim.assert_runs()


@with_one_criu
def test_a_criu_that_is_missing_broken_or_too_old(gpuimg: Gpuimg, start: Start, tmp_path: Path) -> None:
    victim = start()
    dump = ["dump", "-t", victim.pid, "--tag", "t"]
    assert "/nowhere/criu" in gpuimg.refuses(19, *dump, "--criu", "/nowhere/criu")
    gpuimg.environment["GPUIMG_CRIU"] = "/nowhere/criu"
    assert "/nowhere/criu" in gpuimg.refuses(19, *dump)
    fake = tmp_path / "criu"
    for text, status, part in (
        ("echo Version: 3.14", 20, "3.14"),
        ("echo cannot open libnl >&2; exit 127", 19, "cannot open libnl"),
        ("kill -ILL $$", 19, "killed by signal 4"),
    ):
        fake.write_text(f"#!/bin/sh\n{text}\n")
        fake.chmod(0o755)
        assert part in gpuimg.refuses(status, *dump, "--criu", fake)
    victim.assert_runs()
    assert_untouched(gpuimg)


def test_options_that_criu_does_not_take(gpuimg: Gpuimg, start: Start) -> None:
    victim = start()
    dump = ["dump", "-t", victim.pid, "--tag", "t"]
    assert "nonsense" in gpuimg.refuses(21, *dump, "--", "--nonsense")
    assert "gpuimg sets criu's option --tree itself" in gpuimg.refuses(2, *dump, "--", "--tree", "7")
    assert "gpuimg sets criu's option -D itself" in gpuimg.refuses(2, *dump, "--", "-D/tmp")
    assert "--track-mem does not work" in gpuimg.refuses(2, *dump, "--", "--track-mem")
    assert "go behind `--`" in gpuimg.refuses(2, *dump, "shell-job")
    assert "tcp-established" in gpuimg.refuses(2, *dump, "--tcp-established")
    victim.assert_runs()
    assert_untouched(gpuimg)
    gpuimg(*dump)
    victim.assert_gone()
    assert "nonsense" in gpuimg.refuses(21, "restore", "t", "--", "--nonsense")
    gpuimg("restore", "t", "--detach")
    victim.assert_runs()


@with_one_criu
def test_a_bad_tag_is_told_before_anything_is_done(gpuimg: Gpuimg, start: Start) -> None:
    victim = start()
    for tag in ("../x", "a/b", "", "."):
        gpuimg.refuses(8, "dump", "-t", victim.pid, "--tag", tag)
    gpuimg.refuses(6, "restore", "nothing")
    gpuimg.refuses(3, "--store", gpuimg.store / "packs", "dump", "-t", victim.pid, "--tag", "t")
    victim.assert_runs()
    assert_untouched(gpuimg)


def test_a_pid_that_is_in_use(gpuimg: Gpuimg, start: Start) -> None:
    victim = start("tree")
    gpuimg("dump", "-t", victim.pid, "--tag", "t", "--leave-running")
    for options in ([], ["--detach"]):
        told = gpuimg.refuses(21, "restore", "t", *options)
        assert f"{victim.pid}" in told
        assert "a PID of the checkpoint is in use" in told
        victim.assert_runs()
    # A PID further down the tree as well: then the root is there already, and has to go again.
    worker = victim.pids[1]
    os.kill(victim.pid, signal.SIGSTOP)
    os.kill(worker, signal.SIGSTOP)
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: not state(victim.pid), "the root is gone")
    told = gpuimg.refuses(21, "restore", "t")
    assert "a PID of the checkpoint is in use" in told
    assert not state(victim.pid)
    assert state(worker) == "T"


def test_an_images_directory_without_processes(gpuimg: Gpuimg, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "some.img").write_bytes(b"no image")
    gpuimg("import", folder, "--tag", "t")
    assert "has no inventory.img" in gpuimg.refuses(18, "restore", "t")
    (folder / "inventory.img").write_bytes(b"no image either")
    gpuimg("import", folder, "--tag", "u")
    assert "criu restore ended with status 1" in gpuimg.refuses(21, "restore", "u")


# Jobs of a terminal


class Terminal:
    """A new terminal; `command` becomes the leader of its session."""

    def __init__(self, gpuimg: Gpuimg, *command: object) -> None:
        self.shown = b""
        self._leader, follower = pty.openpty()
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *map(str, command)],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=gpuimg.environment,
        )
        os.close(follower)
        os.set_blocking(self._leader, False)

    def shows(self, text: bytes) -> bool:
        with contextlib.suppress(OSError):
            self.shown += os.read(self._leader, 65536)
        return text in self.shown

    def close(self) -> None:
        os.close(self._leader)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


SHELL_JOB = """
import os, sys, time
child = os.fork()
if child:
    open(sys.argv[1], 'w').write(str(child))
    os.waitpid(child, 0)
    time.sleep(1000)
while True:
    print('I am', os.getpid(), flush=True)
    time.sleep(0.05)
"""


def test_a_job_of_a_terminal_needs_an_option_and_moves_to_another_terminal(
    gpuimg: Gpuimg, tmp_path: Path, terminals: list[Terminal]
) -> None:
    first = Terminal(gpuimg, sys.executable, "-I", "-S", "-c", SHELL_JOB, tmp_path / "pid")
    terminals.append(first)
    until(lambda: first.shows(b"I am"), "the job runs")
    pid = int((tmp_path / "pid").read_text())
    told = gpuimg.refuses(21, "dump", "-t", pid, "--tag", "t")
    assert "add `-- --shell-job`" in told
    first.shown = b""
    until(lambda: first.shows(b"I am %d" % pid), "the job runs on")
    assert_untouched(gpuimg)

    gpuimg("dump", "-t", pid, "--tag", "t", "--", "--shell-job")
    until(lambda: not state(pid), "the job is gone")
    second = Terminal(gpuimg, gpuimg.executable, "restore", "t", "--", "--shell-job")
    terminals.append(second)
    until(lambda: second.shows(b"I am %d" % pid), f"it writes to the new terminal: {second.shown!r}")
    os.kill(pid, signal.SIGTERM)
    assert second.process.wait(20) == 128 + signal.SIGTERM


# Another user


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A folder of the user nobody."""
    folder = Path(tempfile.mkdtemp(prefix="gpuimg-test-", dir="/tmp"))
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


@with_one_criu
def test_a_user_who_is_not_root_is_told_so(gpuimg: Gpuimg, start: Start, theirs: Path) -> None:
    victim = start()
    gpuimg("dump", "-t", victim.pid, "--tag", "t", "--leave-running")
    nobody = as_nobody()
    environment = gpuimg.environment | {"HOME": str(theirs), "XDG_RUNTIME_DIR": str(theirs)}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [*nobody, gpuimg.executable, "--store", *arguments]
        return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)

    own = theirs / "store"
    assert run(own, "init").returncode == 0
    images = theirs / "images"
    images.mkdir()
    (images / "inventory.img").write_bytes(b"anything")
    assert run(own, "import", images, "--tag", "t").returncode == 0
    for store in (own, gpuimg.store):
        for arguments in (["dump", "-t", victim.pid, "--tag", "x"], ["restore", "t"]):
            done = run(store, *arguments)
            assert done.returncode == 13, (store, arguments, done.stderr)
            assert done.stderr.startswith("gpuimg: ") and done.stderr.count("\n") == 1
            assert "root" in done.stderr
    victim.assert_runs()
    assert sorted(path.name for path in theirs.iterdir()) == ["images", "store"]


def test_a_holder_of_a_lock_is_told_of_the_option(gpuimg: Gpuimg, tmp_path: Path) -> None:
    holder = Holder(
        tmp_path, "import fcntl\nfile = open(folder + '/lock', 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
    )
    try:
        told = gpuimg.refuses(21, "dump", "-t", holder.pid, "--tag", "t")
        assert "add `-- --file-locks`" in told
        holder.assert_runs()
    finally:
        holder.end()
