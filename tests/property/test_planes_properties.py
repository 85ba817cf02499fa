"""Float planes, for any chunk: what either coder writes, both read; the library reads the kernel's frames.

`GPUIMG_PLANES_EXAMPLES=20000 python -m pytest tests/property/test_planes_properties.py` tries more of them.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from gpuimg.errors import DamagedError
from gpuimg.store import planes
from gpuimg.store.planes import Transform
from tests.fixtures.planes_data import (
    BLOCK,
    PRESENT,
    ZSTD,
    blocks_of,
    coder,
    compiled,
    decoded,
    drawn,
    encoded,
    frames_of,
    needs_kernel,
    shortest_codes,
    taken_apart,
)

MIB = 1 << 20
GUARD = 64

sizes = st.sampled_from([1, 2, 4, 8])
transforms = st.sampled_from(Transform)
# Hypothesis prefers small numbers; but most of what there is to go wrong begins at a kilobyte.
lengths = st.one_of(
    st.integers(0, 20),
    st.builds(
        lambda plane, size, more: max(0, min(plane * size + more, 2 * MIB)),
        st.sampled_from([1024, 2048, 4096, 16 * 1024, BLOCK, BLOCK + 1024, 2 * BLOCK]),
        sizes,
        st.integers(-9, 9),
    ),
    st.builds(lambda steps, more: 331 * steps + more, st.integers(7, 200), st.integers(0, 331)),
)
EXAMPLES = int(os.environ.get("GPUIMG_PLANES_EXAMPLES", "400"))
thorough = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@st.composite
def distributions(draw) -> bytes:
    """Bytes of few or many kinds, as skewed as one likes, anywhere among the 256."""
    kinds = draw(st.integers(1, 256))
    skew = draw(st.sampled_from([1.0, 0.5, 0.1, 1e-2, 1e-4, 1e-8]))
    first = draw(st.integers(0, 256 - kinds))
    order = np.random.default_rng(draw(st.integers(0, 99))).permutation(kinds) + first
    return drawn(np.geomspace(1, skew, kinds), draw(lengths), draw(st.integers(0, 99)), symbols=order)


@st.composite
def repeated(draw) -> bytes:
    """What Hypothesis thinks of, over and over."""
    pattern = draw(st.binary(min_size=1, max_size=400))
    return np.resize(np.frombuffer(pattern, np.uint8), draw(lengths)).tobytes()


@st.composite
def numbers(draw) -> bytes:
    """Floats of a width, special ones among them, in any order."""
    width = draw(st.sampled_from([16, 32, 64]))
    values = draw(st.lists(st.floats(width=width), min_size=1, max_size=60))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    kind = f"<f{width // 8}"
    chosen = rng.choice(np.array(values, kind), draw(lengths) // (width // 8) + 1)
    weights = rng.normal(0, 0.02, len(chosen)).astype(kind)
    mixed = np.where(rng.random(len(chosen)) < draw(st.sampled_from([0, 0.01, 0.5, 1])), chosen, weights)
    return mixed.tobytes()[: draw(lengths)]


@st.composite
def patched(draw) -> bytes:
    """Stretches of one byte, of noise and of everything else: the blocks of a plane differ in kind."""
    parts = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200_000)), min_size=1, max_size=5))
    made = []
    for number, (kind, length) in enumerate(parts):
        if kind == 0:
            made.append(bytes([number]) * length)
        elif kind == 1:
            made.append(drawn(np.ones(256), length, number))
        else:
            made.append(drawn(np.geomspace(1, 1e-3, 1 + 20 * kind), length, number))
    return b"".join(made)[: 2 * MIB]


chunks = st.one_of(st.binary(max_size=64), distributions(), repeated(), numbers(), patched())


@st.composite
def tasks(draw) -> tuple[bytes, int, Transform, bytes | None]:
    """A chunk, an element size, a transform, and a base: nearly the chunk, or a part of it, or nothing."""
    data, size, transform = draw(chunks), draw(sizes), draw(transforms)
    if not transform.needs_base:
        return data, size, transform, None
    base = np.frombuffer(data, np.uint8).copy()
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    changes = rng.random(len(base)) < draw(st.sampled_from([0, 0.001, 0.1, 1]))
    base[changes] += rng.integers(0, 4, int(changes.sum()), dtype=np.uint8)
    cut = draw(st.integers(0, len(data)))
    other = draw(
        st.sampled_from(
            [base.tobytes(), base[cut:].tobytes(), base[:cut].tobytes(), base.tobytes() + b"more", b""]
        )
    )
    return data, size, transform, other


@thorough
@given(tasks())
def test_any_chunk_comes_back_all_four_ways(task):
    data, size, transform, base = task
    for writer in PRESENT:
        payload = encoded(writer, data, size, transform, base)
        event(f"{writer} {'coded' if payload else 'raw'}")
        if payload is None:
            continue
        assert len(payload) < len(data)
        for reader in PRESENT:
            assert decoded(reader, payload, len(data), size, base) == data


@needs_kernel
@thorough
@given(tasks())
def test_the_kernel_reads_what_it_wrote_and_so_does_the_library(task):
    data, size, transform, base = task
    payload = encoded("kernel", data, size, transform, base)
    assume(payload is not None)
    fitted = None if base is None else (base + bytes(len(data)))[: len(data)]
    target = bytearray(len(data))
    assert compiled.decode_planes(payload, target, size, fitted)
    assert target == data
    for frame in frames_of(payload, len(data)):
        plain = zstandard.ZstdDecompressor().decompress(frame.stored, allow_extra_data=False)
        assert len(plain) == frame.length
        event(f"blocks {sorted({block.kind for block in blocks_of(frame.stored)})}")


@needs_kernel
@thorough
@given(distributions())
def test_the_kernels_codes_are_nearly_the_shortest(data):
    """One plane, one block: the frame holds what the best code of eleven bits needs, and a few per cent."""
    data = data[:BLOCK]
    payload = encoded("kernel", data, 1, Transform.PLAIN)
    assume(payload is not None)
    plane = taken_apart(payload, len(data))[0][0]
    assume(plane.mode == ZSTD and blocks_of(plane.stored)[0].kind == 2)
    counts = np.bincount(np.frombuffer(data, np.uint8))
    assert len(plane.stored) < 1.03 * shortest_codes(counts) / 8 + 250


@thorough
@given(tasks())
def test_estimates_agree_and_are_possible(task):
    data, size, transform, base = task
    found = []
    for name in PRESENT:
        with coder(name):
            found.append(planes.estimate(data, size, transform, base))
    assert found == pytest.approx([found[0]] * len(found))
    assert 0 <= found[0] <= len(data) + 4 + 8 * size


def decode_guarded(name: str, payload: bytes, length: int, size: int, base: bytes | None) -> bytes | None:
    """What a payload decodes to, or None if it is refused. Nothing around the target is touched."""
    around = np.full(length + 2 * GUARD, 0x5A, dtype=np.uint8)
    target = around[GUARD : GUARD + length]
    with coder(name):
        try:
            planes.decode(payload, target, size, base)
            result = target.tobytes()
        except DamagedError:
            result = None
    assert (around[:GUARD] == 0x5A).all() and (around[GUARD + length :] == 0x5A).all()
    return result


@thorough
@given(tasks(), st.data())
def test_damaged_payloads_are_refused_or_decoded_but_never_worse(task, data):
    chunk, size, transform, base = task
    payload = encoded(data.draw(st.sampled_from(PRESENT)), chunk, size, transform, base)
    assume(payload is not None)
    whole = len(payload)
    kind = data.draw(st.sampled_from(["flip", "flip head", "cut", "lengthen", "swap"]))
    damaged = bytearray(payload)
    if kind == "cut":
        del damaged[data.draw(st.integers(0, whole - 1)) :]
    elif kind == "lengthen":
        damaged += data.draw(st.binary(min_size=1, max_size=9))
    elif kind == "swap":
        first, second = sorted(data.draw(st.tuples(*[st.integers(0, whole)] * 2)))
        damaged = damaged[:first] + damaged[second:] + damaged[first:second]
    else:
        reach = whole if kind == "flip" else min(whole, 4 + 8 * size + 60)
        for place in data.draw(st.lists(st.integers(0, reach - 1), min_size=1, max_size=4)):
            damaged[place] ^= data.draw(st.integers(1, 255))
    results = [decode_guarded(name, bytes(damaged), len(chunk), size, base) for name in PRESENT]
    event(f"{kind} {'refused' if results[0] is None else 'decoded'}")
    if kind in ("cut", "lengthen"):
        assert results == [None] * len(results)
    # Both refuse the same, and where they do not, they decode the same.
    assert results == [results[0]] * len(results)


@thorough
@given(st.binary(max_size=300), st.integers(0, 3000), st.integers(0, 9), st.none() | st.binary(max_size=40))
def test_any_bytes_are_refused_or_decoded_but_never_worse(payload, length, size, base):
    for name in PRESENT:
        decode_guarded(name, payload, length, size, base)
