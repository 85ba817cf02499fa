"""Checkpoints of a full fine-tuning job: fp32 weights, Adam's two moments and the bf16 copy, a file each.

The run (`series_training`) has one size, that of its model. A larger checkpoint holds it several times: tile
0 is the run itself; in every other tile the weights, and the gradients from the first step on, are multiplied
by random factors close to 1, element by element. Scaling a gradient by f scales the first moment by f and
the second by f², so such a tile is a state that AdamW would have reached, and from there on its steps are
computed in fp32 like any other. No two tiles share a run of bytes (zeros apart), and all change like the
real one. A part of a tile, and so a smaller checkpoint, takes evenly spread pieces of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.series import Block, Bytes, Series, to_bf16
from bench.series_training import GRAIN, Run, Settings, Vector, adamw, open_run

WEIGHTS = "amdgpu-pages-100-1001.img"
FIRST = "amdgpu-pages-100-1002.img"
SECOND = "amdgpu-pages-100-1003.img"
COPY = "amdgpu-pages-100-1004.img"

KIND = {"weights": WEIGHTS, "m": FIRST, "v": SECOND, "bf16": COPY}
"""What is in which file."""

_AT_ONCE = 64
_ELEMENT_BYTES = 4 + 4 + 4 + 2


class FineTuning(Series):
    """Steps 0 (after the warm-up) to 10 of a fine-tuning run.

    `cache` keeps the run between benchmarks; see `series_training.open_run`.
    """

    name = "finetune"
    files = tuple(KIND.values())

    def __init__(
        self,
        size: int,
        seed: int = 1,
        *,
        cache: Path,
        say: Callable[[str], None] = print,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(size, seed)
        self.run: Run = open_run(settings or Settings(), cache, say)
        self.steps = tuple(range(len(self.run.gradients) + 1))

    def blocks(self, step: int) -> Iterator[Block]:
        whole = len(self.run.flags) // GRAIN
        left = max(1, self.size // _ELEMENT_BYTES // GRAIN)
        tile = 0
        while left:
            count = min(whole, left)
            grains = np.arange(count) * whole // count
            for start in range(0, count, _AT_ONCE):
                yield partial(self._state, tile, grains[start : start + _AT_ONCE], step)
            left -= count
            tile += 1

    def _state(self, tile: int, grains: npt.NDArray[np.int64], step: int) -> dict[str, Bytes]:
        """What these pieces of the run hold after `step` steps."""

        def take(vector: Vector) -> Vector:
            return vector.reshape(-1, GRAIN)[grains].reshape(-1)

        weights, first, second = map(take, self.run.state)
        flags = self.run.flags.reshape(-1, GRAIN)[grains].reshape(-1)
        factor = np.ones_like(weights)
        if tile:
            rng = self.rng(tile, int(grains[0]))
            weights *= 1 + np.float32(0.02) * rng.standard_normal(len(weights), dtype=np.float32)
            factor += np.float32(0.02) * rng.standard_normal(len(weights), dtype=np.float32)
            first *= factor
            second *= factor * factor
        warm_up = self.run.settings.warm_up
        for number in range(1, step + 1):
            gradient = take(self.run.gradients[number - 1]) * factor
            adamw((weights, first, second), gradient, flags, self.run.settings, warm_up + number)
        weights_bf16 = to_bf16(weights)
        return {
            WEIGHTS: weights.view(np.uint8),
            FIRST: first.view(np.uint8),
            SECOND: second.view(np.uint8),
            COPY: weights_bf16.view(np.uint8),
        }
