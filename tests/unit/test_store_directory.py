"""Directories go in and come out byte for byte; what is no flat directory of files is refused."""

from __future__ import annotations

import os
import socket

import pytest

import gpuimg
from gpuimg.errors import BadNameError, ImagesDirectoryError
from gpuimg.store.directory import import_directory
from gpuimg.store.reports import Change
from tests.fixtures.store_data import KIB, MIB, PAGE, noise, pages

CHUNK = 64 * KIB
FILES = {
    "pages-1.img": pages(700, 1, ((10, 200),)),
    "core-1.img": noise(900, 2),
    "empty": b"",
    "big": noise(5 * MIB + 1, 3),
    "日本": noise(10_000, 4),
}


@pytest.fixture
def store(tmp_path):
    with gpuimg.init_store(tmp_path / "store", chunk_size=CHUNK) as opened:
        yield opened


def directory(path, files):
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def put(store, files, tag):
    with store.ingest() as session:
        for name, data in files.items():
            file = session.file(name)
            file.write(data)
            file.close()
        return session.commit(tag=tag)


def test_a_directory_comes_back_byte_for_byte(store, tmp_path):
    checkpoint = import_directory(store, directory(tmp_path / "in", FILES), tag="t")
    checkpoint.export(tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == FILES
    again = import_directory(store, tmp_path / "in")
    assert again.root == checkpoint.root
    assert again.statistics.new_chunks == 0


def test_sockets_are_passed_over(store, tmp_path):
    source = directory(tmp_path / "in", FILES)
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.open(source, os.O_RDONLY)
        listening.bind(f"/proc/self/fd/{here}/s.sock")
        os.close(here)
        assert set(import_directory(store, source).files) == set(FILES)


@pytest.mark.parametrize("what", ["folder", "link", "parent", "pipe"])
def test_what_is_no_regular_file_is_refused_by_name(store, tmp_path, what):
    source = directory(tmp_path / "in", FILES)
    if what == "folder":
        (source / what).mkdir()
    elif what == "pipe":
        os.mkfifo(source / what)
    else:
        (source / what).symlink_to("/etc/passwd")
    with pytest.raises(ImagesDirectoryError, match=what):
        import_directory(store, source, tag="t")
    assert store.checkpoints() == []


def test_a_name_that_is_no_utf8_is_refused(store, tmp_path):
    source = directory(tmp_path / "in", {})
    with open(os.fsencode(source) + b"/\xff\xfe", "wb") as file:
        file.write(b"x")
    with pytest.raises(BadNameError):
        import_directory(store, source, tag="t")
    assert store.checkpoints() == []


def test_a_missing_or_empty_directory_or_a_file_is_refused(store, tmp_path):
    (tmp_path / "file").write_text("x")
    directory(tmp_path / "empty", {})
    for name in ("missing", "file", "empty"):
        with pytest.raises(ImagesDirectoryError, match=name):
            import_directory(store, tmp_path / name)


def test_differences_name_every_file_and_the_bytes_that_changed(store):
    fixed = bytearray(noise(10 * CHUNK, 1))
    paged = pages(600, 2)
    put(
        store,
        {"same": noise(MIB, 3), "fixed": bytes(fixed), "pages-1.img": paged, "gone": b"1", "s": b"1"},
        "a",
    )
    fixed[5 * CHUNK] ^= 1
    moved = paged[: 300 * PAGE] + noise(PAGE, 9) + paged[300 * PAGE :]
    put(
        store,
        {"same": noise(MIB, 3), "fixed": bytes(fixed), "pages-1.img": moved, "come": b"12", "s": b"2"},
        "b",
    )
    found = {item.name: item for item in store.diff("a", "b")}
    assert list(found) == sorted(found)
    assert {name: item.change for name, item in found.items()} == {
        "same": Change.EQUAL,
        "fixed": Change.CHANGED,
        "pages-1.img": Change.CHANGED,
        "gone": Change.REMOVED,
        "come": Change.ADDED,
        "s": Change.CHANGED,
    }
    assert found["fixed"].ranges == ((5 * CHUNK, CHUNK),)
    assert found["fixed"].changed_bytes == found["fixed"].new_bytes == CHUNK
    assert found["pages-1.img"].new_bytes < 300 * PAGE < found["pages-1.img"].changed_bytes + 300 * PAGE
    assert (found["come"].new_bytes, found["s"].changed_bytes) == (2, 1)
    assert all(item.change is Change.EQUAL for item in store.diff("a", "a"))


def test_a_file_that_only_lost_its_end_differs(store):
    put(store, {"f": noise(10 * CHUNK, 1)}, "a")
    put(store, {"f": noise(10 * CHUNK, 1)[: 9 * CHUNK]}, "b")
    (item,) = store.diff("a", "b")
    assert (item.change, item.size_a, item.size_b, item.changed_bytes) == (
        Change.CHANGED,
        10 * CHUNK,
        9 * CHUNK,
        0,
    )


def test_one_checkpoint_is_verified_with_the_packs_it_lies_in(store):
    put(store, {"f": noise(MIB, 1)}, "good")
    before = set((store.path / "packs").rglob("*.pack"))
    bad = put(store, {"f": noise(MIB, 2)}, "bad")
    (path,) = set((store.path / "packs").rglob("*.pack")) - before
    data = path.read_bytes()
    place = data.index(noise(MIB, 2)[CHUNK : CHUNK + 100])
    path.write_bytes(data[:place] + b"!" + data[place + 1 :])
    assert not store.verify("good").faults
    assert store.verify("good").objects < store.verify().objects
    (fault,) = store.verify("bad").faults
    assert (fault.kind, fault.checkpoint, fault.file, fault.offset) == ("damaged-chunk", bad.id, "f", CHUNK)
    assert store.verify().faults == (fault,)
    assert not store.verify(quick=True).faults
