"""The choice of a coding: near the best there is, on every kind of data, and again when a file changes."""

from __future__ import annotations

import numpy as np
import pytest

from gpuimg.store import choice, looks, planes
from gpuimg.store.choice import Chooser, Profile, look
from gpuimg.store.codec import RAW, ZSTD, Codec, Coding, decode, encode
from gpuimg.store.planes import Transform
from tests.fixtures.store_data import KIB, counters, floats, noise, text

ALONE = [
    RAW,
    ZSTD,
    *(Coding(Codec.BITSHUFFLE_LZ4, size) for size in (1, 2, 4, 8)),
    *(
        Coding(Codec.FLOAT_PLANES, size, transform)
        for size in (1, 2, 4, 8)
        for transform in (Transform.PLAIN, Transform.ROTATED)
    ),
]
DELTAS = [
    Coding(Codec.FLOAT_PLANES, size, transform)
    for size in (1, 2, 4, 8)
    for transform in (Transform.DIFFERENCE, Transform.EXCLUSIVE)
]
SIZE = 256 * KIB
# Of the best coding's bytes; and of the chunk's, below which a choice costs nothing.
NEAR = 1.12
LITTLE = 0.01


def numbers(kind: str, seed: int = 0) -> bytes:
    """Integers and other numbers that are no normally distributed floats."""
    rng = np.random.default_rng(seed)
    if kind == "int8":
        return rng.normal(0, 20, SIZE).astype("i1").tobytes()
    if kind == "token ids":
        return rng.integers(0, 50_000, SIZE // 4).astype("<i4").tobytes()
    if kind == "pointers":
        return (0x7F00_0000_0000 + rng.integers(0, 1 << 27, SIZE // 8) * 8).astype("<u8").tobytes()
    if kind == "squares":
        return (rng.normal(0, 1e-4, SIZE // 4).astype("<f4") ** 2).tobytes()
    if kind == "few":
        return np.where(rng.random(SIZE // 4) < 0.05, rng.normal(0, 1, SIZE // 4), 0).astype("<f4").tobytes()
    return rng.normal(0, 0.02, SIZE // 2).astype("<f2").tobytes()


CHUNKS = {
    "bf16": lambda: floats(SIZE, 1, "bfloat16"),
    "fp16": lambda: numbers("fp16"),
    "fp32": lambda: floats(SIZE, 2, "float32"),
    "fp64": lambda: floats(SIZE, 3, "float64"),
    "int16 that counts": lambda: counters(SIZE, 2),
    "int32 that counts": lambda: counters(SIZE, 4),
    "int64 that counts": lambda: counters(SIZE, 8),
    "text": lambda: text(SIZE),
    "noise": lambda: noise(SIZE),
    "zeros": lambda: bytes(SIZE),
    "half zeros": lambda: noise(SIZE // 2) + bytes(SIZE // 2),
    "short": lambda: floats(1001, 1),
    **{kind: lambda kind=kind: numbers(kind) for kind in ("int8", "token ids", "pointers", "squares", "few")},
}


@pytest.fixture(params=["as built", "without the kernel"])
def built(request, monkeypatch):
    """The looks and estimates of the kernel where there is one, and those that stand in for it."""
    if request.param == "without the kernel":
        monkeypatch.setattr(planes, "kernel", lambda: None)
        monkeypatch.setattr(looks, "kernel", lambda: None)


def size_of(coding, data, base=None):
    payload = encode(coding, memoryview(data), memoryview(base) if coding.needs_base else None)
    return len(payload or data)


def decoded(coding, payload, size, base=None):
    target = bytearray(size)
    against = memoryview(base) if coding.needs_base else None
    decode(coding.codec, memoryview(payload), memoryview(target), coding.element_size, against)
    return target


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", CHUNKS)
def test_what_is_chosen_is_nearly_as_small_as_the_best(kind):
    data = CHUNKS[kind]()
    coding, promise = look(memoryview(data))
    best = min(size_of(each, data) for each in ALONE)
    assert size_of(coding, data) <= max(NEAR * best, best + LITTLE * len(data)), (coding, best)
    assert (promise == 1.0) == (coding is RAW)
    if len(data) == SIZE:
        assert size_of(coding, data) / SIZE == pytest.approx(promise, abs=0.1)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("kind", "size"), [("bf16", 2), ("fp16", 2), ("fp32", 4), ("fp64", 8), ("squares", 4)]
)
def test_floats_are_coded_as_planes_of_their_own_width_in_every_profile(kind, size):
    for profile in (Profile.FAST, Profile.BALANCED, Profile.DENSE):
        coding, _ = look(memoryview(CHUNKS[kind]()), profile)
        assert (coding.codec, coding.element_size) == (Codec.FLOAT_PLANES, size)


@pytest.mark.usefixtures("built")
def test_what_nothing_shortens_is_raw_in_every_profile_and_all_is_in_the_profile_raw():
    for profile in Profile:
        if profile is not Profile.AUTO:
            coding, promise = look(memoryview(noise(SIZE)), profile)
            assert (coding.codec, promise) == (Codec.RAW, 1.0)
    for make in CHUNKS.values():
        assert look(memoryview(make()), Profile.RAW) == (RAW, 1.0)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", CHUNKS)
def test_a_denser_profile_never_takes_more(kind):
    data = CHUNKS[kind]()
    fast, balanced, dense = (
        size_of(look(memoryview(data), profile).coding, data)
        for profile in (Profile.FAST, Profile.BALANCED, Profile.DENSE)
    )
    assert dense <= balanced <= max(NEAR * fast, fast + LITTLE * len(data))


def trained(data: bytes, dtype: str, seed: int) -> bytes:
    """The numbers, each changed a little, as a training step does."""
    rng = np.random.default_rng(seed)
    if dtype == "bfloat16":
        words = np.frombuffer(data, dtype="<u2").copy()
        words += (rng.random(len(words)) < 0.2).astype("<u2")
        return words.tobytes()
    values = np.frombuffer(data, dtype=dtype)
    return (values * (1 + rng.normal(0, 1e-4, len(values)))).astype(dtype).tobytes()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_numbers_that_changed_a_little_are_coded_against_what_they_were(dtype):
    base = floats(SIZE, 5, dtype)
    data = trained(base, dtype, 6)
    coding, promise = look(memoryview(data), base=memoryview(base))
    assert coding.needs_base
    assert coding.element_size == {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    best = min(size_of(each, data, base) for each in [*ALONE, *DELTAS])
    assert size_of(coding, data, base) <= NEAR * best
    assert size_of(coding, data, base) / SIZE == pytest.approx(promise, abs=0.1)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", CHUNKS)
def test_what_has_nothing_to_do_with_its_base_stands_alone(kind):
    data = CHUNKS[kind]()
    alone = look(memoryview(data))
    assert look(memoryview(data), base=memoryview(noise(SIZE, 9))) == alone
    assert look(memoryview(data), base=memoryview(data[: len(data) // 2])) == alone, "too short a base"


@pytest.mark.usefixtures("built")
def test_a_base_that_saves_little_is_not_worth_its_chain():
    rng = np.random.default_rng(7)
    base = floats(SIZE, 8)
    words, fresh = np.frombuffer(base, dtype="<u4"), np.frombuffer(floats(SIZE, 9), dtype="<u4")
    data = np.where(rng.random(len(words)) < 0.14, words, fresh).tobytes()
    alone = min(size_of(each, data) for each in ALONE)
    assert 0.94 * alone < min(size_of(each, data, base) for each in DELTAS) < 0.98 * alone
    assert not look(memoryview(data), base=memoryview(base)).coding.needs_base


# A file's chunks, one after the other


def test_the_chooser_follows_a_file_that_changes_its_nature():
    chooser = Chooser()
    kinds = [floats(64 * KIB, 1, "bfloat16"), noise(64 * KIB), text(64 * KIB), floats(64 * KIB, 2, "float32")]
    for data in kinds:
        for _ in range(40):
            coding, payload = chooser.encode(memoryview(data))
            if payload is not None:
                assert decoded(coding, payload, len(data)) == data
            else:
                assert coding is RAW
        best = min(size_of(each, data) for each in ALONE)
        assert len(payload or data) <= NEAR * best


def test_the_chooser_follows_a_file_whose_changes_change_their_nature():
    """Numbers trained on, then replaced, then trained on: differences are used, left, and found again."""
    chooser = Chooser()
    base = floats(64 * KIB, 1)
    little, other = trained(base, "float32", 2), floats(64 * KIB, 3)
    used = []
    for data in (little, other, little):
        for _ in range(40):
            against = base if chooser.wants_base() else None
            coding, payload = chooser.encode(memoryview(data), against and memoryview(against))
            assert payload is not None
            assert decoded(coding, payload, len(data), against) == data
            assert against or not coding.needs_base
        used.append(coding.needs_base)
    assert used == [True, False, True]


def test_the_chooser_asks_for_no_base_where_it_does_not_pay():
    """Reading a base costs as much as coding a chunk: mostly it must not be read in vain."""
    chooser = Chooser()
    base, data = floats(64 * KIB, 1), floats(64 * KIB, 2)
    read = 0
    for _ in range(160):
        against = memoryview(base) if chooser.wants_base() else None
        read += against is not None
        chooser.encode(memoryview(data), against)
    assert 1 <= read <= 160 // 8


def test_a_profile_that_changes_is_followed_at_once():
    alone, repeated = memoryview(floats(64 * KIB, 1)), memoryview(floats(KIB, 1) * 64)
    for data in (alone, repeated):
        chooser = Chooser()
        for profile in (Profile.BALANCED, Profile.RAW, Profile.FAST, Profile.RAW, Profile.DENSE):
            chooser.profile = profile
            coding, payload = chooser.encode(data)
            assert (payload is None) == (profile is Profile.RAW)
            assert coding.dense == (profile is Profile.DENSE and data is repeated), "effort where it pays"


def test_the_element_size_is_remembered_until_another_is_seen():
    chooser = Chooser(element_size=4)
    assert chooser.element_size == 4
    chooser.encode(memoryview(noise(64 * KIB)))
    assert chooser.element_size == 4
    chooser.encode(memoryview(floats(64 * KIB, 1, "bfloat16")))
    assert chooser.element_size == 2
    for end in (noise(5), noise(64 * KIB)):
        chooser.encode(memoryview(end))
        assert chooser.element_size == 2, "what has no elements says nothing of those before"
    assert Chooser().element_size == 0


# Looks at samples


def cycled(period: int) -> bytes:
    return (noise(period) * (16 * KIB // period + 1))[: 16 * KIB]


@pytest.mark.parametrize(
    ("data", "low", "high"),
    # Of a long cycle the kernel forgets some before it comes again.
    [
        (noise(16 * KIB), 0, 0.01),
        (text(16 * KIB), 0.8, 1),
        (bytes(16 * KIB), 0.99, 1),
        (cycled(4096), 0.3, 0.8),
    ],
    ids=["noise", "text", "zeros", "cycle"],
)
@pytest.mark.usefixtures("built")
def test_the_share_of_repeats_is_that_of_the_data(data, low, high):
    assert low <= looks.repeats(memoryview(data)) <= high
    for short in range(10):
        assert 0 <= looks.repeats(memoryview(data[:short])) <= 1


@pytest.mark.usefixtures("built")
def test_noise_looks_random_and_nothing_else_does():
    for seed in range(50):
        assert looks.looks_random(memoryview(noise(4096, seed)))
    for kind, make in CHUNKS.items():
        if kind not in ("noise", "half zeros", "short"):
            assert not looks.looks_random(choice._middle(memoryview(make()))), kind
