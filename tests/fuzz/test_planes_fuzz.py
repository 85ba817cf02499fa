"""The C of float planes under the sanitizers: damaged payloads and hostile chunks in buffers of exact length.

`GPUIMG_FUZZ_SECONDS=600 python -m pytest tests/fuzz/test_planes_fuzz.py` runs it for longer.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import zstandard

from gpuimg.store.planes import Transform
from tests.fixtures.planes_damaged import DAMAGED, LENGTH
from tests.fixtures.planes_data import (
    CONSTANT,
    PRESENT,
    RAW,
    ZSTD,
    Stored,
    drawn,
    encoded,
    fibonacci,
    frames_of,
    masked,
    put_together,
    sparse,
)
from tests.fixtures.store_data import KIB, floats, noise, text

KERNEL = Path(__file__).resolve().parents[2] / "gpuimg" / "store" / "kernel"
HARNESS = Path(__file__).with_name("planes_harness.c")
SECONDS = float(os.environ.get("GPUIMG_FUZZ_SECONDS", "4"))
# What the kernel must do with a payload; a frame with matches may be refused.
EITHER, DECODE, REFUSE = range(3)
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


@pytest.fixture(scope="module")
def harness(tmp_path_factory) -> Path:
    """The harness and the kernel without its Python part, compiled with the sanitizers."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("the sanitizers' build of the kernel needs gcc, which is not installed")
    folder = tmp_path_factory.mktemp("harness")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if subprocess.run([compiler, *SANITIZE, probe, "-o", folder / "probe"], capture_output=True).returncode:
        pytest.skip("gcc has no address and undefined-behaviour sanitizer (libasan, libubsan) to link with")
    sources = sorted(path for path in KERNEL.glob("*.c") if path.name != "module.c")
    program = folder / "planes_harness"
    wrapped = [f"-Wl,--wrap={name}" for name in ("vector_available", "vector_sparse_available")]
    flags = ["-std=gnu11", "-O1", "-g", *SANITIZE, "-Wall", "-Wextra", "-Werror", f"-I{KERNEL}", *wrapped]
    subprocess.run([compiler, *flags, HARNESS, *sources, "-lm", "-o", program], check=True)
    return program


def record(data: bytes, size: int, transform: int, payload: bytes, base: bytes | None, *, duty: int) -> bytes:
    head = struct.pack("<6I", size, len(data), base is not None, transform, len(payload), duty)
    return head + data + (base or b"") + payload


def frame_record(frame: Stored) -> bytes:
    data = zstandard.ZstdDecompressor().decompress(frame.stored)
    return record(data, 0, 0, frame.stored, None, duty=DECODE if PRESENT[0] == "kernel" else EITHER)


def columns(*planes: bytes) -> bytes:
    return np.stack([np.frombuffer(plane, np.uint8) for plane in planes], axis=1).tobytes()


