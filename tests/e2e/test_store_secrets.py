"""A checkpoint is the memory of processes: nobody else may see it, and nothing of it lies about."""

from __future__ import annotations

import os
import secrets
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuimg.criu.locate import Criu

from .conftest import Gpuimg, Start, as_nobody, state, until
from .test_criu_failures import Holder

pytestmark = pytest.mark.root

with_one_criu = pytest.mark.parametrize("criu", ["trixie"], indirect=True)

# Runs the real criu, and keeps what the work folder held before and after.
WITNESS = """#!/bin/sh
[ "$1" = --version ] && exec {criu} "$@"
folder=
for argument; do [ "$last" = --work-dir ] && folder=$argument; last=$argument; done
find "$folder" -printf '%m %y %u %p\\n' >>{seen}/modes
{before}
{criu} "$@"
status=$?
find "$folder" -printf '%m %y %u %p\\n' >>{seen}/modes
cp -r "$folder" {seen}/
exit $status
"""


@pytest.fixture
def seen(gpuimg: Gpuimg, criu: Criu, tmp_path: Path) -> Path:
    """What a witness saw of the work folders."""
    folder = tmp_path / "seen"
    folder.mkdir()
    witness(gpuimg, criu, folder)
    return folder


def witness(gpuimg: Gpuimg, criu: Criu, folder: Path, before: str = "") -> None:
    script = folder / "criu"
    script.write_text(WITNESS.format(criu=criu.path, seen=folder, before=before))
    script.chmod(0o755)
    gpuimg.environment["GPUIMG_CRIU"] = str(script)


