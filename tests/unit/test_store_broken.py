"""Stores broken in every named way get their diagnosis, give out no damaged byte and lose nothing else."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import gpuimg
from gpuimg.cli.app import main
from gpuimg.errors import GpuimgError, UnknownReferenceError, VerifyFailedError
from tests.fixtures.make_broken import ALL, BROKEN, CONTENTS, make
from tests.fixtures.store_data import noise

# Repair cannot bring back what these took; what a newer gpuimg wrote is not lost.
LOSING = [name for name, expected in BROKEN.items() if expected.lost and not name.startswith("newer")]


@pytest.fixture(params=BROKEN)
def broken(request, tmp_path):
    return request.param, BROKEN[request.param], make(request.param, tmp_path)


def cli(store, *arguments):
    """Exit status, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["--store", str(store.root), *arguments])
    return status, out.getvalue(), err.getvalue()


def is_one_sentence(text):
    return text.count("\n") == 1 and text.startswith("gpuimg: ") and "Traceback" not in text and ";" in text


def read_everything(checkpoint, tag):
    """Read every file in three ways; whatever is given out is right. Returns what was raised."""
    raised = []
    for name, data in CONTENTS[tag].items():
        try:
            assert checkpoint.read(name) == data
        except GpuimgError as error:
            raised.append(error)
        given = 0
        try:
            for buffer in checkpoint.stream(name):
                assert buffer == data[given : given + len(buffer)]
                given += len(buffer)
            assert given == len(data)
        except GpuimgError as error:
            raised.append(error)
        for offset in range(0, len(data), 50_000):
            try:
                assert checkpoint.read(name, offset, 1000) == data[offset : offset + 1000]
            except GpuimgError as error:
                raised.append(error)
    return raised


def export(checkpoint, tag, directory):
    """Export; what is there afterwards is right, and it is nothing if it failed."""
    try:
        checkpoint.export(directory)
    except GpuimgError:
        assert not list(directory.iterdir())
        return False
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == CONTENTS[tag]
    return True


def check_readable(store, unreadable, reading, folder):
    """All checkpoints but the unreadable ones come back by every way; those are refused by every way."""
    for tag in CONTENTS:
        try:
            checkpoint = store.checkpoint(tag)
        except GpuimgError as error:
            assert tag in unreadable, error
            assert type(error) in reading
            continue
        raised = read_everything(checkpoint, tag)
        assert bool(raised) == (tag in unreadable), raised
        assert {type(error) for error in raised} <= reading
        assert all(error.remedy for error in raised)
        for error in raised:
            assert tag in error.what, "the checkpoint is named"
        assert export(checkpoint, tag, folder / tag) == (tag not in unreadable)


def test_the_library_gives_every_breakage_its_diagnosis(broken, tmp_path):
    _, expected, store = broken
    if expected.opens:
        with pytest.raises(expected.opens) as caught, gpuimg.open_store(store.root) as opened:
            # An index may be broken where only looking finds it.
            opened.checkpoint("hurt").export(tmp_path / "no")
        assert caught.value.remedy
        return
    with gpuimg.open_store(store.root) as opened:
        faults = opened.verify().faults
        quick = opened.verify(quick=True).faults
        assert {fault.kind for fault in faults} == expected.faults
        assert {fault.kind for fault in quick} <= expected.faults | {fault.kind for fault in faults}
        assert all(fault.what and fault.remedy for fault in faults)
        named = {fault.checkpoint for fault in faults if fault.checkpoint}
        known = {store.ids[tag] for tag in expected.hurt} | {store.ids["hurt"]}
        if expected.faults and "manifest" not in broken[0]:
            assert named <= known
        check_readable(opened, expected.hurt, expected.reading, tmp_path)


def test_every_command_says_one_sentence_and_its_status(broken, tmp_path):
    _, expected, store = broken
    for command in (
        ["ls"],
        ["verify"],
        ["export", "hurt", str(tmp_path / "out")],
        ["stats"],
        ["gc"],
        ["show", "hurt"],
    ):
        status, _, err = cli(store, *command)
        if expected.opens and "index-page" not in store.root.name:
            assert status == expected.opens.exit_status
        elif command[0] == "verify" and not expected.opens:
            assert status == (VerifyFailedError.exit_status if expected.faults else 0)
        elif command[0] == "export" and not expected.opens:
            assert (status != 0) == ("hurt" in expected.hurt)
            assert status in {0, *(error.exit_status for error in expected.reading)}
        assert status != 1, "no internal error"
        assert "Traceback" not in err
        if status:
            assert is_one_sentence(err), err


