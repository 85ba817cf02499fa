"""The integration tests of criu-image-streamer with real criu, and what only real criu can show."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.compat.streamlib import EXECUTABLE

ROOT = Path(__file__).resolve().parents[2]
CRIU = {suite: ROOT / ".criu" / suite / "bin" / "criu" for suite in ("trixie", "sid")}
FILTER = next((name for name in ("lz4", "zstd", "gzip") if shutil.which(name)), "cat")
UNFILTER = "cat" if FILTER == "cat" else f"{FILTER} -d"
STREAMER = shlex.quote(str(EXECUTABLE))

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="criu needs root"),
]


def spawn(script: str, directory: Path) -> subprocess.Popen[bytes]:
    command = ["bash", "-c", f"set -o pipefail; {script}"]
    return subprocess.Popen(command, cwd=directory, start_new_session=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def dump(criu: Path, images: Path, pid: int) -> None:
    wait_for(images / "streamer-capture.sock")
    command = [criu, "dump", "--stream", "--shell-job", "--network-lock", "skip", "-D", images, "--tree", pid]
    subprocess.run([*map(str, command), "-v4", "-o", "dump.log"], check=True)


def restore(criu: Path, images: Path) -> None:
    wait_for(images / "streamer-serve.sock")
    command = [criu, "restore", "--stream", "--shell-job", "--restore-detached", "-D", images]
    subprocess.run([*map(str, command), "-v4", "-o", "restore.log"], check=True)


@pytest.fixture(params=sorted(CRIU))
def criu(request):
    """Both criu versions, fetched if they are missing."""
    if not CRIU[request.param].exists():
        fetched = subprocess.run(
            [sys.executable, "-m", "scripts.fetch_criu", request.param],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert fetched.returncode == 0, fetched.stderr
    return CRIU[request.param]


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


@pytest.fixture
def target():
    """A process to dump; killed at the end in whatever shape it is."""
    process = subprocess.Popen(
        ["setsid", "sleep", "1000"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(0.1)
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.wait()


def checkpoint_one_shard(criu, directory, images, target) -> None:
    capture = spawn(f"{STREAMER} -D {images} capture | {FILTER} > img", directory)
    dump(criu, images, target.pid)
    assert capture.wait(30) == 0
    assert target.wait(30) == -signal.SIGKILL
    assert (directory / "img").stat().st_size > 0


def test_checkpoint_and_restore_with_compression(criu, tmp_path, images, target):
    checkpoint_one_shard(criu, tmp_path, images, target)
    shutil.rmtree(images)
    images.mkdir()
    serve = spawn(f"{UNFILTER} < img | {STREAMER} -D {images} serve", tmp_path)
    restore(criu, images)
    os.kill(target.pid, 0)
    assert serve.wait(30) == 0


def test_extract_image_to_disk_is_what_criu_restores_without_a_streamer(criu, tmp_path, images, target):
    checkpoint_one_shard(criu, tmp_path, images, target)
    out = tmp_path / "out"
    assert spawn(f"{UNFILTER} < img | {STREAMER} -D {out} extract", tmp_path).wait(30) == 0
    assert (out / "inventory.img").exists()
    assert (out / "pstree.img").exists()
    assert list(out.glob("core-*.img"))
    subprocess.run([criu, "restore", "--shell-job", "-d", "-D", out, "-o", "restore.log"], check=True)
    os.kill(target.pid, 0)


def test_multi_shard_checkpoint_and_restore(criu, tmp_path, images, target):
    outputs = " ".join(f"{fd}> >({FILTER} > img.{fd})" for fd in (10, 11, 12))
    command = f"{STREAMER} -D {images} --shard-fds 10,11,12 capture {outputs}"
    capture = spawn(f"{command}; status=$?; wait; sleep 0.3; exit $status", tmp_path)
    dump(criu, images, target.pid)
    assert capture.wait(30) == 0
    target.wait(30)
    assert sum(path.stat().st_size for path in tmp_path.glob("img.*")) > 0
    inputs = " ".join(f"{fd}< <({UNFILTER} < img.{fd})" for fd in (10, 11, 12))
    serve = spawn(f"{STREAMER} -D {images} --shard-fds 10,11,12 serve {inputs}", tmp_path)
    restore(criu, images)
    os.kill(target.pid, 0)
    assert serve.wait(30) == 0


def test_checkpoint_and_restore_with_an_external_tarball(criu, tmp_path, images, target):
    """A file system goes along in a FIFO, which the shell holds open on both sides until criu is done."""
    for name in ("source", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "source" / "data").write_bytes(b"file system\n" * 10_000)
    os.mkfifo(tmp_path / "fifo")
    capture = spawn(
        f"tar -C source -cf - . > fifo & exec 20< fifo; "
        f"{STREAMER} -D {images} --ext-file-fds fs.tar:20 capture | {FILTER} > img",
        tmp_path,
    )
    dump(criu, images, target.pid)
    assert capture.wait(30) == 0
    target.wait(30)
    serve = spawn(
        f"tar -C target -xf fifo & exec 20> fifo; "
        f"{UNFILTER} < img | {STREAMER} -D {images} --ext-file-fds fs.tar:20 serve; status=$?; "
        f"exec 20>&-; wait; exit $status",
        tmp_path,
    )
    restore(criu, images)
    assert serve.wait(30) == 0
    os.kill(target.pid, 0)
    assert (tmp_path / "target" / "data").read_bytes() == b"file system\n" * 10_000


def test_progress_output(criu, tmp_path, images, target):
    capture = spawn(f"{STREAMER} -D {images} capture 2> progress | cat > img", tmp_path)
    dump(criu, images, target.pid)
    assert capture.wait(30) == 0
    lines = (tmp_path / "progress").read_text().splitlines()
    assert lines[:2] == ["socket-init", "checkpoint-start"]
    assert lines[2].startswith('{"shards":[{"size":')


def test_smoke_help():
    result = subprocess.run([EXECUTABLE, "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert all(word in result.stdout for word in ("capture", "serve", "extract"))
    assert (
        subprocess.run([EXECUTABLE, "-D", "/tmp", "capture", "--help"], capture_output=True).returncode == 0
    )


def test_a_dump_that_fails_is_told(criu, tmp_path, images):
    """criu meets something that it cannot dump; the status of the capture tells that the image is no
    image.
    """
    left, right = socket.socketpair()
    target = subprocess.Popen(["setsid", "sleep", "1000"], stdin=left, stdout=left, stderr=left)
    try:
        time.sleep(0.1)
        capture = spawn(f"{STREAMER} -D {images} capture 2> progress | cat > img", tmp_path)
        with pytest.raises(subprocess.CalledProcessError):
            dump(criu, images, target.pid)
        assert capture.wait(30) == 16
        assert "criu went away before it sent inventory.img" in (tmp_path / "progress").read_text()
        assert target.poll() is None
    finally:
        target.kill()
        target.wait()
        left.close()
        right.close()


def test_ports_of_a_listening_server_are_remapped(criu, tmp_path, images):
    code = (
        "import socket\n"
        "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\n"
        "print(s.getsockname()[1], flush=True)\n"
        "while True: c, _ = s.accept(); c.sendall(b'hello'); c.close()"
    )
    log = tmp_path / "port"
    with log.open("wb") as out:
        command = ["setsid", "python3", "-c", code]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        while not log.read_text().endswith("\n"):
            time.sleep(0.02)
        old = int(log.read_text())
        new = old - 1000
        capture = spawn(f"{STREAMER} -D {images} capture | cat > img", tmp_path)
        try:
            dump(criu, images, server.pid)
        except subprocess.CalledProcessError:
            if "sockets: Can't get" in (images / "dump.log").read_text():
                pytest.skip("this criu cannot dump TCP sockets on this kernel")
            raise
        assert capture.wait(30) == 0
        server.wait(30)
        remap = f"--tcp-listen-remap {old}:{new}"
        serve = spawn(f"{STREAMER} -D {images} {remap} serve < <(cat img)", tmp_path)
        restore(criu, images)
        assert serve.wait(30) == 0
        with socket.create_connection(("127.0.0.1", new), 5) as connection:
            assert connection.recv(5) == b"hello"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGKILL)
        server.wait()
