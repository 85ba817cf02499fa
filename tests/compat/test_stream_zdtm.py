"""What zdtm.py does with criu-image-streamer in one iteration, with a simulated criu."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.compat.streamlib import EXECUTABLE, Client, read_line


@pytest.fixture
def search_path(tmp_path):
    """A PATH on which the executable goes by upstream's name, as --criu-image-streamer-dir makes it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "criu-image-streamer").symlink_to(EXECUTABLE)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def spawn(action, directory, environment):
    """Start the streamer as zdtm does and wait for the lines that zdtm waits for."""
    read, write = os.pipe()
    streamer = f"criu-image-streamer --images-dir '{directory}' --progress-fd {write} {action}"
    if action == "capture":
        command = f"{streamer} | cat > {directory}/img.criu"
    else:
        command = f"cat {directory}/img.criu | {streamer}"
    log = (directory / "img-streamer.log").open("ab")
    process = subprocess.Popen(
        ["bash", "-c", f"set -o pipefail; {command}"],
        stderr=log,
        env=environment,
        pass_fds=[write],
        start_new_session=True,
    )
    log.close()
    os.close(write)
    if action != "capture":
        assert read_line(read).startswith('{"shards":[{"size":')
    if action != "extract":
        assert read_line(read) == "socket-init"
    os.close(read)
    return process


def test_an_iteration(tmp_path, search_path):
    assert (
        subprocess.run(["criu-image-streamer", "--version"], env=search_path, capture_output=True).returncode
        == 0
    )
    directory = tmp_path / "dump"
    directory.mkdir(mode=0o777)
    process = spawn("capture", directory, search_path)
    client = Client(directory / "streamer-capture.sock")
    pages = os.urandom(300 * 4096)
    pagemap = client.write("pagemap-1.img")
    os.write(pagemap, b"head")
    client.put("pages-1.img", pages)
    os.write(pagemap, b"tail")
    os.close(pagemap)
    client.put("core-1.img", b"core")
    client.put("inventory.img", b"inventory")
    client.close()
    (directory / "stats-dump").write_bytes(b"statistics")
    assert process.wait(30) == 0

    assert spawn("extract", directory, search_path).wait(30) == 0
    assert sum(path.stat().st_size for path in directory.glob("pages-*")) == len(pages)
    assert (directory / "stats-dump").read_bytes() == b"statistics"
    (directory / "inventory.img").unlink()

    process = spawn("serve", directory, search_path)
    client = Client(directory / "streamer-serve.sock")
    assert client.get("inventory.img") == b"inventory"
    assert client.get("pagemap-1.img") == b"headtail"
    assert client.get("netns-1.img") is None
    fd = client.read("pages-1.img")
    os.close(fd)
    client.close()
    assert process.wait(30) == 0
    assert (directory / "img-streamer.log").read_bytes().count(b"Error") == 0


def test_terminate_ends_it(tmp_path, search_path):
    directory = tmp_path / "dump"
    directory.mkdir()
    process = spawn("capture", directory, search_path)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) != 0
    assert b"Traceback" not in (directory / "img-streamer.log").read_bytes()
