"""One byte changed anywhere: never a wrong byte out, verify finds it, repair saves all that is whole."""

from __future__ import annotations

import os
import random
import shutil

import pytest

import gpuimg
from gpuimg.errors import GpuimgError
from tests.fixtures.make_broken import one_core
from tests.fixtures.mini_reader import MiniStore
from tests.fixtures.store_data import KIB, floats, noise, pages, text

FLIPS = int(os.environ.get("GPUIMG_FUZZ_EXAMPLES", "60"))
CHUNK = 64 * KIB
FILES = {
    "core-1.img": text(2000, 1),
    "pages-1.img": pages(60, 2, ((20, 40),)),
    "weights": floats(3 * CHUNK, 3, "bfloat16"),
    "log": text(2 * CHUNK, 4),
    "short": noise(5003, 5),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    root = tmp_path_factory.mktemp("flips") / "store"
    with one_core(), gpuimg.init_store(root, chunk_size=CHUNK) as store, store.ingest() as session:
        for name, data in FILES.items():
            file = session.file(name)
            file.write(data)
            file.close()
        session.commit(tag="t")
    return root


def unchecked(root):
    """Bytes of the pack that say nothing: what fills objects up, and the reserved field of the trailer."""
    (pack,) = MiniStore(root).packs.values()
    (path,) = root.glob("packs/*/*.pack")
    size = path.stat().st_size
    found = set(range(size - 64 + 12, size - 64 + 16))
    for item in pack.objects:
        end = item.offset + 96 + len(item.payload)
        found |= set(range(end, -(-end // 8) * 8))
    return found


def read(store):
    """What can be read of the checkpoint; asserts that nothing read is wrong."""
    readable = {}
    try:
        checkpoint = store.checkpoint("t")
    except GpuimgError:
        return None
    for name, data in FILES.items():
        try:
            assert checkpoint.read(name) == data
            readable[name] = True
        except GpuimgError as error:
            assert error.remedy
            readable[name] = False
        given = 0
        try:
            for buffer in checkpoint.stream(name):
                assert buffer == data[given : given + len(buffer)]
                given += len(buffer)
        except GpuimgError:
            assert not readable[name]
    return readable


def places(root, rng):
    """Where to change a byte: every structure often, payloads too."""
    (pack,) = root.glob("packs/*/*.pack")
    (manifest,) = root.glob("manifests/*")
    (parsed,) = MiniStore(root).packs.values()
    size = pack.stat().st_size
    kind = rng.randrange(6)
    if kind == 0:
        return manifest, rng.randrange(manifest.stat().st_size)
    if kind == 1:
        return pack, rng.randrange(64)
    if kind == 2:
        return pack, size - 1 - rng.randrange(64 + 96 * len(parsed.objects))
    item = rng.choice(parsed.objects)
    if kind == 3:
        return pack, item.offset + rng.randrange(96)
    return pack, item.offset + 96 + rng.randrange(len(item.payload))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_one_changed_byte_is_found_and_never_given_out(good, tmp_path, part):
    silent = unchecked(good)
    for number in range(part, FLIPS, 4):
        rng = random.Random(number)
        original, offset = places(good, rng)
        root = tmp_path / f"s{number}"
        shutil.copytree(good, root)
        path = root / original.relative_to(good)
        data = bytearray(path.read_bytes())
        data[offset] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with gpuimg.open_store(root) as store:
            readable = read(store)
            found = bool(store.verify().faults)
            assert found or (path.suffix == ".pack" and offset in silent), (path, offset)
        report = gpuimg.repair_store(root)
        with gpuimg.open_store(root) as store:
            after = read(store)
            assert (after is None) == (readable is None)
            if readable is not None:
                for name, whole in readable.items():
                    assert after[name] or not whole, "repair made nothing worse"
                assert bool(store.verify().faults) == (not all(after.values()))
                assert bool(report.hurt) == (not all(after.values()))
        assert len(list((root / "damaged").iterdir())) <= 2
        shutil.rmtree(root)
