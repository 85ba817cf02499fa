"""Codecs give back what they were given, never grow, and refuse payloads that are not theirs."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuimg.errors import DamagedError, GpuimgError, NewerFormatError
from gpuimg.store.codec import RAW, ZSTD, Codec, Coding, decode, encode
from gpuimg.store.planes import Transform
from tests.fixtures.store_data import KIB, MIB, counters, floats, noise, text

GENERAL = [ZSTD, ZSTD._replace(dense=True), *(Coding(Codec.BITSHUFFLE_LZ4, size) for size in (1, 2, 4, 8))]
PLANES = [
    Coding(Codec.FLOAT_PLANES, size, transform)
    for size in (1, 2, 4, 8)
    for transform in (Transform.PLAIN, Transform.ROTATED)
]
DELTAS = [
    Coding(Codec.FLOAT_PLANES, size, transform)
    for size in (1, 2, 4, 8)
    for transform in (Transform.DIFFERENCE, Transform.EXCLUSIVE)
]
CODINGS = [*GENERAL, *PLANES]
LENGTHS = [1, 2, 3, 7, 15, 16, 17, 31, 127, 128, 129, 4095, 4096, 4097, 65535, 65537, 2 * MIB - 1, 2 * MIB]
CONTENTS = {
    "zeros": bytes,
    "text": text,
    "noise": noise,
    "bf16": lambda size: floats(size, 1, "bfloat16"),
    "counting": lambda size: counters(size, 4),
}


def decoded(coding: Coding | int, payload: bytes, size: int, base: bytes | None = None) -> bytes:
    """Decoded into a buffer between guards, which a decoder that writes where it must not would hit."""
    codec, element_size = (coding.codec, coding.element_size) if isinstance(coding, Coding) else (coding, 4)
    memory = bytearray(b"\x5a" * (size + 128))
    target = memoryview(memory)[64:-64]
    decode(codec, memoryview(payload), target, element_size, None if base is None else memoryview(base))
    assert memory[:64] == memory[-64:] == b"\x5a" * 64
    return bytes(target)


def name_of(coding: Coding) -> str:
    return f"{coding.codec.name}-{coding.element_size}-{coding.transform.name}" + "-dense" * coding.dense


every_coding = pytest.mark.parametrize("coding", CODINGS, ids=name_of)


@pytest.mark.parametrize("contents", CONTENTS)
@every_coding
def test_every_codec_gives_back_every_length_and_never_grows(coding, contents):
    for length in LENGTHS:
        data = CONTENTS[contents](length)
        payload = encode(coding, memoryview(data))
        if payload is None:
            continue
        assert len(payload) < length
        assert decoded(coding, payload, length) == data


@pytest.mark.parametrize("coding", DELTAS, ids=name_of)
def test_a_difference_to_a_base_of_any_length_comes_back(coding):
    for length in LENGTHS:
        data = floats(length, 1)
        for base in (data, data[: length // 2], floats(length, 2), floats(length + 5, 1), b"x"):
            payload = encode(coding, memoryview(data), memoryview(base))
            if payload is not None:
                assert len(payload) < length
                assert decoded(coding, payload, length, base) == data
            else:
                assert base != data or length < 200, "to itself there is no difference"


def test_what_does_not_compress_is_left_raw():
    data = noise(256 * KIB)
    for coding in (RAW, *CODINGS):
        assert encode(coding, memoryview(data)) is None
    for coding in DELTAS:
        assert encode(coding, memoryview(data), memoryview(noise(256 * KIB, 2))) is None
    assert decoded(RAW, data, len(data)) == data


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=3000), st.sampled_from(CODINGS), st.integers(1, 64))
def test_any_bytes_come_back(data, coding, repeat):
    payload = encode(coding, memoryview(data * repeat))
    if payload is not None:
        assert len(payload) < len(data) * repeat
        assert decoded(coding, payload, len(data) * repeat) == data * repeat


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=3000), st.binary(max_size=3000), st.sampled_from(DELTAS))
def test_any_bytes_come_back_from_any_base(data, base, coding):
    payload = encode(coding, memoryview(data), memoryview(base))
    if payload is not None:
        assert len(payload) < len(data)
        assert decoded(coding, payload, len(data), base) == data


def test_a_raw_payload_of_another_length_is_refused():
    for size in (9, 11):
        with pytest.raises(DamagedError):
            decoded(RAW, b"0123456789", size)


def test_an_unknown_codec_is_called_newer():
    for number in (4, 5, 255):
        with pytest.raises(NewerFormatError):
            decoded(number, b"payload", 7)


@every_coding
@pytest.mark.parametrize("size", [1, 65535, 65537, 2 * MIB])
def test_a_payload_of_another_length_is_refused(coding, size):
    # No zeros: planes of one repeated byte, or of zeros at their end, do not know how long they are.
    payload = encode(coding, memoryview(bytes(1 + (byte & 1) for byte in noise(65536))))
    with pytest.raises(DamagedError):
        decoded(coding, payload, size)


def test_a_base_goes_with_differences_only():
    data = floats(4096)
    for coding in GENERAL:
        payload = encode(coding, memoryview(bytes(4096)))
        with pytest.raises(DamagedError):
            decoded(coding, payload, 4096, data)
    with pytest.raises(DamagedError):
        decoded(RAW, data, 4096, data)
    for coding in PLANES:
        with pytest.raises(DamagedError):
            decoded(coding, encode(coding, memoryview(bytes(4096))), 4096, data)
    for coding in DELTAS:
        with pytest.raises(DamagedError):
            decoded(coding, encode(coding, memoryview(data), memoryview(data)), 4096)


def test_a_frame_that_swells_is_stopped_at_the_length_of_its_chunk():
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 * MIB))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 * MIB))
    for payload in (bomb, unsized):
        with pytest.raises(DamagedError):
            decoded(ZSTD, payload, 4096)


def test_a_frame_that_wants_a_giant_window_is_refused():
    # Frame header with a window of 2^41 bytes, then an empty last block.
    with pytest.raises(DamagedError):
        decoded(ZSTD, b"\x28\xb5\x2f\xfd\x00\xf8\x01\x00\x00", 4096)


HOSTILE = r"""
import sys, numpy as np
from gpuimg.errors import GpuimgError
from gpuimg.store.codec import Codec, Coding, ZSTD, decode, encode
from gpuimg.store.planes import Transform
rng = np.random.default_rng(int(sys.argv[1]))
sources = [rng.normal(0, 0.02, 16384).astype(np.float32).view(np.uint8), np.zeros(65536, np.uint8),
           np.repeat(rng.integers(0, 256, 4096, dtype=np.uint8), 16)]
