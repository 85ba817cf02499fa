"""The channel on which life and death of the tasks hangs."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuimg.criu.control import Control, Question
from gpuimg.criu.folder import check_socket_path, work_folder
from gpuimg.criu.runner import check_extra_args
from gpuimg.errors import PermissionDeniedError, SocketPathError, UsageError


@pytest.fixture
def control() -> Iterator[Control]:
    with work_folder() as folder:
        made = Control(folder, "post-dump")
        yield made
        made.close()


def run_script(control: Control, stage: str, decide: Callable[[Question], None] | None) -> int:
    """Run the script as criu does; answer with `decide`, or not at all."""
    environment = os.environ | {"CRTOOLS_SCRIPT_ACTION": stage, "CRTOOLS_INIT_PID": "42"}
    script = subprocess.Popen([control.script], env=environment, stderr=subprocess.DEVNULL)
    while decide is not None and script.poll() is None:
        control.answer(decide)
        time.sleep(0.002)
    return script.wait(timeout=10)


def test_the_script_succeeds_with_a_good_verdict_only(control: Control) -> None:
    asked: list[Question] = []
    assert run_script(control, "post-dump", asked.append) == 0
    assert asked == [Question("post-dump", 42)]


def test_an_exception_is_a_refusal(control: Control) -> None:
    def refuse(_: Question) -> None:
        raise KeyboardInterrupt

    assert run_script(control, "post-dump", refuse) == 1


def test_other_stages_succeed_at_once(control: Control) -> None:
    for stage in ("pre-stream", "pre-dump", "network-lock", "post-resume"):
        assert run_script(control, stage, None) == 0
    assert not control.asked


def test_nobody_there_is_a_refusal(control: Control) -> None:
    control.close()
    assert run_script(control, "post-dump", None) == 1


def test_a_gpuimg_that_dies_while_asked_is_a_refusal(control: Control) -> None:
    threading.Timer(0.2, control.close).start()
    assert run_script(control, "post-dump", None) == 1


def test_a_second_question_is_refused(control: Control) -> None:
    assert run_script(control, "post-dump", lambda _: None) == 0
    assert run_script(control, "post-dump", lambda _: None) == 1


@pytest.mark.parametrize("line", [b"", b"post-dump\n", b"pre-dump 1\n", b"post-dump x\n", b"a" * 64])
def test_a_malformed_question_decides_nothing(control: Control, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(control.script.with_name("control.sock")))
        client.sendall(line)
        client.shutdown(socket.SHUT_WR)
        assert control.answer(lambda _: pytest.fail("it was taken for a question")) is None
        assert client.recv(10) == b""
    assert not control.asked


def test_folder_and_socket_are_private(control: Control) -> None:
    folder = control.script.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "control.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE(control.script.stat().st_mode) == 0o700


def test_the_work_folder_is_gone_afterwards() -> None:
    with work_folder() as folder:
        (folder / "file").touch()
    assert not folder.exists()


def test_a_long_runtime_folder_is_passed_over(tmp_path: Path) -> None:
    place = tmp_path / ("x" * 100)
    place.mkdir()
    with work_folder(environment={"XDG_RUNTIME_DIR": str(place)}) as folder:
        assert place not in folder.parents
    assert not list(place.iterdir())


def test_a_runtime_folder_of_ones_own_is_used() -> None:
    place = Path("/tmp") / f"gpuimg-test-{os.getpid()}"
    place.mkdir()
    try:
        with work_folder(environment={"XDG_RUNTIME_DIR": str(place)}) as folder:
            assert folder.parent == place
    finally:
        place.rmdir()


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    place = Path("/tmp") / f"gpuimg-test-{os.getpid()}"
    place.mkdir()
    environment = {"XDG_RUNTIME_DIR": str(place)}
    try:
        left, foreign, young = place / "gpuimg-left", place / "gpuimg-foreign", place / "gpuimg-young"
        for folder in (left, foreign, young):
            folder.mkdir()
        (left / "lock").touch()
        (young / "lock").touch()
        (tmp_path / "precious").touch()
        (left / "link").symlink_to(tmp_path)
        with work_folder(environment=environment) as busy:
            for folder in (left, foreign, busy):
                os.utime(folder, (0, 0))
            with work_folder(environment=environment):
                assert [folder.exists() for folder in (left, foreign, young)] == [False, True, True]
            assert busy.exists()
        assert (tmp_path / "precious").exists()
    finally:
        shutil.rmtree(place)


def test_noexec_everywhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mount:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr(os, "statvfs", lambda _: Mount)
    with pytest.raises(PermissionDeniedError, match="/tmp is mounted noexec"), work_folder(environment={}):
        pass


def test_socket_paths_end_at_107_bytes() -> None:
    check_socket_path(Path("/" + "x" * 106))
    with pytest.raises(SocketPathError, match="108 bytes"):
        check_socket_path(Path("/" + "x" * 107))
    with pytest.raises(SocketPathError):
        check_socket_path(Path("/" + "ü" * 54))


@pytest.mark.parametrize(
    "argument", ["--images-dir", "--images-dir=/x", "-D", "-D/x", "--page-server", "--page-s", "--lazy-pages"]
)
def test_options_that_would_break_the_promise_are_refused(argument: str) -> None:
    with pytest.raises(UsageError, match="leave it out after --"):
        check_extra_args(["--tcp-established", argument])


@pytest.mark.parametrize(
    "argument", ["--shell-job", "-j", "--tcp-established", "--network-lock=skip", "-l", "--"]
)
def test_other_options_pass(argument: str) -> None:
    check_extra_args([argument])
