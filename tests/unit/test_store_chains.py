"""Chunks coded against others, these against others again: chains that are short, whole as long as anybody
needs them, decoded once, and named with all that they hurt when one of them is lost or a lie."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import pytest

import gpuimg
from gpuimg.errors import DamagedError, MissingObjectError
from gpuimg.store import codec
from gpuimg.store.bases import DEPTH_LIMIT
from gpuimg.store.codec import ZSTD
from gpuimg.store.hashing import identify
from gpuimg.store.pack import MAX_CHAIN
from gpuimg.store.reports import FaultKind
from tests.fixtures.incremental import (
    Crafted,
    chain,
    chunk_ids,
    drifted,
    flip,
    in_memory,
    location,
    needed,
    put,
    restored,
    stored,
    take,
)
from tests.fixtures.store_data import KIB, MIB, floats, noise

CHUNK = 64 * KIB
STEPS = 12


@pytest.fixture
def tmp_path(tmp_path):
    with in_memory(tmp_path) as folder:
        yield folder


@pytest.fixture
def store(tmp_path):
    with gpuimg.init_store(tmp_path / "store", chunk_size=CHUNK) as opened:
        yield opened


def steps(count, size=MIB + 4, seed=1):
    """The numbers of a file after every step of a training."""
    data = [floats(size, seed)]
    while len(data) < count:
        data.append(drifted(data[-1], seed + len(data)))
    return data


def series(store, contents, name="bo"):
    """Checkpoints of these contents, each the parent of the next."""
    made = []
    for data in contents:
        made.append(take(store, {name: data}, parent=made[-1] if made else None))
    return made


def depths(store, checkpoint, name="bo"):
    return [len(chain(store, chunk_id)) - 1 for chunk_id in chunk_ids(store, checkpoint, name)]


def packs(store):
    return set((store.path / "packs").rglob("*.pack"))


def recipes(store):
    return {
        ref.id
        for checkpoint in store.checkpoints()
        for entry in checkpoint.files.values()
        for ref in entry.segments
    }


def offset_of(store, checkpoint, chunk_id, name="bo"):
    return CHUNK * chunk_ids(store, checkpoint, name).index(chunk_id)


def named(report):
    """What a report says is hurt: checkpoint, file, offset."""
    return {(fault.checkpoint, fault.file, fault.offset) for fault in report.faults}


# How long they become


def test_chains_stay_short_and_every_step_comes_back(store, tmp_path):
    contents = steps(STEPS)
    made = series(store, contents)
    for checkpoint, data in zip(made, contents, strict=True):
        assert restored(checkpoint) == {"bo": data}
        assert max(depths(store, checkpoint)) <= DEPTH_LIMIT
        checkpoint.export(tmp_path / checkpoint.id)
        assert (tmp_path / checkpoint.id / "bo").read_bytes() == data
    assert {checkpoint.statistics.delta_bytes for checkpoint in made[1:]} == {MIB}
    assert depths(store, made[DEPTH_LIMIT]) == [DEPTH_LIMIT] * (MIB // CHUNK) + [0]
    assert not store.verify().faults


def test_a_chain_at_its_limit_goes_on_from_its_last_base(store):
    """Not from one that stands alone: the nearest base that keeps the limit is the most alike."""
    contents = steps(DEPTH_LIMIT + 3)
    made = series(store, contents)
    for checkpoint in made[DEPTH_LIMIT + 1 :]:
        for number, chunk_id in enumerate(chunk_ids(store, checkpoint, "bo")[:-1]):
            base = chain(store, chunk_id)[1]
            assert base == chunk_ids(store, made[DEPTH_LIMIT - 1], "bo")[number]


def test_a_chunk_back_at_what_it_was_is_no_new_chunk(store):
    contents = steps(3)
    made = series(store, [*contents, contents[0], contents[1]])
    assert [checkpoint.statistics.new_chunks for checkpoint in made[3:]] == [0, 0]
    assert restored(made[3]) == {"bo": contents[0]}


# gc


def test_gc_keeps_the_bases_that_are_needed_and_no_others(store):
    contents = steps(STEPS)
    made = series(store, contents)
    for checkpoint in made[:-1]:
        store.remove(checkpoint.id)
    store.gc()
    left = needed(store, made[-1])
    assert len(left) == (MIB // CHUNK) * (DEPTH_LIMIT + 1) + 1
    # A pack is written by one session: it is needed whole, or not at all.
    garbage = stored(store) - left - recipes(store)
    assert all(len(store._context.reader.chunk(chunk_id)) < 4 * KIB for chunk_id in garbage), "old recipes"
    assert restored(store.checkpoint(made[-1].id)) == {"bo": contents[-1]}
    assert not store.verify().faults
    store.remove(made[-1].id)
    store.gc()
    assert not packs(store) and not stored(store)


def test_bases_go_with_their_last_dependant(store):
    contents = steps(3)
    made = series(store, contents)
    store.remove(made[0].id)
    store.gc()
    assert needed(store, made[2]) <= stored(store)
    store.remove(made[2].id)
    store.gc()
    first = set(chunk_ids(store, made[1], "bo"))
    assert first <= stored(store)
    assert restored(made[1]) == {"bo": contents[1]}
    store.remove(made[1].id)
    store.gc()
    assert not packs(store)


def test_any_checkpoint_of_a_series_may_be_the_only_one_left(tmp_path):
    contents = steps(6, size=256 * KIB)
    for kept in range(len(contents)):
        with gpuimg.init_store(tmp_path / str(kept), chunk_size=CHUNK) as store:
            made = series(store, contents)
            for number, checkpoint in enumerate(made):
                if number != kept:
                    store.remove(checkpoint.id)
            store.gc()
            assert restored(made[kept]) == {"bo": contents[kept]}
            assert not store.verify().faults


def test_a_gc_that_rewrites_packs_leaves_chains_whole(store, monkeypatch):
    """In the pack of every step lies noise that nobody needs any more."""
    monkeypatch.setattr(gpuimg.store.ingest, "cores", lambda: 1)
    contents = steps(DEPTH_LIMIT + 1)
    made = []
    for number, data in enumerate(contents):
        files = {"bo": data, "ballast": noise(2 * MIB, 100 + number)}
        take(store, files, parent=made[-1] if made else None, tag=f"with-{number}")
        made.append(take(store, {"bo": data}, parent=made[-1] if made else None))
    for number in range(len(contents)):
        store.remove(f"with-{number}")
    before = packs(store)
    report = store.gc()
    assert report.rewritten_packs == len(contents)
    assert not packs(store) & before
    assert depths(store, made[-1])[0] == DEPTH_LIMIT
    for checkpoint, data in zip(made, contents, strict=True):
        assert restored(store.checkpoint(checkpoint.id)) == {"bo": data}
    assert not store.verify().faults


def test_what_gc_leaves_behind_is_never_taken_for_a_chunk_that_can_be_had(store, monkeypatch):
    """A difference that nobody needs may outlive its base in a pack that is needed for something else."""
    monkeypatch.setattr(gpuimg.store.ingest, "cores", lambda: 1)
    old, kept = floats(MIB, 1), noise(3 * MIB, 2)
    new = drifted(old, 3)
    first = take(store, {"bo": old})
    second = take(store, {"bo": new, "kept": kept}, parent=first)
    take(store, {"kept": kept}, tag="kept")
    orphans = set(chunk_ids(store, second, "bo"))
    store.remove(first.id)
    store.remove(second.id)
    assert store.gc().deleted_packs
    assert orphans <= stored(store), "otherwise this tests nothing"
    assert not store.verify().faults
    for parent in (None, store.checkpoint("kept")):
        again = take(store, {"bo": new}, parent=parent)
        assert restored(again) == {"bo": new}
    assert not store.verify().faults
    path = store.path
    store.close()
    gpuimg.repair_store(path)
    with gpuimg.open_store(path) as opened:
        assert restored(opened.checkpoint(again.id)) == {"bo": new}
        assert not opened.verify().faults


# Beside writers


@pytest.mark.parametrize("with_parent", [True, False])
def test_differences_that_an_open_session_reuses_come_back_from_the_trash_with_their_bases(
    store, with_parent
):
    contents = steps(3)
    made = series(store, contents)
    with store.ingest(parent=made[-1] if with_parent else None) as session:
        put(session, {"bo": contents[-1]})
        session.workers.drain()
        for checkpoint in made:
            store.remove(checkpoint.id)
        report = store.gc()
        assert report.condemned_packs == report.waiting_packs > 0
        assert not packs(store)
        last = session.commit()
    assert last.statistics.new_chunks == 0
    assert restored(last) == {"bo": contents[-1]}
    assert depths(store, last)[0] == min(2, DEPTH_LIMIT)
    assert not store.verify().faults
    store.gc()
    assert restored(last) == {"bo": contents[-1]}


def test_bases_that_an_open_session_has_coded_against_come_back_from_the_trash(store):
    contents = steps(3)
    made = series(store, contents[:2])
    with store.ingest(parent=made[-1]) as session:
        put(session, {"bo": contents[2]})
        session.workers.drain()
        for checkpoint in made:
            store.remove(checkpoint.id)
        assert store.gc().waiting_packs
        last = session.commit()
    assert last.statistics.delta_bytes == MIB
    assert restored(last) == {"bo": contents[2]}
    assert not store.verify().faults
    store.gc()
    assert restored(last) == {"bo": contents[2]}


def test_a_parent_removed_before_the_first_byte_came(store):
    contents = steps(2)
    first = take(store, {"bo": contents[0]})
    with store.ingest(parent=first) as session:
        store.remove(first.id)
        store.gc()
        put(session, {"bo": contents[1]})
        last = session.commit()
    assert restored(last) == {"bo": contents[1]}
    assert not store.verify().faults


# Damage


def test_a_damaged_base_is_named_with_every_place_that_it_hurts(store):
    contents = steps(4)
    made = series(store, contents)
    hurt = chunk_ids(store, made[1], "bo")[5]
    flip(store, hurt)
    report = store.verify()
    assert {fault.kind for fault in report.faults} == {FaultKind.DAMAGED_CHUNK}
    assert named(report) == {(checkpoint.id, "bo", 5 * CHUNK) for checkpoint in made[1:]}
    assert all(fault.what and fault.remedy for fault in report.faults)
    for checkpoint in made[1:]:
        assert named(store.verify(checkpoint.id)) == {(checkpoint.id, "bo", 5 * CHUNK)}
    assert not store.verify(made[0].id).faults


def test_a_lost_base_is_named_with_every_place_that_it_hurts(store):
    contents = steps(4)
    made = series(store, contents)
    chunks = chunk_ids(store, made[1], "bo")
    lost = location(store, chunks[3])[0]
    numbers = [number for number, chunk in enumerate(chunks) if location(store, chunk)[0] == lost]
    # The last chunk is too short to be worth a difference: it hurts its own checkpoint alone.
    shared = [number for number in numbers if number < MIB // CHUNK]
    lost.unlink()
    path = store.path
    store.close()
    with gpuimg.open_store(path) as opened:
        for report in (opened.verify(), opened.verify(quick=True)):
            places = {place for place in named(report) if place[0] != made[1].id}
            assert places == {
                (checkpoint.id, "bo", number * CHUNK) for checkpoint in made[2:] for number in shared
            }
            assert {fault.kind for fault in report.faults} <= {
                FaultKind.MISSING_CHUNK,
                FaultKind.DAMAGED_RECIPE,
            }
        assert not opened.verify(made[0].id).faults
        base = chunks[shared[0]].hex()[:16]
        told = [fault.what for fault in opened.verify().faults if fault.checkpoint == made[2].id]
        assert any(base in what for what in told)


@pytest.mark.parametrize("lose", [False, True], ids=["damaged", "lost"])
def test_reading_a_chunk_whose_base_is_gone_says_which_and_where(store, lose, tmp_path):
    contents = steps(3)
    made = series(store, contents)
    chunk, base, *_ = chain(store, chunk_ids(store, made[2], "bo")[4])
    if lose:
        path = store.path
        location(store, base)[0].unlink()
        store.close()
        store = gpuimg.open_store(path)
    else:
        flip(store, base)
    with store:
        checkpoint = store.checkpoint(made[2].id)
        readers = [
            lambda: checkpoint.read("bo", 4 * CHUNK, 10),
            lambda: checkpoint.read("bo"),
            lambda: b"".join(bytes(part) for part in checkpoint.stream("bo")),
            lambda: checkpoint.export(tmp_path / "out"),
        ]
        for read in readers:
            with pytest.raises((DamagedError, MissingObjectError)) as caught:
                read()
            assert type(caught.value) is (MissingObjectError if lose else DamagedError)
            assert checkpoint.id[:12] in caught.value.what
            assert "file bo at offset" in caught.value.what
            assert caught.value.remedy
            assert "\n" not in str(caught.value)
        with pytest.raises((DamagedError, MissingObjectError)) as caught:
            checkpoint.read("bo", 4 * CHUNK, 10)
        assert chunk.hex()[:16] in caught.value.what
        assert base.hex()[:16] in caught.value.what
        assert f"offset {4 * CHUNK}:" in caught.value.what
        assert caught.value.offset == 4 * CHUNK


def test_repair_saves_differences_from_a_damaged_pack(store):
    contents = steps(3)
    made = series(store, contents)
    hurt = chunk_ids(store, made[1], "bo")[5]
    path, _, _ = location(store, hurt)
    beside = [chunk for chunk in chunk_ids(store, made[1], "bo") if location(store, chunk)[0] == path]
    flip(store, hurt)
    # The table of contents is gone as well: the objects must be found by a scan.
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 100)
    root = store.path
    store.close()
    report = gpuimg.repair_store(root)
    assert report.rebuilt_packs == 1
    assert report.salvaged_objects >= len(beside) - 1
    assert set(report.hurt) == {made[1].id, made[2].id}
    with gpuimg.open_store(root) as opened:
        assert named(opened.verify()) == {(checkpoint.id, "bo", 5 * CHUNK) for checkpoint in made[1:]}
        for checkpoint, data in zip(made, contents, strict=True):
            found = opened.checkpoint(checkpoint.id)
            assert found.read("bo", 0, 5 * CHUNK) == data[: 5 * CHUNK]
            assert found.read("bo", 6 * CHUNK) == data[6 * CHUNK :]


def test_repairing_twice_rebuilds_nothing_twice(store):
    contents = steps(3)
    made = series(store, contents)
    location(store, chunk_ids(store, made[0], "bo")[0])[0].unlink()
    root = store.path
    store.close()
    gpuimg.repair_store(root)
    before = {path.name for path in root.rglob("*.pack")}
    report = gpuimg.repair_store(root)
    assert report.rebuilt_packs == 0
    assert {path.name for path in root.rglob("*.pack")} == before


@pytest.mark.parametrize("keep", ["with index", "without index"])
def test_repair_of_a_whole_store_changes_nothing(store, keep):
    contents = steps(4)
    made = series(store, contents)
    root = store.path
    store.close()
    if keep == "without index":
        for path in (root / "index").iterdir():
            path.unlink()
    before = {path.name for path in root.rglob("*.pack")}
    report = gpuimg.repair_store(root)
    assert (report.rebuilt_packs, report.lost_objects, report.hurt) == (0, 0, ())
    assert {path.name for path in root.rglob("*.pack")} == before
    with gpuimg.open_store(root) as opened:
        for checkpoint, data in zip(made, contents, strict=True):
            assert restored(opened.checkpoint(checkpoint.id)) == {"bo": data}


# What reading costs


@pytest.fixture
def decoded(monkeypatch):
    """How many times payloads were decoded."""
    counts = Counter()
    real = codec.decode

    def decode(number, payload, *arguments):
        counts[bytes(payload)] += 1
        return real(number, payload, *arguments)

    monkeypatch.setattr(codec, "decode", decode)
    return counts


@pytest.mark.parametrize("size", [MIB, 5 * MIB])
def test_a_read_decodes_every_chunk_and_every_base_once(store, decoded, size):
    contents = steps(DEPTH_LIMIT + 3, size=size)
    made = series(store, contents)
    for checkpoint, data in zip(made, contents, strict=True):
        decoded.clear()
        assert checkpoint.read("bo") == data
        assert len(decoded) == len(needed(store, checkpoint))
        assert set(decoded.values()) == {1}


def test_a_base_that_many_chunks_share_is_decoded_once_for_many(store, decoded):
    """Bases are shared among what is decoded together, a megabyte: they are not kept longer."""
    chunk = floats(CHUNK, 1)
    count = 48
    first = take(store, {"bo": chunk * count})
    assert len(set(chunk_ids(store, first, "bo"))) == 1
    data = b"".join(drifted(chunk, 2 + number) for number in range(count))
    second = take(store, {"bo": data}, parent=first)
    assert second.statistics.delta_bytes == len(data)
    decoded.clear()
    assert second.read("bo") == data
    assert sum(decoded.values()) <= count + 2 * (len(data) // MIB)


def test_many_small_differences_to_large_bases_need_little_memory(store):
    """One run of a file, 256 chunks of 4 KiB, each against its own base of 2 MiB."""
    crafted = Crafted(store)
    chunks = []
    data = []
    for number in range(256):
        base = floats(4 * KIB, number) + bytes(2 * MIB - 4 * KIB)
        crafted.coded(base, ZSTD)
        data.append(drifted(base[: 4 * KIB], number))
        chunks.append((crafted.delta(data[-1], base), 4 * KIB))
    checkpoint = crafted.checkpoint({"bo": chunks})
    checkpoint.read("bo", 0, 1)
    tracemalloc.start()
    try:
        assert checkpoint.read("bo") == b"".join(data)
        assert next(iter(checkpoint.stream("bo"))) == b"".join(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24 * MIB
    assert not store.verify().faults


# Lies


def crafted_chain(store, length, size=CHUNK):
    """A checkpoint whose only chunk rests on so many bases; its bytes."""
    crafted = Crafted(store)
    contents = steps(length + 1, size=size)
    crafted.alone(contents[0])
    for base, data in itertools.pairwise(contents):
        crafted.delta(data, base)
    return crafted.checkpoint({"bo": [(identify(contents[-1]), size)]}), contents[-1]


def test_the_longest_chain_that_is_allowed_is_read(store):
    checkpoint, data = crafted_chain(store, MAX_CHAIN)
    assert restored(checkpoint) == {"bo": data}
    assert not store.verify().faults
    # What goes on from it keeps to the writers' own limit again.
    after = take(store, {"bo": drifted(data, 99)}, parent=checkpoint)
    assert restored(after) == {"bo": drifted(data, 99)}
    assert max(depths(store, after)) <= DEPTH_LIMIT


def test_a_chain_beyond_what_is_allowed_is_refused(store):
    checkpoint, data = crafted_chain(store, MAX_CHAIN + 1)
    refuses(store, checkpoint, data)


def test_a_very_long_chain_is_refused(store):
    checkpoint, data = crafted_chain(store, 1200, size=2 * KIB)
    refuses(store, checkpoint, data)


@pytest.mark.parametrize("length", [1, 2, 5, 8, 9])
def test_a_cycle_of_bases_is_refused(store, length):
    crafted = Crafted(store)
    contents = [floats(CHUNK, number) for number in range(length)]
    for number, data in enumerate(contents):
        base = contents[(number + 1) % length]
        # A chunk against itself would be all zeros; the lie is in the name of the base.
        crafted.delta(data, drifted(data, 1), identify(base))
    checkpoint = crafted.checkpoint({"bo": [(identify(contents[0]), CHUNK)]})
    refuses(store, checkpoint, contents[0])


def refuses(store, checkpoint, data):
    """Every operation comes to an end and says what is wrong, and new checkpoints do not suffer."""
    with pytest.raises(DamagedError) as caught:
        checkpoint.read("bo")
    assert "does not end" in caught.value.what
    assert "file bo at offset 0" in caught.value.what
    for report in (store.verify(), store.verify(quick=True), store.verify(checkpoint.id)):
        assert (checkpoint.id, "bo", 0) in named(report)
    again = [take(store, {"bo": data}), take(store, {"bo": data}, parent=checkpoint)]
    changed = take(store, {"bo": drifted(data, 50)}, parent=checkpoint)
    for made in again:
        assert restored(made) == {"bo": data}
    assert restored(changed) == {"bo": drifted(data, 50)}
    with store.ingest(parent=checkpoint) as session:
        put(session, {"bo": drifted(data, 51)})
        # It will look everything up again.
        store.remove(changed.id)
        store.gc()
        last = session.commit()
    assert restored(last) == {"bo": drifted(data, 51)}
    root = store.path
    store.close()
    gpuimg.repair_store(root)
    with gpuimg.open_store(root) as opened:
        assert restored(opened.checkpoint(last.id)) == {"bo": drifted(data, 51)}
        assert restored(opened.checkpoint(again[0].id)) == {"bo": data}


@pytest.mark.parametrize("size", [4, CHUNK // 2 + 4, CHUNK - 4, CHUNK + 4, 2 * CHUNK, 2 * MIB])
def test_a_base_may_be_longer_or_shorter(store, size):
    crafted = Crafted(store)
    data, base = floats(CHUNK, 1), floats(size, 2)
    shared = min(size, CHUNK)
    data = drifted(base[:shared], 3) + data[shared:]
    crafted.alone(base)
    checkpoint = crafted.checkpoint({"bo": [(crafted.delta(data, base), CHUNK)]})
    assert restored(checkpoint) == {"bo": data}
    assert not store.verify().faults
    after = take(store, {"bo": drifted(data, 4)}, parent=checkpoint)
    assert restored(after) == {"bo": drifted(data, 4)}


def test_a_base_that_is_not_there_is_missed_by_name(store):
    crafted = Crafted(store)
    data, base = floats(CHUNK, 1), drifted(floats(CHUNK, 1), 2)
    other = noise(CHUNK, 3)
    crafted.alone(other)
    chunks = [(identify(other), CHUNK), (crafted.delta(data, base), CHUNK)]
    checkpoint = crafted.checkpoint({"bo": chunks})
    with pytest.raises(MissingObjectError) as caught:
        checkpoint.read("bo")
    for part in (identify(data).hex()[:16], identify(base).hex()[:16], f"file bo at offset {CHUNK}:"):
        assert part in caught.value.what
    assert checkpoint.read("bo", 0, CHUNK) == other
    assert named(store.verify()) == {(checkpoint.id, "bo", CHUNK)}
    # Taken again, the chunk is stored anew and the older checkpoint is whole as well.
    for parent in (checkpoint, None):
        assert restored(take(store, {"bo": other + data}, parent=parent)) == {"bo": other + data}
    assert restored(checkpoint) == {"bo": other + data}
    assert not store.verify().faults


def test_a_base_that_is_another_chunk_than_the_writer_had_is_found_out(store):
    """Base and payload are sound, and do not belong together."""
    crafted = Crafted(store)
    data, base, wrong = floats(CHUNK, 1), drifted(floats(CHUNK, 1), 2), floats(CHUNK, 3)
    crafted.alone(wrong)
    checkpoint = crafted.checkpoint({"bo": [(crafted.delta(data, base, identify(wrong)), CHUNK)]})
    with pytest.raises(DamagedError):
        checkpoint.read("bo")
    assert named(store.verify()) == {(checkpoint.id, "bo", 0)}
    second = take(store, {"bo": drifted(data, 4)}, parent=checkpoint)
    assert restored(second) == {"bo": drifted(data, 4)}
