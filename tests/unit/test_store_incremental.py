"""What a checkpoint costs when its parent is known: nothing for what stayed, a difference for numbers that
changed, a chunk or two where pages came or went; and it is restorable whatever became of the parent."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

import gpuimg
from gpuimg.errors import IndexBrokenError, InputOutputError
from gpuimg.store import incoming, recipe
from gpuimg.store import ingest as ingest_module
from gpuimg.store import pack as pack_module
from gpuimg.store import parent as parent_module
from gpuimg.store import workers as workers_module
from gpuimg.store.choice import Profile
from gpuimg.store.packwriter import PackWriter
from gpuimg.store.pool import SLAB_SIZE
from gpuimg.store.reader import ChunkReader
from tests.fixtures.incremental import (
    WAYS,
    chunk_ids,
    drifted,
    entries,
    flip,
    in_memory,
    lengths,
    location,
    places,
    reordered,
    restored,
    take,
)
from tests.fixtures.store_data import KIB, MIB, PAGE, floats, noise, pages

CHUNK = 64 * KIB
# FIXED and PAGES.
NAMES = ["bo-1.bin", "pages-1.img"]
SIZES = [PAGE + 1, CHUNK - 1, CHUNK + 1, SLAB_SIZE - 1, SLAB_SIZE + 1, 5 * MIB + PAGE + 3, 20 * MIB + 1234]


@pytest.fixture
def tmp_path(tmp_path):
    with in_memory(tmp_path) as folder:
        yield folder


@pytest.fixture
def store(tmp_path):
    with gpuimg.init_store(tmp_path / "store", chunk_size=CHUNK) as opened:
        yield opened


@pytest.fixture
def hashed(monkeypatch):
    """What BLAKE3 was computed of."""
    seen = []

    def identify(data):
        seen.append(bytes(data[:4]))
        return real(data)

    real = ingest_module.identify
    monkeypatch.setattr(ingest_module, "identify", identify)
    monkeypatch.setattr(parent_module, "identify", identify)
    return seen


@pytest.fixture
def in_short_segments(monkeypatch):
    """Recipes of many segments."""
    monkeypatch.setattr(recipe, "SEGMENT_ENTRIES", 8)


def written(store):
    return sum(path.stat().st_size for path in store.path.rglob("*") if path.is_file()) - sum(
        path.stat().st_size for path in (store.path / "index").iterdir()
    )


# What has not changed


@pytest.mark.parametrize("way", WAYS)
def test_what_has_not_changed_is_neither_hashed_nor_written(store, hashed, monkeypatch, way):
    whole = pages(SIZES[-1] // PAGE + 1, 1, ((300, 330), (600, 1700)))
    files = {f"bo-{size}.bin": whole[-size:] for size in SIZES}
    files |= {f"pages-{size}.img": whole[:size] for size in SIZES}
    first = take(store, files, way=way)
    packs = set((store.path / "packs").rglob("*.pack"))
    before = written(store)
    hashed.clear()
    monkeypatch.setattr(PackWriter, "__init__", None)
    second = take(store, files, parent=first, way=way)
    monkeypatch.undo()
    raw = sum(map(len, files.values()))
    assert hashed == [b"GPRC"] * sum(len(entry.segments) for entry in second.files.values())
    assert set((store.path / "packs").rglob("*.pack")) == packs
    assert written(store) - before <= raw / 1000
    told = second.statistics
    assert (told.new_bytes, told.new_chunks, told.deduplicated_bytes) == (0, 0, 0)
    assert told.unchanged_bytes + told.zero_bytes == told.raw_bytes == raw
    assert told.chunks == sum(len(chunk_ids(store, second, name)) for name in files)
    for name in files:
        assert second.files[name].segments == first.files[name].segments
    assert second.parent == first.id
    assert restored(second) == files


@pytest.mark.parametrize("name", NAMES)
def test_an_unchanged_file_among_changed_ones_shares_its_recipe(store, name):
    files = {name: floats(3 * MIB + 5, 1), "other": floats(MIB, 2)}
    first = take(store, files)
    files["other"] = drifted(files["other"], 3)
    second = take(store, files, parent=first)
    assert second.files[name].segments == first.files[name].segments
    assert second.figures[name].statistics.unchanged_bytes == len(files[name])
    assert second.figures["other"].statistics.unchanged_bytes == 0
    assert restored(second) == files


@pytest.mark.usefixtures("in_short_segments")
def test_many_segments_are_shared_and_only_the_changed_one_is_new(store):
    data = noise(7 * MIB + 77, 1)
    first = take(store, {"bo": data})
    changed = data[: 3 * MIB] + noise(10, 2) + data[3 * MIB + 10 :]
    second = take(store, {"bo": changed}, parent=first)
    pairs = list(zip(first.files["bo"].segments, second.files["bo"].segments, strict=True))
    assert len(pairs) == 15
    assert sum(old != new for old, new in pairs) == 1
    assert restored(second) == {"bo": changed}


# What has changed in place


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_changed_become_differences_to_the_chunks_at_their_places(store, tmp_path, name, way):
    old = floats(5 * MIB + 3 * PAGE + 40, 1)
    new = drifted(old, 2)
    first = take(store, {name: old})
    second = take(store, {name: new}, parent=first, way=way)
    assert lengths(store, second, name) == lengths(store, first, name)
    assert [place.base for place in places(store, second, name)] == chunk_ids(store, first, name)
    told = second.statistics
    assert told.delta_bytes == told.raw_bytes == len(new)
    with gpuimg.init_store(tmp_path / "other", chunk_size=CHUNK) as other:
        alone = take(other, {name: new}).statistics
    assert told.stored_bytes < 0.75 * alone.stored_bytes
    assert restored(second) == {name: new}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_small_step_of_numbers_of_every_width_is_a_difference(store, dtype):
    old = floats(2 * MIB, 1, dtype)
    width = {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    words = np.frombuffer(old, dtype=f"<u{width}").copy()
    words += np.random.default_rng(2).integers(0, 2, len(words)).astype(words.dtype)
    first = take(store, {"bo": old})
    second = take(store, {"bo": words.tobytes()}, parent=first)
    assert second.statistics.delta_bytes == 2 * MIB
    # A bit a number, and what codes that are whole bits cost.
    assert second.statistics.stored_bytes < 1.4 * 2 * MIB / (8 * width)
    assert second.read("bo") == words.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_few_changed_chunks_are_differences_and_the_rest_costs_nothing(store, name):
    """Contents of the same place that stayed are no sign that contents moved."""
    old = floats(12 * MIB, 1)
    first = take(store, {name: old})
    new = bytearray(old)
    offset = changed = 0
    for number, length in enumerate(lengths(store, first, name)):
        if number % 4 == 0:
            new[offset : offset + PAGE] = drifted(old[offset : offset + PAGE], number)
            changed += length
        offset += length
    for way in WAYS:
        second = take(store, {name: bytes(new)}, parent=first, way=way)
        told = second.statistics
        assert told.unchanged_bytes == len(old) - changed
        assert lengths(store, second, name) == lengths(store, first, name)
        assert [place.base for place in places(store, second, name)[::4]] == chunk_ids(store, first, name)[
            ::4
        ]
        assert told.stored_bytes < changed / 4
        assert restored(second) == {name: bytes(new)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_noise_that_became_other_noise_stands_alone(store, name, way):
    first = take(store, {name: noise(3 * MIB, 1)})
    second = take(store, {name: noise(3 * MIB, 2)}, parent=first, way=way)
    assert not any(place.base for place in places(store, second, name))
    assert second.statistics.delta_bytes == 0
    assert second.statistics.raw_stored_bytes == 3 * MIB
    assert restored(second) == {name: noise(3 * MIB, 2)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_become_zero_and_zeros_become_chunks(store, name, way):
    zeros = bytes(2 * MIB + CHUNK)
    data = floats(2 * MIB + CHUNK, 1)
    end = floats(CHUNK + 9, 2)
    versions = [
        data + zeros + end,
        zeros + data + end,
        zeros + zeros + end,
        data + data[:CHUNK] + zeros[CHUNK:] + end,
        bytes(len(data) * 2 + len(end)),
        data + zeros + end,
    ]
    parent = take(store, {name: versions[0]})
    for version in versions[1:]:
        parent = take(store, {name: version}, parent=parent, way=way)
        assert restored(parent) == {name: version}
        plain = take(store, {name: version})
        assert parent.statistics.zero_bytes >= plain.statistics.zero_bytes
    assert not store.verify().faults


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [CHUNK, 300_001, 4 * MIB + 5])
def test_a_file_that_grew_or_shrank_costs_what_is_new(store, name, way, size):
    old = floats(size, 1)
    first = take(store, {name: old})
    for new in (old + floats(MIB + 3, 2), old[: size * 2 // 3], old[:-1], old + b"x", old[:PAGE], b""):
        second = take(store, {name: new}, parent=first, way=way)
        assert restored(second) == {name: new}
        told = second.statistics
        # What is cut anew is one chunk, of up to a megabyte in page images.
        border = CHUNK if name == "bo-1.bin" else MIB
        shared = min(len(new), len(old))
        assert told.unchanged_bytes + told.deduplicated_bytes >= shared - border
        unit = CHUNK if name == "bo-1.bin" else PAGE
        assert all(length % unit == 0 for length in lengths(store, second, name)[:-1])
        if name == "bo-1.bin":
            again = take(store, {name: new})
            assert again.statistics.new_chunks == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_another_file_of_the_same_name_is_stored_like_any_other(store, tmp_path, name, way):
    first = take(store, {name: floats(3 * MIB, 1)})
    new = floats(4 * MIB + 7, 9, "bfloat16")
    second = take(store, {name: new}, parent=first, way=way)
    with gpuimg.init_store(tmp_path / "other", chunk_size=CHUNK) as other:
        alone = take(other, {name: new}).statistics
    assert second.statistics.stored_bytes < 1.05 * alone.stored_bytes
    assert restored(second) == {name: new}


def test_a_checkpoint_of_no_file_of_its_parent_is_a_full_one(store):
    first = take(store, {"a": floats(MIB, 1)})
    second = take(store, {"b": floats(MIB, 2), "small": b"s"}, parent=first)
    assert second.statistics.unchanged_bytes == second.statistics.delta_bytes == 0
    assert restored(second) == {"b": floats(MIB, 2), "small": b"s"}


# With a parent as without one


@pytest.mark.parametrize("profile", list(Profile))
def test_with_or_without_a_parent_and_either_way_the_same_comes_back(store, tmp_path, profile):
    old = {"bo-1.bin": floats(2 * MIB + 9, 1), "pages-1.img": pages(700, 2, ((100, 300),)), "core": b"1"}
    new = {
        "bo-1.bin": drifted(old["bo-1.bin"], 3)[:MIB] + old["bo-1.bin"][MIB:],
        "pages-1.img": old["pages-1.img"][: 90 * PAGE] + noise(5 * PAGE, 4) + old["pages-1.img"][90 * PAGE :],
        "core": b"2",
    }
    first = take(store, old, profile=profile)
    made = [take(store, new, profile=profile)]
    made += [take(store, new, parent=first, profile=profile, way=way) for way in WAYS]
    for number, checkpoint in enumerate(made):
        checkpoint.export(tmp_path / str(number))
        found = {path.name: path.read_bytes() for path in (tmp_path / str(number)).iterdir()}
        assert found == new
    with gpuimg.init_store(tmp_path / "fresh", chunk_size=CHUNK) as fresh:
        first = take(fresh, old)
        alone = take(fresh, new, parent=first)
        assert restored(alone) == new
    assert not store.verify().faults


def test_stream_and_path_find_the_same(tmp_path):
    """Which chunks are new, and how they are stored, does not depend on how the bytes came."""
    old = floats(9 * MIB + 3, 1)
    new = old[: 4 * MIB] + drifted(old[4 * MIB : 6 * MIB], 2) + old[6 * MIB :]
    inserted = old[: 3 * MIB] + noise(50 * PAGE, 3) + old[3 * MIB :]
    found = []
    for way in WAYS:
        with gpuimg.init_store(tmp_path / way, chunk_size=CHUNK) as store:
            first = take(store, {"bo": old, "pages-1.img": old, "pages-2.img": old}, way=way)
            second = take(
                store, {"bo": new, "pages-1.img": new, "pages-2.img": inserted}, parent=first, way=way
            )
            found.append({name: lengths(store, second, name) for name in second.files})
            told = second.statistics
            found[-1]["told"] = [told.unchanged_bytes, told.delta_bytes, told.chunks, told.new_chunks]
    assert found[0] == found[1] == found[2]


def test_more_files_at_once_than_there_are_buffers_for(store):
    """Files that hold a buffer for long give it back half filled."""
    rng = np.random.default_rng(5)
    old = {name: floats(700_000 + 9 * n, n) for n in range(20) for name in (f"bo-{n}", f"pages-{n}.img")}
    first = take(store, old)
    new = {}
    for name, data in old.items():
        at = int(rng.integers(0, 100)) * PAGE
        new[name] = data[:at] + noise(4 * PAGE, at) + data[at:]
    for files in (old, new):
        with store.ingest(parent=first) as session:
            opened = {name: session.file(name) for name in files}
            for start in range(0, 900_000, 50_000):
                for name, file in opened.items():
                    file.write(files[name][start : start + 50_000])
            for file in opened.values():
                file.close()
            second = session.commit()
        assert restored(second) == files
        if files is old:
            assert second.statistics.unchanged_bytes == sum(map(len, old.values()))
        else:
            paged = [second.figures[name].statistics for name in files if name.startswith("pages")]
            assert sum(told.unchanged_bytes for told in paged) > 20 * 300_000


# What goes wrong while a file is read


def descriptors():
    """Open files, packs aside."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(link.suffix != ".pack" for link in links)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_becomes_shorter_while_it_is_read_fails_the_checkpoint_and_nothing_else(
    store, tmp_path, monkeypatch, name
):
    data = floats(8 * MIB, 1)
    first = take(store, {name: data})
    (tmp_path / name).write_bytes(data)
    before = descriptors()
    real = incoming._Source.read
    calls = []

    def read(self, target, offset):
        calls.append(offset)
        return real(self, target, offset) if len(calls) < 3 else 0

    monkeypatch.setattr(incoming._Source, "read", read)
    session = store.ingest(parent=first)
    session.add_path(name, tmp_path / name)
    with pytest.raises(InputOutputError, match="became shorter"):
        session.commit()
    assert descriptors() == before
    monkeypatch.undo()
    assert take(store, {name: data}, parent=first).statistics.new_chunks == 0


