"""Which coding suits a chunk: a look at a few samples of it, and what won on the same file before."""

from __future__ import annotations

import enum
from typing import NamedTuple

from gpuimg.store import codec, planes
from gpuimg.store.codec import RAW, ZSTD, Codec, Coding
from gpuimg.store.looks import looks_random, repeats
from gpuimg.store.planes import Transform

# A coding that is not this much smaller than raw is not worth its decoding.
_WORTHWHILE = 0.97
# A coding against a base ties a chunk to another: it must be clearly smaller than one that stands alone.
_DELTA_ADVANTAGE = 0.93
# zstd costs many times as much as bitshuffle+LZ4 or float planes: it must win clearly.
_ZSTD_ADVANTAGE = 0.90
# From this share of repeated words on, dictionary coders are looked at.
_REPEATS = 0.05
# Bit shuffling is looked at when the steps from element to element take this much less than the elements.
_STEPS = 0.5
_REPEATS_WORTH_EFFORT = 0.01
_SAMPLE = 4096
_SAMPLES = 4
_LOOK_EVERY = 16
_LONGEST_PAUSE = 16
_SURPRISE = 0.10

_PLANES = [
    Coding(Codec.FLOAT_PLANES, 2, Transform.ROTATED),
    Coding(Codec.FLOAT_PLANES, 4, Transform.ROTATED),
    Coding(Codec.FLOAT_PLANES, 8, Transform.ROTATED),
    Coding(Codec.FLOAT_PLANES, 1, Transform.PLAIN),
    Coding(Codec.FLOAT_PLANES, 4, Transform.PLAIN),
    Coding(Codec.FLOAT_PLANES, 8, Transform.PLAIN),
]
_DELTAS = [
    Coding(Codec.FLOAT_PLANES, size, transform)
    for size in (2, 4, 8, 1)
    for transform in (Transform.DIFFERENCE, Transform.EXCLUSIVE)
]
_SHUFFLED = [Coding(Codec.BITSHUFFLE_LZ4, size) for size in (1, 2, 4, 8)]


class Profile(enum.StrEnum):
    """How much is done for a smaller store (docs/operations.md has figures)."""

    RAW = "raw"
    FAST = "fast"
    BALANCED = "balanced"
    DENSE = "dense"
    AUTO = "auto"


class Look(NamedTuple):
    """A coding, and the ratio stored/raw that samples promise of it."""

    coding: Coding
    ratio: float


class Encoded(NamedTuple):
    """The coding that a chunk got, and the payload (None: it is stored raw)."""

    coding: Coding
    payload: bytes | None


def look(chunk: memoryview, profile: Profile = Profile.BALANCED, base: memoryview | None = None) -> Look:
    """The coding that suits a chunk, from a few samples of it (and of the chunk it may be coded against)."""
    if profile is Profile.RAW:
        return Look(RAW, 1.0)
    sample = _sample(chunk)
    repeated = repeats(sample)
    best = _best_planes(_PLANES, sample, None)
    if profile is not Profile.FAST and repeated > _REPEATS:
        best = _against_dictionaries(sample, best)
    elif profile is not Profile.FAST and _counts(_middle(chunk), best.ratio):
        best = min(best, _best_shuffled(sample), key=_ratio)
    if best.ratio >= _WORTHWHILE:
        best = Look(RAW, 1.0)
    if base is not None and len(base) >= len(chunk):
        delta = _best_planes(_DELTAS, sample, _sample(base[: len(chunk)]))
        if delta.ratio < best.ratio * _DELTA_ADVANTAGE:
            best = delta
    # Where nothing repeats there is nothing to be had for the effort.
    if profile is Profile.DENSE and repeated > _REPEATS_WORTH_EFFORT:
        return Look(best.coding._replace(dense=True), best.ratio)
    return best


def _best_planes(codings: list[Coding], sample: memoryview, base: memoryview | None) -> Look:
    looks = (
        Look(coding, planes.estimate(sample, coding.element_size, coding.transform, base) / len(sample))
        for coding in codings
    )
    return min(looks, key=_ratio)


def _counts(data: memoryview, ratio: float) -> bool:
    """Whether the elements of some width count up or down: bit shuffling makes long runs of those."""
    steps = (planes.estimate(data[size:], size, Transform.DIFFERENCE, data) for size in (4, 8, 2))
    return any(step < len(data) * ratio * _STEPS for step in steps)


