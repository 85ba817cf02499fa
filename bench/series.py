"""Series of checkpoints of one job, as directories of images: what incremental checkpoints are measured on.

`python -m bench.series KIND STEP DIRECTORY [SIZE]` writes one. Every series makes any of its steps by itself,
in blocks, from random generators that are seeded with seed, series, file and block: equal arguments give
equal bytes, memory does not depend on the size, and what did not change is byte for byte the same.
"""

from __future__ import annotations

import argparse
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.generate import BLOCK, blocks, parse_size

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

Block = Callable[[], dict[str, Bytes]]
"""Makes the next bytes of one or more files."""

PAGE = 4096

SMALL_FILES = (
    "core-100.img",
    "fdinfo-2.img",
    "files.img",
    "ids-100.img",
    "mm-100.img",
    "pagemap-100.img",
    "pstree.img",
    "inventory.img",
)


class Series(ABC):
    """Checkpoints of one job, `size` bytes in the page files of each (nearly, if they come in pieces)."""

    name: str
    files: tuple[str, ...]
    steps: tuple[int, ...] = (0, 1)

    def __init__(self, size: int, seed: int = 1) -> None:
        self.size = size
        self.seed = seed

    @abstractmethod
    def blocks(self, step: int) -> Iterator[Block]:
        """The contents of the page files, in order."""

    def rng(self, *identity: int | str) -> np.random.Generator:
        """A generator that belongs to this series and these words and numbers."""
        words = (zlib.crc32(part.encode()) if isinstance(part, str) else part for part in identity)
        return np.random.Generator(np.random.SFC64([self.seed, zlib.crc32(self.name.encode()), *words]))

    def write(self, step: int, directory: Path, only: Collection[str] = ()) -> int:
        """Write one checkpoint (of the page files only those in `only`, if given); bytes of all files."""
        if step not in self.steps:
            raise ValueError(f"{self.name} has no step {step}; it has {', '.join(map(str, self.steps))}")
        directory.mkdir(parents=True)
        workers = len(os.sched_getaffinity(0))
        names = [name for name in self.files if not only or name in only]
        with ExitStack() as stack:
            streams = {name: stack.enter_context((directory / name).open("wb")) for name in names}
            pool = stack.enter_context(ThreadPoolExecutor(workers))
            waiting: list[Block] = []

            def flush() -> None:
                for made in pool.map(lambda block: block(), waiting):
                    for name, data in made.items():
                        if name in streams:
                            streams[name].write(data.data)
                waiting.clear()

            for block in self.blocks(step):
                waiting.append(block)
                if len(waiting) == 2 * workers:
                    flush()
            flush()
        for number, name in enumerate(SMALL_FILES):
            # The process image changes a little with every checkpoint: registers, pids, times.
            contents = self.rng(name).integers(0, 64, 200 + 700 * number, dtype=np.uint8)
            contents[16:48] = self.rng(name, step).integers(0, 64, 32, dtype=np.uint8)
            (directory / name).write_bytes(contents.tobytes())
        return sum(path.stat().st_size for path in directory.iterdir())


def to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """Rounded to nearest even (finite values), as the upper half of each float32."""
    bits = values.view(np.uint32)
    rounded = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def pages(size: float) -> int:
    """`size` as a whole number of 4 KiB pages, in bytes."""
    return int(size) // PAGE * PAGE


def _only(file: str, make: Callable[[], Bytes]) -> dict[str, Bytes]:
    return {file: make()}


def _weights(name: str, seed: int, file: str, size: int) -> Iterator[Block]:
    """Weights in bf16 that stay what they are; equal names, seeds and sizes give equal weights."""
    for make in blocks("weights-bf16", name, size, seed):
        yield partial(_only, file, make)


class Unchanged(Series):
    """One file of host memory that nobody writes to."""

    name = "unchanged"
    files = ("pages-1.img",)

    def blocks(self, step: int) -> Iterator[Block]:
        del step
        return _weights(self.name, self.seed, self.files[0], self.size)


