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
        this process, on two threads); each with `encode` and `decode` in bytes/s, and `ratio`.
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
    """The codecs alone: every thread chooses and codes the chunks of its half, and decodes them again."""
    from gpuimg.store import codec
    from gpuimg.store.choice import Chooser, Encoded, Profile

    chunks = _chunks(source)
    raw = sum(map(len, chunks))
    per_thread = -(-len(chunks) // THREADS)
    halves = [chunks[start : start + per_thread] for start in range(0, len(chunks), per_thread)]

    def encode(some: Chunks) -> list[Encoded]:
        chooser = Chooser(Profile(profile))
        return [chooser.encode(chunk) for chunk in some]

    def decode(some: list[Encoded], half: Chunks, *, check: bool) -> None:
        target = memoryview(bytearray(CHUNK))
        for (coding, payload), chunk in zip(some, half, strict=True):
            view, stored = target[: len(chunk)], chunk if payload is None else memoryview(payload)
            codec.decode(coding.codec, stored, view, coding.element_size)
            if check and view != chunk:
                raise CommandFailedError("a chunk decodes to other bytes")

    encoding, decoding = [], []
    stored = 0
    with ThreadPoolExecutor(THREADS) as pool:
        for number in range(runs + 1):
            started = time.monotonic()
            coded = list(pool.map(encode, halves))
            ended = time.monotonic()
            list(pool.map(lambda pair: decode(*pair, check=False), zip(coded, halves, strict=True)))
            # The first time loads libraries and touches memory.
            if number:
                encoding.append(raw / (ended - started))
                decoding.append(raw / (time.monotonic() - ended))
            else:
                for pair in zip(coded, halves, strict=True):
                    decode(*pair, check=True)
                sizes = (
                    len(chunk if made.payload is None else made.payload)
                    for half, some in zip(halves, coded, strict=True)
                    for chunk, made in zip(half, some, strict=True)
                )
                stored = sum(sizes)
    return {"encode": spread(encoding), "decode": spread(decoding), "ratio": raw / stored}


def _chunks(source: Path) -> Chunks:
    """Chunks of the page files, at most 512 MiB in all."""
    made: Chunks = []
    left = _IN_PROCESS
    for path in sorted(source.glob("*pages-*.img")):
        data = np.fromfile(path, dtype=np.uint8, count=min(left, path.stat().st_size)).data
        left -= len(data)
        made += [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    return made