def write_corpus(path: Path) -> None:
    """Payloads of both coders and of a denser writer, in all modes, transforms and element sizes."""
    records = []
    weights = floats(40 * KIB, 1)
    later = (np.frombuffer(weights, np.float32) + np.float32(1e-6)).tobytes()
    thin = drawn([0.9, 0.05, 0.05], 5000)
    cases = [
        (weights, 4, Transform.ROTATED, None),
        (floats(20 * KIB + 1, 2, "bfloat16"), 2, Transform.ROTATED, None),
        (later, 4, Transform.DIFFERENCE, weights),
        (later, 4, Transform.EXCLUSIVE, weights),
        (later[:-3], 8, Transform.DIFFERENCE, weights[:-3]),
        (
            columns(noise(5000), b"\7" * 5000, thin, drawn(np.geomspace(1, 0.01, 30), 5000)),
            4,
            Transform.PLAIN,
            None,
        ),
        (fibonacci(22, 60_000), 1, Transform.PLAIN, None),
        (drawn(np.geomspace(1, 1e-4, 200), 70_000), 1, Transform.PLAIN, None),
        (drawn([0.4, 0.6], 128 * KIB + 1500), 1, Transform.PLAIN, None),
        (drawn([0.4, 0.6], 128 * KIB) + bytes([9]) * 128 * KIB + noise(1000), 1, Transform.PLAIN, None),
        (thin * 2 + bytes(3000) + b"\1" + bytes(700), 1, Transform.PLAIN, None),
        (text(9000), 2, Transform.PLAIN, None),
        (drawn([0.4, 0.6], 1024), 1, Transform.PLAIN, None),
        (b"\5" * 100 + b"\6" * 3, 1, Transform.PLAIN, None),
    ]
    for data, size, transform, base in cases:
        for name in PRESENT:
            payload = encoded(name, data, size, transform, base)
            if payload is not None:
                records.append(
                    record(data, size, transform, payload, base, duty=DECODE if name == "kernel" else EITHER)
                )
    # Few values in lists of every mode, raw ones at the payload's end.
    ones = bytes([0, 0, 2]) * 20
    mask = np.packbits(np.frombuffer(ones, np.uint8) > 0, bitorder="little").tobytes()
    for values in ((RAW, b"\2" * 20), (CONSTANT, b"\2")):
        for gaps in ((RAW, b"\2" * 20), (CONSTANT, b"\2")):
            payload = put_together(0, [sparse(gaps, values, (20, 20))])
            records.append(record(ones, 1, 0, payload, None, duty=DECODE))
        payload = put_together(0, [masked((RAW, mask), values, 20)])
        records.append(record(ones, 1, 0, payload, None, duty=DECODE))
    last = sparse((RAW, b"\xff\xff\xff\xea"), (RAW, b"\1"), (1, 4))
    records.append(record(bytes(999) + b"\1", 1, 0, put_together(0, [last]), None, duty=DECODE))
    for data in (cases[0][0], drawn([0.3, 0.7], 70_000), drawn(np.geomspace(1, 1e-4, 200), 140_000)):
        frames = frames_of(encoded(PRESENT[0], data, 1, Transform.PLAIN) or b"", len(data))
        records += [frame_record(frame) for frame in frames]
    for level in (1, 19):
        frame = zstandard.ZstdCompressor(level=level, write_checksum=True).compress(text(3000))
        listed = zstandard.ZstdCompressor(level=level).compress(b"\2" * 1000)
        payload = put_together(0, [(ZSTD, frame), sparse((ZSTD, listed), (ZSTD, listed), (1000, 1000))])
        data = columns(text(3000), bytes([0, 0, 2]) * 1000)
        records.append(record(data, 2, 0, payload, None, duty=EITHER))
    records += [record(bytes(LENGTH), 2, 0, payload, None, duty=REFUSE) for payload in DAMAGED.values()]
    assert len(records) > 60
    path.write_bytes(b"".join(records))


def test_no_sanitizer_reports_anything(harness, tmp_path):
    write_corpus(tmp_path / "corpus")
    result = subprocess.run(
        [harness, tmp_path / "corpus", str(SECONDS)],
        env={
            **os.environ,
            "ASAN_OPTIONS": "allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        capture_output=True,
        text=True,
        timeout=SECONDS + 60,
    )
    assert result.returncode == 0, result.stderr[-8000:]
    assert int(result.stdout.split()[2]) > 100 * SECONDS


def test_the_harness_would_notice(harness, tmp_path):
    data = drawn([0.4, 0.6], 2000)
    good, other = put_together(0, [(RAW, data)]), put_together(0, [(CONSTANT, b"\7")])
    corpora = {
        "the payload is not decoded to the chunk": record(data, 1, 0, other, None, duty=EITHER),
        "damage is not noticed": record(data, 1, 0, good, None, duty=REFUSE),
        "the corpus is cut short": record(data, 1, 0, good, None, duty=EITHER)[:-1],
        "the corpus is empty": b"",
    }
    for complaint, corpus in corpora.items():
        (tmp_path / "corpus").write_bytes(corpus)
        command = [harness, tmp_path / "corpus", "0.1"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert result.returncode != 0 and complaint in result.stderr