class Inference(Series):
    """A server on two GPUs: 65 % weights, 30 % KV cache, 5 % activations.

    The KV cache is paged (16 tokens of 1024 bf16 channels a block) and zero where no token has come yet. 32
    sequences take the next free block in turns; at step 0 it is 40 % full, and 5 % more with every step. Its
    channels differ in scale, as those of the activations, which are all new at every step.
    """

    name = "inference"
    steps = (0, 1, 2, 3, 4)
    files = ("amdgpu-pages-100-1a2b.img", "amdgpu-pages-100-3c4d.img")

    _CHANNELS = 1024
    _TOKENS = 16
    _SEQUENCES = 32

    def blocks(self, step: int) -> Iterator[Block]:
        for file in self.files:
            share = pages(self.size / len(self.files))
            cache, activations = pages(share * 0.30), pages(share * 0.05)
            yield from _weights(self.name + file, self.seed, file, share - cache - activations)
            for number in range(-(-cache // BLOCK)):
                yield partial(self._cache, file, cache, number, step)
            for number in range(-(-activations // BLOCK)):
                yield partial(self._activations, file, activations, number, step)

    def _activations(self, file: str, size: int, number: int, step: int) -> dict[str, Bytes]:
        return {file: self._values(self.rng(file, "activations", step, number))[: size - number * BLOCK]}

    def _values(self, rng: np.random.Generator) -> Bytes:
        """One block of bf16 vectors, in bytes."""
        values = rng.standard_normal((BLOCK // 2 // self._CHANNELS, self._CHANNELS), dtype=np.float32)
        values *= np.exp(self.rng("channels").standard_normal(self._CHANNELS)).astype(np.float32)
        return to_bf16(values.reshape(-1)).view(np.uint8)

    def _cache(self, file: str, capacity: int, number: int, step: int) -> dict[str, Bytes]:
        token = 2 * self._CHANNELS
        written = int(capacity // token * (0.40 + 0.05 * step))
        row = np.arange(number * BLOCK // token, (number + 1) * BLOCK // token)
        block, place = row // self._TOKENS, row % self._TOKENS
        sequence = block % self._SEQUENCES
        position = block // self._SEQUENCES * self._TOKENS + place
        # Sequences began at different times: their last blocks are filled differently.
        ahead = sequence * 5 % self._TOKENS - self._TOKENS // 2
        filled = position < written // self._SEQUENCES + ahead
        values = np.zeros((BLOCK // token, token), dtype=np.uint8)
        if filled.any():
            values = self._values(self.rng(file, "cache", number)).reshape(-1, token)
            values[~filled] = 0
        return {file: values.reshape(-1)[: capacity - number * BLOCK]}


class Replicas(Series):
    """Four GPUs with the same bf16 weights, behind a small buffer of their own of different length."""

    name = "replicas"
    steps = (0,)
    files = tuple(f"amdgpu-pages-100-{number:04x}.img" for number in (0x1A2B, 0x3C4D, 0x5E6F, 0x7081))

    def blocks(self, step: int) -> Iterator[Block]:
        del step
        for number, file in enumerate(self.files):
            yield partial(self._own, file, (number + 1) * PAGE)
            yield from _weights(self.name, self.seed, file, pages(self.size / len(self.files)))

    def _own(self, file: str, size: int) -> dict[str, Bytes]:
        own = np.zeros(size, dtype=np.uint8)
        own[:64] = self.rng(file).integers(0, 256, 64, dtype=np.uint8)
        return {file: own}


class Lora(Series):
    """Frozen bf16 weights (97 %) and fp32 adapters with Adam's moments (1 % each), one step apart.

    The gradient of an adapter element is a fixed part and a part that is new in every step, of equal size,
    times the scale of its block; AdamW has made 100 steps before step 0.
    """

    name = "lora"
    steps = (0, 1)
    files = ("amdgpu-pages-100-1a2b.img",)

    _WARM_UP = 100
    _RATE = 2e-4
    _BETAS = (0.9, 0.999)
    _ELEMENTS = BLOCK // 16

    def blocks(self, step: int) -> Iterator[Block]:
        adapter = pages(self.size * 0.01)
        file = self.files[0]
        yield from _weights(self.name, self.seed, file, self.size - 3 * adapter)
        block = 4 * self._ELEMENTS
        for number in range(-(-adapter // block)):
            yield partial(self._adapter, min(block, adapter - number * block), number, step)

    def _adapter(self, size: int, number: int, step: int) -> dict[str, Bytes]:
        """A tensor, then its moments: an allocation each, `size` bytes long."""
        kinds = [kind.view(np.uint8)[:size] for kind in self._train(number, step)]
        return {self.files[0]: np.concatenate(kinds)}

    def _train(self, number: int, step: int) -> tuple[Floats, Floats, Floats]:
        rng = self.rng("adapter", number)
        scale = np.float32(1e-4 * np.exp(rng.standard_normal()))
        fixed = rng.standard_normal(self._ELEMENTS, dtype=np.float32)
        weights = rng.standard_normal(self._ELEMENTS, dtype=np.float32) * np.float32(0.1)
        first, second = np.zeros_like(weights), np.zeros_like(weights)
        for count in range(1, self._WARM_UP + step + 1):
            gradient = (fixed + rng.standard_normal(self._ELEMENTS, dtype=np.float32)) * scale
            first += (gradient - first) * np.float32(1 - self._BETAS[0])
            second *= np.float32(self._BETAS[1])
            second += gradient * gradient * np.float32(1 - self._BETAS[1])
            norm = np.sqrt(second / np.float32(1 - self._BETAS[1] ** count)) + np.float32(1e-8)
            weights -= np.float32(self._RATE / (1 - self._BETAS[0] ** count)) * first / norm
        return weights, first, second


class Churn(Series):
    """An allocator that frees buffers and allocates them elsewhere; what a buffer holds never changes.

    Buffers of 4 KiB to 2 MiB (log-uniform) lie one after the other. Before every step 4 % of them are freed,
    8 % are moved elsewhere, 4 % come: new ones, or such as were freed before.
    """

    name = "churn"
    steps = (0, 1, 2, 3, 4)
    files = ("amdgpu-pages-100-1a2b.img", "amdgpu-pages-100-3c4d.img")

    def buffers(self, file: str, step: int) -> list[int]:
        """The numbers of a file's buffers in the order in which they lie."""
        rng = self.rng(file, "order")
        live: list[int] = []
        total = 0
        while total < self.size // len(self.files):
            live.append(len(live))
            total += self.length(file, live[-1])
        freed: list[int] = []
        known = len(live)
        for _ in range(step):
            come: list[int] = []
            for _ in range(max(1, len(live) // 25)):
                if freed and rng.random() < 0.5:
                    come.append(freed.pop(int(rng.integers(len(freed)))))
                else:
                    come.append(known)
                    known += 1
            freed += [live.pop(int(rng.integers(len(live)))) for _ in range(max(1, len(live) // 25))]
            moved = [live.pop(int(rng.integers(len(live)))) for _ in range(max(1, len(live) // 12))]
            for number in [*moved, *come]:
                live.insert(int(rng.integers(len(live) + 1)), number)
        return live

    def length(self, file: str, number: int) -> int:
        """Bytes of a buffer."""
        return int(512 ** self.rng(file, "length", number).random()) * PAGE

    def contents(self, file: str, number: int) -> Bytes:
        """What a buffer holds: bf16 weights."""
        rng = self.rng(file, "contents", number)
        values = rng.standard_normal(self.length(file, number) // 2, dtype=np.float32)
        return to_bf16(values * np.float32(0.02)).view(np.uint8)

    def blocks(self, step: int) -> Iterator[Block]:
        for file in self.files:
            live = self.buffers(file, step)
            for start in range(0, len(live), 16):
                yield partial(self._some, file, live[start : start + 16])

    def _some(self, file: str, numbers: list[int]) -> dict[str, Bytes]:
        return {file: np.concatenate([self.contents(file, number) for number in numbers])}


KINDS: dict[str, type[Series]] = {kind.name: kind for kind in (Unchanged, Inference, Replicas, Lora, Churn)}
"""The series that need nothing but numpy; fine-tuning is `bench.series_finetuning`."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.series", description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("step", type=int)
    parser.add_argument("directory", type=Path)
    parser.add_argument("size", type=parse_size, nargs="?", default=256 << 20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    series = KINDS[given.kind](given.size, given.seed)
    if given.step not in series.steps:
        parser.error(f"{series.name} has the steps {', '.join(map(str, series.steps))}")
    print(f"{series.write(given.step, given.directory)} bytes in {given.directory}")


if __name__ == "__main__":
    main()
