"""Any series of contents, taken one after the other as increments, comes back bit for bit, whatever is
removed, collected, reopened or repaired in between."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpuimg
from gpuimg.store import recipe
from gpuimg.store.bases import DEPTH_LIMIT
from gpuimg.store.choice import Profile
from gpuimg.store.chunking import MAX_PAGES
from tests.fixtures.incremental import WAYS, chain, chunk_ids, drifted, entries, in_memory, take
from tests.fixtures.store_data import KIB, MIB, PAGE, floats, noise

EXAMPLES = int(os.environ.get("GPUIMG_FUZZ_EXAMPLES", "25"))
LIMIT = 6 * MIB
NAMES = ["bo-1.bin", "pages-1.img", "amdgpu-pages-10-1a2b.img"]

seeds = st.integers(0, 2**16)
# Where in a file, and how much of it, in parts of 2^16; pages are what page images are made of.
shares = st.integers(0, 2**16)
units = st.sampled_from([1, 4, PAGE, 64 * KIB])


def filled(kind, size, seed):
    if kind == "zeros":
        return bytes(size)
    if kind == "pattern":
        return (b"%08d" % seed * (size // 8 + 1))[:size]
    if kind == "noise":
        return noise(size, seed)
    return floats(size, seed, kind)


contents = st.builds(
    filled,
    st.sampled_from(["float32", "bfloat16", "float64", "noise", "float32", "pattern", "zeros"]),
    st.sampled_from([MIB, 2 * MIB + 1, 3 * MIB + PAGE, 300_001, 4 * MIB, 70_000, 4097, 4096, 0]),
    seeds,
)


def region(data, at, length, unit):
    """A range of the data, from shares of 2^16, in whole units."""
    start = len(data) * at >> 16
    start -= start % unit
    end = start + max(unit, (len(data) >> 2) * length >> 16)
    end -= (end - start) % unit
    return start, min(end, len(data))


def drift(data, at, length, unit, seed):
    start, end = region(data, at, length, max(unit, 4))
    return data[:start] + drifted(data[start:end], seed, 1e-3) + data[end:]


def drift_all(data, at, length, unit, seed):  # noqa: ARG001
    return drifted(data, seed, 1e-5)


def overwrite(data, at, length, unit, seed):
    start, end = region(data, at, length, unit)
    return data[:start] + noise(end - start, seed) + data[end:]


def insert(data, at, length, unit, seed):
    start, end = region(data, at, length, unit)
    return (data[:start] + noise(end - start, seed) + data[start:])[:LIMIT]


def repeat(data, at, length, unit, seed):
    start, end = region(data, at, length, unit)
    to = len(data) * (seed & 0xFF) >> 8
    return (data[: to - to % unit] + data[start:end] + data[to - to % unit :])[:LIMIT]


def delete(data, at, length, unit, seed):  # noqa: ARG001
    start, end = region(data, at, length, unit)
    return data[:start] + data[end:]


def zero(data, at, length, unit, seed):  # noqa: ARG001
    start, end = region(data, at, length, unit)
    return data[:start] + bytes(end - start) + data[end:]


def swap(data, at, length, unit, seed):
    start, end = region(data, at, length, unit)
    rest = data[:start] + data[end:]
    to = len(rest) * (seed & 0xFF) >> 8
    to -= to % unit
    return rest[:to] + data[start:end] + rest[to:]


def truncate(data, at, length, unit, seed):  # noqa: ARG001
    return data[: region(data, at, length, unit)[0]]


def append(data, at, length, unit, seed):  # noqa: ARG001
    return (data + floats(max(unit, (length << 4)), seed))[:LIMIT]


EDITS = [drift, drift_all, insert, delete, swap, overwrite, repeat, zero, append, drift, truncate]
edits = st.tuples(st.sampled_from(EDITS), shares, shares, units, seeds)
steps = st.fixed_dictionaries(
    {
        "edits": st.lists(edits, min_size=1, max_size=3),
        # None: a full checkpoint; 0: the one before; others further back.
        "parent": st.sampled_from([0, 0, 0, 0, 1, 2, None]),
        "way": st.sampled_from(WAYS),
        "profile": st.sampled_from(list(Profile)),
        "then": st.sampled_from(["", "", "", "remove and collect", "reopen", "repair"]),
    }
)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(NAMES),
    chunk_size=st.sampled_from([64 * KIB, 256 * KIB, MIB]),
    segment=st.sampled_from([5, 4096]),
    first=contents,
    series=st.lists(steps, min_size=2, max_size=7),
)
def test_any_series_of_increments_comes_back(name, chunk_size, segment, first, series):
    with tempfile.TemporaryDirectory() as disk, in_memory(disk) as folder:
        usual, recipe.SEGMENT_ENTRIES = recipe.SEGMENT_ENTRIES, segment
        try:
            run(Path(folder), name, chunk_size, first, series)
        finally:
            recipe.SEGMENT_ENTRIES = usual


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    count=st.integers(100, 1200),
    seed=seeds,
    series=st.lists(
        st.tuples(
            st.lists(
                st.tuples(
                    st.sampled_from([insert, delete, swap, overwrite, drift, zero, repeat]),
                    shares,
                    shares,
                    seeds,
                ),
                min_size=1,
                max_size=4,
            ),
            st.sampled_from(WAYS),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_pages_that_come_go_and_change_come_back_in_chunks_of_whole_pages(count, seed, series):
    data = floats(count * PAGE, seed)
    with (
        tempfile.TemporaryDirectory() as disk,
        in_memory(disk) as folder,
        gpuimg.init_store(Path(folder) / "store", chunk_size=64 * KIB) as store,
    ):
        parent = take(store, {"pages-1.img": data})
        for changes, way in series:
            for edit, at, length, number in changes:
                data = edit(data, at, length, PAGE, number)
            parent = take(store, {"pages-1.img": data}, parent=parent, way=way)
            assert parent.read("pages-1.img") == data
            made = entries(store, parent, "pages-1.img") if parent.files["pages-1.img"].segments else []
            assert all(entry.length % PAGE == 0 for entry in made)
            assert all(entry.length <= MAX_PAGES * PAGE for entry in made if entry.id is not None)


def run(folder, name, chunk_size, data, series):
    store = gpuimg.init_store(folder / "store", chunk_size=chunk_size)
    try:
        made = [(take(store, {name: data}).id, data)]
        for step in series:
            for edit, *arguments in step["edits"]:
                data = edit(data, *arguments)
            back = step["parent"]
            parent = None if back is None or back >= len(made) else store.checkpoint(made[-1 - back][0])
            taken = take(store, {name: data}, parent=parent, way=step["way"], profile=step["profile"])
            made.append((taken.id, data))
            told = taken.statistics
            assert told.raw_bytes == len(data)
            assert len(data) == (
                told.inline_bytes
                + told.zero_bytes
                + told.unchanged_bytes
                + told.deduplicated_bytes
                + told.delta_bytes
                + told.coded_bytes
                + told.raw_stored_bytes
            )
            store = afterwards(store, step["then"], made)
            checkpoint = store.checkpoint(taken.id)
            assert checkpoint.read(name) == data
            if checkpoint.files[name].segments:
                depth = max(
                    (len(chain(store, chunk)) for chunk in chunk_ids(store, checkpoint, name)), default=1
                )
                assert depth <= DEPTH_LIMIT + 1
        for checkpoint_id, expected in made:
            assert store.checkpoint(checkpoint_id).read(name) == expected
        report = store.verify()
        assert not report.faults, report.faults
        for checkpoint_id, _ in made:
            store.remove(checkpoint_id)
        store.gc()
        assert not list((store.path / "packs").rglob("*.pack"))
    finally:
        store.close()


def afterwards(store, action, made):
    """Do something that must not matter."""
    if action == "remove and collect":
        if len(made) > 1:
            store.remove(made.pop(np.random.default_rng(len(made)).integers(len(made) - 1))[0])
        store.gc()
    elif action:
        path = store.path
        store.close()
        if action == "repair":
            report = gpuimg.repair_store(path)
            assert not report.hurt and not report.rebuilt_packs
        store = gpuimg.open_store(path)
    return store
