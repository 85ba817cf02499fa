"""What goes into the store comes out of it, whatever its size and however it arrives."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import gpuimg
from gpuimg.errors import (
    BadNameError,
    GpuimgError,
    ImagesDirectoryError,
    InputOutputError,
    NoSpaceError,
    StoreExistsError,
    UnknownReferenceError,
    UsageError,
)
from gpuimg.store import packwriter
from gpuimg.store.pool import SLAB_SIZE
from tests.fixtures.store_data import KIB, MIB, PAGE, floats, noise, pages, text

CHUNK = 64 * KIB
BORDERS = sorted(
    {0, 1, 2 * SLAB_SIZE + 12345, 7 * MIB + 1}
    | {base + step for base in (PAGE, CHUNK, 16 * PAGE, MIB, SLAB_SIZE, 2 * SLAB_SIZE) for step in (-1, 0, 1)}
)


@pytest.fixture
def store(tmp_path):
    with gpuimg.init_store(tmp_path / "store", chunk_size=CHUNK) as opened:
        yield opened


def put(store, files, tag="t"):
    with store.ingest() as session:
        for name, data in files.items():
            file = session.file(name)
            file.write(data)
            file.close()
        return session.commit(tag=tag)


def streamed(checkpoint, name):
    return b"".join(bytes(buffer) for buffer in checkpoint.stream(name))


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def tree(root):
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def exported(checkpoint, directory):
    checkpoint.export(directory)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def bordering_files():
    whole = noise(BORDERS[-1], 1)
    paged = pages(-(-BORDERS[-1] // PAGE), 2, ((0, 3), (200, 230), (500, 1030)))
    files = {f"fixed-{size}": whole[:size] for size in BORDERS}
    files |= {f"pages-{size}.img": paged[:size] for size in BORDERS}
    return files | {f"zero-{size}": bytes(size) for size in BORDERS}


def test_files_of_every_bordering_size_come_back(store, tmp_path):
    files = bordering_files()
    checkpoint = put(store, files)
    assert {name: entry.size for name, entry in checkpoint.files.items()} == {
        name: len(data) for name, data in files.items()
    }
    for name, data in files.items():
        assert checkpoint.read(name) == data, name
        assert streamed(checkpoint, name) == data, name
    assert exported(checkpoint, tmp_path / "out") == files
    assert not store.verify().faults
    assert sum(len(data) for data in files.values()) == checkpoint.statistics.raw_bytes


def test_paths_and_streams_make_the_same_recipes(store, tmp_path):
    files = bordering_files()
    (tmp_path / "in").mkdir()
    for name, data in files.items():
        (tmp_path / "in" / name).write_bytes(data)
    streams = put(store, files)
    packs = tree(store.path / "packs")
    with store.ingest() as session:
        for name in files:
            session.add_path(name, tmp_path / "in" / name)
        from_paths = session.commit()
    assert from_paths.files == streams.files
    assert from_paths.root == streams.root
    assert tree(store.path / "packs") == packs, "nothing was stored twice"


@pytest.mark.parametrize("piece", [1000, 4096, 65537, 1 << 20])
def test_a_pipe_in_odd_pieces_gives_the_same_file(store, piece):
    data = pages(900, 3, ((100, 200),)) + b"end"
    reading, writing = os.pipe()

    def feed():
        for start in range(0, len(data), piece):
            os.write(writing, data[start : start + piece])
        os.close(writing)

    feeder = threading.Thread(target=feed)
    feeder.start()
    with store.ingest() as session:
        file = session.file("pages-1.img")
        total = 0
        while count := file.fill(reading):
            total += count
        file.close()
        checkpoint = session.commit()
    feeder.join()
    os.close(reading)
    assert total == len(data)
    assert checkpoint.read("pages-1.img") == data
    assert put(store, {"pages-1.img": data}).files == checkpoint.files


def test_fill_takes_no_more_than_its_limit_and_lets_a_dry_pipe_say_so(store):
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with store.ingest() as session:
        file = session.file("f")
        with pytest.raises(BlockingIOError):
            file.fill(reading)
        os.write(writing, b"0123456789")
        assert file.fill(reading, limit=3) == 3
        assert file.fill(reading, limit=100) == 7
        with pytest.raises(BlockingIOError):
            file.fill(reading)
        os.close(writing)
        assert file.fill(reading) == 0
        file.close()
        assert session.small_file("f") == b"0123456789"
        checkpoint = session.commit()
    os.close(reading)
    assert checkpoint.read("f") == b"0123456789"


MANY = r"""
import resource, sys
import numpy as np
import gpuimg
rng = np.random.default_rng(0)
data = [rng.bytes(700_000 + 4099 * n) for n in range(10)]
count = 240
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with gpuimg.init_store(sys.argv[1], chunk_size=1 << 20) as store, store.ingest() as session:
    files = [session.file(f"pages-{n}.img" if n % 2 else f"file-{n}") for n in range(count)]
    for start in range(0, 800_000, 50_000):
        for number, file in enumerate(files):
            file.write(data[number % 10][start : start + 50_000])
    for file in reversed(files):
        file.close()
    checkpoint = session.commit()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, file in enumerate(files):
        assert checkpoint.read(file.name) == data[number % 10][:800_000], file.name
