"""Explaining: how checkpoints are stored, what differs between two, what the store holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import numpy as np
import pytest

import gpuimg
from gpuimg.store.bases import DEPTH_LIMIT
from gpuimg.store.codec import Codec
from gpuimg.store.explain import LOST, Chains, coding_name, explain
from gpuimg.store.index import Place
from gpuimg.store.model import BufferObject, Statistics
from gpuimg.store.recipe import SEGMENT_ENTRIES
from gpuimg.store.reports import Change
from tests.fixtures.store_data import KIB, MIB, PAGE, floats, noise, text

CHUNK = 64 * KIB
KINDS = [
    "zero_bytes",
    "unchanged_bytes",
    "deduplicated_bytes",
    "delta_bytes",
    "coded_bytes",
    "raw_stored_bytes",
]


@pytest.fixture
def store(tmp_path):
    with gpuimg.init_store(tmp_path / "store", chunk_size=CHUNK) as opened:
        yield opened


def put(store, files, tag=None, parent=None, bos=None):
    with store.ingest(parent=parent) as session:
        for name, data in files.items():
            file = session.file(name, bo=(bos or {}).get(name))
            file.write(data)
            file.close()
        return session.commit(tag=tag)


def trained(weights, seed):
    """The weights after a small step."""
    numbers = np.frombuffer(weights, np.float32)
    step = np.random.default_rng(seed).normal(0, 1e-6, numbers.size).astype(np.float32)
    return (numbers + step).tobytes()


def series(store, count):
    """Checkpoints of a training job, each the parent of the next."""
    files = {
        "weights": floats(2 * MIB, 1),
        "memory": noise(MIB, 2) + bytes(MIB) + text(MIB, 3),
        "twice": noise(MIB, 2),
        "small": b"123",
    }
    made = [put(store, files, "step0")]
    for number in range(1, count):
        files["weights"] = trained(files["weights"], number)
        files["memory"] = noise(number * PAGE, 10 + number) + files["memory"][number * PAGE :]
        made.append(put(store, files, f"step{number}", made[-1]))
    return made


def unique_chunks(store, checkpoint):
    """Id and place of every chunk, and how deep its chain is, found in the plainest way."""
    context = store._context
    found = {}
    for entry in checkpoint.files.values():
        for ref in entry.segments:
            for chunk_id in context.reader.segment(ref).chunk_ids():
                (place,) = context.index.lookup([chunk_id])
                depth, base = 0, place.base
                while base:
                    depth += 1
                    base = context.index.lookup([base])[0].base
                found[chunk_id] = (place, depth)
    return found


def test_a_checkpoint_is_explained_by_its_chunks(store):
    for checkpoint in series(store, DEPTH_LIMIT + 2):
        report = explain(store, checkpoint)
        chunks = unique_chunks(store, checkpoint)
        now = report.now
        assert now.chunks == len(chunks)
        assert now.raw_bytes == sum(place.raw for place, _ in chunks.values())
        assert now.stored_bytes == sum(place.stored for place, _ in chunks.values())
        assert now.ratio == checkpoint.raw_bytes / (now.stored_bytes + 3)
        by_codec = Counter(coding_name(place) for place, _ in chunks.values())
        assert {name: item.chunks for name, item in now.codecs.items()} == by_codec
        assert sum(item.stored_bytes for item in now.codecs.values()) == now.stored_bytes
        by_depth = Counter(depth for _, depth in chunks.values())
        assert {item.depth: item.chunks for item in now.depths} == by_depth
        assert now.max_depth == max(by_depth)
        weighted = sum(depth * place.raw for place, depth in chunks.values())
        assert now.mean_depth == pytest.approx(weighted / now.raw_bytes)
        assert now.lost_chunks == 0


def test_files_are_explained_as_they_were_taken_and_as_they_are_stored(store):
    *_, last = series(store, DEPTH_LIMIT + 1)
    report = explain(store, last)
    assert [item.entry.name for item in report.files] == ["memory", "twice", "weights"]
    for item in report.files:
        taken = item.taken.statistics
        assert sum(getattr(taken, kind) for kind in KINDS) == taken.raw_bytes == item.entry.size
    memory, twice, weights = report.files
    assert weights.taken.element_size == 4
    assert weights.taken.statistics.delta_bytes == 2 * MIB
    assert (weights.now.max_depth, weights.now.mean_depth) == (DEPTH_LIMIT, DEPTH_LIMIT)
    assert weights.now.ratio == 2 * MIB / weights.now.stored_bytes > 1.5
    assert list(weights.now.codecs) == ["float_planes/4+base"]
    assert twice.taken.statistics.unchanged_bytes == MIB
    assert (twice.now.max_depth, twice.now.codecs["raw"].chunks) == (0, MIB // CHUNK)
    assert memory.taken.statistics.zero_bytes == MIB
    # A chunk that two files have counts in both, and once in the whole.
    assert report.now.chunks < sum(item.now.chunks for item in report.files)
    for field in fields(Statistics):
        if field.name in KINDS:
            total = sum(getattr(item.taken.statistics, field.name) for item in report.files)
            assert total == getattr(last.statistics, field.name)


def test_bases_of_other_checkpoints_are_counted_apart(store):
    first, second, third = series(store, 3)
    assert explain(store, first).base_chunks == 0
    weights = 2 * MIB // CHUNK
    own = unique_chunks(store, third)
    needed = {}
    for place, _ in own.values():
        base = place.base
        while base:
            needed[base] = store._context.index.lookup([base])[0]
            base = needed[base].base
    others = {chunk_id: place for chunk_id, place in needed.items() if chunk_id not in own}
    assert len(others) >= weights
    report = explain(store, third)
    assert (report.base_chunks, report.base_bytes) == (
        len(others),
        sum(place.stored for place in others.values()),
    )
    # Removing the others changes nothing about it.
    store.remove(first.id)
    store.remove(second.id)
    store.gc()
    store.gc()
    again = explain(store, store.checkpoint("step2"))
    assert (again.now, again.base_bytes) == (report.now, report.base_bytes)


def test_a_checkpoint_that_has_lost_chunks_is_explained_as_far_as_it_goes(store):
    (checkpoint,) = series(store, 1)
    whole = explain(store, checkpoint).now
    later = put(store, {"weights": trained(floats(2 * MIB, 1), 1)}, "later", checkpoint)
    assert later.statistics.delta_bytes == 2 * MIB
    context = store._context
    (weights,) = checkpoint.files["weights"].segments
    chunk_ids = context.reader.segment(weights).chunk_ids()
    lost = {chunk_ids[0]}
    (recipe,) = checkpoint.files["twice"].segments
    forget(context.index, lost | {recipe.id})
    report = explain(store, checkpoint)
    _, twice, weights = report.files
    assert twice.now is None
    assert weights.now.lost_chunks == 1
    assert weights.now.chunks == 2 * MIB // CHUNK - 1
    assert report.now.lost_chunks == 1
    assert report.now.stored_bytes < whole.stored_bytes
    # What rests on a lost chunk is lost as well.
    assert explain(store, later).now.lost_chunks == 1


def forget(index, chunk_ids):
    """Remove chunks from the index alone, as a lost pack would."""

    def action(txn):
        for chunk_id in chunk_ids:
            assert txn.delete(chunk_id, db=index._chunks)

    index._write(action)


def test_chains_that_never_end_are_lost_not_followed_for_ever(store):
    def place(base=b""):
        return Place(1, 0, 64, 10, 20, Codec.FLOAT_PLANES, 4, 1 if base else 0, base)

    chains = Chains(store._context.index)
    one, two = b"1" * 32, b"2" * 32
    chains.bases = {one: place(two), two: place(one), b"3" * 32: place()}
    assert chains.depths([place(one), place(b"3" * 32), place(), None]) == [LOST, 1, 0, LOST]
    assert chains.depths([place(b"4" * 32)]) == [LOST]


def test_the_statistics_of_the_store_count_every_chunk_by_codec_and_depth(store):
    made = series(store, DEPTH_LIMIT + 2)
    chunks = {}
    recipes = set()
    for checkpoint in made:
        chunks |= unique_chunks(store, checkpoint)
        recipes |= {ref.id for entry in checkpoint.files.values() for ref in entry.segments}
    stats = store.stats()
    assert stats.unique_chunks == len(chunks)
    assert {name: item.chunks for name, item in stats.codecs.items()} == Counter(
        coding_name(place) for place, _ in chunks.values()
    )
    assert stats.codecs["float_planes/4+base"].raw_bytes >= 2 * MIB * DEPTH_LIMIT
    assert stats.recipes.chunks == len(recipes)
    by_depth = Counter(depth for _, depth in chunks.values())
    assert {item.depth: item.chunks for item in stats.depths} == by_depth
    assert set(by_depth) == set(range(DEPTH_LIMIT + 1))
    for item in stats.depths:
        same = [place for place, depth in chunks.values() if depth == item.depth]
        assert item.raw_bytes == sum(place.raw for place in same)
        assert item.stored_bytes == sum(place.stored for place in same)
    assert [line.parent for line in stats.checkpoints] == ["", *(item.id for item in made[:-1])]
    assert [line.statistics for line in stats.checkpoints] == [item.statistics for item in made]


def test_a_difference_says_how_it_is_stored(store):
    weights = floats(2 * MIB, 1)
    memory = noise(MIB, 2) + bytes(MIB) + noise(MIB, 3)
    first = put(store, {"weights": weights, "memory": memory, "s": b"1"}, "a")
    changed = bytearray(memory)
    changed[0:CHUNK] = memory[CHUNK : 2 * CHUNK]
    changed[2 * CHUNK : 3 * CHUNK] = bytes(CHUNK)
    changed[3 * CHUNK : 4 * CHUNK] = noise(CHUNK, 4)
    second = put(
        store, {"weights": trained(weights, 1), "memory": bytes(changed), "s": b"2", "t": b"33"}, "b", first
    )
    found = {item.name: item for item in store.diff("a", "b")}
    item = found["weights"]
    assert (item.changed_bytes, item.delta_bytes, item.alone_bytes) == (2 * MIB, 2 * MIB, 0)
    assert item.stored_bytes == second.figures["weights"].statistics.stored_bytes < MIB
    item = found["memory"]
    assert item.changed_bytes == 3 * CHUNK
    assert (item.moved_bytes, item.zero_bytes, item.alone_bytes) == (CHUNK, CHUNK, CHUNK)
    assert (item.new_bytes, item.stored_bytes) == (CHUNK, CHUNK)
    assert item.ranges == ((0, CHUNK), (2 * CHUNK, 2 * CHUNK))
    assert (found["s"].alone_bytes, found["s"].stored_bytes) == (1, 1)
    assert (found["t"].change, found["t"].stored_bytes) == (Change.ADDED, 2)
    for item in found.values():
        kinds = (item.zero_bytes, item.moved_bytes, item.delta_bytes, item.other_delta_bytes)
        assert sum(kinds) + item.alone_bytes == item.changed_bytes


def test_differences_to_a_sibling_are_told_from_differences_to_the_older_checkpoint(store):
    weights = floats(2 * MIB, 1)
    root = put(store, {"w": weights}, "root")
    one = put(store, {"w": trained(weights, 1)}, "one", root)
    put(store, {"w": trained(weights, 2)}, "two", root)
    put(store, {"w": trained(one.read("w"), 3)}, "three", one)
    other = put(store, {"w": floats(2 * MIB, 9)}, "other")
    put(store, {"w": trained(other.read("w"), 4)}, "of-other", other)

    def kinds(a, b):
        (item,) = store.diff(a, b)
        return (item.delta_bytes, item.other_delta_bytes, item.alone_bytes)

    assert kinds("one", "three") == (2 * MIB, 0, 0)
    # Coded on what the older one rests on, too.
    assert kinds("one", "two") == (2 * MIB, 0, 0)
    assert kinds("root", "of-other") == (0, 2 * MIB, 0)
    assert kinds("one", "root") == (0, 0, 2 * MIB)


def test_zeros_are_equal_however_recipes_divide_them(store):
    size = 8 * MIB
    put(store, {"f": noise(CHUNK, 1) + bytes(size)}, "a")
    put(store, {"f": noise(CHUNK, 1) + bytes(CHUNK) + noise(CHUNK, 2) + bytes(size - 2 * CHUNK)}, "b")
    (item,) = store.diff("a", "b")
    assert item.ranges == ((2 * CHUNK, CHUNK),)
    assert (item.changed_bytes, item.alone_bytes, item.zero_bytes) == (CHUNK, CHUNK, 0)
    (item,) = store.diff("b", "a")
    assert item.ranges == ((2 * CHUNK, CHUNK),)
    assert (item.changed_bytes, item.zero_bytes, item.stored_bytes) == (CHUNK, CHUNK, 0)


def test_buffer_objects_are_matched_and_named_by_what_they_are(store):
    size = MIB

    def bo(handle, address):
        return BufferObject(0x1A2B, handle, address, size, 0x20)

    weights, cache = floats(size, 1), floats(size, 2)
    first = put(
        store,
        {"bo-1": weights, "bo-2": cache},
        "a",
        bos={"bo-1": bo(1, 0x1000_0000), "bo-2": bo(2, 0x2000_0000)},
    )
    # The handles are exchanged, the addresses tell which is which.
    second = put(
        store,
        {"bo-1": cache, "bo-2": trained(weights, 1)},
        "b",
        first,
        bos={"bo-1": bo(1, 0x2000_0000), "bo-2": bo(2, 0x1000_0000)},
    )
    found = {item.name: item for item in store.diff("a", "b")}
    assert list(found) == ["bo-1", "bo-2"]
    assert (found["bo-1"].change, found["bo-1"].name_a) == (Change.EQUAL, "bo-2")
    assert (found["bo-2"].delta_bytes, found["bo-2"].name_a) == (size, "bo-1")
    assert found["bo-2"].bo == second.files["bo-2"].bo == bo(2, 0x1000_0000)
    report = explain(store, second)
    assert [item.entry.bo for item in report.files] == [bo(1, 0x2000_0000), bo(2, 0x1000_0000)]


def test_long_recipes_are_explained_segment_by_segment(store):
    count = SEGMENT_ENTRIES + 10
    put(
        store, {"f": b"".join(number.to_bytes(8, "little") * (CHUNK // 8) for number in range(1, count))}, "t"
    )
    checkpoint = store.checkpoint("t")
    assert len(checkpoint.files["f"].segments) == 2
    report = explain(store, checkpoint)
    assert report.now.chunks == report.files[0].now.chunks == count - 1