@pytest.mark.parametrize("way", ["write", "path"])
def test_a_parent_on_bad_sectors_is_no_obstacle(store, monkeypatch, way):
    """Neither its recipe nor its chunks can be read, and the process that is dumped may not live for long."""
    data = {name: floats(3 * MIB, 1) for name in NAMES}
    first = take(store, data)
    packs = set((store.path / "packs").rglob("*.pack"))
    real = os.preadv

    def preadv(fd, *arguments):
        if Path(f"/proc/self/fd/{fd}").readlink() in packs:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *arguments)

    for files in (data, {name: drifted(old, 2) for name, old in data.items()}):
        monkeypatch.setattr(os, "preadv", preadv)
        second = take(store, files, parent=first, way=way)
        monkeypatch.undo()
        assert restored(second) == files
        assert not second.statistics.delta_bytes


def test_an_index_that_breaks_while_the_parent_is_read_fails_the_checkpoint(store, tmp_path, monkeypatch):
    data = floats(8 * MIB, 1)
    first = take(store, {"bo": data})
    (tmp_path / "bo").write_bytes(data)
    before = descriptors()

    def segment(*_):
        raise IndexBrokenError("the index cannot be used", remedy="run `gpuimg repair`")

    monkeypatch.setattr(ChunkReader, "segment", segment)
    session = store.ingest(parent=first)
    session.add_path("bo", tmp_path / "bo")
    with pytest.raises(IndexBrokenError):
        session.commit()
    assert descriptors() == before


