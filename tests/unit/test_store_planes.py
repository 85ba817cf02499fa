"""Float planes: kernel and fallback write what the other reads, in the format that is documented."""

from __future__ import annotations

import array
import os
import struct
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard

from gpuimg.errors import DamagedError
from gpuimg.store import planes, planes_pure
from gpuimg.store.planes import Transform
from tests.fixtures.planes_damaged import DAMAGED, EIGHT, FRAME, GOOD, LENGTH, MASK
from tests.fixtures.planes_data import (
    BLOCK,
    CODERS,
    CONSTANT,
    MASKED,
    PRESENT,
    RAW,
    SPARSE,
    ZSTD,
    blocks_of,
    coder,
    compiled,
    decoded,
    drawn,
    encoded,
    fibonacci,
    frames_of,
    lists_of,
    masked,
    needs_kernel,
    put_together,
    shortest_codes,
    sparse,
    taken_apart,
    tree_head,
)
from tests.fixtures.store_data import KIB, MIB, floats, noise, text

SIZES = [1, 2, 4, 8]
TRANSFORMS = list(Transform)


def changed(data: bytes, size: int, seed: int = 0) -> bytes:
    """`data` one small step later: most elements move by a few units, some not at all."""
    count = len(data) // size
    elements = np.frombuffer(data, dtype=f"<u{size}", count=count)
    steps = np.rint(np.random.default_rng(seed).normal(0, 1.2, count)).astype(np.int64)
    moved = elements + steps.astype(elements.dtype)
    return moved.tobytes() + data[count * size :]


def check_all_ways(data: bytes, size: int, transform: Transform, base: bytes | None = None) -> bool:
    """Every coder reads what every coder writes; whether there was anything to read."""
    payloads = [encoded(name, data, size, transform, base) for name in PRESENT]
    for payload in payloads:
        assert payload is None or len(payload) < len(data)
        for reader in PRESENT if payload is not None else []:
            assert decoded(reader, payload, len(data), size, base) == data
    return any(payload is not None for payload in payloads)


