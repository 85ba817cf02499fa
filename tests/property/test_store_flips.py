"""One byte changed anywhere: never a wrong byte out, verify finds it, repair saves all that is whole."""

from __future__ import annotations

import os
import random
import shutil

import pytest

import gpuimg
from gpuimg.errors import GpuimgError
from tests.fixtures.make_broken import one_core, trained
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
# The second is coded against the first, the third against the second.
CHECKPOINTS = {
    "t": FILES,
    "u": FILES | {"weights": trained(FILES["weights"], 6)},
    "v": FILES | {"weights": trained(trained(FILES["weights"], 6), 7)},
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    root = tmp_path_factory.mktemp("flips") / "store"
    with one_core(), gpuimg.init_store(root, chunk_size=CHUNK) as store:
        parent = None
        for tag, files in CHECKPOINTS.items():
            with store.ingest(parent=parent) as session:
                for name, data in files.items():
                    file = session.file(name)
                    file.write(data)
                    file.close()
                parent = session.commit(tag=tag)
    mini = MiniStore(root)
    assert {len(mini.chain(chunk_id)) for chunk_id in mini.objects} == {1, 2, 3}
    return root


def unchecked(root):
    """Bytes of packs that say nothing: what fills objects up, and the reserved field of the trailer."""
    found = set()
    for pack_id, pack in MiniStore(root).packs.items():
        path = root / f"packs/{pack_id.hex()[:2]}/{pack_id.hex()}.pack"
        size = path.stat().st_size
        found |= {(path, offset) for offset in range(size - 64 + 12, size - 64 + 16)}
        for item in pack.objects:
            end = item.offset + 96 + len(item.payload)
            found |= {(path, offset) for offset in range(end, -(-end // 8) * 8)}
    return found


def read(store):
    """What can be read of the checkpoints; asserts that nothing read is wrong."""
    readable = {}
    for tag, files in CHECKPOINTS.items():
        try:
            checkpoint = store.checkpoint(tag)
        except GpuimgError:
            readable[tag, "manifest"] = False
            continue
        readable[tag, "manifest"] = True
        for name, data in files.items():
            readable[tag, name] = read_file(checkpoint, name, data)
    return readable


def read_file(checkpoint, name, data):
    """Whether the file can be read, which must be the same in every way."""
    try:
        assert checkpoint.read(name) == data
        readable = True
    except GpuimgError as error:
        assert error.remedy
        readable = False
    given = 0
    try:
        for buffer in checkpoint.stream(name):
            assert buffer == data[given : given + len(buffer)]
            given += len(buffer)
        assert readable
    except GpuimgError:
        assert not readable
    return readable


def places(root, rng):
    """Where to change a byte: every structure often, payloads too."""
    pack = rng.choice(sorted(root.glob("packs/*/*.pack")))
    manifest = rng.choice(sorted(root.glob("manifests/*")))
    parsed = MiniStore(root).packs[bytes.fromhex(pack.stem)]
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
            assert found or (original, offset) in silent, (path, offset)
        report = gpuimg.repair_store(root)
        with gpuimg.open_store(root) as store:
            after = read(store)
            lost = {tag for tag in CHECKPOINTS if not readable[tag, "manifest"]}
            assert lost == {tag for tag in CHECKPOINTS if not after[tag, "manifest"]}
            for what, whole in readable.items():
                assert after[what] or not whole, "repair made nothing worse"
            hurt = {tag for (tag, _), whole in after.items() if not whole} - lost
            assert bool(store.verify().faults) == bool(hurt)
            assert set(report.hurt) == {store.checkpoint(tag).id for tag in hurt}
        assert len(list((root / "damaged").iterdir())) <= 2
        shutil.rmtree(root)
