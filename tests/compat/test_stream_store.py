"""The streamer on the store: dump into it, restore out of it, shards both ways."""

from __future__ import annotations

import fcntl
import os
import threading

import pytest

import gpuimg
from gpuimg.errors import BadStreamError, IncompleteDumpError, UnknownReferenceError
from gpuimg.stream import pipes, stored
from gpuimg.stream.store_source import StoreSource
from tests.compat.streamlib import Client, read_line, read_shards, reader, write_all

FILES = {
    "pages-1.img": os.urandom(5_000_000) + bytes(3_000_000) + b"tail",
    "pages-2.img": b"x" * 4096,
    "pages-3.img": os.urandom(600_000),
    "pipes-data.img": os.urandom(700_000),
    "core-1.img": b"core" * 100,
    "mm-1.img": os.urandom(4097),
    "inventory.img": b"inventory",
}


@pytest.fixture
def store(tmp_path):
    with gpuimg.init_store(tmp_path / "store") as store:
        yield store


@pytest.fixture
def checkpoint(store):
    with store.ingest() as session:
        for name, data in FILES.items():
            file = session.file(name)
            file.write(data)
            file.close()
        return session.commit(tag="t")


class Background:
    """Runs a call in a thread; `result` raises what it raised."""

    def __init__(self, call, *arguments, **options):
        self.outcome = None
        self.error = None
        self.thread = threading.Thread(target=self._run, args=(call, arguments, options), daemon=True)
        self.thread.start()

    def _run(self, call, arguments, options):
        try:
            self.outcome = call(*arguments, **options)
        except BaseException as error:
            self.error = error

    def result(self):
        self.thread.join(60)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.outcome


@pytest.fixture
def progress():
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def test_capture_makes_a_checkpoint(store, tmp_path, progress):
    ext, ext_write = os.pipe()
    capture = Background(
        stored.capture,
        store,
        tmp_path / "images",
        tag="t",
        ext_files=[("fs.tar", ext)],
        progress_fd=progress[1],
    )
    assert read_line(progress[0]) == "socket-init"
    client = Client(tmp_path / "images" / "streamer-capture.sock")
    write_all(ext_write, b"tarball")
    os.close(ext_write)
    for name, data in FILES.items():
        client.put(name, data)
    client.close()
    checkpoint = capture.result()
    assert read_line(progress[0]) == "checkpoint-start"
    assert read_line(progress[0]).startswith('{"shards":[{"size":')
    assert store.checkpoint("t").id == checkpoint.id
    assert {name: checkpoint.read(name) for name in checkpoint.files} == {**FILES, "fs.tar": b"tarball"}


def test_a_failed_dump_makes_none(store, tmp_path, progress):
    capture = Background(stored.capture, store, tmp_path, tag="t", progress_fd=progress[1])
    assert read_line(progress[0]) == "socket-init"
    client = Client(tmp_path / "streamer-capture.sock")
    client.put("core-1.img", b"core")
    client.close()
    with pytest.raises(IncompleteDumpError):
        capture.result()
    with pytest.raises(UnknownReferenceError):
        store.checkpoint("t")


def test_many_files_at_once_are_captured(store, tmp_path, progress):
    """More open files than the store has buffers."""
    capture = Background(stored.capture, store, tmp_path, progress_fd=progress[1])
    assert read_line(progress[0]) == "socket-init"
    client = Client(tmp_path / "streamer-capture.sock")
    fds = [client.write(f"pages-{number}.img") for number in range(120)]
    for step in range(5):
        for number, fd in enumerate(fds):
            write_all(fd, bytes((number, step)) * 20_000)
    for fd in fds:
        os.close(fd)
    client.put("inventory.img", b"inventory")
    client.close()
    checkpoint = capture.result()
    for number in range(120):
        expected = b"".join(bytes((number, step)) * 20_000 for step in range(5))
        assert checkpoint.read(f"pages-{number}.img") == expected


def test_serve_gives_everything_back(checkpoint, tmp_path, progress):
    out, ext = os.pipe()
    serve = Background(
        stored.serve,
        checkpoint,
        tmp_path / "images",
        ext_files=[("core-1.img", ext), ("absent", os.pipe()[1])],
        progress_fd=progress[1],
    )
    with reader(out) as file:
        assert file.read() == FILES["core-1.img"]
    assert read_line(progress[0]) == "socket-init"
    client = Client(tmp_path / "images" / "streamer-serve.sock")
    for _ in range(2):
        assert client.get("core-1.img") is None
        assert client.get("none") is None
        for name, data in FILES.items():
            if name != "core-1.img":
                assert client.get(name) == data
    os.close(client.read("pages-1.img"))
    client.close()
    serve.result()


