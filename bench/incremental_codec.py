"""Coding bf16 weights that have no parent: whole imports and exports, and the codecs alone on two threads."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.incremental_measure import Outcome, Say, require_equal, spread, warm
from bench.incremental_peers import Incremental
from bench.measure import Command, CommandFailedError, run
from bench.peers import gpuimg_command

PROFILES = ("fast", "balanced", "dense")
THREADS = 2
CHUNK = 256 << 10
_IN_PROCESS = 512 << 20

Chunks = list[memoryview]


def codec_cases(sources: dict[str, Path], *, runs: int, work: Path, say: Say) -> dict[str, Any]:
    """Per source (a directory of images with bf16 weights) and profile: speed and ratio.

    Returns
    -------
    dict
        source → profile → `process` (import and export by whole processes) and `threads` (codecs alone, in
        this process, on two threads); each with `encode` and `decode` in bytes/s, and `ratio`; `threads` also
        with `encode_cpu` and `decode_cpu`, which a busy machine disturbs less.
    """
    made: dict[str, Any] = {}
    for name, source in sources.items():
        made[name] = {}
        for profile in PROFILES:
            process = _guarded(lambda p=profile, s=source: _process(s, p, runs, work))  # type: ignore[misc]
            threads = _guarded(lambda p=profile, s=source: in_process(s, p, runs))  # type: ignore[misc]
            made[name][profile] = {"process": process, "threads": threads}
            for where, figures in made[name][profile].items():
                say(f"  {name} {profile} {where}: {_summary(figures)}")
    return made


def _guarded(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return action()
    except Exception as error:
        # One profile that breaks, in whatever way, must not take the others' figures with it.
        return {"failure": f"{type(error).__name__}: {error}"}


def _summary(figures: dict[str, Any]) -> str:
    if "failure" in figures:
        return str(figures["failure"])
    encode, decode = (figures[step]["median"] / 1e9 for step in ("encode", "decode"))
    return f"encode {encode:.2f} GB/s, decode {decode:.2f} GB/s, ratio {figures['ratio']:.3f}"


def _process(source: Path, profile: str, runs: int, work: Path) -> dict[str, Any]:
    program, outcome = Incremental(), Outcome()
    raw = sum(path.stat().st_size for path in source.iterdir())
    for number in range(runs):
        work.mkdir()
        try:
            store, out = work / "store", work / "out"
            program.peer.make_store(store)
            empty = program.sizes(store)["data"]
            warm(source)
            argv = [gpuimg_command(), "--store", str(store), "import", str(source), "--tag", "a"]
            outcome.size("encode", raw / run(Command([*argv, "--profile", profile])).seconds)
            outcome.size("ratio", raw / (program.sizes(store)["data"] - empty))
            outcome.size("decode", raw / run(program.peer.give_back(store, "a", out)).seconds)
            if number == 0:
                require_equal(source, out)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    report = outcome.report()
    return report | {"ratio": report["ratio"]["median"]}


def in_process(source: Path, profile: str, runs: int) -> dict[str, Any]:
    """The codecs alone: every thread chooses and codes the chunks of its half, and decodes them again.

    As in an import, what was coded is let go at once; decoding is into one buffer a thread.
    """
    from gpuimg.store import codec
    from gpuimg.store.choice import Chooser, Encoded, Profile

    chunks = _chunks(source)
    raw = sum(map(len, chunks))
    per_thread = -(-len(chunks) // THREADS)
    halves = [chunks[start : start + per_thread] for start in range(0, len(chunks), per_thread)]

    def encode(half: Chunks) -> None:
        chooser = Chooser(Profile(profile))
        for chunk in half:
            chooser.encode(chunk)

    def keep(half: Chunks) -> list[Encoded]:
        chooser = Chooser(Profile(profile))
        return [chooser.encode(chunk) for chunk in half]

    def decode(half: Chunks, some: list[Encoded], *, check: bool = False) -> None:
        target = memoryview(bytearray(CHUNK))
        for chunk, (coding, payload) in zip(half, some, strict=True):
            view, stored = target[: len(chunk)], chunk if payload is None else memoryview(payload)
            codec.decode(coding.codec, stored, view, coding.element_size)
            if check and view != chunk:
                raise CommandFailedError("a chunk decodes to other bytes")

    with ThreadPoolExecutor(THREADS) as pool:
        coded = list(pool.map(keep, halves))
        list(pool.map(lambda half, some: decode(half, some, check=True), halves, coded))
        rates: dict[str, list[float]] = {}
        for _ in range(runs):
            _time(rates, "encode", raw, lambda: list(pool.map(encode, halves)))
            _time(rates, "decode", raw, lambda: list(pool.map(decode, halves, coded)))
    stored = sum(
        len(chunk if made.payload is None else made.payload)
        for half, some in zip(halves, coded, strict=True)
        for chunk, made in zip(half, some, strict=True)
    )
    return {name: spread(values) for name, values in rates.items()} | {"ratio": raw / stored}


def _time(rates: dict[str, list[float]], name: str, size: int, action: Callable[[], object]) -> None:
    """Bytes per second of `name`, and of `name_cpu`: by processor time, as if nobody else used the cores."""
    started, cpu = time.monotonic(), time.process_time()
    action()
    rates.setdefault(name, []).append(size / (time.monotonic() - started))
    rates.setdefault(f"{name}_cpu", []).append(size * THREADS / (time.process_time() - cpu))


def _chunks(source: Path) -> Chunks:
    """Chunks of the page files, at most 512 MiB in all."""
    made: Chunks = []
    left = _IN_PROCESS
    for path in sorted(source.glob("*pages-*.img")):
        data = np.fromfile(path, dtype=np.uint8, count=min(left, path.stat().st_size)).data
        left -= len(data)
        made += [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    return made
