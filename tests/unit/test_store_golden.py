"""The golden stores, made from the document by hand, are read by gpuimg as they are by a second reader."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import gpuimg
from gpuimg.store import chunking, looks, planes
from gpuimg.store.model import BufferObject, Layout, Process, SourceKind
from tests.fixtures.make_golden import FILES, golden_files, planes_checkpoints, planes_files
from tests.fixtures.mini_reader import MiniStore
from tests.fixtures.planes_data import taken_apart

GOLDEN = Path(__file__).resolve().parents[1] / "fixtures" / "golden-store"
PLANES = GOLDEN.with_name("golden-planes")
EMPTY_FOLDERS = ("leases", "trash", "damaged", "tmp", "index")


def copied(store, root):
    shutil.copytree(store, root)
    for name in EMPTY_FOLDERS:
        (root / name).mkdir(exist_ok=True)
    return root


@pytest.fixture
def golden(tmp_path):
    return copied(GOLDEN, tmp_path / "store")


@pytest.fixture
def series(tmp_path):
    return copied(PLANES, tmp_path / "series")


@pytest.fixture(params=["as built", "without the kernel"])
def built(request, monkeypatch):
    if request.param == "without the kernel":
        for module in (chunking, looks, planes):
            monkeypatch.setattr(module, "kernel", lambda: None)


@pytest.mark.parametrize(("folder", "files"), [(GOLDEN, golden_files), (PLANES, planes_files)])
def test_the_committed_bytes_are_those_of_the_script(folder, files):
    committed = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    assert committed == files()


def test_gpuimg_reads_the_golden_store(golden, tmp_path):
    with gpuimg.open_store(golden) as store:
        assert not store.verify().faults
        checkpoint = store.checkpoint("golden")
        for name, data in FILES.items():
            assert checkpoint.read(name) == data
            assert b"".join(bytes(buffer) for buffer in checkpoint.stream(name)) == data
        checkpoint.export(tmp_path / "out")
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == FILES
        assert checkpoint.files["pages-1.img"].layout is Layout.PAGES
        assert checkpoint.source.kind is SourceKind.IMPORT
        assert checkpoint.source.processes == (Process(100, 0, 2, "init"),)
        assert checkpoint.statistics.seconds == 0.5


def test_the_second_reader_reads_the_golden_store():
    mini = MiniStore(GOLDEN)
    for name, data in FILES.items():
        assert mini.read(mini.tags["golden"], name) == data


def test_new_checkpoints_share_the_golden_chunks(golden):
    with gpuimg.open_store(golden) as store:
        with store.ingest() as session:
            file = session.file("weights")
            file.write(FILES["weights"])
            file.close()
            checkpoint = session.commit(tag="again")
        assert checkpoint.statistics.new_chunks == 0
        assert store.gc().deleted_packs == 0
        assert checkpoint.read("weights") == FILES["weights"]
        store.remove("golden")
        store.gc()
        assert checkpoint.read("weights") == FILES["weights"]
        assert not store.verify().faults


# Float planes, and checkpoints coded one against the other


def test_golden_planes_has_every_transform_mode_and_width_that_the_document_names():
    transforms, modes, widths = set(), set(), set()
    for item in MiniStore(PLANES).objects.values():
        if item.codec == 3:
            transforms.add(item.payload[0])
            widths.add(item.element_size)
            modes |= {plane.mode for plane in taken_apart(item.payload, item.raw)[0]}
    assert transforms == {0, 1, 2, 3}
    assert modes == {0, 1, 2, 3, 4}
    assert widths == {1, 2, 4, 8}


@pytest.mark.usefixtures("built")
def test_gpuimg_reads_golden_planes(series, tmp_path):
    with gpuimg.open_store(series) as store:
        assert not store.verify().faults
        parent = ""
        for step, files in enumerate(planes_checkpoints()):
            checkpoint = store.checkpoint(f"step-{step}")
            for name, data in files.items():
                assert checkpoint.read(name) == data
                assert b"".join(bytes(buffer) for buffer in checkpoint.stream(name)) == data
                for offset in range(0, len(data), 30_011):
                    assert checkpoint.read(name, offset, 100) == data[offset : offset + 100]
            checkpoint.export(tmp_path / f"out-{step}")
            assert {path.name: path.read_bytes() for path in (tmp_path / f"out-{step}").iterdir()} == files
            assert checkpoint.parent == parent
            assert checkpoint.files["weights"].bo == BufferObject(7, 3, 1 << 40, len(files["weights"]), 1)
            assert checkpoint.figures["weights"].element_size == 2
            parent = checkpoint.id


def test_the_second_reader_reads_golden_planes():
    mini = MiniStore(PLANES)
    for step, files in enumerate(planes_checkpoints()):
        for name, data in files.items():
            assert mini.read(mini.tags[f"step-{step}"], name) == data
    assert max(len(mini.chain(chunk_id)) for chunk_id in mini.objects) == 3


def test_golden_planes_outlive_their_parents_and_are_gone_on_with(series):
    first, _, last = planes_checkpoints()
    with gpuimg.open_store(series) as store:
        store.remove("step-0")
        store.remove("step-1")
        store.gc()
        assert not store.verify().faults
        checkpoint = store.checkpoint("step-2")
        assert checkpoint.read("weights") == last["weights"]
        with store.ingest(parent=checkpoint) as session:
            file = session.file("weights", bo=checkpoint.files["weights"].bo)
            file.write(last["weights"][:-1000] + first["weights"][:1000])
            file.close()
            following = session.commit(tag="step-3")
        assert following.statistics.unchanged_bytes >= 2 * 65536
        assert following.read("weights") == last["weights"][:-1000] + first["weights"][:1000]
        assert not store.verify().faults
