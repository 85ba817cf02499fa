"""The store between programs that know nothing of it: criu by itself, crit, a streamer, a shell's pipes."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuimg.criu.locate import Criu

from .conftest import ROOT, Gpuimg, Start, Victim, parent, state, until
from .test_criu_failures import Holder

pytestmark = pytest.mark.root

LOCKS = ["--", "--file-locks"]

with_newer_criu = pytest.mark.parametrize("criu", ["sid"], indirect=True)


@pytest.fixture
def images(runtime: Path) -> Iterator[Path]:
    """A directory with a path that is short enough for sockets."""
    folder = runtime.with_name(f"{runtime.name}-images")
    folder.mkdir()
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)


def plain(criu: Criu, verb: str, images: Path, *options: object, work: Path | None = None) -> None:
    """criu without gpuimg."""
    work = work or images
    command = [criu.path, verb, "-D", images, "-W", work, "-o", f"{verb}.log", *options]
    done = subprocess.run(list(map(str, command)), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        log = (work / f"{verb}.log").read_text().splitlines()
        raise AssertionError("\n".join([done.stdout + done.stderr, *log[-20:]]))


def crit(criu: Criu, images: list[Path]) -> subprocess.CompletedProcess[str]:
    """`crit decode` of each image, in one interpreter."""
    [library] = criu.path.parents[1].glob("usr/lib/python3/dist-packages")
    script = (
        "import sys\n"
        "from crit.__main__ import main\n"
        "for image in sys.argv[1:]:\n"
        "    sys.argv = ['crit', 'decode', '-i', image, '-o', '/dev/null']\n"
        "    main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, images)],
        env={**os.environ, "PYTHONPATH": str(library)},
        capture_output=True,
        text=True,
    )


def assert_back(victim: Victim) -> None:
    victim.assert_runs()
    victim.assert_whole()


def test_every_exported_image_is_read_by_crit_and_restored_by_criu_alone(
    gpuimg: Gpuimg, start: Start, criu: Criu, tmp_path: Path
) -> None:
    victim = start("world")
    gpuimg("dump", "-t", victim.pid, "--tag", "t", *LOCKS)
    victim.assert_gone()
    out = tmp_path / "out"
    gpuimg("export", "t", out)
    entries = {entry["name"]: entry["size"] for entry in gpuimg.json("show", "t", "--files")["entries"]}
    assert {path.name: path.stat().st_size for path in out.iterdir()} == entries
    images = [path for path in sorted(out.iterdir()) if not path.name.startswith("pages-")]
    kinds = {path.name.split(".")[0].split("-")[0] for path in images}
    assert kinds >= {
        "core",
        "mm",
        "pagemap",
        "fdinfo",
        "files",
        "inventory",
        "pstree",
        "seccomp",
        "ids",
        "fs",
    }
    assert kinds >= {"pipes", "fifo", "sk", "ghost", "remap", "filelocks", "tty"}, kinds
    done = crit(criu, images)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    tree = subprocess.run([criu.path.with_name("crit"), "x", out, "ps"], capture_output=True, text=True)
    assert all(str(pid) in tree.stdout for pid in victim.pids), tree.stdout + tree.stderr

    plain(criu, "restore", out, "-d", "--file-locks", work=tmp_path)
    assert_back(victim)


def test_a_directory_that_criu_wrote_alone_restores_from_the_store(
    gpuimg: Gpuimg, start: Start, criu: Criu, images: Path, tmp_path: Path
) -> None:
    victim = start("tree")
    plain(criu, "dump", images, "-t", victim.pid)
    victim.assert_gone()
    gpuimg("import", images, "--tag", "t")
    pids = [process["pid"] for process in gpuimg.json("show", "t")["processes"]]
    assert pids == victim.pids
    out = tmp_path / "out"
    gpuimg("export", "t", out)
    # criu's log and statistics are files of that directory like any others.
    assert {path.name for path in out.iterdir()} >= {"dump.log", "stats-dump", "inventory.img"}
    for path in images.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()
    gpuimg("restore", "t", "--detach")
    assert_back(victim)


# The streamer's commands, with a criu that somebody else starts


def test_capture_and_serve_with_a_criu_started_by_hand(
    gpuimg: Gpuimg, start: Start, criu: Criu, images: Path
) -> None:
    victim = start("tree")
    capturing = gpuimg.start("capture", "-D", images, "--tag", "t", "--json")
    until((images / "streamer-capture.sock").exists, "capture listens")
    plain(criu, "dump", images, "--stream", "-t", victim.pid)
    done = gpuimg.finish(capturing)
    assert (done.returncode, done.stderr) == (0, "")
    victim.assert_gone()
    victim.remember_files()
    shown = gpuimg.json("show", "t")
    assert shown["kind"] == "capture"
    assert f'"checkpoint": "{shown["id"]}"' in done.stdout
    assert [process["pid"] for process in shown["processes"]] == victim.pids

    for _ in range(2):
        serving = gpuimg.start("serve", "t", "-D", images)
        until((images / "streamer-serve.sock").exists, "serve listens")
        plain(criu, "restore", images, "-d", "--stream")
        done = gpuimg.finish(serving)
        assert (done.returncode, done.stderr) == (0, "")
        assert_back(victim)
        victim.kill()
        victim.put_files_back()
    # What a capture took, `restore` takes as well.
    gpuimg("restore", "t", "--detach")
    assert_back(victim)


def test_a_capture_whose_criu_fails_leaves_no_checkpoint(
    gpuimg: Gpuimg, start: Start, criu: Criu, images: Path
) -> None:
    victim = start("world")
    capturing = gpuimg.start("capture", "-D", images, "--tag", "t")
    until((images / "streamer-capture.sock").exists, "capture listens")
    # It holds a file lock, which criu does not take without being told to.
    failed = subprocess.run(
        [criu.path, "dump", "--stream", "-t", str(victim.pid), "-D", images, "-o", "dump.log"],
        capture_output=True,
    )
    assert failed.returncode != 0
    done = gpuimg.finish(capturing)
    assert done.returncode == 16
    assert done.stderr.startswith("gpuimg: criu went away before it sent inventory.img")
    assert gpuimg.json("ls") == {"checkpoints": []}
    assert gpuimg("verify").startswith("clean: 0 checkpoints")
    assert_back(victim)


def shell(script: str, gpuimg: Gpuimg, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        ["bash", "-c", f"set -o pipefail; {script}"], env=gpuimg.environment, text=True, **options
    )


def test_streams_of_the_image_streamer_go_in_and_come_out(
    gpuimg: Gpuimg, start: Start, criu: Criu, images: Path
) -> None:
    victim = start("tree")
    streamer, command = (shlex.quote(str(path)) for path in (gpuimg.streamer, gpuimg.executable))
    extracting = shell(f"{streamer} -D {images} capture | {command} extract --tag t", gpuimg)
    until((images / "streamer-capture.sock").exists, "the streamer listens")
    plain(criu, "dump", images, "--stream", "-t", victim.pid)
    assert extracting.wait(30) == 0
    victim.assert_gone()
    victim.remember_files()
    shown = gpuimg.json("show", "t")
    assert shown["kind"] == "extract"
    assert [process["pid"] for process in shown["processes"]] == victim.pids

    for fds in ([1], [10, 11, 12]):
        # Shards as pipes between two programs: what one writes to fd N the other reads from fd N.
        names = ",".join(map(str, fds))
        if fds == [1]:
            script = f"{command} export t --shard-fds 1 | {streamer} -D {images} serve"
        else:
            fifos = [images / f"shard-{fd}" for fd in fds]
            for fifo in fifos:
                os.mkfifo(fifo)
            out = " ".join(f"{fd}>{fifo}" for fd, fifo in zip(fds, fifos, strict=True))
            back = " ".join(f"{fd}<{fifo}" for fd, fifo in zip(fds, fifos, strict=True))
            script = (
                f"{command} export t --shard-fds {names} {out} & "
                f"{streamer} -D {images} --shard-fds {names} serve {back} && wait $!"
            )
        serving = shell(script, gpuimg, stdout=subprocess.DEVNULL)
        until((images / "streamer-serve.sock").exists, "the streamer serves")
        plain(criu, "restore", images, "-d", "--stream")
        assert serving.wait(30) == 0
        assert_back(victim)
        victim.kill()
        victim.put_files_back()
    gpuimg("restore", "t", "--detach")
    assert_back(victim)


# What else criu dumps


def test_a_container_comes_back_with_its_namespaces(
    gpuimg: Gpuimg, native: list[str], tmp_path: Path
) -> None:
    """In it the process has PID 1; outside another one before and after, and that is what gpuimg tells."""
    inside = shlex.join([*native, str(tmp_path), "4"])
    container = subprocess.Popen(
        [
            "unshare",
            "--pid",
            "--uts",
            "--ipc",
            "--fork",
            "sh",
            "-c",
            f"hostname inside; exec setsid {inside}",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
    )
    count = tmp_path / "count"
    until(lambda: count.exists() and count.read_text() != "", "it is up")
    [first] = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
    gpuimg("dump", "-t", first, "--tag", "t")
    container.wait(10)
    assert gpuimg.json("show", "t")["processes"][0]["pid"] == 1
    told = gpuimg.json("restore", "t", "--detach", "--pidfile", tmp_path / "pid")
    pid = told["pid"]
    try:
        assert pid != 1
        assert (tmp_path / "pid").read_text() == f"{pid}\n"
        assert f"NSpid:\t{pid}\t1\n" in Path(f"/proc/{pid}/status").read_text()
        name = subprocess.run(
            ["nsenter", "-t", str(pid), "-u", "hostname"], capture_output=True, text=True, check=True
        )
        assert name.stdout == "inside\n"
        before = count.read_text()
        until(lambda: count.read_text() > before, "it counts on")
        (tmp_path / "check").touch()
        until((tmp_path / "checked").exists, "it has checked its memory")
        assert (tmp_path / "checked").read_text().startswith("good")
    finally:
        os.kill(pid, signal.SIGKILL)
        until(lambda: not state(pid), "it is gone")


def server(folder: Path) -> Holder:
    """Echoes what comes on a TCP port."""
    return Holder(
        folder,
        "import socket, threading\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "def serve():\n"
        "    while True:\n"
        "        channel = server.accept()[0]\n"
        "        while data := channel.recv(100): channel.sendall(data)\n"
        "threading.Thread(target=serve, daemon=True).start()\n"
        "open(folder + '/port', 'w').write(str(server.getsockname()[1]))\n",
    )


@contextlib.contextmanager
def ending(holder: Holder) -> Iterator[None]:
    try:
        yield
    finally:
        if parent(holder.pid) == os.getpid():
            os.kill(holder.pid, signal.SIGKILL)
        until(lambda: not state(holder.pid), "it is gone")
        holder.child.wait()


@with_newer_criu
def test_a_listening_port_is_another_after_serve(
    gpuimg: Gpuimg, tmp_path: Path, criu: Criu, images: Path
) -> None:
    holder = server(tmp_path)
    with ending(holder):
        old = int((tmp_path / "port").read_text())
        gpuimg("dump", "-t", holder.pid, "--tag", "t")
        until(lambda: not state(holder.pid), "it is gone")
        with socket.create_server(("127.0.0.1", 0)) as free:
            new = free.getsockname()[1]
        serving = gpuimg.start("serve", "t", "-D", images, "--tcp-listen-remap", f"{old}:{new}")
        until((images / "streamer-serve.sock").exists, "serve listens")
        plain(criu, "restore", images, "-d", "--stream")
        assert gpuimg.finish(serving).returncode == 0
        with socket.create_connection(("127.0.0.1", new), 5) as channel:
            channel.sendall(b"hello")
            assert channel.recv(10) == b"hello"


@with_newer_criu
def test_an_open_connection_goes_on(gpuimg: Gpuimg, tmp_path: Path) -> None:
    """Both ends are in the process, as in one that talks to its own server."""
    holder = Holder(
        tmp_path,
        "import socket, threading\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\n"
        "channel = server.accept()[0]\n"
        "client.sendall(b'on its way')\n"
        "def talk():\n"
        "    while not os.path.exists(folder + '/go'): time.sleep(0.01)\n"
        "    client.sendall(b', later')\n"
        "    open(folder + '/got', 'wb').write(channel.recv(17, socket.MSG_WAITALL))\n"
        "threading.Thread(target=talk, daemon=True).start()\n",
    )
    options = ["--", "--tcp-established", "--network-lock", "skip"]
    with ending(holder):
        gpuimg("dump", "-t", holder.pid, "--tag", "t", *options)
        until(lambda: not state(holder.pid), "it is gone")
        gpuimg("restore", "t", "--detach", *options)
        (tmp_path / "go").touch()
        until(lambda: (tmp_path / "got").exists() and (tmp_path / "got").read_bytes() != b"", "it has talked")
        assert (tmp_path / "got").read_bytes() == b"on its way, later"


# The library


@with_newer_criu
def test_the_library_does_what_the_commands_do(gpuimg: Gpuimg, start: Start, criu: Criu) -> None:
    """In a program of its own: dump a child that runs on, then restore it twice and wait for its end."""
    victim = start("counter", mib=4)
    program = (
        "import sys, gpuimg\n"
        "from gpuimg.criu.dump import dump\n"
        "from gpuimg.criu.restore import restore\n"
        "store, pid, criu, folder, step = sys.argv[1:]\n"
        "with gpuimg.open_store(store) as store:\n"
        "    if step == 'dump':\n"
        "        made = dump(store, int(pid), tag='t', leave_running=True, criu=criu)\n"
        "        assert made.id == store.checkpoint('t').id and 'pages-1.img' in made.files\n"
        "        assert [process.pid for process in made.source.processes] == [int(pid)]\n"
        "    else:\n"
        "        result = restore(store, 't', criu=criu)\n"
        "        assert result.pid == int(pid) and result.exit_status == 9, result\n"
        "        assert result.statistics.pages_restored > 1024, result\n"
    )

    def run(step: str) -> None:
        command = [sys.executable, "-c", program, gpuimg.store, victim.pid, criu.path, victim.folder, step]
        subprocess.run(list(map(str, command)), check=True, cwd=ROOT, env=gpuimg.environment)

    run("dump")
    assert_back(victim)
    victim.kill()
    (victim.folder / "exit").write_text("9")
    for _ in range(2):
        run("restore")
