"""Running criu: whatever goes wrong, no task is lost and none is left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from gpuimg.criu.folder import work_folder
from gpuimg.criu.images import process_tree
from gpuimg.criu.locate import Criu
from gpuimg.criu.runner import DumpResult, RestoreResult, Watch, run_dump, run_restore
from gpuimg.errors import CriuFailedError, NoSuchProcessError, StalledError, UsageError

from .conftest import Start, Victim, state, until
from .memory_streamer import MemoryCapture, MemoryServe

pytestmark = pytest.mark.root
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    with work_folder() as path:
        yield path


def dump(criu: Criu, victim: Victim, **options: object) -> tuple[dict[str, bytes], DumpResult]:
    files: dict[str, bytes] = {}
    with work_folder() as folder:
        capture = MemoryCapture(folder)
        try:
            result = run_dump(
                criu,
                victim.pid,
                folder,
                on_post_dump=lambda: files.update(capture.complete()),
                **options,  # type: ignore[arg-type]
            )
        finally:
            capture.close()
    return files, result


def restore(criu: Criu, files: dict[str, bytes], **options: object) -> RestoreResult:
    with work_folder() as folder:
        serve = MemoryServe(folder, files)
        options.setdefault("on_post_restore", lambda: None)
        try:
            return run_restore(criu, folder, **options)  # type: ignore[arg-type]
        finally:
            serve.close()


@pytest.mark.parametrize("kind", ["native", "counter", "tree"])
def test_a_process_is_dumped_and_goes_on_where_it_was(criu: Criu, start: Start, kind: str) -> None:
    victim = start(kind)
    files, result = dump(criu, victim)
    victim.assert_gone()
    assert result.statistics is not None
    assert 0 < result.statistics.frozen_seconds < result.seconds
    tree = process_tree(files.__getitem__)
    assert tree[0].pid == victim.pid
    assert len(tree) == (2 if kind == "tree" else 1)
    count = victim.count()
    restored = restore(criu, files, detach=True)
    assert restored.pid == victim.pid
    assert restored.exit_status is None
    until(lambda: victim.count() > count, "it counts on")
    assert victim.count() < count + 200
    victim.assert_whole()


def test_one_dump_restores_twice(criu: Criu, start: Start) -> None:
    victim = start("native", mib=8)
    files, _ = dump(criu, victim)
    for _ in range(2):
        victim.assert_gone()
        restore(criu, files, detach=True)
        victim.assert_runs()
        victim.assert_whole()
        victim.kill()


def test_leave_running(criu: Criu, start: Start) -> None:
    victim = start()
    files, _ = dump(criu, victim, leave_running=True)
    victim.assert_runs()
    victim.kill()
    restore(criu, files, detach=True)
    victim.assert_runs()


def assert_none_left(pids: list[int]) -> None:
    """Not even a dead child of this process; init is given a moment to collect its own."""
    until(lambda: not any(map(state, pids)), f"the processes {pids} are gone, not {list(map(state, pids))}")


class RefusedError(Exception):
    pass


def refuse() -> None:
    raise RefusedError


def test_a_commit_that_fails_lets_the_tasks_run_on(criu: Criu, start: Start, folder: Path) -> None:
    victim = start("tree")
    capture = MemoryCapture(folder)
    with pytest.raises(RefusedError):
        run_dump(criu, victim.pid, folder, on_post_dump=refuse)
    capture.close()
    victim.assert_runs()
    victim.assert_whole()


def test_an_interrupted_commit_lets_the_tasks_run_on(criu: Criu, start: Start, folder: Path) -> None:
    victim = start()
    capture = MemoryCapture(folder)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_dump(criu, victim.pid, folder, on_post_dump=interrupt)
    capture.close()
    victim.assert_runs()


def test_the_action_client_killed_lets_the_tasks_run_on(criu: Criu, start: Start, folder: Path) -> None:
    victim = start()
    capture = MemoryCapture(folder)

    def kill_client() -> None:
        capture.complete()
        clients = [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and str(folder).encode() + b"/control.sock" in cmdline(entry)
        ]
        assert len(clients) == 1
        os.kill(clients[0], signal.SIGKILL)
        until(lambda: state(clients[0]) in ("", "Z"), "the client is dead")

    with pytest.raises(CriuFailedError):
        run_dump(criu, victim.pid, folder, on_post_dump=kill_client)
    capture.close()
    victim.assert_runs()


def cmdline(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_gpuimg_killed_at_any_moment_lets_the_tasks_run_on(criu: Criu, start: Start, sign: int) -> None:
    victim = start("native", mib=16)
    rng = random.Random(0)
    program = [sys.executable, "-m", "tests.e2e.dump_once", str(criu.path), str(victim.pid)]
    for _ in range(6):
        child = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert child.stdout is not None
        assert child.stdout.readline() == b"start\n"
        time.sleep(rng.uniform(0.0, 0.15))
        child.send_signal(sign)
        committed = b"committed" in child.communicate(timeout=60)[0]
        if committed:
            victim.assert_gone()
            return
        victim.assert_runs()
    victim.assert_whole()


def test_criu_killed_while_it_writes_lets_the_tasks_run_on(criu: Criu, start: Start, folder: Path) -> None:
    victim = start("native", mib=16)
    capture = MemoryCapture(folder, slow=0.02)
    # Not earlier: a criu that dies while it runs its own code in a task takes the task with it.
    writes = threading.Thread(target=kill_criu, args=(folder, lambda: "pages-1.img" in capture.names))
    writes.start()
    with pytest.raises(CriuFailedError, match="killed by signal 9"):
        run_dump(criu, victim.pid, folder, on_post_dump=refuse)
    writes.join()
    capture.close()
    victim.assert_runs()
    victim.assert_whole()


def test_a_criu_that_hangs_in_a_dump_is_left_alone(
    start: Start, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs the privilege that criu needs")
    hanging = tmp_path / "criu"
    hanging.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setattr("gpuimg.criu.runner._GRACE_SECONDS", 0.2)
    with pytest.raises(StalledError, match="does not end") as caught:
        run_dump(
            Criu(hanging, (4, 2), "--criu"),
            start().pid,
            folder,
            on_post_dump=refuse,
            watch=Watch(stall_seconds=0.2),
        )
    pid = int((tmp_path / "pid").read_text())
    assert str(pid) in caught.value.what
    assert state(pid) == "S"
    os.kill(pid, signal.SIGKILL)


def kill_criu(folder: Path, when: object) -> None:
    until(when, "criu has begun")  # type: ignore[arg-type]
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            words = cmdline(entry).split(b"\0")
            if os.fsencode(folder) in words and b"--images-dir" in words:
                os.kill(int(entry.name), signal.SIGKILL)
                return


def test_a_streamer_that_stands_still_ends_the_dump(criu: Criu, start: Start, folder: Path) -> None:
    victim = start("native", mib=16)
    capture = MemoryCapture(folder, slow=60)
    watch = Watch(progress=lambda: capture.progress, abort=capture.abort, stall_seconds=0.5)
    began = time.monotonic()
    with pytest.raises(StalledError, match=r"no progress for 0\.5 s"):
        run_dump(criu, victim.pid, folder, on_post_dump=refuse, watch=watch)
    assert time.monotonic() - began < 10
    capture.close()
    victim.assert_runs()
    victim.assert_whole()


def test_the_streamers_fault_is_told_rather_than_what_criu_makes_of_it(
    criu: Criu, start: Start, folder: Path
) -> None:
    victim = start("native", mib=16)
    capture = MemoryCapture(folder, slow=0.01)
    threading.Timer(0.1, capture.abort).start()
    with pytest.raises(RefusedError):
        run_dump(criu, victim.pid, folder, on_post_dump=refuse, watch=Watch(fault=RefusedError))
    victim.assert_runs()


@pytest.mark.parametrize("kind", ["native", "tree"])
@pytest.mark.parametrize("detach", [True, False])
def test_a_refused_restore_leaves_nothing_behind(
    criu: Criu, start: Start, kind: str, detach: bool, tmp_path: Path
) -> None:
    victim = start(kind)
    files, _ = dump(criu, victim)
    victim.assert_gone()
    pids = [process.pid for process in process_tree(files.__getitem__)]
    pidfile = tmp_path / "pid"

    def late_refusal() -> None:
        assert all(state(pid) for pid in pids)
        raise RefusedError

    with pytest.raises(RefusedError):
        restore(criu, files, detach=detach, pidfile=pidfile, on_post_restore=late_refusal)
    assert_none_left(pids)
    assert not pidfile.exists()
    # The dump is as good as before.
    restore(criu, files, detach=True)
    victim.assert_runs()


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("kind", ["native", "tree"])
def test_a_criu_killed_during_restore_leaves_nothing_behind(
    criu: Criu, start: Start, folder: Path, detach: bool, kind: str
) -> None:
    victim = start(kind)
    files, _ = dump(criu, victim)
    victim.assert_gone()
    pids = [process.pid for process in process_tree(files.__getitem__)]
    serve = MemoryServe(folder, files)

    def kill() -> None:
        kill_criu(folder, lambda: True)
        time.sleep(0.2)

    with pytest.raises(CriuFailedError):
        run_restore(criu, folder, detach=detach, on_post_restore=kill)
    serve.close()
    assert_none_left(pids)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("kind", ["native", "tree"])
def test_gpuimg_killed_at_any_moment_of_a_restore_leaves_all_or_nothing(
    criu: Criu, start: Start, tmp_path: Path, sign: int, kind: str
) -> None:
    victim = start(kind)
    files, _ = dump(criu, victim)
    victim.assert_gone()
    pids = [process.pid for process in process_tree(files.__getitem__)]
    images = tmp_path / "images"
    images.mkdir()
    for name, data in files.items():
        (images / name).write_bytes(data)
    program = [sys.executable, "-m", "tests.e2e.restore_once", str(criu.path), str(images)]
    rng = random.Random(1)
    for _ in range(3):
        child = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert child.stdout is not None
        begin, folder = child.stdout.readline().split()
        assert begin == b"start"
        time.sleep(rng.uniform(0.0, 0.2))
        child.send_signal(sign)
        restored = b"restored" in child.communicate(timeout=60)[0]
        # criu, if it was left alone, notices and cleans up.
        until(partial(nobody_works_in, folder), "criu has ended")
        if restored and any(state(pid) not in ("", "Z") for pid in pids):
            victim.assert_runs()
            victim.assert_whole()
            victim.kill()
        assert_none_left(pids)


def nobody_works_in(folder: bytes) -> bool:
    return not any(folder in cmdline(p).split(b"\0") for p in Path("/proc").iterdir() if p.name.isdecimal())


def test_criu_killed_at_any_moment_of_a_restore_leaves_nothing(criu: Criu, start: Start) -> None:
    victim = start("tree")
    files, _ = dump(criu, victim)
    victim.assert_gone()
    pids = [process.pid for process in process_tree(files.__getitem__)]
    rng = random.Random(7)
    for attempt in range(6):
        with work_folder() as folder:
            serve = MemoryServe(folder, files)
            delay = rng.uniform(0.0, 0.05)

            killer = threading.Thread(target=kill_soon, args=(folder, serve, delay))
            killer.start()
            with pytest.raises(CriuFailedError):
                # Never lets criu finish: the killer comes first.
                run_restore(criu, folder, detach=attempt % 2 == 0, on_post_restore=lambda: time.sleep(0.3))
            killer.join()
            serve.close()
        assert_none_left(pids)


def kill_soon(folder: Path, serve: MemoryServe, delay: float) -> None:
    until(lambda: len(serve.names) > 3, "criu has begun")
    time.sleep(delay)
    kill_criu(folder, lambda: True)


def test_a_restore_whose_streamer_stands_still_is_given_up(criu: Criu, start: Start, folder: Path) -> None:
    victim = start("native", mib=4)
    files, _ = dump(criu, victim)
    victim.assert_gone()
    serve = MemoryServe(folder, files)
    serve.hold = "pages-1.img"
    watch = Watch(progress=lambda: serve.progress, abort=serve.abort, stall_seconds=0.5)
    with pytest.raises(StalledError):
        run_restore(criu, folder, on_post_restore=refuse, watch=watch)
    serve.close()
    assert_none_left([victim.pid])


def test_a_cut_image_does_not_restore(criu: Criu, start: Start) -> None:
    victim = start("native", mib=8)
    files, _ = dump(criu, victim)
    victim.assert_gone()
    cut = {name: data[:-4096] if name.startswith("pages") else data for name, data in files.items()}
    with pytest.raises(CriuFailedError) as caught:
        restore(criu, cut, detach=True)
    assert "EOF" in caught.value.what
    assert_none_left([victim.pid])


def test_an_attached_restore_waits_for_the_end(criu: Criu, start: Start, tmp_path: Path) -> None:
    victim = start()
    files, _ = dump(criu, victim)
    victim.assert_gone()
    (victim.folder / "exit").write_text("7")
    result = restore(criu, files, pidfile=tmp_path / "pid")
    assert result.exit_status == 7
    assert result.pid == victim.pid
    assert (tmp_path / "pid").read_text() == f"{victim.pid}\n"


def test_a_relative_pidfile_lies_in_the_callers_folder(
    criu: Criu, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = start()
    files, _ = dump(criu, victim)
    victim.assert_gone()
    monkeypatch.chdir(tmp_path)
    restore(criu, files, detach=True, pidfile="here.pid")
    assert (tmp_path / "here.pid").read_text() == f"{victim.pid}\n"
    victim.assert_runs()


def test_a_pid_in_use_is_told_with_its_remedy(criu: Criu, start: Start) -> None:
    victim = start()
    files, _ = dump(criu, victim, leave_running=True)
    with pytest.raises(CriuFailedError) as caught:
        restore(criu, files, detach=True)
    assert "a PID of the checkpoint is in use" in caught.value.remedy
    victim.assert_runs()


def test_a_missing_process_is_told_before_criu_starts(criu: Criu, folder: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(NoSuchProcessError):
        run_dump(criu, child.pid, folder, on_post_dump=refuse)
    assert not (folder / "action.sh").exists()


def test_gpuimgs_own_tree_is_refused(criu: Criu, folder: Path) -> None:
    for pid in (os.getpid(), os.getppid()):
        with pytest.raises(UsageError, match="gpuimg itself"):
            run_dump(criu, pid, folder, on_post_dump=refuse)
