"""Real processes into the store and back, by the commands that a user types."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuimg.criu.locate import Criu, find_criu

from .conftest import ROOT, Gpuimg, Start, Victim, children, parent, state, until

LAUNCH = ROOT / "bench" / "launch.py"

pytestmark = pytest.mark.root

with_one_criu = pytest.mark.parametrize("criu", ["sid"], indirect=True)


def dump(gpuimg: Gpuimg, victim: Victim, tag: str, *options: object) -> None:
    gpuimg("dump", "-t", victim.pid, "--tag", tag, *options)
    victim.assert_gone()


def assert_restores(gpuimg: Gpuimg, victim: Victim, tag: str, *options: object) -> None:
    """It is the same process, with its memory, and counts on."""
    count = victim.count()
    told = gpuimg("restore", tag, "--detach", *options)
    assert told == f"process {victim.pid} runs\n"
    victim.assert_runs()
    assert victim.count() > count
    victim.assert_whole()


def test_a_process_comes_back_with_its_pid_and_memory(
    gpuimg: Gpuimg, start: Start, tmp_path: Path, criu: Criu
) -> None:
    victim = start("counter", mib=24)
    told = gpuimg("dump", "-t", victim.pid, "--tag", "first")
    assert "checkpoint " in told and " as first: " in told
    victim.assert_gone()
    pidfile = tmp_path / "pid"
    assert_restores(gpuimg, victim, "first", "--pidfile", pidfile)
    assert pidfile.read_text() == f"{victim.pid}\n"

    shown = gpuimg.json("show", "first")
    assert shown["kind"] == "dump"
    assert shown["criu_version"] == criu.version_text
    assert shown["kernel"] == os.uname().release
    [process] = shown["processes"]
    assert (process["pid"], process["threads"]) == (victim.pid, 1)
    assert process["comm"] == Path(f"/proc/{victim.pid}/comm").read_text().rstrip("\n")
    assert f"{victim.pid} {process['comm']}" in gpuimg("show", "first")

    [listed] = gpuimg.json("ls")["checkpoints"]
    assert listed["id"] == shown["id"]
    assert listed["tags"] == ["first"]
    for name in ("raw_bytes", "new_bytes", "zero_bytes", "inline_bytes", "deduplicated_bytes"):
        assert listed[name] == shown[name]
    sizes = sum(entry["size"] for entry in gpuimg.json("show", "first", "--files")["entries"])
    assert listed["raw_bytes"] == sizes > 24 << 20
    parts = ("zero", "inline", "unchanged", "deduplicated", "delta", "coded", "raw_stored")
    assert sum(shown[f"{part}_bytes"] for part in parts) == listed["raw_bytes"]
    assert shown["unchanged_bytes"] == shown["delta_bytes"] == 0, "it has no parent"

    stats = gpuimg.json("stats")
    assert stats["raw_bytes"] == listed["raw_bytes"]
    assert [(c["id"], c["new_bytes"]) for c in stats["checkpoints"]] == [(shown["id"], listed["new_bytes"])]
    # The process's memory is random: it takes its room, and nothing else takes much.
    assert 24 << 20 < stats["stored_bytes"] < 30 << 20
    on_disk = [path for folder in ("packs", "manifests") for path in (gpuimg.store / folder).rglob("*")]
    assert stats["stored_bytes"] == sum(path.stat().st_size for path in on_disk if path.is_file())
    assert gpuimg("verify").startswith("clean: 1 checkpoints")


@pytest.mark.parametrize("ask", ["exit", "kill"])
def test_restore_waits_for_the_process_and_ends_as_it_does(
    gpuimg: Gpuimg, start: Start, ask: str, tmp_path: Path
) -> None:
    victim = start()
    dump(gpuimg, victim, "t")
    pidfile = tmp_path / "pid"
    restoring = gpuimg.start("restore", "t", "--pidfile", pidfile)
    until(pidfile.exists, "it is restored")
    victim.assert_runs()
    victim.assert_whole()
    assert restoring.poll() is None
    if ask == "exit":
        (victim.folder / "exit").write_text("7")
    else:
        os.kill(victim.pid, signal.SIGUSR1)
    done = gpuimg.finish(restoring)
    assert (done.stdout, done.stderr) == ("", "")
    assert done.returncode == (7 if ask == "exit" else 128 + signal.SIGUSR1)
    victim.assert_gone()


def test_a_program_is_told_how_the_restored_process_ended(gpuimg: Gpuimg, start: Start) -> None:
    victim = start()
    dump(gpuimg, victim, "t")
    (victim.folder / "exit").write_text("7")
    done = gpuimg.run("restore", "t", "--json")
    assert done.returncode == 7
    assert done.stdout == f'{{"pid": {victim.pid}, "exit_status": 7}}\n'


def test_an_interrupted_wait_leaves_the_process_running(gpuimg: Gpuimg, start: Start) -> None:
    victim = start()
    dump(gpuimg, victim, "t")
    restoring = gpuimg.start("restore", "t")
    until(lambda: parent(victim.pid) == restoring.pid, "criu has ended and left it to gpuimg")
    victim.assert_runs()
    restoring.send_signal(signal.SIGINT)
    done = gpuimg.finish(restoring)
    assert (done.returncode, done.stderr.strip()) == (130, "gpuimg: interrupted")
    victim.assert_runs()
    victim.assert_whole()


def test_a_whole_tree_comes_back(gpuimg: Gpuimg, start: Start) -> None:
    """Threads, pipes, sockets, shared memory, files, signals, zombies: the processes look for themselves."""
    victim = start("world")
    worker, exited, killed, stopped = map(int, (victim.folder / "pids").read_text().split())
    [grandchild] = children(worker)
    dump(gpuimg, victim, "t", "--", "--file-locks")
    victim.remember_files()
    for _ in range(2):
        gpuimg("restore", "t", "--detach", "--", "--file-locks")
        victim.assert_runs()
        assert [state(pid) for pid in (worker, grandchild, exited, killed, stopped)] == list("SSZZT")
        victim.assert_whole()
        victim.kill()
        victim.put_files_back()

    processes = {item["pid"]: item for item in gpuimg.json("show", "t")["processes"]}
    assert processes.keys() == set(victim.pids)
    assert processes[victim.pid]["comm"] == "wörld (a) 1"
    assert processes[victim.pid]["threads"] == 4
    assert processes[grandchild]["ppid"] == worker
    shown = gpuimg("show", "t").splitlines()
    assert f"{'processes':<11} {victim.pid} wörld (a) 1, 4 threads" in shown
    assert any(line.startswith(f"{'':<11}     {grandchild} ") for line in shown)


def test_a_running_process_is_dumped_again_and_again_for_little(gpuimg: Gpuimg, start: Start) -> None:
    victim = start("native", mib=16)
    counts = []
    for number in range(3):
        made = gpuimg.json("dump", "-t", victim.pid, "--tag", f"t{number}", "--leave-running")
        counts.append(victim.count())
        victim.assert_runs()
        if number:
            assert made["new_bytes"] < 1 << 20
            assert made["deduplicated_bytes"] > 15 << 20
    assert gpuimg.json("stats")["stored_bytes"] < 18 << 20
    victim.kill()
    for number in (1, 0, 2):
        gpuimg("restore", f"t{number}", "--detach")
        until(lambda: victim.count() != counts[-1], "it counts")
        # Each is as it was at its dump, not a bit later.
        assert abs(victim.count() - counts[number]) < 200
        victim.assert_runs()
        victim.assert_whole()
        victim.kill()
    assert gpuimg("verify").startswith("clean: 3 checkpoints")


def test_a_restored_process_is_dumped_again(gpuimg: Gpuimg, start: Start) -> None:
    victim = start("tree")
    for generation in range(3):
        made = gpuimg.json("dump", "-t", victim.pid, "--tag", "job")
        # The shared memory has not changed; Python's own pages change whenever it counts references.
        assert generation == 0 or made["deduplicated_bytes"] > 1 << 20
        victim.assert_gone()
        assert_restores(gpuimg, victim, "job")
    # The tag went with each dump; the older checkpoints are there still.
    listed = gpuimg.json("ls")["checkpoints"]
    assert [item["tags"] for item in listed] == [[], [], ["job"]]
    assert listed[-1]["id"] == made["checkpoint"]


def test_the_other_criu_restores_it_or_says_why_not(gpuimg: Gpuimg, start: Start, criu: Criu) -> None:
    victim = start("native", mib=4)
    dump(gpuimg, victim, "t")
    other = criu.path.parents[2] / ("sid" if "trixie" in criu.path.parts else "trixie") / "bin" / "criu"
    if find_criu(other).version > criu.version:
        assert_restores(gpuimg, victim, "t", "--criu", other)
        return
    done = gpuimg.run("restore", "t", "--detach", "--criu", other)
    if done.returncode:
        assert "use the one that dumped it" in done.stderr, done.stderr
        victim.assert_gone()
        assert_restores(gpuimg, victim, "t")


@pytest.mark.slow
def test_a_process_of_a_gib_goes_through_little_memory(gpuimg: Gpuimg, start: Start) -> None:
    victim = start("native", mib=1024)
    made, dumping = measured(gpuimg, "dump", "-t", victim.pid, "--tag", "large")
    assert "1.0 GiB" in made
    victim.assert_gone()
    count = victim.count()
    _, restoring = measured(gpuimg, "restore", "large", "--detach")
    victim.assert_runs()
    assert victim.count() > count
    victim.assert_whole()
    print(
        f"1 GiB: dump {dumping[0]:.1f} s, {dumping[1]} MiB; restore {restoring[0]:.1f} s, {restoring[1]} MiB"
    )
    # 256 MiB, and the interpreter with its modules.
    assert max(dumping[1], restoring[1]) <= 256 + 48


def measured(gpuimg: Gpuimg, *arguments: object) -> tuple[str, tuple[float, int]]:
    """What a command prints; its seconds, and its MiB at the most.

    It is started by a small process: the peak that wait4 tells includes that of the forking process.
    """
    read, write = os.pipe()
    command = [sys.executable, "-S", str(LAUNCH), str(write), str(gpuimg.executable), *map(str, arguments)]
    done = subprocess.run(
        command, env=gpuimg.environment, pass_fds=[write], capture_output=True, text=True, timeout=120
    )
    os.close(write)
    with os.fdopen(read) as stream:
        cost = json.loads(stream.read())
    assert cost["status"] == 0, done.stdout + done.stderr
    return done.stdout, (cost["seconds"], cost["rss"] >> 20)
