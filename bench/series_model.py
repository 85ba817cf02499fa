"""A sentence encoder (BERT's layers) in numpy with its gradients, so that real weights can really be trained.

Only what training needs: no dropout, no padding. The loss is the one sentence encoders are tuned with: in a
batch of sentence pairs, each sentence must be more similar to its partner than to any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]
Tokens = npt.NDArray[np.int64]

_EPSILON = 1e-12
_GELU = 0.7978845608028654
_SHARPNESS = 20.0
"""Cosine similarities are multiplied by this before the softmax."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of an encoder; the defaults are those of all-MiniLM-L6-v2."""

    vocabulary: int = 30522
    positions: int = 512
    hidden: int = 384
    inner: int = 1536
    layers: int = 6
    heads: int = 12

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, in the order of a safetensors file (by name)."""
        hidden, inner = self.hidden, self.inner
        made: dict[str, tuple[int, ...]] = {
            "embeddings.position_embeddings.weight": (self.positions, hidden),
            "embeddings.token_type_embeddings.weight": (2, hidden),
            "embeddings.word_embeddings.weight": (self.vocabulary, hidden),
            "pooler.dense.weight": (hidden, hidden),
            "pooler.dense.bias": (hidden,),
        }
        norms = ["embeddings.LayerNorm"]
        for number in range(self.layers):
            layer = f"encoder.layer.{number}"
            for name, outputs, inputs in (
                ("attention.self.query", hidden, hidden),
                ("attention.self.key", hidden, hidden),
                ("attention.self.value", hidden, hidden),
                ("attention.output.dense", hidden, hidden),
                ("intermediate.dense", inner, hidden),
                ("output.dense", hidden, inner),
            ):
                made[f"{layer}.{name}.weight"] = (outputs, inputs)
                made[f"{layer}.{name}.bias"] = (outputs,)
            norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
        for name in norms:
            made[f"{name}.weight"] = made[f"{name}.bias"] = (hidden,)
        return dict(sorted(made.items()))


class Encoder:
    """Computes the loss of a batch and adds its gradients to those that were given."""

    def __init__(
        self, shape: Shape, parameters: Mapping[str, Floats], gradients: Mapping[str, Floats]
    ) -> None:
        self._shape = shape
        self._parameters = parameters
        self._gradients = gradients

    def learn(self, tokens: Tokens) -> float:
        """Add the gradients of a batch; its loss.

        Parameters
        ----------
        tokens
            Sentences of equal length, shape (2 × pairs, length): row i and row i + pairs are a pair.
        """
        steps: list[Any] = []
        values = self._embed(tokens, steps)
        for number in range(self._shape.layers):
            values = self._layer(f"encoder.layer.{number}", values, tokens.shape, steps)
        loss, slope = _contrast(values.reshape(*tokens.shape, -1))
        back = slope.reshape(values.shape)
        while steps:
            back = steps.pop()(back)
        return loss

    def _embed(self, tokens: Tokens, steps: list[Any]) -> Floats:
        word, position, kind = (
            f"embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")
        )
        length = tokens.shape[1]
        values = self._parameters[word][tokens] + self._parameters[position][:length]
        values += self._parameters[kind][0]

        def back(slope: Floats) -> None:
            np.add.at(self._gradients[word], tokens.reshape(-1), slope)
            by_position = slope.reshape(*tokens.shape, -1).sum(axis=0)
            self._gradients[position][:length] += by_position
            self._gradients[kind][0] += by_position.sum(axis=0)

        steps.append(back)
        return self._norm("embeddings.LayerNorm", values.reshape(tokens.size, -1), steps)

    def _layer(self, layer: str, values: Floats, shape: tuple[int, ...], steps: list[Any]) -> Floats:
        inside: list[Any] = []
        attended = self._attention(f"{layer}.attention", values, shape, inside)
        values = self._residual(f"{layer}.attention.output.LayerNorm", values, attended, inside, steps)
        inside = []
        inner = self._linear(f"{layer}.intermediate.dense", values, inside)
        outer = self._linear(f"{layer}.output.dense", _gelu(inner, inside), inside)
        return self._residual(f"{layer}.output.LayerNorm", values, outer, inside, steps)

    def _residual(
        self, norm: str, values: Floats, added: Floats, inside: list[Any], steps: list[Any]
    ) -> Floats:
        def back(slope: Floats) -> Floats:
            through = slope
            while inside:
                through = inside.pop()(through)
            return slope + through

        steps.append(back)
        return self._norm(norm, values + added, steps)

    def _linear(self, name: str, values: Floats, steps: list[Any]) -> Floats:
        weight = self._parameters[f"{name}.weight"]

        def back(slope: Floats) -> Floats:
            self._gradients[f"{name}.weight"][...] += slope.T @ values
            self._gradients[f"{name}.bias"][...] += slope.sum(axis=0)
            return np.asarray(slope @ weight)

        steps.append(back)
        return np.asarray(values @ weight.T + self._parameters[f"{name}.bias"])

    def _norm(self, name: str, values: Floats, steps: list[Any]) -> Floats:
        gain = self._parameters[f"{name}.weight"]
        centred = values - values.mean(axis=1, keepdims=True)
        scale = 1 / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + _EPSILON)
        normal = centred * scale

        def back(slope: Floats) -> Floats:
            self._gradients[f"{name}.weight"][...] += (slope * normal).sum(axis=0)
            self._gradients[f"{name}.bias"][...] += slope.sum(axis=0)
            inner = slope * gain
            inner -= inner.mean(axis=1, keepdims=True) + normal * (inner * normal).mean(axis=1, keepdims=True)
            return np.asarray(inner * scale)

        steps.append(back)
        return np.asarray(normal * gain + self._parameters[f"{name}.bias"])

    def _attention(self, name: str, values: Floats, shape: tuple[int, ...], steps: list[Any]) -> Floats:
        heads = self._shape.heads
        width = self._shape.hidden // heads

        def split(flat: Floats) -> Floats:
            return flat.reshape(*shape, heads, width).transpose(0, 2, 1, 3)

        def join(by_head: Floats) -> Floats:
            return by_head.transpose(0, 2, 1, 3).reshape(values.shape)

        parts: list[tuple[Floats, list[Any]]] = []
        for part in ("query", "key", "value"):
            inside: list[Any] = []
            parts.append((split(self._linear(f"{name}.self.{part}", values, inside)), inside))
        (query, back_query), (key, back_key), (value, back_value) = parts
        scale = width**-0.5
        weights = _softmax(query @ key.swapaxes(2, 3) * scale)

        def back(slope: Floats) -> Floats:
            by_head = split(slope)
            by_weight = by_head @ value.swapaxes(2, 3)
            by_score = weights * (by_weight - (by_weight * weights).sum(axis=3, keepdims=True)) * scale
            to_value = back_value.pop()(join(weights.swapaxes(2, 3) @ by_head))
            to_query = back_query.pop()(join(by_score @ key))
            to_key = back_key.pop()(join(by_score.swapaxes(2, 3) @ query))
            return np.asarray(to_value + to_query + to_key)

        steps.append(back)
        return self._linear(f"{name}.output.dense", join(weights @ value), steps)


def _softmax(scores: Floats) -> Floats:
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(scores / scores.sum(axis=-1, keepdims=True))


def _gelu(values: Floats, steps: list[Any]) -> Floats:
    """The tanh form."""
    square = values * values
    bend = np.tanh(values * (1 + 0.044715 * square) * _GELU)

    def back(slope: Floats) -> Floats:
        steep = (1 - bend * bend) * (1 + 3 * 0.044715 * square) * _GELU
        return np.asarray(slope * 0.5 * (1 + bend + values * steep))

    steps.append(back)
    return np.asarray(0.5 * values * (1 + bend))


def _contrast(values: Floats) -> tuple[float, Floats]:
    """Loss and its slope for token vectors of shape (2 × pairs, length, hidden): mean, cosine, softmax."""
    count, length, _ = values.shape
    pairs = count // 2
    means = values.mean(axis=1)
    norms = np.sqrt((means * means).sum(axis=1, keepdims=True))
    unit = means / norms
    chances = _softmax(unit[:pairs] @ unit[pairs:].T * _SHARPNESS)
    diagonal = np.arange(pairs)
    loss = -float(np.log(chances[diagonal, diagonal]).mean())
    by_score = chances.copy()
    by_score[diagonal, diagonal] -= 1
    by_score *= _SHARPNESS / pairs
    by_unit = np.concatenate([by_score @ unit[pairs:], by_score.T @ unit[:pairs]])
    by_mean = (by_unit - unit * (by_unit * unit).sum(axis=1, keepdims=True)) / norms
    return loss, np.repeat(by_mean[:, None, :] / length, length, axis=1)


def batches(vocabulary: int, *, pairs: int, at_once: int, length: int, seed: int) -> Iterator[Tokens]:
    """Endless batches of sentence pairs, shape (2 × at_once, length), from a set of `pairs` sentence pairs.

    The set is gone through in a new order each time. Its words follow Zipf's law with the two regimes of
    natural language, common and rare words: BERT's vocabulary is sorted by frequency behind its special and
    single-character entries. Partners share two thirds of their words. Sentences begin and end with BERT's
    marks.
    """
    rng = np.random.default_rng(seed)
    first = min(1996, vocabulary // 8)
    ranks = np.arange(vocabulary - first) + 2.7
    weights = 1 / (ranks * np.maximum(1, ranks / 5000))
    chances = np.cumsum(weights / weights.sum())

    def draw() -> Tokens:
        drawn = np.searchsorted(chances, rng.random((pairs, length)))
        made = first + np.minimum(drawn, vocabulary - first - 1)
        made[:, 0], made[:, -1] = min(101, first - 2), min(102, first - 1)
        return made

    one = draw()
    other = np.where(rng.random(one.shape) < 2 / 3, one, draw())
    while True:
        order = rng.permutation(pairs)
        for start in range(0, pairs - at_once + 1, at_once):
            chosen = order[start : start + at_once]
            yield np.concatenate([one[chosen], other[chosen]])
