"""Capture and serve: CPU and peak memory of the streamer while a simulated criu sends or asks."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import client
from bench.generate import write_set
from bench.measure import Command, CommandFailedError, Cost, Running, Series, run, sync_tree, tree_size
from bench.peers import gpuimg_command

KINDS = {"raw": "noise", "coded": "weights-bf16"}
"""What is served: chunks that no codec makes smaller, and chunks that are coded."""


def measure(place: Path, *, size: int, runs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Capture into a store and serve from it, raw and coded chunks; upstream's streamer too if installed."""
    report: dict[str, Any] = {"bytes": size}
    upstream = shutil.which("criu-image-streamer")
    for kind, name in KINDS.items():
        place.mkdir()
        try:
            source = place / "source"
            raw = write_set(name, source, size)
            sync_tree(source)
            report[kind] = _gpuimg(place, source, raw, runs)
            if upstream is not None:
                report[kind]["criu-image-streamer"] = _upstream(place, source, raw)
        except (CommandFailedError, OSError) as error:
            report[kind] = {"failure": str(error)}
        finally:
            shutil.rmtree(place)
        say(f"{kind}: {_line(report[kind])}")
    return report


def _line(report: dict[str, Any]) -> str:
    if "failure" in report:
        return str(report["failure"])
    parts = []
    for step in ("capture", "serve"):
        made = report[step]
        parts.append(
            f"{step} {made['bytes_per_second'] / 1e6:.0f} MB/s, {made['cpu_per_gb']:.2f} CPU s/GB, "
            f"{made['max_rss'] / 2**20:.0f} MiB"
        )
    return "; ".join(parts)


def _gpuimg(place: Path, source: Path, raw: int, runs: int) -> dict[str, Any]:
    store, images = place / "store", place / "images"
    gpuimg = [gpuimg_command(), "--store", str(store)]
    captures, serves = Series(), Series()
    for _ in range(runs):
        shutil.rmtree(store, ignore_errors=True)
        run(Command([*gpuimg, "init"]))
        captures.costs.append(
            _capture(Command([*gpuimg, "capture", "-D", str(images), "--tag", "a"]), images, source)
        )
    stored = tree_size(store)
    for number in range(runs):
        command = Command([*gpuimg, "serve", "a", "-D", str(images)])
        serves.costs.append(_serve(command, images, source, seed=number))
    return {
        "stored_bytes": stored,
        "capture": _with_rates(captures, raw),
        "serve": _with_rates(serves, raw),
    }


def _upstream(place: Path, source: Path, raw: int) -> dict[str, Any]:
    """criu-image-streamer, once: its shard goes through `cat` into a file, since a shard must be a pipe."""
    images, shard = place / "images", place / "shard"
    tool = f"criu-image-streamer -D '{images}'"
    capture = _capture(Command(["sh", "-c", f"{tool} capture | cat > '{shard}'"]), images, source)
    serve = _serve(Command(["sh", "-c", f"cat '{shard}' | {tool} serve"]), images, source, seed=0)
    return {
        "capture": _with_rates(Series([capture]), raw),
        "serve": _with_rates(Series([serve]), raw),
    }


def _capture(command: Command, images: Path, source: Path) -> Cost:
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir(mode=0o700)
    server = Running(command)
    try:
        criu = client.connect(images / "streamer-capture.sock", lambda: not server.ended())
        client.send_files(criu, sorted(source.iterdir()))
    finally:
        cost = server.wait()
    return cost


def _serve(command: Command, images: Path, source: Path, *, seed: int) -> Cost:
    """Serve every file and a missing one, asked for in a shuffled order."""
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir(mode=0o700)
    wanted = {path.name: path.stat().st_size for path in source.iterdir()} | {"tty-info.img": -1}
    names = sorted(wanted)
    random.Random(seed).shuffle(names)
    server = Running(command)
    try:
        criu = client.connect(images / "streamer-serve.sock", lambda: not server.ended())
        got = client.read_files(criu, names)
    finally:
        cost = server.wait()
    wrong = [name for name in names if got[name] != wanted[name]]
    if wrong:
        raise CommandFailedError(f"serve gave other sizes for {', '.join(wrong)}")
    return cost


def _with_rates(series: Series, raw: int) -> dict[str, Any]:
    return series.report() | {
        "bytes_per_second": raw / series.median(),
        "cpu_per_gb": series.median("cpu") / (raw / 1e9),
    }
