"""The workflow tests of criu-image-streamer, against the installed executable and a simulated criu."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import random
import threading
import time

import pytest

from tests.compat.streamlib import Workflow, read_line, reader, resident, write_all

KIB, MIB = 1024, 1024 * 1024


@pytest.fixture
def workflow(tmp_path):
    """Makes workflows and ends what a failed test left behind."""
    made = []

    def make(**options):
        made.append(Workflow(tmp_path / "images", **options))
        return made[-1]

    yield make
    for each in made:
        each.kill() if each.consumer.process.poll() is None else None


def content(name: str, size: int) -> bytes:
    """Pseudo-random content that only depends on the name."""
    return random.Random(name).randbytes(size)


def test_basic(workflow):
    flow = workflow()
    flow.client.put("file.img", b"hello world")
    flow.finish_capture()
    client = flow.connect_serve()
    assert client.get("file.img") == b"hello world"
    flow.finish()


def test_missing_files(workflow):
    flow = workflow()
    flow.finish_capture(started=False)
    client = flow.connect_serve()
    assert client.get("no-file.img") is None
    flow.finish()


def test_ext_files(workflow):
    sources = {"file1.ext": b"content of file 1", "file2.ext": b"and of file 2"}
    ext_in, ext_out, outputs = [], [], {}
    for name, data in sources.items():
        read, write = os.pipe()
        write_all(write, data)
        os.close(write)
        ext_in.append((name, read))
        outputs[name], write = os.pipe()
        ext_out.append((name, write))
    flow = workflow(ext_in=ext_in, ext_out=ext_out)
    flow.finish_capture(started=False)
    for name, data in sources.items():
        with reader(outputs[name]) as file:
            assert file.read() == data
    flow.connect_serve()
    flow.finish()


def test_ext_file_whose_reader_leaves_early_harms_nothing(workflow):
    read, write = os.pipe()
    gone, out = os.pipe()
    flow = workflow(ext_in=[("fs.tar", read)], ext_out=[("fs.tar", out), ("absent", os.pipe()[1])])
    os.close(gone)
    write_all(write, b"x" * 60_000)
    os.close(write)
    flow.client.put("file.img", b"hello")
    flow.finish_capture()
    assert flow.connect_serve().get("file.img") == b"hello"
    flow.finish()


def test_an_ext_file_is_written_in_whole_blocks_of_tar(workflow):
    """However it came: tar takes a read that ends within a block for a broken archive."""
    data = content("tarball", 700_000) + b"end"
    read, write = os.pipe()
    out, target = os.pipe()
    flow = workflow(ext_in=[("fs.tar", read)], ext_out=[("fs.tar", target)])

    def trickle():
        for begin in range(0, len(data), 7001):
            write_all(write, data[begin : begin + 7001])
        os.close(write)

    thread = threading.Thread(target=trickle)
    thread.start()
    got = b""
    while piece := os.read(out, 10 * KIB):
        got += piece
        assert len(got) % 512 == 0 or len(got) == len(data)
    thread.join()
    os.close(out)
    assert got == data
    flow.finish_capture(started=False)
    flow.connect_serve()
    flow.finish()


def test_load_balancing(workflow):
    """A shard that is read at 1 MiB/s gets little; the others take over."""

    def relay(index, source, target):
        step, pause = (4 * KIB, 1 / 256) if index == 0 else (MIB, 0)
        held = []
        while data := os.read(source, step):
            held.append(data)
            time.sleep(pause)
        write_all(target, b"".join(held))
        os.close(target)
        os.close(source)

    flow = workflow(relay=relay)
    data = os.urandom(40 * MIB)
    flow.client.put("file.img", data)
    stats = flow.finish_capture()
    assert stats[0]["size"] < 2 * MIB
    assert all(each["size"] > 2 * MIB for each in stats[1:])
    client = flow.connect_serve()
    assert client.get("file.img") == data
    flow.finish()


@pytest.mark.slow
def test_restore_mem_usage(workflow):
    """Serving costs under 200 bytes for a small file, and no memory at all for the data of large ones."""
    small, large = 100_000, 105 * MIB
    flow = workflow()
    empty = resident(flow.consumer.process.pid)
    for number in range(small):
        flow.client.put(f"small-{number}.img", b"0123456789")
    piece = bytes(range(256)) * 4
    fd = flow.client.write("large.img")
    for _ in range(large // len(piece)):
        write_all(fd, piece)
    os.close(fd)
    flow.finish_capture()
    client = flow.connect_serve()
    pid = flow.consumer.process.pid
    full = resident(pid)
    assert (full - empty - 10 * small) / (small + 1) < 200
    fd = client.read("large.img")
    digest, total = hashlib.sha256(), 0
    while data := os.read(fd, 10 * KIB):
        digest.update(data)
        total += len(data)
        if total % (8 * MIB) < 10 * KIB:
            assert resident(pid) - full < 12 * MIB
    os.close(fd)
    assert total == large
    assert digest.digest() == hashlib.sha256(piece * (large // len(piece))).digest()
    assert client.get("small-77.img") == b"0123456789"
    flow.finish()


def send_set(client, prefix: str) -> None:
    for n in range(1000):
        client.put(f"{prefix}-medium-{n}", content(f"{prefix}m{n}", 10 * KIB))
    for n in range(2):
        client.put(f"{prefix}-large-{n}", content(f"{prefix}l{n}", 25 * MIB))
    for n in range(10_000):
        client.put(f"{prefix}-small-{n}", content(f"{prefix}s{n}", 10))
    for n in range(1000):
        client.put(f"{prefix}-steps-{n}", content(f"{prefix}t{n}", 10 * KIB), 10)


def check_set(client, prefix: str) -> None:
    for n in range(1000):
        assert client.get(f"{prefix}-medium-{n}") == content(f"{prefix}m{n}", 10 * KIB)
    for n in range(2):
        assert client.get(f"{prefix}-large-{n}") == content(f"{prefix}l{n}", 25 * MIB)
    for n in range(10_000):
        assert client.get(f"{prefix}-small-{n}") == content(f"{prefix}s{n}", 10)
    for n in range(1000):
        assert client.get(f"{prefix}-steps-{n}") == content(f"{prefix}t{n}", 10 * KIB)


class FileLock:
    """A lock that processes share, as criu's tasks share one connection."""

    def __init__(self, path):
        self.path = path
        self.fd = None

    def __enter__(self):
        if self.fd is None:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self.fd, fcntl.LOCK_EX)

    def __exit__(self, *_):
        fcntl.flock(self.fd, fcntl.LOCK_UN)