def test_repair_saves_what_is_whole_and_verify_names_the_rest(broken, tmp_path):
    name, expected, store = broken
    before = {path for path in store.root.glob("[pm]a*/**/*") if path.is_file()}
    status, _, err = cli(store, "repair")
    if expected.repairs:
        assert status == expected.repairs.exit_status
        assert is_one_sentence(err)
        assert {path for path in store.root.glob("[pm]a*/**/*") if path.is_file()} == before
        return
    assert (status, err) == (0, "")
    with gpuimg.open_store(store.root) as opened:
        assert {fault.kind for fault in opened.verify().faults} == expected.after
        unreadable = expected.lost | expected.gone
        reading = expected.reading | {UnknownReferenceError, gpuimg.errors.MissingObjectError}
        check_readable(opened, unreadable, reading, tmp_path)
        listed = {each.id for each in opened.checkpoints()}
        assert {store.ids[tag] for tag in ALL - unreadable} <= listed
        assert set(opened.tags()) == ALL - expected.gone
    damaged = {path.name for path in (store.root / "damaged").iterdir()}
    lost = {path.name for path in before if not path.exists()} - damaged
    assert not lost, "nothing is deleted"
    # Once repaired is enough.
    again = gpuimg.repair_store(store.root)
    assert (again.set_aside, again.rebuilt_packs) == ((), 0), name


@pytest.mark.parametrize("name", LOSING)
def test_taking_a_hurt_checkpoint_again_after_repair_cures_it(name, tmp_path):
    store = make(name, tmp_path)
    gpuimg.repair_store(store.root)
    with gpuimg.open_store(store.root) as opened:
        for tag in BROKEN[name].lost:
            with opened.ingest() as session:
                for file_name, data in CONTENTS[tag].items():
                    file = session.file(file_name)
                    file.write(data)
                    file.close()
                session.commit(tag=f"{tag}-again")
        assert not opened.verify().faults
        check_readable(opened, frozenset(), frozenset(), tmp_path)
        opened.gc()
        assert not opened.verify().faults


def test_gc_on_a_broken_store_removes_nothing_that_is_needed(broken, tmp_path):
    _, expected, store = broken
    cli(store, "gc")
    if expected.repairs:
        return
    gpuimg.repair_store(store.root)
    with gpuimg.open_store(store.root) as opened:
        unreadable = expected.lost | expected.gone
        reading = expected.reading | {UnknownReferenceError, gpuimg.errors.MissingObjectError}
        check_readable(opened, unreadable, reading, tmp_path)


def test_the_installed_command_agrees_with_the_library(tmp_path):
    gpuimg_command = Path(sys.executable).with_name("gpuimg")
    if not gpuimg_command.exists():
        pytest.skip("gpuimg is not installed beside this Python")
    for name in ("payload-raw", "newer-store", "index-garbage", "not-a-store"):
        expected, store = BROKEN[name], make(name, tmp_path)
        ended = subprocess.run(
            [gpuimg_command, "--store", store.root, "--json", "verify"], capture_output=True, text=True
        )
        error = expected.opens or VerifyFailedError
        assert ended.returncode == error.exit_status
        assert is_one_sentence(ended.stderr)
        for line in ended.stdout.splitlines():
            if line.startswith('{"error"'):
                assert json.loads(line)["error"] == error.name


def test_the_script_makes_the_stores_it_names(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.make_broken", tmp_path, "manifest"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ},
    )
    assert ended.returncode == 0, ended.stderr
    with gpuimg.open_store(tmp_path / "broken-manifest") as store:
        assert store.verify().faults


def test_a_damaged_recipe_read_again_and_again_uses_up_no_buffers(tmp_path):
    store = make("recipe", tmp_path)
    with gpuimg.open_store(store.root) as opened:
        for _ in range(100):
            with pytest.raises(GpuimgError):
                list(opened.checkpoint("hurt").stream("raw"))
        pool = opened._resources.pool
        assert len(pool._free) + pool._left == pool.size
        assert opened.checkpoint("whole").read("raw") == noise(300_000, 3)
