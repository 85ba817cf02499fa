"""The benchmark harness measures what it says."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import client
from bench.generate import BLOCK, PAGE_FILES, SETS, write_set
from bench.measure import Command, CommandFailedError, Cost, Series, run, tree_size
from bench.targets import judge
from gpuimg.stream import pipes
from gpuimg.stream.capture import Capture
from gpuimg.stream.serve import Serve

MIB = 1 << 20


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", SETS)
def test_equal_seeds_give_equal_bytes_and_others_do_not(name: str, tmp_path: Path) -> None:
    size = 2 * BLOCK + 12_346
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert write_set(name, tmp_path / folder, size, seed) == tree_size(tmp_path / folder)
    assert _contents(tmp_path / "a") == _contents(tmp_path / "b")
    assert _contents(tmp_path / "a") != _contents(tmp_path / "c")
    assert sum(len(_contents(tmp_path / "a")[file]) for file in PAGE_FILES) == size


def test_the_data_looks_like_what_it_stands_for(tmp_path: Path) -> None:
    def values(name: str, kind: type) -> Any:
        write_set(name, tmp_path / name, 6 * BLOCK)
        return np.frombuffer((tmp_path / name / PAGE_FILES[0]).read_bytes(), dtype=kind)

    weights = (values("weights-bf16", np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert abs(float(weights.std()) - 0.02) < 1e-4
    cache = values("kv-cache", np.uint16).reshape(-1, 1024, 1024)
    assert not cache[:, 512:].any()
    assert (cache[:, :512] != 0).mean() > 0.99
    weight, first, second = np.split(values("training-fp32", np.float32), 3)
    assert abs(float(weight.std()) - 0.02) < 1e-4
    assert abs(float(first.std()) - 1e-4) < 1e-6
    assert (second >= 0).all()


def test_the_cost_of_a_command_is_its_own() -> None:
    ballast = np.ones(200 * MIB, dtype=np.uint8)
    cost = run(Command([sys.executable, "-c", "x = bytearray(50 << 20); sum(range(2_000_000))"]))
    assert 50 * MIB < cost.rss < 120 * MIB < ballast.nbytes
    assert 0 < cost.cpu < cost.seconds * 2


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(CommandFailedError, match="no such luck"):
        run(Command(["sh", "-c", "echo no such luck; exit 3"]))


class _Sink:
    """Keeps what arrives."""

    def __init__(self, files: dict[str, bytes], name: str) -> None:
        self.files, self.name = files, name
        files[name] = b""

    def pump(self, fd: int) -> int:
        data = pipes.read_some(fd, MIB)
        self.files[self.name] += data
        return len(data)

    def close(self) -> None:
        pass


class _Arrived:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def open(self, name: str) -> _Sink:
        return _Sink(self.files, name)


def test_the_simulated_criu_sends_every_file_whole(tmp_path: Path) -> None:
    write_set("noise", tmp_path / "source", 3 * MIB)
    arrived = _Arrived()
    capture = Capture(tmp_path / "images", arrived)
    capture.start()
    criu = client.connect(tmp_path / "images" / "streamer-capture.sock", lambda: True)
    sent = client.send_files(criu, sorted((tmp_path / "source").iterdir()))
    capture.wait(30)
    capture.require_inventory()
    assert arrived.files == _contents(tmp_path / "source")
    assert sent == sum(map(len, arrived.files.values()))


class _Served:
    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def send(self, pipe: int, moved: Any) -> None:
        pipes.write_all(pipe, self.data)
        moved(self.size)


class _Source:
    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def lookup(self, name: str) -> _Served | None:
        return _Served(self.files[name]) if name in self.files else None


def test_the_simulated_criu_reads_every_file_it_asks_for(tmp_path: Path) -> None:
    files = {f"pages-{n}.img": bytes(n * 300_000) for n in range(7)}
    serve = Serve(tmp_path, _Source(files))
    serve.start()
    criu = client.connect(tmp_path / "streamer-serve.sock", lambda: True)
    got = client.read_files(criu, ["missing.img", *files])
    serve.wait(30)
    assert got == {"missing.img": -1} | {name: len(data) for name, data in files.items()}
    assert threading.active_count() < 10


def test_waiting_for_a_streamer_that_has_ended_fails(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        client.connect(tmp_path / "none.sock", lambda: False)


def _step(rate: float, rss: int = 0, cpu: float = 0.0) -> dict[str, float]:
    return {"bytes_per_second": rate, "max_rss": rss, "cpu_per_gb": cpu}


def _peer(first: float, second: float, export: float, stored: int) -> dict[str, Any]:
    steps = {"first": _step(first), "second": _step(second), "export": _step(export)}
    return steps | {"stored_bytes": stored}


def test_targets_are_judged_by_the_lowest_ratio() -> None:
    results = {
        "help": {"median": 0.05},
        "sets": {
            "weights-bf16": {
                "places": {
                    "disk": {"gpuimg": _peer(30, 40, 30, 90), "borg": _peer(10, 10, 10, 100)},
                    "tmpfs": {"gpuimg": _peer(49, 80, 29, 90), "borg": _peer(10, 10, 10, 100)},
                }
            }
        },
        "streaming": {
            "bytes": 4 << 30,
            "raw": {"serve": _step(1, 256 * MIB, 0.3), "capture": _step(1, 0, 0.5)},
            "coded": {"failure": "it broke"},
        },
    }
    verdicts = {target.name: target.reached for target in judge(results)}
    assert verdicts == {
        "first import of bf16 weights, disk": True,
        "first import of bf16 weights, tmpfs": False,
        "store of bf16 weights": True,
        "import of a second copy": True,
        "export": False,
        "gpuimg --help": True,
        "serve 4 GiB, raw: peak RSS": True,
        "serve 4 GiB, raw: CPU": True,
        "capture 4 GiB, raw: CPU": None,
        "serve, coded chunks": None,
    }


def test_a_series_gives_median_and_spread() -> None:
    series = Series([Cost(3.0, 1.0, 5), Cost(1.0, 1.0, 9), Cost(2.0, 4.0, 7)])
    report = series.report()
    assert (report["median_seconds"], report["min_seconds"], report["max_seconds"]) == (2.0, 1.0, 3.0)
    assert report["max_rss"] == 9
