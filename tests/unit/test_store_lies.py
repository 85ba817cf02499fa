"""Stores whose hashes are all right and whose contents are not: written by something else than gpuimg."""

from __future__ import annotations

import shutil
import zlib

import pytest

import gpuimg
from gpuimg.errors import DamagedError, GpuimgError, MissingObjectError, NewerFormatError
from gpuimg.store.reports import FaultKind
from tests.fixtures import make_golden as golden
from tests.fixtures.make_golden import LETTERS, ODD, hash256, number, segment, text

SIZE = len(LETTERS) + len(ODD)
PLAIN = [(len(LETTERS), LETTERS), (len(ODD), ODD)]


def changed(data, offset, value):
    return data[:offset] + bytes([value]) + data[offset + 1 :]


def make(root, recipe, *, size=SIZE, segment_size=None, objects=None):
    """A store with one checkpoint of one file `f` that this recipe segment describes."""
    for name in ("packs", "manifests", "tags", "leases", "trash", "damaged", "tmp", "index"):
        (root / name).mkdir(parents=True)
    shutil.copy(golden.__file__.replace("make_golden.py", "golden-store/config"), root / "config")
    chunks = [(1, 0, LETTERS, golden.LETTERS_ZSTD), (0, 0, ODD, ODD)] if objects is None else objects
    packed, pack_id = golden.pack([*chunks, (0, 0, recipe, recipe)])
    path = root / "packs" / pack_id.hex()[:2] / f"{pack_id.hex()}.pack"
    path.parent.mkdir()
    path.write_bytes(packed)
    described = text(1, hash256(recipe)) + number(2, size if segment_size is None else segment_size)
    manifest, checkpoint_id = golden.manifest([text(1, b"f") + number(2, size) + text(5, described)])
    (root / "manifests" / checkpoint_id.hex()).write_bytes(manifest)
    (root / "tags" / "t").write_text(checkpoint_id.hex() + "\n")


def outcome(root, folder):
    """The errors of reading in every way, and the kinds of verify."""
    with gpuimg.open_store(root) as store:
        checkpoint = store.checkpoint("t")
        errors = []
        for call in (
            lambda: checkpoint.read("f"),
            lambda: list(checkpoint.stream("f")),
            lambda: checkpoint.export(folder),
        ):
            with pytest.raises(GpuimgError) as caught:
                call()
            errors.append(type(caught.value))
        assert not list(folder.iterdir())
        (error,) = set(errors)
        return error, {fault.kind for fault in store.verify().faults}


def test_the_same_store_without_a_lie_is_read(tmp_path):
    make(tmp_path / "store", segment(PLAIN))
    with gpuimg.open_store(tmp_path / "store") as store:
        assert store.checkpoint("t").read("f") == LETTERS + ODD
        assert not store.verify().faults


@pytest.mark.parametrize(("offset", "value"), [(4, 2), (5, 2)])
def test_a_recipe_of_a_later_version_is_called_newer_and_named_by_verify(tmp_path, offset, value):
    make(tmp_path / "store", changed(segment(PLAIN), offset, value))
    error, kinds = outcome(tmp_path / "store", tmp_path / "out")
    assert error is NewerFormatError
    assert kinds == {FaultKind.DAMAGED_RECIPE}
    with gpuimg.open_store(tmp_path / "store") as store:
        with pytest.raises(GpuimgError):
            store.gc()
        assert len(list((tmp_path / "store").rglob("*.pack"))) == 1


def test_a_recipe_that_gives_a_chunk_another_length_is_damaged(tmp_path):
    make(tmp_path / "store", segment([(len(LETTERS) - 1, LETTERS), (len(ODD) + 1, ODD)]))
    assert outcome(tmp_path / "store", tmp_path / "out") == (DamagedError, {FaultKind.DAMAGED_RECIPE})


def test_a_recipe_that_describes_another_size_than_the_manifest_says_is_damaged(tmp_path):
    make(tmp_path / "store", segment(PLAIN), size=SIZE + 1)
    assert outcome(tmp_path / "store", tmp_path / "out") == (DamagedError, {FaultKind.DAMAGED_RECIPE})


def test_a_recipe_that_names_a_chunk_nobody_has_misses_it(tmp_path):
    make(tmp_path / "store", segment(PLAIN), objects=[(0, 0, ODD, ODD)])
    assert outcome(tmp_path / "store", tmp_path / "out") == (MissingObjectError, {FaultKind.MISSING_CHUNK})


@pytest.mark.parametrize(
    "payload",
    [
        (1, 0, LETTERS, golden.LETTERS_ZSTD[:-1] + b"b"),
        (1, 0, LETTERS, zlib.compress(LETTERS)),
        (2, 4, LETTERS, golden.STEPS_BLOSC),
        (2, 4, LETTERS, golden.LETTERS_ZSTD),
        (9, 0, LETTERS, golden.LETTERS_ZSTD),
    ],
    ids=["other bytes", "no zstd", "other Blosc", "no Blosc", "unknown codec"],
)
def test_a_payload_with_right_checksums_that_is_not_its_chunk_is_never_given_out(tmp_path, payload):
    make(tmp_path / "store", segment(PLAIN), objects=[payload, (0, 0, ODD, ODD)])
    error, kinds = outcome(tmp_path / "store", tmp_path / "out")
    assert error in {DamagedError, NewerFormatError}
    assert kinds == {FaultKind.DAMAGED_CHUNK}
    report = gpuimg.repair_store(tmp_path / "store")
    assert report.lost_objects == 1
    with gpuimg.open_store(tmp_path / "store") as store:
        assert store.checkpoint("t").read("f", len(LETTERS)) == ODD
        assert {fault.kind for fault in store.verify().faults} == {FaultKind.MISSING_CHUNK}


def test_a_long_zero_run_costs_nothing_to_keep_and_little_to_read(tmp_path):
    run = 1 << 36
    make(tmp_path / "store", segment([(run, None), (len(ODD), ODD)]), size=run + len(ODD))
    with gpuimg.open_store(tmp_path / "store") as store:
        checkpoint = store.checkpoint("t")
        assert not store.verify().faults
        assert checkpoint.read("f", run - 10, 20) == bytes(10) + ODD[:10]
        assert checkpoint.read("f", run // 2, 5) == bytes(5)
        checkpoint.export(tmp_path / "out")
        path = tmp_path / "out" / "f"
        assert path.stat().st_size == run + len(ODD)
        assert path.stat().st_blocks * 512 < 1 << 20, "zeros are holes"