# Lengths and contents


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.name)
def test_every_length_comes_back(size, transform):
    whole = drawn(np.geomspace(1, 1e-4, 60), 16 * KIB, seed=size)
    lengths = [*range(11), *(size * KIB + more for more in (-1, 0, 1, size, 7)), 16 * KIB]
    coded = 0
    for length in lengths:
        base = noise(length, 3) if transform.needs_base else None
        data = whole[:length]
        if transform is Transform.EXCLUSIVE:
            data = bytes(np.frombuffer(data, np.uint8) ^ np.frombuffer(base, np.uint8))
        elif transform is Transform.DIFFERENCE:
            base = data[: length // 2] + changed(data[length // 2 :], size)
        coded += check_all_ways(data, size, transform, base)
    assert coded >= 4


@pytest.mark.parametrize("size", SIZES)
def test_planes_at_the_edges_of_zstd_blocks_come_back(size):
    for plane in (BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + KIB, 2 * BLOCK - 1, 2 * BLOCK + 1):
        length = min(plane * size + size // 2, 2 * MIB)
        assert check_all_ways(drawn(np.geomspace(1, 1e-3, 100), length, seed=plane), size, Transform.PLAIN)


@pytest.mark.parametrize(
    ("size", "transform"), [(2, Transform.ROTATED), (4, Transform.DIFFERENCE), (8, Transform.EXCLUSIVE)]
)
def test_the_longest_chunks_come_back(size, transform):
    base = floats(2 * MIB, 1, "bfloat16" if size == 2 else f"float{8 * size}")
    data = changed(base, size) if transform.needs_base else base
    assert check_all_ways(data, size, transform, base if transform.needs_base else None)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.name)
@pytest.mark.parametrize(("kind", "bits"), [("<f2", "<u2"), ("<f4", "<u4"), ("<f8", "<u8")])
def test_the_odd_numbers_among_floats_come_back(kind, bits, transform):
    info = np.finfo(kind)
    odd = np.array(
        [
            0,
            -0.0,
            np.inf,
            -np.inf,
            np.nan,
            info.tiny,
            -info.tiny,
            info.max,
            -info.max,
            info.smallest_subnormal,
        ],
        dtype=kind,
    )
    # All patterns of NaN count, signalling ones and their signs as well.
    patterns = np.concatenate([odd.view(bits), ~odd.view(bits), odd.view(bits) | np.array(1, dtype=bits)])
    data = np.resize(patterns, 5000).tobytes()
    base = np.resize(patterns[::-1], 5000).tobytes() if transform.needs_base else None
    assert check_all_ways(data, np.dtype(kind).itemsize, transform, base)


CONTENTS = {
    # More than 128 weights: the tree's description must be entropy-coded.
    "many-kinds": lambda: drawn(np.geomspace(1, 1e-5, 200), 300 * KIB),
    "all-kinds-alike": lambda: drawn(np.geomspace(1, 0.02, 256), 300 * KIB),
    "two-kinds": lambda: drawn([0.4, 0.6], 200 * KIB, symbols=[0, 1]),
    "two-kinds-of-many": lambda: drawn([0.4, 0.6], 200 * KIB, symbols=[117, 118]),
    "two-kinds-far-apart": lambda: drawn([0.4, 0.6], 200 * KIB, symbols=[0, 255]),
    "fibonacci": lambda: fibonacci(26, 250 * KIB),
    "fibonacci-in-a-quarter-block": lambda: fibonacci(20, 20 * KIB),
    "span-of-128": lambda: drawn(np.geomspace(1, 1e-3, 128), 200 * KIB, symbols=range(100, 228)),
    "span-of-129": lambda: drawn(np.geomspace(1, 1e-3, 129), 200 * KIB, symbols=range(100, 229)),
    "one-repeated-block": lambda: drawn([0.4, 0.6], BLOCK) + b"\x07" * BLOCK + drawn([0.4, 0.6], BLOCK),
    "one-random-block": lambda: drawn([0.4, 0.6], BLOCK) + noise(BLOCK) + drawn([0.4, 0.6], 5),
    "a-byte-seen-once": lambda: drawn([0.4, 0.6], 100 * KIB) + b"\xff" + drawn([0.4, 0.6], 100 * KIB),
    "text": lambda: text(100 * KIB),
    "long-runs-of-zeros": lambda: (
        (bytes(254) + b"\1" + bytes(255) + b"\2" + bytes(256) + b"\3" + bytes(700)) * 99
    ),
    "half-of-zeros": lambda: drawn([0.55, *[0.01] * 45], 130 * KIB),
    "nine-of-ten-zeros": lambda: drawn([0.9, *[0.01] * 10], 130 * KIB),
    "ninety-nine-of-a-hundred-zeros": lambda: drawn([0.99, *[0.001] * 10], 130 * KIB),
    "zeros-in-a-row": lambda: noise(5000) + bytes(60_000) + noise(4321, 1) + bytes(40_000) + b"\1",
}


@pytest.mark.parametrize("contents", CONTENTS)
def test_every_distribution_comes_back(contents):
    data = CONTENTS[contents]()
    for size in SIZES:
        # As one plane, and as all planes alike.
        alike = np.repeat(np.frombuffer(data, np.uint8), size).tobytes()[: 2 * MIB]
        assert check_all_ways(alike, size, Transform.PLAIN)
        check_all_ways(data, size, Transform.ROTATED)


def test_what_does_not_get_smaller_is_not_coded():
    for name in PRESENT:
        for length in (0, 1, 7, 100, 4096, 256 * KIB):
            assert encoded(name, noise(length, 9), 4, Transform.ROTATED) is None
            assert encoded(name, noise(length, 9), 4, Transform.EXCLUSIVE, noise(length)) is None
        assert encoded(name, b"", 1, Transform.PLAIN) is None


@pytest.mark.parametrize("name", CODERS)
def test_a_base_of_another_length_is_cut_or_filled_with_zeros(name):
    base = floats(64 * KIB, 5)
    data = changed(base, 4)
    fitting = {"cut": base + noise(100), "filled": base[: 40 * KIB + 3], "none": b""}
    for transform in (Transform.DIFFERENCE, Transform.EXCLUSIVE):
        for other in fitting.values():
            exact = other[: len(data)] + bytes(len(data) - min(len(other), len(data)))
            payload = encoded(name, data, 4, transform, other)
            assert payload == encoded(name, data, 4, transform, exact)
            if payload is not None:
                assert decoded(name, payload, len(data), 4, other) == data
        assert encoded(name, data, 4, transform, fitting["cut"]) is not None


@pytest.mark.parametrize("name", CODERS)
def test_any_contiguous_buffer_will_do(name):
    data = floats(64 * KIB, 6)
    expected = encoded(name, data, 4, Transform.ROTATED)
    assert expected is not None
    numbers = np.frombuffer(data, np.float32).reshape(64, -1)
    odd_place = memoryview(b"x" + data)[1:]
    for buffer in (bytearray(data), memoryview(data), numbers, array.array("f", data), odd_place):
        assert encoded(name, buffer, 4, Transform.ROTATED) == expected
    for target in (bytearray(len(data)), np.zeros((64, 256), np.float32), array.array("f", bytes(len(data)))):
        with coder(name):
            planes.decode(np.frombuffer(expected, np.uint8), target, 4)
        assert bytes(memoryview(target).cast("B")) == data
    around = bytearray(b"\x5a" * (len(data) + 10))
    with coder(name):
        planes.decode(expected, memoryview(around)[5:-5], 4)
    assert around == b"\x5a" * 5 + data + b"\x5a" * 5


@pytest.mark.parametrize("name", CODERS)
def test_a_callers_mistake_is_an_error(name):
    data, base = bytes(100), bytes(100)
    with coder(name):
        for arguments in (
            (data, 3, Transform.PLAIN, None),
            (data, 0, Transform.PLAIN, None),
            (data, 2**32 + 2, Transform.PLAIN, None),
            (data, 2, Transform.PLAIN, base),
            (data, 2, Transform.DIFFERENCE, None),
            (data, 2, 4, None),
            (bytes(2 * MIB + 1), 2, Transform.PLAIN, None),
        ):
            for call in (planes.encode, planes.estimate):
                with pytest.raises(ValueError):
                    call(*arguments)


# The format


def read_by_the_book(payload: bytes, length: int, size: int, base: bytes | None) -> bytes:
    """A decoder made from docs/store-format.md alone, element by element."""
    transform, claimed, zero = struct.unpack_from("<BBH", payload)
    assert (claimed, zero) == (size, 0)
    stored, tail = taken_apart(payload, length)
    columns = []
    for plane in stored:
        if plane.mode not in (SPARSE, MASKED):
            columns.append(list_by_the_book(plane.mode, plane.stored, plane.length))
            continue
        places, values = (list_by_the_book(one.mode, one.stored, one.length) for one in lists_of(plane))
        column, position, taken = bytearray(plane.length), 0, iter(values)
        for gap in places if plane.mode == SPARSE else ():
            position += gap
            if gap < 255:
                column[position] = next(taken)
                position += 1
        for i in range(8 * len(places) if plane.mode == MASKED else 0):
            if places[i // 8] >> i % 8 & 1:
                column[i] = next(taken)
        assert next(taken, None) is None
        columns.append(bytes(column))
    bits, whole = 8 * size, bytearray()
    for i in range(length // size):
        x = sum(column[i] << 8 * p for p, column in enumerate(columns))
        b = int.from_bytes((base or b"")[i * size : (i + 1) * size], "little")
        if transform == 1:
            x = x >> 1 | (x & 1) << bits - 1
        elif transform == 2:
            x = (b + (x // 2 if x % 2 == 0 else -(x + 1) // 2)) % 2**bits
        elif transform == 3:
            x ^= b
        whole += x.to_bytes(size, "little")
    return bytes(whole) + tail


def list_by_the_book(mode: int, stored: bytes, length: int) -> bytes:
    if mode == CONSTANT:
        assert len(stored) == 1
        return stored * length
    data = stored if mode == RAW else zstandard.ZstdDecompressor().decompress(stored)
    assert len(data) == length and mode in (RAW, ZSTD)
    return data


@pytest.mark.parametrize("name", CODERS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.name)
def test_payloads_are_what_the_page_says(name, size, transform):
    base = drawn(np.geomspace(1, 1e-2, 40), 4000 * size + 5, seed=size)
    data = changed(base, size)
    payload = encoded(name, data, size, transform, base if transform.needs_base else None)
    assert payload is not None and payload[0] == transform
    assert read_by_the_book(payload, len(data), size, base) == data


@pytest.mark.parametrize("name", CODERS)
def test_each_plane_gets_the_mode_that_suits_it(name):
    count = 64 * KIB
    columns = [
        noise(count, 1),
        noise(count, 2),
        b"\x2a" * count,
        drawn(np.geomspace(1, 0.01, 30), count),
        drawn([0.985, 0.01, 0.005], count),
        drawn([0.6, *[0.01] * 40], count),
        noise(count, 3),
        drawn([0.8, *[0.02] * 10], count),
    ]
    expected = [RAW, RAW, CONSTANT, ZSTD, SPARSE, MASKED, RAW, MASKED]
    for picked in ([3, 1, 0, 2], [0, 1, 6, 3], [0, 4, 6, 5], range(8)):
        data = np.stack([np.frombuffer(columns[i], np.uint8) for i in picked], axis=1).tobytes()
        payload = encoded(name, data + b"+", len(picked), Transform.PLAIN)
        assert payload is not None
        stored, tail = taken_apart(payload, len(data) + 1)
        assert [plane.mode for plane in stored] == [expected[i] for i in picked] and tail == b"+"
        for plane, i in zip(stored, picked, strict=True):
            assert plane.mode != RAW or plane.stored == columns[i]
        for reader in PRESENT:
            assert decoded(reader, payload, len(data) + 1, len(picked)) == data + b"+"


@pytest.mark.parametrize("name", CODERS)
@pytest.mark.parametrize("contents", CONTENTS)
def test_frames_are_read_by_the_library(name, contents):
    data = CONTENTS[contents]()
    payload = encoded(name, data, 1, Transform.PLAIN)
    assert payload is not None
    for frame in frames_of(payload, len(data)):
        parameters = zstandard.get_frame_parameters(frame.stored)
        assert (parameters.content_size, parameters.has_checksum, parameters.dict_id) == (
            frame.length,
            False,
            0,
        )
        plain = zstandard.ZstdDecompressor().decompress(frame.stored, allow_extra_data=False)
        assert len(plain) == frame.length
        if frame.length == len(data):
            assert plain == data


def kernel_frame(data: bytes) -> bytes:
    """The frame that the kernel makes of one plane."""
    payload = encoded("kernel", data, 1, Transform.PLAIN)
    assert payload is not None
    (plane,), _ = taken_apart(payload, len(data))
    assert plane.mode == ZSTD
    return plane.stored


@needs_kernel
def test_the_kernel_uses_what_frames_offer():
    """The contents above reach every kind of block and of tree; else they would prove nothing."""
    many, two, few = (blocks_of(kernel_frame(CONTENTS[one]())) for one in ("many-kinds", "two-kinds", "text"))
    assert all(block.kind == 2 for block in many + two + few)
    trees = [tree_head(block) for block in many]
    assert any(tree is not None and tree < 128 for tree in trees) and None in trees
    assert tree_head(two[0]) == 128
    assert [block.kind for block in blocks_of(kernel_frame(CONTENTS["one-repeated-block"]()))] == [
        2,
        2,
        1,
        2,
        2,
    ]
    assert [block.kind for block in blocks_of(kernel_frame(CONTENTS["one-random-block"]()))] == [2, 2, 0, 0]
    # Sizes of literals have 14 bits or 18; fewer than 1024 bytes are not coded.
    forms = [blocks_of(kernel_frame(drawn([0.3, 0.7], size)))[0].data[0] >> 2 & 3 for size in (KIB, 64 * KIB)]
    assert forms == [2, 3]
    for size, mode in ((KIB - 1, RAW), (KIB, ZSTD)):
        data = np.stack([np.frombuffer(drawn([0.4, 0.6], size), np.uint8), np.zeros(size)], axis=1)
        payload = encoded("kernel", data.astype(np.uint8), 2, Transform.PLAIN)
        assert payload is not None and taken_apart(payload, 2 * size)[0][0].mode == mode


@needs_kernel
@pytest.mark.parametrize(
    "data",
    [
        fibonacci(26, BLOCK),
        fibonacci(26, BLOCK, seed=1)[: BLOCK // 2],
        drawn([0.5, *np.geomspace(0.1, 1e-5, 200)], BLOCK),
        drawn([*[0.1] * 8, *[1e-4] * 200], BLOCK),
    ],
    ids=["fibonacci", "half", "steps", "cliff"],
)
def test_codes_of_at_most_eleven_bits_are_close_to_the_best(data):
    counts = np.bincount(np.frombuffer(data, np.uint8))
    assert shortest_codes(counts, 11) > shortest_codes(counts, 20)
    assert len(kernel_frame(data)) < 1.01 * shortest_codes(counts, 11) / 8 + 200


@needs_kernel
def test_the_kernel_reads_its_own_frames_itself():
    """Else the library would hide that it cannot."""
    for contents in CONTENTS.values():
        data = contents()
        payload = encoded("kernel", data, 1, Transform.PLAIN)
        assert payload is not None
        target = bytearray(len(data))
        assert compiled.decode_planes(payload, target, 1, None)
        assert target == data


@pytest.mark.parametrize("name", CODERS)
def test_frames_of_denser_writers_are_read(name):
    column = drawn(np.geomspace(1, 1e-3, 50), 200 * KIB) + text(56 * KIB)
    for level, checksum in ((1, False), (3, True), (19, False), (19, True)):
        frame = zstandard.ZstdCompressor(level=level, write_checksum=checksum).compress(column)
        values = bytes(range(1, 256)) * 4
        gaps = zstandard.ZstdCompressor(level=level).compress(b"\x10" * len(values))
        listed = sparse((ZSTD, gaps), (RAW, values), (len(values), len(values)))
        payload = put_together(0, [(ZSTD, frame), listed], tail=b"!")
        thin = bytearray(len(column))
        thin[16 : 17 * len(values) : 17] = values
        expected = np.stack([np.frombuffer(part, np.uint8) for part in (column, thin)], axis=1).tobytes()
        assert decoded(name, payload, 2 * len(column) + 1, 2) == expected + b"!"


@pytest.mark.parametrize("name", CODERS)
def test_empty_and_full_planes_of_few_values_are_read(name):
    none = sparse((RAW, b""), (RAW, b""), (0, 0))
    assert decoded(name, put_together(0, [none]), 300, 1) == bytes(300)
    full = sparse((CONSTANT, b"\0"), (CONSTANT, b"\7"), (300, 300))
    assert decoded(name, put_together(0, [full]), 300, 1) == b"\7" * 300
    last = sparse((RAW, b"\xff\x2c"), (RAW, b"\7"), (1, 2))
    assert decoded(name, put_together(0, [last]), 300, 1) == bytes(299) + b"\7"
    for length in (1, 7, 8, 9, 64, 65, 300):
        size, full = -(-length // 8), (1 << length) - 1
        none = masked((CONSTANT, b"\0"), (RAW, b""), 0)
        assert decoded(name, put_together(0, [none]), length, 1) == bytes(length)
        all_set = masked((RAW, full.to_bytes(size, "little")), (CONSTANT, b"\7"), length)
        assert decoded(name, put_together(0, [all_set]), length, 1) == b"\7" * length
        only_last = masked((RAW, (1 << length - 1).to_bytes(size, "little")), (RAW, b"\7"), 1)
        assert decoded(name, put_together(0, [only_last]), length, 1) == bytes(length - 1) + b"\7"


# Damage


@pytest.mark.parametrize("name", CODERS)
def test_the_base_of_the_damaged_payloads_is_good(name):
    assert decoded(name, put_together(0, GOOD), LENGTH, 2) == b"\1\2" * 1000
    frame = put_together(0, [(ZSTD, FRAME), GOOD[1]])
    assert decoded(name, frame, LENGTH, 2)[::2] == bytes(range(250)) * 4
    assert decoded(name, put_together(0, [masked(MASK, EIGHT, 8)]), 1000, 1) == EIGHT[1] + bytes(992)


@pytest.mark.parametrize("name", CODERS)
@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_refused_in_little_memory(name, damage):
    around = np.full(LENGTH + 128, 0x5A, dtype=np.uint8)
    planes_pure.decode(memoryview(put_together(0, [(ZSTD, FRAME)])), memoryview(bytearray(1000)), 1, None)
    tracemalloc.start()
    try:
        with coder(name), pytest.raises(DamagedError):
            planes.decode(DAMAGED[damage], around[64:-64], 2)
        assert tracemalloc.get_traced_memory()[1] < 256 * KIB
    finally:
        tracemalloc.stop()
    assert (around[:64] == 0x5A).all() and (around[-64:] == 0x5A).all()


@pytest.mark.parametrize("name", CODERS)
def test_bits_of_a_mask_behind_the_plane_are_damage(name):
    """Seven bits of the last byte of the mask of 1001 bytes mean nothing."""
    good = masked((RAW, MASK[1] + b"\0"), EIGHT, 8)
    assert decoded(name, put_together(0, [good]), 1001, 1) == EIGHT[1] + bytes(993)
    for bit in range(1, 8):
        beyond = masked((RAW, MASK[1] + bytes([1 << bit])), (RAW, b"123456789"), 9)
        with coder(name), pytest.raises(DamagedError):
            planes.decode(put_together(0, [beyond]), bytearray(1001), 1)


@pytest.mark.parametrize("name", CODERS)
def test_what_object_and_payload_disagree_about_is_damage(name):
    payload = put_together(0, GOOD)
    with coder(name):
        for length, size, base in (
            (2000, 2, bytes(2000)),
            (2000, 3, None),
            (2000, 4, None),
            (2001, 2, None),
            (0, 2, None),
        ):
            with pytest.raises(DamagedError):
                planes.decode(payload, bytearray(length), size, base)
        with pytest.raises(DamagedError):
            planes.decode(b"", bytearray(1), 2)


# Estimates


def bf16(numbers: np.ndarray) -> np.ndarray:
    """Rounded to the nearest."""
    return ((numbers.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def weights_and_steps():
    rng = np.random.default_rng(8)
    weights = rng.normal(0, 0.02, 128 * KIB).astype(np.float32)
    yield "fp32", weights, 4, Transform.ROTATED, None
    yield "bf16", bf16(weights), 2, Transform.ROTATED, None
    yield "nothing new", weights, 4, Transform.DIFFERENCE, weights
    for step in (1e-6, 1e-5, 2e-5, 1e-4):
        later = (weights + rng.normal(0, step, len(weights))).astype(np.float32)
        for transform in (Transform.DIFFERENCE, Transform.EXCLUSIVE):
            yield f"fp32 {transform.name} {step}", later, 4, transform, weights
            yield f"bf16 {transform.name} {step}", bf16(later), 2, transform, bf16(weights)


@pytest.mark.parametrize("name", CODERS)
@pytest.mark.parametrize("case", list(weights_and_steps()), ids=lambda case: case[0].replace(" ", "-"))
def test_estimates_are_near_the_truth(name, case):
    _, data, size, transform, base = case
    payload = encoded(name, data, size, transform, base)
    assert payload is not None
    with coder(name):
        assert planes.estimate(data, size, transform, base) == pytest.approx(len(payload), rel=0.15)


@needs_kernel
def test_both_coders_estimate_the_same():
    for contents in CONTENTS.values():
        data = contents()
        for length in (0, 1, 5, 4095, 4096 * 8, 100_003, len(data)):
            for size in SIZES:
                for transform in TRANSFORMS:
                    base = noise(length) if transform.needs_base else None
                    with coder("kernel"):
                        expected = planes.estimate(data[:length], size, transform, base)
                    with coder("pure"):
                        assert planes.estimate(data[:length], size, transform, base) == pytest.approx(
                            expected
                        )


def test_random_bytes_are_estimated_to_stay_raw():
    for name in PRESENT:
        with coder(name):
            assert planes.estimate(noise(64 * KIB), 4, Transform.ROTATED) == 64 * KIB + 36


# Which of the two


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return result.stdout


LOADED = (
    "import sys; from gpuimg.store import planes; t = planes.Transform.PLAIN;"
    "p = planes.encode(bytes(5000), 2, t); b = bytearray(5000);"
    "planes.decode(p, b, 2); planes.estimate(b, 2, t);"
    "print(planes.kernel_available(), *(name in sys.modules for name in ('numpy', 'zstandard')))"
)


@needs_kernel
def test_the_kernel_needs_no_other_library():
    assert run_python(LOADED, GPUIMG_KERNEL="").split() == ["True", "False", "False"]


def test_the_kernel_can_be_turned_off():
    assert run_python(LOADED, GPUIMG_KERNEL="off").split() == ["False", "True", "True"]


@pytest.mark.parametrize("name", CODERS)
def test_threads_do_not_disturb_each_other(name):
    chunks = [floats(64 * KIB, seed) for seed in range(8)]
    expected = [encoded(name, chunk, 4, Transform.ROTATED) for chunk in chunks]

    def work(turn: int) -> None:
        for i in range(turn, turn + 40):
            chunk, payload = chunks[i % 8], planes.encode(chunks[i % 8], 4, Transform.ROTATED)
            target = bytearray(len(chunk))
            planes.decode(payload, target, 4)
            assert payload == expected[i % 8] and target == chunk

    with coder(name), ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
