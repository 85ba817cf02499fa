"""A store does not show whether the compiled kernel was there: what is written with it is read, compared and
gone on with without it, and the other way round. In processes of their own, as on two machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuimg.store.kernel_loader import kernel
from tests.fixtures.store_data import KIB, MIB, counters, floats, noise, pages, text

pytestmark = pytest.mark.skipif(kernel() is None, reason="the compiled kernel is not built (no C compiler?)")

GPUIMG = str(Path(sys.executable).with_name("gpuimg"))
Files = dict[str, bytes]


def gpuimg(switch: str, store: Path, *arguments: object) -> dict[str, Any]:
    """Run a command with the kernel `on` or `off`; what it says as JSON."""
    done = subprocess.run(
        [GPUIMG, "--store", store, *map(str, arguments), "--json"],
        env=os.environ | {"GPUIMG_KERNEL": switch},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def trained(data: bytes, kind: str, seed: int) -> bytes:
    """Numbers, some of which have become the next number."""
    words = np.frombuffer(data, dtype=kind)
    return (words + (np.random.default_rng(seed).random(len(words)) < 0.2)).astype(kind).tobytes()


FIRST: Files = {
    "amdgpu-pages-7-1a2b.img": floats(3 * MIB, 1, "bfloat16"),
    "weights": floats(2 * MIB, 2),
    "doubles": floats(MIB, 3, "float64"),
    "table": counters(512 * KIB, 4),
    "log": text(300_001, 4),
    "zeros": bytes(MIB),
    "pages-1.img": pages(500, 5, ((0, 20), (100, 110), (300, 400))) + b"end",
    "core-1.img": b"small",
}
STEPS: list[Files] = [FIRST]
for number in range(1, 5):
    before = STEPS[-1]
    paged = before["pages-1.img"]
    at = 50 * number * 4096
    STEPS.append(
        before
        | {
            "amdgpu-pages-7-1a2b.img": trained(before["amdgpu-pages-7-1a2b.img"], "<u2", number),
            "weights": trained(before["weights"], "<u4", number),
            "doubles": trained(before["doubles"], "<u8", number),
            "pages-1.img": paged[:at] + noise(3 * 4096, number) + paged[at:],
        }
    )


def written(folder: Path, files: Files) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def exported(switch: str, store: Path, tag: str, folder: Path) -> Files:
    gpuimg(switch, store, "export", tag, folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_switch_turns_the_kernel_off():
    for switch, expected in (("on", "True"), ("off", "False")):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "from gpuimg.store import kernel_loader as k; print(k.kernel() is not None)",
            ],
            env=os.environ | {"GPUIMG_KERNEL": switch},
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize(("writer", "reader"), [("on", "off"), ("off", "on")])
def test_what_is_written_one_way_is_read_and_gone_on_with_the_other_way(tmp_path, writer, reader):
    store = tmp_path / "store"
    gpuimg(writer, store, "init", "--chunk-size", "64KiB")
    # The writer makes two steps, the reader two more on top of them, and the writer the last.
    switches = [writer, writer, reader, reader, writer]
    for step, (switch, files) in enumerate(zip(switches, STEPS, strict=True)):
        directory = written(tmp_path / f"in-{step}", files)
        against = ["--parent", f"step-{step - 1}"] if step else []
        made = gpuimg(switch, store, "import", directory, "--tag", f"step-{step}", *against)
        if step:
            assert made["delta_bytes"] > 5 * MIB, "floats are stored as differences"
            same = sum(len(FIRST[name]) for name in ("table", "log"))
            assert made["unchanged_bytes"] >= same, "and fingerprints are the same"
    for switch in (reader, writer):
        assert gpuimg(switch, store, "verify")["faults"] == []
        for step, files in enumerate(STEPS):
            assert exported(switch, store, f"step-{step}", tmp_path / f"{switch}-{step}") == files


@pytest.mark.parametrize(("writer", "reader"), [("on", "off"), ("off", "on")])
def test_the_same_files_are_the_same_chunks_either_way(tmp_path, writer, reader):
    store = tmp_path / "store"
    gpuimg(writer, store, "init", "--chunk-size", "64KiB")
    directory = written(tmp_path / "in", FIRST)
    first = gpuimg(writer, store, "import", directory, "--tag", "first")
    again = gpuimg(reader, store, "import", directory, "--tag", "again")
    beside = gpuimg(reader, store, "import", directory, "--tag", "beside", "--parent", "first")
    assert first["new_chunks"] > 50
    assert (again["new_chunks"], again["new_bytes"]) == (0, 0)
    assert (beside["new_chunks"], beside["deduplicated_bytes"], beside["delta_bytes"]) == (0, 0, 0)
    assert all(item["change"] == "equal" for item in gpuimg(reader, store, "diff", "first", "again")["files"])


def test_gc_and_repair_serve_what_the_other_wrote(tmp_path):
    store = tmp_path / "store"
    gpuimg("on", store, "init", "--chunk-size", "64KiB")
    for step in (0, 1):
        directory = written(tmp_path / f"in-{step}", STEPS[step])
        against = ["--parent", "step-0"] if step else []
        gpuimg("on", store, "import", directory, "--tag", f"step-{step}", *against)
    gpuimg("off", store, "rm", "step-0")
    gpuimg("off", store, "gc")
    (pack,) = sorted(store.glob("packs/*/*.pack"), key=lambda path: path.stat().st_size)[:1]
    with pack.open("r+b") as stream:
        stream.truncate(pack.stat().st_size - 10)
    assert gpuimg("off", store, "repair")["rebuilt_packs"] == 1
    for switch in ("off", "on"):
        assert gpuimg(switch, store, "verify")["faults"] == []
        assert exported(switch, store, "step-1", tmp_path / f"out-{switch}") == STEPS[1]