def in_processes(action, client, prefixes, lock_path) -> None:
    """Run `action(client, prefix)` in a process for each prefix, all on one connection."""
    children = []
    for prefix in prefixes:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                client.lock = FileLock(lock_path)
                action(client, prefix)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * len(children)


@pytest.mark.slow
def test_stress(workflow, tmp_path):
    """72 012 files, five of the six sets at the same time, read back one after the other."""
    flow = workflow()
    send_set(flow.client, "first")
    others = [f"set{n}" for n in range(5)]
    in_processes(send_set, flow.client, others, tmp_path / "lock")
    flow.finish_capture()
    client = flow.connect_serve()
    for prefix in ("first", *others):
        check_set(client, prefix)
    flow.finish()


def test_splice_bug(workflow):
    flow = workflow()
    for n in range(100):
        flow.client.put(f"file-{n}.img", content(str(n), 10 * KIB), 10)
    flow.finish_capture()
    client = flow.connect_serve()
    for n in range(100):
        assert client.get(f"file-{n}.img") == content(str(n), 10 * KIB)
    flow.finish()


def test_extract_to_disk(workflow):
    flow = workflow(operation="extract")
    files = {"small.img": content("small", KIB), "medium.img": content("medium", 100 * KIB)}
    for name, data in files.items():
        flow.client.put(name, data)
    flow.finish_capture()
    flow.finish()
    for name, data in files.items():
        assert (flow.directory / name).read_bytes() == data


