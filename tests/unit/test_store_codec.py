"""Codecs give back what they were given, never grow, and refuse payloads that are not theirs."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuimg.errors import DamagedError, GpuimgError, NewerFormatError
from gpuimg.store.codec import RAW, ZSTD, Chooser, Codec, Coding, decode, encode, look
from tests.fixtures.store_data import KIB, MIB, counters, floats, noise, text

CODINGS = [ZSTD, *(Coding(Codec.BITSHUFFLE_LZ4, size) for size in (1, 2, 4, 8))]
LENGTHS = [1, 2, 3, 7, 15, 16, 17, 31, 127, 128, 129, 4095, 4096, 4097, 65535, 65537, 2 * MIB - 1, 2 * MIB]
CONTENTS = {
    "zeros": bytes,
    "text": text,
    "noise": noise,
    "bf16": lambda size: floats(size, 1, "bfloat16"),
    "counting": lambda size: counters(size, 4),
}


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


def decoded(codec: int, payload: bytes, size: int) -> bytes:
    target = np.full(size, 0xAA, dtype=np.uint8)
    decode(codec, memoryview(payload), target)
    return target.tobytes()


@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: f"{coding.codec.name}-{coding.element_size}")
def test_every_codec_gives_back_every_length_and_never_grows(coding, contents):
    for length in LENGTHS:
        data = CONTENTS[contents](length)
        payload = encode(coding, array(data))
        if payload is None:
            continue
        assert len(payload) < length
        assert decoded(coding.codec, payload, length) == data


def test_what_does_not_compress_is_left_raw():
    data = noise(256 * KIB)
    for coding in (RAW, *CODINGS):
        assert encode(coding, array(data)) is None
    assert decoded(Codec.RAW, data, len(data)) == data


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=3000), st.sampled_from(CODINGS), st.integers(1, 64))
def test_any_bytes_come_back(data, coding, repeat):
    payload = encode(coding, array(data * repeat))
    if payload is not None:
        assert len(payload) < len(data) * repeat
        assert decoded(coding.codec, payload, len(data) * repeat) == data * repeat


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("bf16", floats(256 * KIB, 1, "bfloat16"), {Coding(Codec.BITSHUFFLE_LZ4, 2)}),
        ("fp32", floats(256 * KIB, 2, "float32"), {Coding(Codec.BITSHUFFLE_LZ4, 4)}),
        ("fp64", floats(256 * KIB, 3, "float64"), {Coding(Codec.BITSHUFFLE_LZ4, 8)}),
        ("int32", counters(256 * KIB, 4), {Coding(Codec.BITSHUFFLE_LZ4, 4)}),
        ("int64", counters(256 * KIB, 8), set(CODINGS[1:])),
        ("text", text(256 * KIB), {ZSTD}),
        ("noise", noise(256 * KIB), {RAW}),
    ],
)
def test_the_look_knows_what_suits_a_chunk(name, data, expected):
    coding, promise = look(array(data))
    assert coding in expected, name
    assert (promise == 1.0) == (coding is RAW)
    payload = encode(coding, array(data))
    actual = len(payload) / len(data) if payload else 1.0
    assert actual == pytest.approx(promise, abs=0.1)


def test_the_chooser_follows_a_file_that_changes_its_nature():
    chooser = Chooser()
    kinds = [floats(64 * KIB, 1, "bfloat16"), noise(64 * KIB), text(64 * KIB), floats(64 * KIB, 2, "float32")]
    for data in kinds:
        for _ in range(40):
            coding, payload = chooser.encode(array(data))
            if payload is not None:
                assert decoded(coding.codec, payload, len(data)) == data
            else:
                assert coding is RAW
        best = min(len(encode(each, array(data)) or data) for each in CODINGS)
        assert len(payload or data) <= 1.12 * best


def test_a_raw_payload_of_another_length_is_refused():
    for size in (9, 11):
        with pytest.raises(DamagedError):
            decoded(Codec.RAW, b"0123456789", size)


def test_an_unknown_codec_is_called_newer():
    for number in (3, 4, 255):
        with pytest.raises(NewerFormatError):
            decoded(number, b"payload", 7)


@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: f"{coding.codec.name}-{coding.element_size}")
@pytest.mark.parametrize("size", [1, 4095, 4097, 2 * MIB])
def test_a_payload_of_another_length_is_refused(coding, size):
    payload = encode(coding, array(bytes(4096)))
    with pytest.raises(DamagedError):
        decoded(coding.codec, payload, size)


def test_a_frame_that_swells_is_stopped_at_the_length_of_its_chunk():
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 * MIB))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 * MIB))
    for payload in (bomb, unsized):
        with pytest.raises(DamagedError):
            decoded(Codec.ZSTD, payload, 4096)


def test_a_frame_that_wants_a_giant_window_is_refused():
    # Frame header with a window of 2^41 bytes, then an empty last block.
    with pytest.raises(DamagedError):
        decoded(Codec.ZSTD, b"\x28\xb5\x2f\xfd\x00\xf8\x01\x00\x00", 4096)


HOSTILE = r"""
import sys, numpy as np
from gpuimg.errors import GpuimgError
from gpuimg.store.codec import Codec, Coding, ZSTD, decode, encode
rng = np.random.default_rng(int(sys.argv[1]))
sources = [rng.normal(0, 0.02, 16384).astype(np.float32).view(np.uint8), np.zeros(65536, np.uint8),
           np.repeat(rng.integers(0, 256, 4096, dtype=np.uint8), 16)]
codings = [ZSTD, *(Coding(Codec.BITSHUFFLE_LZ4, size) for size in (1, 2, 4, 8))]
right = refused = 0
for turn in range(int(sys.argv[2])):
    source = sources[turn % len(sources)]
    coding = codings[turn % len(codings)]
    payload = bytearray(encode(coding, source) or b"")
    if not payload:
        continue
    kind = turn % 4
    head = min(len(payload), 64)
    if kind == 0:
        payload[rng.integers(head)] ^= rng.integers(1, 256)
    elif kind == 1:
        for _ in range(8):
            payload[rng.integers(len(payload))] = rng.integers(256)
    elif kind == 2:
        del payload[rng.integers(len(payload)):]
        if coding is not ZSTD and len(payload) >= 16:
            payload[12:16] = len(payload).to_bytes(4, "little")
    else:
        start = int(rng.integers(head))
        payload[start : start + 16] = rng.bytes(min(16, len(payload) - start))
        if coding is not ZSTD and len(payload) >= 16:
            payload[4:8] = len(source).to_bytes(4, "little")
            payload[12:16] = len(payload).to_bytes(4, "little")
    # Guards on both sides show a decoder that writes where it must not.
    memory = np.full(len(source) + 8192, 0x5A, np.uint8)
    target = memory[4096:-4096]
    try:
        decode(coding.codec, memoryview(bytes(payload)), target)
        right += bool((target == source).all())
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
        decoded(Codec.ZSTD, payload, size)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=16, max_size=200), st.integers(1, 70_000))
def test_a_blosc_payload_that_contradicts_its_chunk_is_refused_before_decoding(payload, size):
    head = struct.unpack_from("<II", payload, 4)
    if head[0] != size or struct.unpack_from("<I", payload, 12)[0] != len(payload):
        with pytest.raises(DamagedError):
            decoded(Codec.BITSHUFFLE_LZ4, payload, size)
