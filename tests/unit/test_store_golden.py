"""The golden store, made from the document by hand, is read by gpuimg as it is by a second reader."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import gpuimg
from gpuimg.store.model import Layout, Process, SourceKind
from tests.fixtures.make_golden import FILES, golden_files
from tests.fixtures.mini_reader import MiniStore

GOLDEN = Path(__file__).resolve().parents[1] / "fixtures" / "golden-store"
EMPTY_FOLDERS = ("leases", "trash", "damaged", "tmp", "index")


@pytest.fixture
def golden(tmp_path):
    root = tmp_path / "store"
    shutil.copytree(GOLDEN, root)
    for name in EMPTY_FOLDERS:
        (root / name).mkdir(exist_ok=True)
    return root


def test_the_committed_bytes_are_those_of_the_script():
    committed = {
        path.relative_to(GOLDEN).as_posix(): path.read_bytes() for path in GOLDEN.rglob("*") if path.is_file()
    }
    assert committed == golden_files()


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
