"""Which file of the parent a file of a new checkpoint is compared with."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import gpuimg
from gpuimg.store.model import BufferObject, FileEntry, Layout, SegmentRef
from gpuimg.store.parent import Matcher
from tests.fixtures.incremental import drifted, in_memory, lengths, take
from tests.fixtures.store_data import KIB, MIB, floats

BO = BufferObject(gpu_id=0x1A2B, handle=7, address=0x7F0000000000, size=1 << 20, flags=3)


def file(name, bo=None, *, small=False):
    segments = () if small else (SegmentRef(bytes(32), 1 << 20),)
    return FileEntry(name, 1 << 20, Layout.FIXED, b"", segments, bo)


def matched(parents, wanted):
    """Names of the parent's files by those of the new ones, which are asked for in the given order."""
    matcher = Matcher(parents)
    found = {}
    for name, bo in wanted:
        entry = matcher.match(name, bo)
        found[name] = entry and entry.name
    return found


def by_name(parents, wanted):
    return matched([file(name) for name in parents], [(name, None) for name in wanted])


# BOs


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"handle": 99},
        {"address": 0x7FFF00000000},
        {"handle": 99, "address": 0x7FFF00000000},
        {"gpu_id": 0x9F00},
        {"gpu_id": 0x9F00, "handle": 99, "address": 0x7FFF00000000},
    ],
    ids=["the same", "handle", "address", "handle and address", "gpu", "all"],
)
def test_a_bo_is_found_by_what_is_left_of_its_identity(change):
    assert matched([file("bo-7", BO)], [("bo-99", replace(BO, **change))]) == {"bo-99": "bo-7"}


@pytest.mark.parametrize("change", [{"size": 2 << 20}, {"flags": 4}], ids=["size", "flags"])
def test_a_bo_of_another_kind_is_not_compared(change):
    assert matched([file("bo-7", BO)], [("bo-7", replace(BO, **change))]) == {"bo-7": None}


def test_among_bos_of_equal_size_the_whole_identity_decides_in_any_order():
    bos = {f"bo-{n}": replace(BO, handle=n, address=0x1000000 * n) for n in range(1, 5)}
    parents = [file(name, bo) for name, bo in bos.items()]
    for order in itertools.permutations(bos):
        assert matched(parents, [(name, bos[name]) for name in order]) == {name: name for name in bos}


def test_a_surer_reason_wins_whoever_comes_first():
    """One BO is as it was, of one the handle moved, one is new: all of one size."""
    kept, moved = replace(BO, handle=1, address=1 << 30), replace(BO, handle=2, address=2 << 30)
    parents = [file("kept", kept), file("moved", moved)]
    wanted = {
        "kept": kept,
        "moved": replace(moved, handle=50),
        "new": replace(BO, handle=60, address=6 << 30),
    }
    for order in itertools.permutations(wanted):
        found = matched(parents, [(name, wanted[name]) for name in order])
        assert (found["kept"], found["moved"]) == ("kept", "moved")


def test_swapped_addresses_are_no_swapped_bos_when_handles_say_nothing_else():
    """Where address and handle contradict each other, the address counts: it is what the process knows."""
    one, two = replace(BO, handle=1, address=1 << 30), replace(BO, handle=2, address=2 << 30)
    parents = [file("one", one), file("two", two)]
    wanted = [("a", replace(one, handle=2)), ("b", replace(two, handle=1))]
    assert matched(parents, wanted) == {"a": "one", "b": "two"}


def test_all_bos_of_a_process_that_was_restored_elsewhere_find_theirs():
    """Other GPUs, other handles, the same addresses and sizes."""
    old = [replace(BO, handle=n, address=n << 30, size=(1 + n % 3) << 20) for n in range(1, 20)]
    new = [replace(bo, gpu_id=0x9F00, handle=100 + number) for number, bo in enumerate(old)]
    parents = [file(f"old-{number}", bo) for number, bo in enumerate(old)]
    found = matched(parents, [(f"new-{number}", bo) for number, bo in enumerate(new)])
    # Sizes are all that is left when the GPU has changed; the order decides between equal ones.
    sizes = {entry.name: entry.bo.size for entry in parents}
    assert [sizes[found[f"new-{number}"]] for number in range(19)] == [bo.size for bo in new]
    assert len(set(found.values())) == 19


def test_no_file_of_the_parent_is_given_twice_for_the_same_reason():
    parents = [file("bo-1", BO)]
    wanted = [(f"new-{n}", replace(BO, handle=10 + n, address=n << 20)) for n in range(3)]
    assert list(matched(parents, wanted).values()) == ["bo-1", None, None]
    twins = [("one", BO), ("two", BO)]
    assert list(matched(parents, twins).values()) == ["bo-1", None]


def test_bos_and_other_files_are_not_mixed_up():
    assert matched([file("bo-1.img", BO)], [("other", None)]) == {"other": None}
    assert matched([file("pages-1.img")], [("pages-1.img", BO)]) == {"pages-1.img": None}


# Names