blosc = [Coding(Codec.BITSHUFFLE_LZ4, size) for size in (1, 2, 4, 8)]
planes = [Coding(Codec.FLOAT_PLANES, size, t) for size in (1, 2, 4, 8) for t in Transform]
codings = [ZSTD, *blosc, *planes]
base = memoryview(rng.normal(0, 0.02, 16384).astype(np.float32).tobytes())
right = refused = 0
for turn in range(int(sys.argv[2])):
    source = sources[turn % len(sources)]
    coding = codings[turn % len(codings)]
    against = base if coding.needs_base else None
    payload = bytearray(encode(coding, memoryview(source.tobytes()), against) or b"")
    if not payload:
        continue
    kind = rng.integers(4)
    head = min(len(payload), 64)
    if kind == 0:
        payload[rng.integers(head)] ^= rng.integers(1, 256)
    elif kind == 1:
        for _ in range(8):
            payload[rng.integers(len(payload))] = rng.integers(256)
    elif kind == 2:
        del payload[rng.integers(len(payload)):]
        if coding in blosc and len(payload) >= 16:
            payload[12:16] = len(payload).to_bytes(4, "little")
    else:
        start = int(rng.integers(head))
        payload[start : start + 16] = rng.bytes(min(16, len(payload) - start))
        if coding in blosc and len(payload) >= 16:
            payload[4:8] = len(source).to_bytes(4, "little")
            payload[12:16] = len(payload).to_bytes(4, "little")
    # Guards on both sides show a decoder that writes where it must not.
    memory = np.full(len(source) + 8192, 0x5A, np.uint8)
    target = memoryview(memory)[4096:-4096]
    try:
        decode(coding.codec, memoryview(bytes(payload)), target, coding.element_size, against)
        right += target == source.tobytes()
    except GpuimgError:
        refused += 1
    assert (memory[:4096] == 0x5A).all() and (memory[-4096:] == 0x5A).all(), "wrote beyond its chunk"
print("done", right, refused)
"""


@pytest.mark.parametrize("seed", range(3))
def test_hostile_payloads_never_crash_a_decoder_or_make_it_write_elsewhere(seed):
    """In a process of its own: the decoders are C, and a crash of theirs would take the tests with it."""
    turns = os.environ.get("GPUIMG_FUZZ_EXAMPLES", "6000")
    ended = subprocess.run(
        [sys.executable, "-c", HOSTILE, str(seed), turns], capture_output=True, text=True, timeout=3600
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.startswith("done")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 70_000))
def test_any_bytes_as_a_zstd_payload_meet_a_sentence(payload, size):
    with pytest.raises(GpuimgError):
        decoded(ZSTD, payload, size)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=16, max_size=200), st.integers(1, 70_000))
def test_a_blosc_payload_that_contradicts_its_chunk_is_refused_before_decoding(payload, size):
    head = struct.unpack_from("<II", payload, 4)
    if head[0] != size or struct.unpack_from("<I", payload, 12)[0] != len(payload):
        with pytest.raises(DamagedError):
            decoded(Coding(Codec.BITSHUFFLE_LZ4, 4), payload, size)


COLLECTED = r"""
import gc, random
import numpy as np
from gpuimg.errors import GpuimgError
from gpuimg.store.codec import decode, encode
from tests.unit.test_store_codec import CODINGS, DELTAS
# Few of the numbers are not zero, and few of them not what they were: planes with lists of places.
rng = np.random.default_rng(1)
words = np.where(rng.random(5000) < 0.1, rng.integers(0, 1 << 32, 5000), 0).astype("<u4")
base = memoryview(words.tobytes())
data = (words + (rng.random(5000) < 0.1)).astype("<u4").tobytes()
for coding in CODINGS + DELTAS:
    against = base if coding.needs_base else None
    payload = encode(coding, memoryview(data), against)
    for seed in range(40 if payload else 0):
        rng = random.Random(seed)
        broken = memoryview(bytearray(payload))
        broken[rng.randrange(100)] ^= 1 << rng.randrange(8)
        try:
            decode(coding.codec, broken, memoryview(bytearray(len(data))), coding.element_size, against)
        except GpuimgError as error:
            error.itself = error
        del broken
        gc.collect()
"""


def test_errors_about_damaged_payloads_can_be_collected_with_all_that_they_hold():
    """In a process of its own, for an interpreter that frees views that are still looked at crashes."""
    ended = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")