@pytest.mark.usefixtures("checkpoint")
def test_a_damaged_checkpoint_fails_the_restore(store, tmp_path, progress):
    for pack in (tmp_path / "store").rglob("*.pack"):
        # Everywhere: which file's chunks lie where in the packs is the workers' doing.
        with pack.open("r+b") as file:
            for offset in range(1000, pack.stat().st_size, 50_000):
                file.seek(offset)
                file.write(b"damage")
    serve = Background(stored.serve, store.checkpoint("t"), tmp_path / "images", progress_fd=progress[1])
    assert read_line(progress[0]) == "socket-init"
    client = Client(tmp_path / "images" / "streamer-serve.sock")
    got = client.get("pages-1.img")
    assert len(got) < len(FILES["pages-1.img"])
    assert FILES["pages-1.img"].startswith(got)
    client.close()
    with pytest.raises(gpuimg.errors.GpuimgError, match=r"pages-1\.img"):
        serve.result()


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_goes_out_as_shards_and_comes_in_again(checkpoint, tmp_path, shards, progress):
    ends = [os.pipe() for _ in range(shards)]
    export = Background(stored.export_shards, checkpoint, [write for _, write in ends])
    with gpuimg.init_store(tmp_path / "other") as other:
        extract = Background(
            stored.extract, other, [read for read, _ in ends], tag="t", progress_fd=progress[1]
        )
        export.result()
        for _, write in ends:
            os.close(write)
        copy = extract.result()
        assert {name: copy.read(name) for name in copy.files} == FILES
    assert read_line(progress[0]).count('"size":') == shards
    for read, _ in ends:
        os.close(read)


def extract_bytes(store, data):
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)
    write_all(write, data)
    os.close(write)
    try:
        return stored.extract(store, [read])
    finally:
        os.close(read)


def test_streams_that_are_cut_or_of_failed_dumps_are_not_stored(store):
    from gpuimg.stream.shards import ShardWriter

    read, write = os.pipe()
    writer = ShardWriter([write])
    file = writer.open("core-1.img")
    file.write(b"core")
    file.close()
    writer.finish()
    os.close(write)
    stream = os.read(read, 1 << 20)
    os.close(read)
    assert read_shards([stream]) == {"core-1.img": b"core"}
    with pytest.raises(IncompleteDumpError):
        extract_bytes(store, stream)
    with pytest.raises(BadStreamError):
        extract_bytes(store, stream[:-1])
    assert store.checkpoints() == []


def test_lent_pages_are_never_changed_before_they_are_read(store):
    """The buffers behind a pipe are reused by the next read-ahead; a slow reader must not see that."""
    data = os.urandom(30_000_000)
    with store.ingest() as session:
        for name in ("pages-1.img", "amdgpu-pages-1-2.img"):
            file = session.file(name)
            file.write(data)
            file.close()
        checkpoint = session.commit()
    for name in ("pages-1.img", "amdgpu-pages-1-2.img"):
        read, write = os.pipe()
        pipes.try_capacity(write, 1 << 20)
        file = StoreSource(checkpoint).lookup(name)
        sending = Background(file.send, write, lambda _: None)
        got, sizes = bytearray(), [1, 4095, 4097, 65536, 100_000, 1 << 20]
        while len(got) < len(data):
            got += os.read(read, sizes[len(got) % len(sizes)])
        assert got == data
        sending.result()
        os.close(read)
        os.close(write)


def test_a_reader_that_leaves_ends_the_sending(checkpoint):
    read, write = os.pipe()
    sending = Background(StoreSource(checkpoint).lookup("pages-1.img").send, write, lambda _: None)
    os.read(read, 100)
    os.close(read)
    with pytest.raises(BrokenPipeError):
        sending.result()
    os.close(write)


def test_external_files_must_be_pipes(store, checkpoint, tmp_path):
    with (tmp_path / "x").open("wb") as file:
        with pytest.raises(BadStreamError, match="is not a pipe"):
            stored.capture(store, tmp_path, ext_files=[("a", file.fileno())])
        with pytest.raises(BadStreamError, match="is not a pipe"):
            stored.serve(checkpoint, tmp_path, ext_files=[("a", file.fileno())])


def test_remapping_needs_files_image(checkpoint, tmp_path):
    with pytest.raises(BadStreamError, match=r"files\.img"):
        stored.serve(checkpoint, tmp_path, tcp_listen_remap=[(1, 2)])