def test_names_that_did_not_change_win_in_any_order():
    parents = ["pages-7.img", "pages-12.img", "pages-30.img"]
    for order in itertools.permutations(["pages-12.img", "pages-30.img", "pages-99.img"]):
        found = by_name(parents, order)
        assert (found["pages-12.img"], found["pages-30.img"]) == ("pages-12.img", "pages-30.img")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pages-7.img", "pages-12.img"),
        ("amdgpu-pages-100-1a2b.img", "amdgpu-pages-200-1a2b.img"),
        ("amdgpu-pages-100-1a2b.img", "amdgpu-pages-100-9f00.img"),
        ("amdgpu-pages-100-1a2b.img", "amdgpu-pages-200-c0de.img"),
        ("amdgpu-pages-100-abc.img", "amdgpu-pages-7-123.img"),
    ],
)
def test_names_whose_numbers_changed_are_known_by_the_rest(old, new):
    assert by_name([old], [new]) == {new: old}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pages-7.img", "pagemap-7.img"),
        ("pages-7.img", "amdgpu-pages-7-1a2b.img"),
        ("fs.img", "mm.img"),
        ("pages-shmem-1.img", "pages-1.img"),
    ],
)
def test_names_of_other_kinds_are_not_compared(old, new):
    assert by_name([old], [new]) == {new: None}


def test_of_two_gpus_each_is_compared_with_itself_when_the_pid_changed():
    parents = ["amdgpu-pages-100-1a2b.img", "amdgpu-pages-100-9f00.img"]
    for order in itertools.permutations(["amdgpu-pages-200-1a2b.img", "amdgpu-pages-200-9f00.img"]):
        found = by_name(parents, order)
        assert {new[-8:]: old[-8:] for new, old in found.items()} == {
            "1a2b.img": "1a2b.img",
            "9f00.img": "9f00.img",
        }


def test_of_two_processes_each_is_compared_with_itself_when_the_gpu_changed():
    parents = ["amdgpu-pages-100-1a2b.img", "amdgpu-pages-200-1a2b.img"]
    for order in itertools.permutations(["amdgpu-pages-100-9f00.img", "amdgpu-pages-200-9f00.img"]):
        found = by_name(parents, order)
        assert {new: old[13:16] for new, old in found.items()} == {new: new[13:16] for new in order}


def test_files_that_stand_in_the_manifest_are_not_given():
    assert matched([file("core-1.img", small=True)], [("core-1.img", None)]) == {"core-1.img": None}


def test_more_files_than_the_parent_had():
    found = by_name(["pages-1.img", "pages-2.img"], [f"pages-{n}.img" for n in range(3, 8)])
    assert sorted(filter(None, found.values())) == ["pages-1.img", "pages-2.img"]


# In a store


@pytest.fixture
def tmp_path(tmp_path):
    with in_memory(tmp_path) as folder:
        yield folder


@pytest.fixture
def store(tmp_path):
    with gpuimg.init_store(tmp_path / "store", chunk_size=64 * KIB) as opened:
        yield opened


def take_bos(store, bos, parent=None):
    with store.ingest(parent=parent) as session:
        for name, (bo, data) in bos.items():
            file = session.file(name, bo=bo)
            file.write(data)
            file.close()
        return session.commit()


def test_bos_are_remembered_and_matched_across_names(store):
    one, two = replace(BO, handle=1, address=1 << 30), replace(BO, handle=2, address=2 << 30)
    data = {1: floats(MIB, 1), 2: floats(MIB, 2)}
    first = take_bos(store, {"bo-1": (one, data[1]), "bo-2": (two, data[2])})
    assert first.files["bo-1"].bo == one
    # The names are the other way round, and one has a new handle.
    second = take_bos(store, {"bo-2": (one, data[1]), "bo-1": (replace(two, handle=9), data[2])}, first)
    assert second.statistics.unchanged_bytes == 2 * MIB
    assert second.read("bo-1") == data[2] and second.read("bo-2") == data[1]
    assert store.checkpoint(second.id).files["bo-1"].bo == replace(two, handle=9)


def test_a_bo_whose_name_says_another_layout_is_taken_for_itself(store):
    data = floats(MIB, 1)
    first = take_bos(store, {"pages-1.img": (BO, data)})
    assert set(lengths(store, first, "pages-1.img")) != {64 * KIB}
    for new in (data, drifted(data, 2)):
        second = take_bos(store, {"bo-1": (BO, new)}, first)
        assert second.read("bo-1") == new
        assert set(lengths(store, second, "bo-1")) == {64 * KIB}
        third = take_bos(store, {"pages-2.img": (BO, new)}, second)
        assert third.read("pages-2.img") == new
        assert set(lengths(store, third, "pages-2.img")) != {64 * KIB}


@pytest.mark.parametrize(
    "names", [("pages-7.img", "pages-12.img"), ("amdgpu-pages-1-1a2b.img", "amdgpu-pages-2-1a2b.img")]
)
def test_a_file_whose_name_changed_costs_nothing(store, names):
    data = floats(3 * MIB, 1)
    first = take(store, {names[0]: data})
    second = take(store, {names[1]: data}, parent=first)
    assert second.statistics.unchanged_bytes == len(data)
    assert second.statistics.new_bytes == 0
    assert second.read(names[1]) == data
