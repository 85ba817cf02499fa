"""What users meet: criu refuses a process, and gpuimg says why and what to do. The process runs on."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuimg.criu.folder import work_folder
from gpuimg.criu.locate import Criu
from gpuimg.criu.runner import run_dump, run_restore
from gpuimg.errors import CriuFailedError

from .conftest import Start, state, until
from .memory_streamer import MemoryCapture, MemoryServe

pytestmark = pytest.mark.root
ROOT = Path(__file__).resolve().parents[2]

# Each holds something that criu takes only with an option, in a process that starts like a service.
HOLDERS = {
    "tcp": (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\n"
        "peer = server.accept()\n",
        "-- --tcp-established",
    ),
    "lock": (
        "import fcntl\nfile = open(folder + '/lock', 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n",
        "-- --file-locks",
    ),
    "ghost": (
        "file = open(folder + '/ghost', 'wb')\nos.remove(folder + '/ghost')\nfile.write(b'x' * (4 << 20))\n"
        "file.flush()\n",
        "-- --ghost-limit",
    ),
    "link": (
        "file = open(folder + '/a', 'wb')\nos.link(folder + '/a', folder + '/b')\nos.remove(folder + '/a')\n",
        "-- --link-remap",
    ),
}

LOOP = """
import os, sys, time
folder = sys.argv[1]
{hold}
count = 0
while True:
    count += 1
    with open(folder + '/count.new', 'w') as out:
        out.write(str(count))
    os.rename(folder + '/count.new', folder + '/count')
    time.sleep(0.02)
"""


class Holder:
    def __init__(self, folder: Path, hold: str, **options: object) -> None:
        self.folder = folder
        self.child = subprocess.Popen(  # type: ignore[call-overload]
            [sys.executable, "-I", "-S", "-c", LOOP.format(hold=hold), str(folder)],
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            | {"start_new_session": True, "cwd": "/"}
            | options,
        )
        self.pid: int = self.child.pid
        until(lambda: self.count() > 0, "the holder is up")

    def count(self) -> int:
        try:
            return int((self.folder / "count").read_text())
        except FileNotFoundError:
            return 0

    def assert_runs(self) -> None:
        before = self.count()
        until(lambda: self.count() > before, f"it counts on (state {state(self.pid)})")

    def end(self) -> None:
        self.child.kill()
        self.child.wait()


def dump_fails(criu: Criu, pid: int) -> CriuFailedError:
    with work_folder() as folder:
        capture = MemoryCapture(folder)
        with pytest.raises(CriuFailedError) as caught:
            run_dump(criu, pid, folder, on_post_dump=lambda: None)
        capture.close()
    return caught.value


@pytest.fixture
def ends() -> Iterator[list[Holder]]:
    holders: list[Holder] = []
    yield holders
    for holder in holders:
        holder.end()


@pytest.mark.parametrize("kind", HOLDERS)
def test_the_option_that_is_missing_is_named(
    criu: Criu, tmp_path: Path, kind: str, ends: list[Holder]
) -> None:
    hold, remedy = HOLDERS[kind]
    holder = Holder(tmp_path, hold)
    ends.append(holder)
    error = dump_fails(criu, holder.pid)
    if "sockets: Can't get" in error.what:
        # Kernels from 6.16 on refuse a socket option for which criu before 4.2 asks.
        assert criu.version < (4, 2)
        remedy = "use criu 4.2"
    assert remedy in error.remedy, str(error)
    holder.assert_runs()


SHELL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if os.fork():
    os.wait()
    sys.exit()
with open(folder + '/pid', 'w') as out:
    out.write(str(os.getpid()))
"""


def test_a_job_of_a_terminal(criu: Criu, tmp_path: Path, ends: list[Holder]) -> None:
    leader, terminal = pty.openpty()
    try:
        holder = Holder(tmp_path, SHELL, stdin=terminal, stdout=terminal, stderr=terminal)
        ends.append(holder)
        error = dump_fails(criu, int((tmp_path / "pid").read_text()))
        assert "-- --shell-job" in error.remedy, str(error)
        holder.assert_runs()
    finally:
        os.close(terminal)
        os.close(leader)


def test_an_option_that_criu_does_not_know(criu: Criu, start: Start) -> None:
    victim = start()
    with work_folder() as folder:
        capture = MemoryCapture(folder)
        with pytest.raises(CriuFailedError, match="nonsense"):
            run_dump(criu, victim.pid, folder, on_post_dump=lambda: None, extra_args=["--nonsense"])
        capture.close()
    victim.assert_runs()


def test_no_streamer(criu: Criu, start: Start) -> None:
    victim = start()
    with work_folder() as folder, pytest.raises(CriuFailedError, match="image streamer socket"):
        run_dump(criu, victim.pid, folder, on_post_dump=lambda: None)
    victim.assert_runs()


@pytest.mark.parametrize("change", ["grown", "gone"])
def test_a_file_that_is_not_what_it_was(criu: Criu, tmp_path: Path, change: str) -> None:
    held = tmp_path / "held"
    held.write_text("as it was")
    holder = Holder(tmp_path, "file = open(folder + '/held')")
    files: dict[str, bytes] = {}
    with work_folder() as folder:
        capture = MemoryCapture(folder)
        run_dump(criu, holder.pid, folder, on_post_dump=lambda: files.update(capture.complete()))
        capture.close()
    holder.child.wait()
    if change == "grown":
        held.write_text("something else entirely")
    else:
        held.unlink()
    with work_folder() as folder:
        serve = MemoryServe(folder, files)
        with pytest.raises(CriuFailedError) as caught:
            run_restore(criu, folder, on_post_restore=lambda: None, detach=True)
        serve.close()
    assert "held" in caught.value.what
    assert "put " in caught.value.remedy, str(caught.value)
    until(lambda: not state(holder.pid), "nothing is left")


def test_a_shell_job_comes_back_in_another_terminal(criu: Criu, tmp_path: Path, native: list[str]) -> None:
    process, images = tmp_path / "process", tmp_path / "images"
    process.mkdir()
    images.mkdir()
    shell, terminal = pty.fork()
    if shell == 0:
        # A shell that starts one job in its terminal.
        job = subprocess.Popen([*native, str(process), "1"], cwd="/")
        job.wait()
        os._exit(0)
    until((process / "count").exists, "the job is up")
    pid = int((process / "pid").read_text())
    with work_folder() as folder:
        capture = MemoryCapture(folder)

        def keep() -> None:
            for name, data in capture.complete().items():
                (images / name).write_bytes(data)

        run_dump(criu, pid, folder, on_post_dump=keep, extra_args=["--shell-job"])
        capture.close()
    os.waitpid(shell, 0)
    os.close(terminal)
    count = int((process / "count").read_text())
    shell, terminal = pty.fork()
    if shell == 0:
        os.chdir(ROOT)
        program = [sys.executable, "-m", "tests.e2e.restore_files", str(criu.path), str(images)]
        os.execv(program[0], [*program, "--shell-job"])
    until(lambda: int((process / "count").read_text()) > count, "the job goes on")
    assert Path(f"/proc/{pid}/fd/0").readlink() == Path(f"/proc/{shell}/fd/0").readlink()
    (process / "exit").write_text("5")
    assert os.waitstatus_to_exitcode(os.waitpid(shell, 0)[1]) == 5
    os.close(terminal)