def test_many_files_open_at_once_in_both_directions(workflow):
    """criu writes and reads dozens of files alternately; nobody waits for another one's end."""
    names = [f"file-{n}.img" for n in range(40)]
    flow = workflow()
    fds = {name: flow.client.write(name) for name in names}
    for step in range(40):
        for name in names:
            write_all(fds[name], content(f"{name}{step}", 20_000))
    for fd in fds.values():
        os.close(fd)
    flow.finish_capture()
    client = flow.connect_serve()
    fds = {name: client.read(name) for name in reversed(names)}
    files = {name: os.fdopen(fd, "rb") for name, fd in fds.items()}
    for step in range(40):
        for name in names:
            assert files[name].read(20_000) == content(f"{name}{step}", 20_000)
    for file in files.values():
        assert file.read() == b""
        file.close()
    flow.finish()


def test_repeated_reads_and_early_closes_are_harmless(workflow):
    data = content("pages", 3 * MIB)
    flow = workflow()
    flow.client.put("pages-1.img", data)
    flow.client.put("inventory.img", b"inventory")
    flow.finish_capture()
    client = flow.connect_serve()
    for _ in range(3):
        fd = client.read("pages-1.img")
        os.read(fd, 100)
        os.close(fd)
        assert client.get("pages-1.img") == data
        assert client.get("inventory.img") == b"inventory"
    flow.finish()


def test_a_failed_dump_is_not_taken_for_a_good_one(workflow):
    """criu died before inventory.img: the stream is whole for upstream's tools, the status tells the
    truth.
    """
    flow = workflow(operation="extract")
    flow.client.put("core-17.img", b"core")
    flow.client.put("pages-1.img", b"pages" * 1000)
    assert flow.capture.line() == "checkpoint-start"
    flow.client.close()
    assert len(flow.capture.stats()) == 4
    assert flow.capture.wait() == 16
    flow.consumer.stats()
    assert flow.consumer.wait() == 0


def test_serving_needs_no_directory_on_disk_for_small_images(workflow, tmp_path):
    flow = workflow()
    flow.client.put("inventory.img", b"x" * 4096)
    flow.finish_capture()
    assert flow.connect_serve().get("inventory.img") == b"x" * 4096
    flow.finish()
    assert list((tmp_path / "images").iterdir()) == []


def test_progress_lines_nobody_reads_do_not_matter(workflow):
    flow = workflow()
    os.close(flow.capture.progress)
    flow.capture.progress = os.open("/dev/null", os.O_RDONLY)
    flow.client.put("file.img", b"hello")
    flow.client.close()
    assert flow.capture.wait() == 0
    flow.consumer.stats()
    assert flow.connect_serve().get("file.img") == b"hello"
    flow.finish()


def test_a_file_sent_twice_ends_the_capture_with_a_sentence(workflow):
    flow = workflow()
    flow.client.put("file.img", b"one")

    def send_again() -> None:
        # The streamer hangs up at once or in the middle of it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            flow.client.put("file.img", b"two")

    thread = threading.Thread(target=send_again, daemon=True)
    thread.start()
    assert flow.capture.wait() == 15
    assert flow.consumer.wait() == 15
    thread.join(10)


def test_lines_come_one_by_one(workflow):
    """checkpoint-start is not held back until the end, and cpuinfo.img is no checkpoint."""
    flow = workflow()
    flow.client.put("cpuinfo.img", b"cpu")
    fd = flow.client.write("pstree.img")
    assert read_line(flow.capture.progress) == "checkpoint-start"
    os.close(fd)
    flow.client.put("inventory.img", b"inventory")
    flow.finish_capture(started=False)
    flow.connect_serve()
    flow.finish()