def open_to_others(root: Path) -> list[str]:
    """Folders that are not 0700 and files that are not 0600, or 0400."""
    found = []
    for path in [root, *root.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode not in ((0o700,) if path.is_dir() else (0o600, 0o400)):
            found.append(f"{mode:o} {path}")
    return found


@with_one_criu
def test_everything_is_for_the_owner_alone_whatever_the_umask(
    gpuimg: Gpuimg, start: Start, seen: Path, tmp_path: Path
) -> None:
    victim = start("counter", mib=8)
    store = tmp_path / "open"

    def run(*arguments: object) -> None:
        gpuimg("--store", store, *arguments, umask=0)
        assert open_to_others(store) == []

    run("init")
    run("dump", "-t", victim.pid, "--tag", "t", "--leave-running")
    run("dump", "-t", victim.pid, "--tag", "u")
    victim.assert_gone()
    run("restore", "t", "--detach")
    victim.assert_runs()
    run("export", "t", tmp_path / "images")
    assert open_to_others(tmp_path / "images") == []
    run("import", tmp_path / "images", "--tag", "v")
    run("tag", "w", "v")
    run("rm", "u")
    run("gc")
    run("gc")
    run("verify")
    run("repair")

    modes = [line.split() for line in (seen / "modes").read_text().splitlines()]
    folders = {path: mode for mode, kind, _, path in modes if Path(path).parent == gpuimg.runtime}
    sockets = {Path(path).name: mode for mode, kind, _, path in modes if kind == "s"}
    assert len(folders) == 3 and set(folders.values()) == {"700"}
    assert sockets == dict.fromkeys(
        ("streamer-capture.sock", "streamer-serve.sock", "control.sock"), "600"
    ), sockets
    # criu makes its statistics itself; the folder keeps them.
    files = {Path(path).name: mode for mode, kind, _, path in modes if kind == "f"}
    others = {name: mode for name, mode in files.items() if not mode.endswith("00")}
    assert others.keys() <= {"stats-dump", "stats-restore"}, others
    assert {user for _, _, user, _ in modes} == {"root"}


KNOCK = """
import socket, sys
channel = socket.socket(socket.AF_UNIX)
channel.settimeout(10)
try:
    channel.connect(sys.argv[1])
    channel.sendall(sys.argv[2].encode())
    print(channel.recv(100) or 'turned away')
except (BrokenPipeError, ConnectionResetError):
    print('turned away')
except PermissionError:
    print('refused')
"""


def knock(path: Path, words: str) -> str:
    """What nobody hears who says `words` to a socket."""
    command = [*as_nobody(), sys.executable, "-I", "-S", "-c", KNOCK, str(path), words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout.strip()


@pytest.fixture
def images(runtime: Path) -> Iterator[Path]:
    folder = runtime.with_name(f"{runtime.name}-images")
    folder.mkdir(mode=0o755)
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)


@with_one_criu
def test_another_user_is_turned_away_from_the_streamers_sockets(
    gpuimg: Gpuimg, start: Start, criu: Criu, images: Path
) -> None:
    victim = start("native", mib=4)
    for command, name, verb in (
        (["capture", "--tag", "t"], "streamer-capture.sock", ["dump", "-t", str(victim.pid)]),
        (["serve", "t"], "streamer-serve.sock", ["restore", "-d"]),
    ):
        running = gpuimg.start(*command, "-D", images, umask=0)
        path = images / name
        until(path.exists, "it listens")
        until(lambda path=path: stat.S_IMODE(path.lstat().st_mode) == 0o600, "it is closed to others")
        assert knock(path, "hello") == "refused"
        # Even with an open door it is for root and the owner.
        path.chmod(0o666)
        for _ in range(3):
            assert knock(path, "a request for pages") == "turned away"
        ended = subprocess.run([criu.path, *verb, "--stream", "-D", images, "-v4", "-o", "log"])
        assert ended.returncode == 0, (images / "log").read_text(errors="replace")[-3000:]
        done = gpuimg.finish(running)
        assert (done.returncode, done.stderr) == (0, "")
        if verb[0] == "dump":
            # Its PID must be free before it can come back.
            victim.assert_gone()
    victim.assert_runs()
    victim.assert_whole()


@with_one_criu
def test_another_user_cannot_speak_for_criu(gpuimg: Gpuimg, start: Start, criu: Criu, seen: Path) -> None:
    """With folder and sockets thrown open, nobody says at once that the dump is done; it is not believed."""
    victim = start("native", mib=4)
    script = seen / "knock.py"
    script.write_text(KNOCK)
    open_up = f"chmod 755 {gpuimg.runtime} $folder; chmod 666 $folder/*.sock"
    said = f"cp {script} $folder/knock.py; chmod 644 $folder/knock.py"
    nobody = " ".join(as_nobody())
    words = "post-dump 1\n"
    knocks = (
        f"{nobody} {sys.executable} -I -S $folder/knock.py $folder/control.sock '{words}' >>{seen}/heard\n"
        f"{nobody} {sys.executable} -I -S $folder/knock.py $folder/streamer-capture.sock x >>{seen}/heard"
    )
    witness(gpuimg, criu, seen, f"{open_up}; {said}; {knocks}")
    gpuimg("dump", "-t", victim.pid, "--tag", "t")
    assert (seen / "heard").read_text() == "turned away\n" * 2
    victim.assert_gone()
    gpuimg("restore", "t", "--detach", "--criu", criu.path)
    victim.assert_runs()
    victim.assert_whole()


def test_no_word_of_the_memory_is_told_or_left_behind(gpuimg: Gpuimg, seen: Path, tmp_path: Path) -> None:
    secret = secrets.token_hex(20)
    (tmp_path / "secret").write_text(secret)
    holder = Holder(
        tmp_path,
        "secret = open(folder + '/secret').read()\nos.remove(folder + '/secret')\n"
        "reader, writer = os.pipe()\nos.write(writer, secret.encode() * 100)\n",
        env={**os.environ, "PASSWORD": secret},
    )
    told = []

    def run(status: int, *arguments: object) -> None:
        for form in ([], ["--json"]):
            done = gpuimg.run(*form, *arguments, "--progress-fd", 2)
            assert done.returncode == status, done.stderr
            told.append(done.stdout + done.stderr)
            if status == 9:
                until(lambda: not state(holder.pid), "nothing is left of it")

    try:
        run(0, "dump", "-t", holder.pid, "--tag", "t", "--leave-running")
        run(21, "restore", "t")
        run(21, "dump", "-t", holder.pid, "--tag", "u", "--", "--nonsense")
        os.kill(holder.pid, signal.SIGKILL)
        holder.child.wait()
        for command in (
            ["show", "t", "--files"],
            ["ls"],
            ["stats"],
            ["verify"],
            ["diff", "t", "t"],
            ["doctor"],
        ):
            run(0, *command)
        gpuimg("export", "t", tmp_path / "images")
        pages = (tmp_path / "images" / "pages-1.img").read_bytes()
        assert secret.encode() in pages
        for pack in gpuimg.store.rglob("*.pack"):
            data = bytearray(pack.read_bytes())
            for offset in range(len(data) // 2, len(data) - 4096, 4096):
                data[offset] ^= 1
            pack.write_bytes(data)
        run(9, "restore", "t")
        run(24, "verify")
    finally:
        holder.end()
        until(lambda: not state(holder.pid), "it is gone")

    assert secret not in "".join(told)
    assert list(gpuimg.runtime.iterdir()) == []
    logs = list(seen.rglob("criu.log"))
    assert len(logs) >= 5
    lying_about = [path for path in seen.rglob("*") if path.is_file()] + list(tmp_path.glob("*.*"))
    for path in lying_about:
        assert secret.encode() not in path.read_bytes(), path


@with_one_criu
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["dump", "restore"])
def test_a_gpuimg_that_is_told_to_end_cleans_up(
    gpuimg: Gpuimg, start: Start, number: signal.Signals, command: str
) -> None:
    victim = start("native", mib=64)
    if command == "restore":
        gpuimg("dump", "-t", victim.pid, "--tag", "t")
        victim.assert_gone()
        running = gpuimg.start("restore", "t", "--detach")
    else:
        running = gpuimg.start("dump", "-t", victim.pid, "--tag", "t")
    until(lambda: any(gpuimg.runtime.glob("*/criu.log")), "criu runs")
    running.send_signal(number)
    done = gpuimg.finish(running)
    assert list(gpuimg.runtime.iterdir()) == []
    assert done.returncode == 128 + number, done.stderr
    assert done.stderr.strip() in ("gpuimg: interrupted", f"gpuimg: ended by {number.name}")
    if command == "dump":
        victim.assert_runs()
        assert gpuimg.json("ls") == {"checkpoints": []}
    else:
        victim.assert_gone()
    assert gpuimg("verify").startswith("clean")


@with_one_criu
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_capture_that_is_told_to_end_takes_its_socket_along(
    gpuimg: Gpuimg, images: Path, number: signal.Signals
) -> None:
    running = gpuimg.start("capture", "-D", images, "--tag", "t")
    until((images / "streamer-capture.sock").exists, "it listens")
    running.send_signal(number)
    assert gpuimg.finish(running).returncode == 128 + number
    assert list(images.iterdir()) == []
    assert gpuimg("gc") and gpuimg("verify").startswith("clean: 0 checkpoints")