# Pages that come and go


@pytest.mark.parametrize("way", ["write", "path"])
def test_inserted_and_removed_pages_cost_themselves_and_a_few_chunks(store, way):
    """Noise, so that a new byte is a stored byte; a chunk of a page image is 256 KiB long on average."""
    rng = np.random.default_rng(7)
    excess = []
    for number, size in enumerate([64 * KIB, 256 * KIB, MIB] * 2):
        old = noise(16 * MIB, number)
        first = take(store, {"pages-1.img": old})
        at = int(rng.integers(0, len(old) // PAGE)) * PAGE
        inserted = old[:at] + rng.bytes(size) + old[at:]
        removed = old[:at] + old[at + size :]
        for new, truly in ((inserted, size), (removed, 0)):
            second = take(store, {"pages-1.img": new}, parent=first, way=way)
            assert second.read("pages-1.img") == new
            excess.append(second.statistics.new_bytes - truly)
    assert max(excess) < 2.5 * MIB
    assert np.mean(excess) < 0.6 * MIB


@pytest.mark.parametrize("way", ["write", "path"])
def test_pages_come_and_go_through_a_chain_of_checkpoints(store, way):
    rng = np.random.default_rng(3)
    data = noise(12 * MIB, 2)
    checkpoint = take(store, {"pages-1.img": data})
    made = [(checkpoint, data)]
    truly = 0
    for number in range(10):
        size = int(rng.integers(16, 257)) * PAGE
        at = int(rng.integers(0, len(data) // PAGE)) * PAGE
        if number % 2:
            data = data[:at] + data[at + size :]
        else:
            data = data[:at] + rng.bytes(size) + data[at:]
            truly += size
        checkpoint = take(store, {"pages-1.img": data}, parent=checkpoint, way=way)
        assert checkpoint.statistics.unchanged_bytes > 0.8 * len(data)
        made.append((checkpoint, data))
    added = sum(checkpoint.statistics.new_bytes for checkpoint, _ in made[1:])
    assert added < truly + 10 * 0.6 * MIB
    for checkpoint, expected in made:
        assert checkpoint.read("pages-1.img") == expected


@pytest.mark.parametrize("way", ["write", "path"])
def test_pages_come_and_go_after_all_numbers_have_changed_in_place(store, way):
    """Chunks end where the contents of an older checkpoint had them end, and are found again all the same."""
    rng = np.random.default_rng(5)
    data = floats(12 * MIB, 1)
    checkpoint = take(store, {"pages-1.img": data})
    for number in range(2):
        data = drifted(data, number)
        checkpoint = take(store, {"pages-1.img": data}, parent=checkpoint)
        assert checkpoint.statistics.delta_bytes == len(data)
    truly = added = 0
    for number in range(6):
        size = int(rng.integers(1, 100)) * PAGE
        at = int(rng.integers(0, len(data) // PAGE)) * PAGE
        if number % 2:
            data = data[:at] + data[at + size :]
        else:
            data = data[:at] + rng.bytes(size) + data[at:]
            truly += size
        checkpoint = take(store, {"pages-1.img": data}, parent=checkpoint, way=way)
        assert restored(checkpoint) == {"pages-1.img": data}
        assert checkpoint.statistics.unchanged_bytes > 0.8 * len(data)
        added += checkpoint.statistics.new_bytes
    assert added < truly + 6 * 0.6 * MIB


@pytest.mark.parametrize("way", ["write", "path"])
@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_blocks_of_pages_in_another_order_cost_a_chunk_at_every_border(store, way, blocks):
    old = noise(16 * MIB, 1)
    new = reordered(old, blocks, blocks)
    first = take(store, {"pages-1.img": old})
    second = take(store, {"pages-1.img": new}, parent=first, way=way)
    assert second.read("pages-1.img") == new
    assert second.statistics.new_bytes < blocks * MIB + MIB
    assert second.statistics.unchanged_bytes + second.statistics.deduplicated_bytes > 8 * MIB


@pytest.mark.parametrize("way", ["write", "path"])
def test_numbers_that_changed_behind_inserted_pages_are_differences_again(store, way):
    """Once contents are found again, what changed there lines up as well."""
    old = floats(12 * MIB, 1)
    new = old[:MIB] + noise(37 * PAGE, 2) + old[MIB : 6 * MIB] + drifted(old[6 * MIB :], 3)
    first = take(store, {"pages-1.img": old})
    second = take(store, {"pages-1.img": new}, parent=first, way=way)
    assert second.read("pages-1.img") == new
    assert second.statistics.delta_bytes > 5.5 * MIB


@pytest.mark.parametrize("way", ["write", "path"])
def test_pages_that_came_from_another_file_are_not_stored_again(store, way):
    one, two = noise(8 * MIB, 1), noise(8 * MIB, 2)
    first = take(store, {"pages-1.img": one, "pages-2.img": two})
    files = {"pages-1.img": one[: 3 * MIB] + two[2 * MIB :], "pages-2.img": two[: 2 * MIB] + one[3 * MIB :]}
    second = take(store, files, parent=first, way=way)
    assert restored(second) == files
    assert second.statistics.new_bytes < 3 * MIB


@pytest.mark.parametrize("way", ["write", "path"])
def test_behind_what_came_from_another_file_the_own_parent_counts_again(store, way):
    one, two = floats(8 * MIB, 1), floats(4 * MIB, 2)
    first = take(store, {"pages-1.img": one, "pages-2.img": two})
    new = one[: 2 * MIB] + two + one[2 * MIB : 5 * MIB] + drifted(one[5 * MIB :], 3)
    second = take(store, {"pages-1.img": new}, parent=first, way=way)
    assert restored(second) == {"pages-1.img": new}
    told = second.statistics
    assert told.unchanged_bytes > 3 * MIB
    assert told.deduplicated_bytes > 3 * MIB
    assert told.delta_bytes > 2.5 * MIB


# A parent that is not whole


def lose(store, chunk_id):
    """Delete the pack that a chunk lies in."""
    location(store, chunk_id)[0].unlink()


def reopened(store, *checkpoints):
    """The store opened anew, when it has seen what is lost, and the same checkpoints."""
    path = store.path
    store.close()
    opened = gpuimg.open_store(path)
    return opened, *(opened.checkpoint(checkpoint.id) for checkpoint in checkpoints)


@pytest.fixture
def in_many_packs(monkeypatch):
    """Packs that end early, filled one after the other: chunks and recipes lie apart."""
    monkeypatch.setattr(pack_module, "TARGET_SIZE", 256 * KIB)
    monkeypatch.setattr(workers_module.os, "sched_getaffinity", lambda _: {0})


@pytest.mark.parametrize("way", ["write", "path"])
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_chunk_whose_base_is_damaged_stands_alone(store, name, way):
    old = floats(3 * MIB, 1)
    first = take(store, {name: old})
    hurt = chunk_ids(store, first, name)[2]
    flip(store, hurt)
    second = take(store, {name: drifted(old, 2)}, parent=first, way=way)
    bases = [place.base for place in places(store, second, name)]
    assert bases == [b"" if base == hurt else base for base in chunk_ids(store, first, name)]
    assert restored(second) == {name: drifted(old, 2)}
    assert not store.verify(second.id).faults


@pytest.mark.parametrize("way", ["write", "path"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("in_many_packs")
def test_chunks_of_the_parent_that_are_lost_are_stored_again(store, name, way):
    """Changed or not: what has the parent's fingerprint may still not be there."""
    old = floats(3 * MIB, 1)
    first = take(store, {name: old})
    lose(store, chunk_ids(store, first, name)[2])
    store, first = reopened(store, first)
    with store:
        lost = set(chunk_ids(store, first, name)) - {
            chunk_id for chunk_id, _ in store._context.index.places()
        }
        assert lost
        same = take(store, {name: old}, parent=first, way=way)
        assert restored(same) == {name: old}
        gone = sum(entry.length for entry in entries(store, first, name) if entry.id in lost)
        assert same.statistics.unchanged_bytes == len(old) - gone
        changed = take(store, {name: drifted(old, 2)}, parent=first, way=way)
        assert restored(changed) == {name: drifted(old, 2)}
        assert not store.verify().faults


@pytest.mark.parametrize("way", ["write", "path"])
def test_chunks_of_the_parent_whose_bases_are_lost_are_stored_again(store, way):
    old = floats(2 * MIB, 1)
    new = drifted(old, 2)
    first = take(store, {"bo": old})
    second = take(store, {"bo": new}, parent=first)
    lose(store, chunk_ids(store, first, "bo")[0])
    store, second = reopened(store, second)
    with store:
        for parent in (second, None):
            again = take(store, {"bo": new}, parent=parent, way=way)
            assert restored(again) == {"bo": new}
        assert not store.verify(again.id).faults


@pytest.mark.parametrize("way", ["write", "path"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", [flip, lose])
@pytest.mark.usefixtures("in_many_packs", "in_short_segments")
def test_a_recipe_of_the_parent_that_cannot_be_read_only_costs_bytes(store, name, way, damage):
    """What is stored anew under the id of a damaged segment takes its place."""
    old = floats(6 * MIB, 1)
    first = take(store, {name: old})
    segments = first.files[name].segments
    assert len(segments) > 2
    damage(store, segments[1].id)
    store, first = reopened(store, first)
    with store:
        for new in (old, drifted(old, 2), old + old[:MIB], old[: 4 * MIB]):
            second = take(store, {name: new}, parent=first, way=way)
            assert restored(second) == {name: new}
            assert not store.verify(second.id).faults


@pytest.mark.parametrize("way", ["write", "path"])
def test_a_parent_of_which_nothing_is_left_is_no_obstacle(store, way):
    files = {"bo": floats(3 * MIB, 1), "pages-1.img": floats(3 * MIB, 2), "small": b"small"}
    first = take(store, files)
    for path in (store.path / "packs").rglob("*.pack"):
        path.unlink()
    store, first = reopened(store, first)
    with store:
        for new in (files, {name: drifted(data, 3) for name, data in files.items()}):
            second = take(store, new, parent=first, way=way)
            assert restored(second) == new
            assert not store.verify(second.id).faults


@pytest.mark.parametrize("way", ["write", "path"])
def test_a_parent_whose_packs_vanish_under_an_open_store_is_no_obstacle(store, way):
    """Nothing is taken for unchanged or as a base that cannot be read; what is there in name is believed."""
    old = floats(3 * MIB, 1)
    first = take(store, {"bo": old})
    for path in (store.path / "packs").rglob("*.pack"):
        path.unlink()
    second = take(store, {"bo": drifted(old, 2)}, parent=first, way=way)
    assert restored(second) == {"bo": drifted(old, 2)}


@pytest.mark.parametrize("way", ["write", "path"])
@pytest.mark.usefixtures("in_many_packs")
def test_a_parent_that_was_removed_and_collected_before_the_session_is_no_obstacle(store, way):
    """Its recipe may be readable still, in a pack that lives on for another's sake."""
    data, kept = floats(3 * MIB, 1), noise(CHUNK, 2)
    first = take(store, {"bo": data, "kept": kept})
    take(store, {"kept": kept})
    store.remove(first.id)
    assert store.gc().deleted_packs
    reader = store._context.reader
    assert all(reader.segment(ref) for ref in first.files["bo"].segments), "the recipe is there"
    assert not all(store._context.index.contains(chunk_ids(store, first, "bo"))), "its chunks are not"
    second = take(store, {"bo": data, "kept": kept}, parent=first, way=way)
    assert restored(second) == {"bo": data, "kept": kept}
    assert not store.verify().faults


def test_repair_and_taking_it_again_heals_a_damaged_base(store):
    old = floats(MIB, 1)
    first = take(store, {"bo": old})
    second = take(store, {"bo": drifted(old, 2)}, parent=first)
    hurt = chunk_ids(store, first, "bo")[0]
    flip(store, hurt)
    path = store.path
    store.close()
    gpuimg.repair_store(path)
    with gpuimg.open_store(path) as opened:
        assert {fault.checkpoint for fault in opened.verify().faults} == {first.id, second.id}
        second = opened.checkpoint(second.id)
        third = take(opened, {"bo": drifted(old, 2)}, parent=second)
        assert restored(third) == {"bo": drifted(old, 2)}
        # The chunk that could not be decoded has been stored anew under the same id.
        assert restored(second) == {"bo": drifted(old, 2)}
        assert {fault.checkpoint for fault in opened.verify().faults} == {first.id}