def _against_dictionaries(sample: memoryview, best: Look) -> Look:
    """`best`, or a dictionary coder that beats it."""
    zstd = len(codec.compress(ZSTD, sample)) / len(sample)
    if zstd >= best.ratio * _ZSTD_ADVANTAGE:
        return best
    shuffled = _best_shuffled(sample)
    return Look(ZSTD, zstd) if zstd < shuffled.ratio * _ZSTD_ADVANTAGE else shuffled


def _best_shuffled(sample: memoryview) -> Look:
    looks = (Look(coding, len(codec.compress(coding, sample)) / len(sample)) for coding in _SHUFFLED)
    return min(looks, key=_ratio)


def _ratio(look: Look) -> float:
    return look.ratio


def _sample(chunk: memoryview) -> memoryview:
    if len(chunk) <= _SAMPLE * _SAMPLES:
        return chunk
    step = (len(chunk) - _SAMPLE) // (_SAMPLES - 1) & ~7
    return memoryview(b"".join(chunk[i * step : i * step + _SAMPLE] for i in range(_SAMPLES)))


def _middle(chunk: memoryview) -> memoryview:
    start = max(0, len(chunk) // 2 - _SAMPLE // 2)
    return chunk[start : start + _SAMPLE]


class Chooser:
    """Chooses the coding of the chunks of one file, with a memory of what won on it before.

    A full look is taken at every 16th chunk, and whenever a chunk is not what the last look promised: a
    coded one by its ratio, one that was to be stored raw by a glance at its bytes. Bases cost their reading:
    after chunks for which they did not pay they are asked for again in growing intervals.
    """

    def __init__(self, profile: Profile = Profile.BALANCED, element_size: int = 0) -> None:
        self.profile = profile
        self.element_size = element_size
        """Bytes of an element of the file as the last coding that has elements saw it, else as given."""
        self._alone = _Memory()
        self._against = _Memory()
        # Chunks to code before a base is asked for, and how many it will be the next time.
        self._pause = 0
        self._next_pause = 1

    def wants_base(self) -> bool:
        """Whether reading the base of the next chunk is likely to pay."""
        return self._pause <= 0

    def encode(self, chunk: memoryview, base: memoryview | None = None) -> Encoded:
        """Code a chunk, against `base` (of any length) if there is one and it pays."""
        memory = self._against if base is not None else self._alone
        # Where a base has been read already, it is looked at.
        unused = base is not None and not memory.look.coding.needs_base
        looked = unused or memory.until_look <= 0 or memory.profile is not self.profile
        if looked:
            memory.renew(chunk, self.profile, base)
        elif memory.look.coding.codec is Codec.RAW and not looks_random(_middle(chunk)):
            looked = True
            memory.renew(chunk, self.profile, base)
        memory.until_look -= 1
        coding, promise = memory.look
        payload = _encode(coding, chunk, base)
        ratio = len(payload) / len(chunk) if payload else 1.0
        if not looked and abs(ratio - promise) > _SURPRISE:
            memory.renew(chunk, self.profile, base)
            if memory.look.coding != coding:
                coding = memory.look.coding
                payload = _encode(coding, chunk, base)
        elif coding is not RAW:
            # The whole chunk knows its ratio better than its samples did.
            memory.look = Look(coding, ratio)
        self._remember_base(asked=base is not None, used=coding.needs_base)
        if payload is None:
            return Encoded(RAW, None)
        self.element_size = coding.element_size or self.element_size
        return Encoded(coding, payload)

    def _remember_base(self, *, asked: bool, used: bool) -> None:
        if used:
            self._pause, self._next_pause = 0, 1
        elif asked:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
        else:
            self._pause -= 1


def _encode(coding: Coding, chunk: memoryview, base: memoryview | None) -> bytes | None:
    return codec.encode(coding, chunk, base if coding.needs_base else None)


class _Memory:
    """What the last look at a file's chunks found."""

    def __init__(self) -> None:
        self.look = Look(RAW, 1.0)
        self.profile = Profile.BALANCED
        self.until_look = 0

    def renew(self, chunk: memoryview, profile: Profile, base: memoryview | None) -> None:
        self.look = look(chunk, profile, base)
        self.profile = profile
        self.until_look = _LOOK_EVERY