print((peak - before) // 1024)
"""


def test_hundreds_of_files_open_at_once_come_back_and_memory_stays_bounded(tmp_path):
    """Each file is larger than what the pool could hold of all of them."""
    ended = subprocess.run(
        [sys.executable, "-c", MANY, str(tmp_path / "store")], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    # The pool (96 MiB), and what each file may keep of a chunk that is not full.
    assert int(ended.stdout) < 96 + 240 * 1.1


def test_streams_beside_paths_never_wait_for_each_other(store, tmp_path):
    """Workers that read paths need slabs while the streams take all they can get."""
    for number in range(8):
        (tmp_path / f"in-{number}").write_bytes(noise(6 * MIB, number))
    block = noise(MIB, 99)
    with store.ingest() as session:
        session.pool._left = session.pool.size = 8
        for number in range(8):
            session.add_path(f"path-{number}", tmp_path / f"in-{number}")
        file = session.file("stream")
        for _ in range(48):
            file.write(block)
        file.close()
        checkpoint = session.commit()
    assert checkpoint.files["stream"].size == 48 * MIB
    assert checkpoint.read("path-7") == noise(6 * MIB, 7)


def test_ranged_reads_are_slices_of_the_file(store):
    files = {
        "pages-1.img": pages(1300, 4, ((0, 40), (600, 900))),
        "weights": floats(5 * MIB + 77, 5, "bfloat16"),
        "small": text(4000),
        "empty": b"",
    }
    checkpoint = put(store, files)
    for name, data in files.items():
        size = len(data)
        for offset in (0, 1, 4095, 4096, CHUNK - 1, SLAB_SIZE - 1, SLAB_SIZE, size - 1, size, size + 5):
            for length in (0, 1, 100, CHUNK + 1, SLAB_SIZE + 3, size, None):
                if offset < 0:
                    continue
                end = None if length is None else offset + length
                assert checkpoint.read(name, offset, length) == data[offset:end], (name, offset, length)
        buffer = bytearray(b"\xee" * 200)
        count = checkpoint.read_into(name, 3, buffer)
        assert buffer == data[3 : 3 + count] + b"\xee" * (200 - count)


def test_offsets_and_lengths_below_zero_are_refused_rather_than_guessed(store):
    checkpoint = put(store, {"big": noise(MIB), "small": b"small"})
    for name in ("big", "small"):
        with pytest.raises(UsageError):
            checkpoint.read(name, -1)
        with pytest.raises(UsageError):
            checkpoint.read_into(name, -5, bytearray(10))
        with pytest.raises(UsageError):
            checkpoint.read(name, 0, -1)


def test_a_file_that_is_not_there_is_named(store):
    checkpoint = put(store, {"a": b"1"})
    for call in (lambda: checkpoint.read("b"), lambda: next(checkpoint.stream("b"))):
        with pytest.raises(BadNameError, match="'b'"):
            call()


def test_streams_given_up_halfway_leave_their_buffers_to_others(store):
    checkpoint = put(store, {"f": noise(20 * MIB)})
    for _ in range(80):
        stream = checkpoint.stream("f")
        next(stream)
        stream.close()
    together = [checkpoint.stream("f") for _ in range(60)]
    for stream in together:
        next(stream)
    assert checkpoint.read("f", 5, 10) == noise(20 * MIB)[5:15]
    assert streamed(checkpoint, "f") == noise(20 * MIB)


def test_export_refuses_to_overwrite_and_removes_nothing(store, tmp_path):
    checkpoint = put(store, {"a": b"new", "b": b"new"})
    out = tmp_path / "out"
    out.mkdir()
    (out / "b").write_text("old")
    with pytest.raises(ImagesDirectoryError, match="exists"):
        checkpoint.export(out)
    assert {path.name: path.read_text() for path in out.iterdir()} == {"b": "old"}
    (out / "b").unlink()
    (out / "b").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ImagesDirectoryError):
        checkpoint.export(out)
    assert not (tmp_path / "elsewhere").exists()


def test_export_onto_a_file_is_refused_by_its_name(store, tmp_path):
    (tmp_path / "file").write_text("mine")
    for files in ({"a": b"1"}, {}):
        with pytest.raises(ImagesDirectoryError, match="file"):
            put(store, files).export(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# Names


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/abs", "../up", "nul\0", "n" * 256, "é" * 128, "\udcff", "a/"]
)
def test_a_hostile_file_name_is_refused(store, name):
    with store.ingest() as session:
        with pytest.raises(BadNameError):
            session.file(name)
        with pytest.raises(BadNameError):
            session.add_path(name, store.path / "config")
        file = session.file("good")
        file.close()
        assert set(session.commit().files) == {"good"}


def test_unusual_names_that_are_allowed_come_back(store, tmp_path):
    names = ["n" * 255, "é" * 127, " ", "...", "-rf", "new\nline", "\x01", "日本", "a\\b", "%s"]
    files = {name: name.encode() * 3000 for name in names}
    assert exported(put(store, files), tmp_path / "out") == files


def test_a_name_given_twice_is_refused(store, tmp_path):
    (tmp_path / "f").write_text("x")
    with store.ingest() as session:
        session.file("f")
        with pytest.raises(BadNameError, match="twice"):
            session.file("f")
        with pytest.raises(BadNameError, match="twice"):
            session.add_path("f", tmp_path / "f")


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "-x", ".hidden", "a b", "t" * 129, "a\0", "a\n", "é"])
def test_a_bad_tag_is_refused_before_anything_is_committed(store, tag):
    put(store, {"a": b"1"}, tag="good")
    with store.ingest() as session:
        file = session.file("f")
        file.write(noise(MIB))
        file.close()
        with pytest.raises(BadNameError):
            session.commit(tag=tag)
    assert len(store.checkpoints()) == 1
    with pytest.raises(BadNameError):
        store.set_tag(tag, "good")
    assert set(store.tags()) == {"good"}


# What does not end well


def test_a_commit_with_an_unfinished_file_is_refused_and_leaves_the_tag(store):
    first = put(store, {"a": b"1"})
    with store.ingest() as session:
        session.file("open").write(noise(3 * MIB))
        with pytest.raises(GpuimgError, match="open"):
            session.commit(tag="t")
    assert store.tags() == {"t": first.id}
    assert [each.id for each in store.checkpoints()] == [first.id]


def test_an_abandoned_session_leaves_nothing_visible_and_gc_takes_the_rest(store):
    first = put(store, {"a": noise(MIB, 1)})
    visible = tree(store.path / "manifests") | tree(store.path / "tags")
    with store.ingest() as session:
        for number in range(3):
            file = session.file(f"f{number}")
            file.write(noise(40 * MIB, 2 + number))
            if number:
                file.close()
    assert tree(store.path / "manifests") | tree(store.path / "tags") == visible
    assert tree(store.path / "leases") == set()
    assert not store.verify().faults
    store.gc()
    assert tree(store.path / "tmp") == tree(store.path / "trash") == set()
    assert len(tree(store.path / "packs")) == 1
    assert first.read("a") == noise(MIB, 1)


def test_a_session_that_has_ended_takes_nothing_more(store):
    ended = []
    with store.ingest() as session:
        file = session.file("f")
        file.write(b"x" * 10_000)
        file.close()
        session.commit()
        ended.append((session, file))
    with store.ingest() as session:
        ended.append((session, session.file("f")))
    for session, file in ended:
        for call in (
            lambda file=file: file.write(b"more"),
            lambda session=session: session.file("g"),
            lambda session=session: session.add_path("h", store.path / "config"),
            lambda session=session: session.commit(tag="again"),
        ):
            with pytest.raises(GpuimgError):
                call()
        session.abandon()
    assert len(store.checkpoints()) == 1
    assert store.tags() == {}


@pytest.mark.parametrize("size", [10, 5000])
def test_a_file_that_is_complete_takes_no_more_bytes(store, size):
    with store.ingest() as session:
        file = session.file("f")
        file.write(b"x" * size)
        file.close()
        file.close()
        with pytest.raises(GpuimgError):
            file.write(b"more")
        with open("/dev/zero", "rb") as zero, pytest.raises(GpuimgError):
            file.fill(zero.fileno(), limit=1)
        checkpoint = session.commit()
    assert checkpoint.read("f") == b"x" * size


def test_a_path_that_cannot_be_read_fails_the_session_with_its_name(store, tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        with store.ingest() as session, pytest.raises(InputOutputError, match=path.name):
            session.add_path("f", path)
            session.commit(tag="t")
        assert store.checkpoints() == []


@pytest.mark.parametrize("stage", ["write", "fsync", "rename"])
def test_a_full_disk_is_called_that_and_leaves_the_store_clean(store, monkeypatch, stage):
    first = put(store, {"a": noise(MIB, 1)})

    def full(*_arguments, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if stage == "write":
            patch.setattr(packwriter.os, "pwritev", full)
        elif stage == "fsync":
            patch.setattr(packwriter.os, "fsync", full)
        else:
            patch.setattr(type(store.path), "rename", full)
        with pytest.raises(NoSpaceError, match="free some space"):
            put(store, {"b": noise(10 * MIB, 2)})
    assert store.tags() == {"t": first.id}
    assert [each.id for each in store.checkpoints()] == [first.id]
    assert not store.verify().faults
    assert put(store, {"b": noise(10 * MIB, 2)}).read("b") == noise(10 * MIB, 2)


def test_a_tag_that_cannot_be_written_takes_its_checkpoint_back(store, monkeypatch):
    first = put(store, {"a": b"1"})

    def full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type(store._context.catalogue), "set_tag", full)
        with pytest.raises(NoSpaceError):
            put(store, {"a": b"2"})
    assert [each.id for each in store.checkpoints()] == [first.id]
    assert store.tags() == {"t": first.id}


def test_failing_sessions_leak_no_descriptors_or_threads(store, tmp_path):
    def failing():
        with store.ingest() as session:
            session.file("open").write(noise(5 * MIB))
            with pytest.raises(GpuimgError):
                session.add_path("missing", tmp_path / "missing")
                session.commit()

    failing()
    before = open_descriptors(), threading.active_count()
    for _ in range(5):
        failing()
    assert (open_descriptors(), threading.active_count()) == before


# The folder


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_are_0600_and_folders_0700_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        with gpuimg.init_store(tmp_path / "store", chunk_size=CHUNK) as store:
            put(store, {"a": noise(MIB), "b": b"small"})
            put(store, {"a": noise(MIB, 2)}, tag="u")
            store.remove("t")
            held = store.ingest()
            store.gc()
            held.abandon()
            store.checkpoint("u").export(tmp_path / "out")
            modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in (tmp_path / "store").rglob("*")}
        for path in (tmp_path / "store" / "index").iterdir():
            path.unlink()
        (tmp_path / "store" / "index").rmdir()
        with gpuimg.open_store(tmp_path / "store"):
            pass
        gpuimg.repair_store(tmp_path / "store")
    finally:
        os.umask(before)
    modes |= {path: stat.S_IMODE(path.lstat().st_mode) for path in tmp_path.rglob("*")}
    wrong = {path: oct(mode) for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)}
    wrong = {path: mode for path, mode in wrong.items() if path.exists()}
    assert wrong == {}


def test_init_refuses_what_is_there_and_finishes_what_a_crash_began(tmp_path):
    gpuimg.init_store(tmp_path / "store").close()
    with pytest.raises(StoreExistsError):
        gpuimg.init_store(tmp_path / "store")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("full", "file"):
        with pytest.raises(StoreExistsError):
            gpuimg.init_store(tmp_path / name)
    (tmp_path / "crashed" / "packs").mkdir(parents=True)
    (tmp_path / "crashed" / "config.tmp").write_text("{")
    with gpuimg.init_store(tmp_path / "crashed") as store:
        assert put(store, {"a": b"1"}).read("a") == b"1"


@pytest.mark.parametrize("size", [0, 1, 100_000, 32 * KIB, 2 * MIB, -65536])
def test_a_chunk_size_that_is_not_allowed_makes_no_store(tmp_path, size):
    with pytest.raises(UsageError):
        gpuimg.init_store(tmp_path / "store", chunk_size=size)
    assert not (tmp_path / "store").exists()


def test_one_store_opened_twice_in_a_process_is_one_store(store):
    first = put(store, {"a": noise(MIB)})
    other = gpuimg.open_store(store.path)
    second = put(other, {"b": noise(MIB, 2)}, tag="u")
    assert store.checkpoint("u").read("b") == noise(MIB, 2)
    other.close()
    other.close()
    assert store.checkpoint("t").read("a") == noise(MIB)
    assert {each.id for each in store.checkpoints()} == {first.id, second.id}
    assert put(store, {"c": noise(MIB, 3)}, tag="v").read("c") == noise(MIB, 3)


def test_a_forked_child_opens_the_store_anew_beside_its_parent(store):
    put(store, {"a": noise(MIB)})
    child = os.fork()
    if not child:
        status = 1
        try:
            with gpuimg.open_store(store.path) as mine:
                assert streamed(mine.checkpoint("t"), "a") == noise(MIB)
                put(mine, {"b": noise(MIB, 2)}, tag="child")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert store.checkpoint("child").read("b") == noise(MIB, 2)
    assert put(store, {"b": noise(MIB, 2)}, tag="parent").statistics.new_chunks == 0
    assert not store.verify().faults


def test_references_are_tags_ids_and_unique_beginnings(store):
    first, second = put(store, {"a": b"1"}, tag="one"), put(store, {"a": b"2"}, tag="two")
    assert store.checkpoint("one").id == store.checkpoint(first.id).id == store.checkpoint(first.id[:16]).id
    for reference in ("three", "", first.id[:3], "zz" * 32, "../one", "one\n", "x" * 300, "0" * 64):
        with pytest.raises(UnknownReferenceError):
            store.checkpoint(reference)
    store.set_tag("one", second.id)
    assert store.tags() == {"one": second.id, "two": second.id}
    assert store.checkpoint("one").tags == ("one", "two")
    store.remove_tag("two")
    with pytest.raises(UnknownReferenceError):
        store.remove_tag("two")
    assert store.remove("one") == second.id
    assert store.tags() == {}
    assert [each.id for each in store.checkpoints()] == [first.id]


def test_statistics_add_up(store):
    files = {"a": noise(MIB, 1), "b": noise(MIB, 1), "zeros": bytes(MIB), "w": floats(MIB, 1), "s": b"small"}
    figures = put(store, files).statistics
    assert figures.raw_bytes == sum(map(len, files.values()))
    stored = figures.coded_bytes + figures.raw_stored_bytes
    assert (
        stored + figures.deduplicated_bytes + figures.zero_bytes + figures.inline_bytes == figures.raw_bytes
    )
    assert (figures.zero_bytes, figures.inline_bytes, figures.deduplicated_bytes) == (MIB, 5, MIB)
    assert figures.chunks == 3 * MIB // CHUNK and figures.new_chunks == 2 * MIB // CHUNK
    packs = sum(path.stat().st_size for path in (store.path / "packs").rglob("*.pack"))
    assert figures.new_bytes == packs
    report = store.stats()
    assert report.unique_chunks == figures.new_chunks
    assert report.raw_bytes == figures.raw_bytes


def test_the_open_file_limit_does_not_stop_a_session(store):
    """Many packs, many files, few descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = open_descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, used + 40), hard))
    try:
        files = {f"f{number}": noise(100_000, number) for number in range(300)}
        checkpoint = put(store, files)
        for name, data in files.items():
            assert checkpoint.read(name) == data
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
