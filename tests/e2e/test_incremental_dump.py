"""A training process is dumped again and again: what has changed is stored, and all of it comes back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Gpuimg, Victim, until

pytestmark = pytest.mark.root

WEIGHTS = 64 << 20
KINDS = (
    "unchanged_bytes",
    "deduplicated_bytes",
    "delta_bytes",
    "coded_bytes",
    "raw_stored_bytes",
    "zero_bytes",
    "inline_bytes",
)

# Holds weights that no other process knows; `FOLDER/step` lets it train one step, in place. It knows the
# hash that its weights should have, and compares when `FOLDER/check` appears. Memory for a step is set aside
# beforehand: a process in the middle of its work does not grow with every step either.
PROGRAM = """
import hashlib, os, sys, time
from pathlib import Path
import numpy as np

folder, count = Path(sys.argv[1]), int(sys.argv[2]) // 4
rng = np.random.default_rng()
weights = np.empty(count, np.float32)
BLOCK = 1 << 18
gradient, change = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)

def blocks():
    for start in range(0, count, BLOCK):
        yield weights[start : start + BLOCK]

def put(name, text):
    (folder / "new").write_text(text)
    (folder / "new").rename(folder / name)

for block in blocks():
    rng.standard_normal(dtype=np.float32, out=block)
    block *= np.float32(0.02)
known = hashlib.sha256(weights).hexdigest()
counter = os.open(folder / "count", os.O_RDWR | os.O_CREAT, 0o600)
ticks = 0
while True:
    ticks += 1
    os.pwrite(counter, b"%020d" % ticks, 0)
    if (folder / "step").exists():
        (folder / "step").unlink()
        for block in blocks():
            rng.standard_normal(dtype=np.float32, out=gradient)
            np.abs(gradient, out=change)
            change += np.float32(0.1)
            np.divide(gradient, change, out=change)
            change *= np.float32(1e-6)
            block -= change
        known = hashlib.sha256(weights).hexdigest()
        put("stepped", known)
    if (folder / "check").exists():
        (folder / "check").unlink()
        found = hashlib.sha256(weights).hexdigest()
        put("checked", ("good " if found == known else "bad ") + found)
    time.sleep(0.02)
"""


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Victim]:
    folder = tmp_path / "trainer"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    # One thread: no pool of threads is of use here.
    one_thread = ["env", "OPENBLAS_NUM_THREADS=1"]
    victim = Victim(
        folder, [*one_thread, sys.executable, "-I", str(folder / "train.py"), str(folder), str(WEIGHTS)]
    )
    yield victim
    victim.kill()


def step(trainer: Victim) -> str:
    """Let it train one step; the hash of its weights afterwards."""
    stepped = trainer.folder / "stepped"
    stepped.unlink(missing_ok=True)
    (trainer.folder / "step").touch()
    until(stepped.exists, "it has trained one step")
    return stepped.read_text()


def dump(gpuimg: Gpuimg, trainer: Victim, *options: str) -> dict[str, Any]:
    report: dict[str, Any] = gpuimg.json("dump", "-t", trainer.pid, "--tag", "job", *options)
    assert sum(report[kind] for kind in KINDS) == report["raw_bytes"] > WEIGHTS
    return report


def test_a_training_process_is_dumped_incrementally_and_restored_without_its_first_checkpoint(
    gpuimg: Gpuimg, trainer: Victim, tmp_path: Path
) -> None:
    for _ in range(2):
        step(trainer)
    first = dump(gpuimg, trainer, "--incremental", "--leave-running")
    assert first["parent"] is None
    assert first["full_because"] == "there is no checkpoint with the tag job yet"
    trainer.assert_runs()

    digest = step(trainer)
    second = dump(gpuimg, trainer, "--incremental", "--leave-running")
    assert (second["parent"], second["full_because"]) == (first["checkpoint"], None)
    # Every weight is another one, and few of them are stored again.
    assert second["delta_bytes"] > 0.75 * WEIGHTS
    assert second["stored_bytes"] < 0.6 * first["stored_bytes"]
    trainer.assert_runs()

    third = dump(gpuimg, trainer, "--incremental")
    trainer.assert_gone()
    assert third["parent"] == second["checkpoint"]
    assert third["unchanged_bytes"] > 0.95 * WEIGHTS
    # An interpreter counts references all over its memory; the weights cost nothing.
    assert third["new_bytes"] < 0.05 * WEIGHTS

    shown = gpuimg.json("show", "job", "--map", tmp_path / "map.html")
    (pages,) = [entry for entry in shown["entries"] if entry["name"] == "pages-1.img"]
    assert pages["taken"]["unchanged_bytes"] > 0.95 * WEIGHTS
    # The weights still are differences to those of the first checkpoint.
    assert pages["now"]["max_depth"] >= 1
    assert shown["base_bytes"] > 0.5 * WEIGHTS
    assert b"<svg" in (tmp_path / "map.html").read_bytes()

    gpuimg("rm", first["checkpoint"])
    gpuimg("gc")
    gpuimg("gc")
    assert gpuimg.json("verify")["clean"]
    count = trainer.count()
    assert gpuimg("restore", "job", "--detach") == f"process {trainer.pid} runs\n"
    trainer.assert_runs()
    assert trainer.count() > count
    trainer.assert_whole()
    assert (trainer.folder / "checked").read_text() == f"good {digest}"

    # And it goes on from there: trained and dumped against what it was restored from.
    digest = step(trainer)
    fourth = dump(gpuimg, trainer, "--parent", "job")
    trainer.assert_gone()
    assert fourth["parent"] == third["checkpoint"]
    assert fourth["delta_bytes"] > 0.75 * WEIGHTS
    gpuimg("restore", "job", "--detach")
    trainer.assert_whole()
    assert (trainer.folder / "checked").read_text() == f"good {digest}"


def test_without_its_parent_no_dump_begins(gpuimg: Gpuimg, trainer: Victim) -> None:
    line = gpuimg.refuses(6, "dump", "-t", trainer.pid, "--tag", "job", "--parent", "gone")
    assert "no checkpoint or tag 'gone'" in line
    trainer.assert_runs()
    assert gpuimg.json("ls")["checkpoints"] == []
