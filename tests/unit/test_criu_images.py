"""CRIU's image framing: what is right is read, what is wrong is refused without harm."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuimg._proto import criu_images_pb2 as pb
from gpuimg.criu import images
from gpuimg.criu.images import Process, dump_statistics, process_tree, records, restore_statistics
from gpuimg.errors import ImagesDirectoryError


def image(*messages: bytes, magic: tuple[int, ...] = (images.COMMON_MAGIC, images.PSTREE_MAGIC)) -> bytes:
    head = b"".join(struct.pack("<I", word) for word in magic)
    return head + b"".join(struct.pack("<I", len(message)) + message for message in messages)


def tree(*entries: tuple[int, int, list[int]]) -> bytes:
    messages = [pb.TreeEntry(pid=pid, ppid=ppid, threads=threads) for pid, ppid, threads in entries]
    return image(*(message.SerializeToString() for message in messages))


def core(comm: bytes) -> bytes:
    entry = pb.CoreEntry(task=pb.TaskCore(comm=comm))
    return image(entry.SerializeToString(), magic=(images.COMMON_MAGIC, images.CORE_MAGIC))


def test_the_tree_has_names_and_threads() -> None:
    files = {
        "pstree.img": tree((10, 0, [10, 11]), (12, 10, [12])),
        "core-10.img": core(b"train"),
        "core-12.img": core(b"\xffworker"),
    }
    assert process_tree(files.__getitem__) == [
        Process(10, 0, (10, 11), "train"),
        Process(12, 10, (12,), "\\xffworker"),
    ]


def test_a_process_without_a_core_image_has_no_name() -> None:
    assert process_tree({"pstree.img": tree((10, 0, [10]))}.__getitem__) == [Process(10, 0, (10,), "")]


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"pstree.img": b""},
        {"pstree.img": tree((10, 0, []))[:-1]},
        {"pstree.img": tree((10, 0, [])) + b"\x01"},
        {"pstree.img": image(b"\xff\xff\xff")},
        {"pstree.img": tree((10, 0, []), (10, 0, []))},
        {"pstree.img": tree((10, 0, []), (12, 11, []))},
        {"pstree.img": tree((10, 0, [])), "core-10.img": tree((10, 0, []))},
        {"pstree.img": image(magic=(images.SERVICE_MAGIC, images.STATS_MAGIC))},
    ],
)
def test_a_damaged_tree_is_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(ImagesDirectoryError):
        process_tree(files.__getitem__)


@pytest.mark.parametrize("length", [5, 1 << 31, 0xFFFFFFFF])
def test_a_length_beyond_the_file_is_refused_before_anything_is_read(length: int) -> None:
    data = struct.pack("<II", images.COMMON_MAGIC, images.PSTREE_MAGIC) + struct.pack("<I", length) + b"abcd"
    with pytest.raises(ImagesDirectoryError, match=r"pstree\.img"):
        list(records(data, "pstree.img", images.COMMON_MAGIC, images.PSTREE_MAGIC))


def test_an_inventory_has_one_magic_only() -> None:
    data = image(b"body", magic=(images.INVENTORY_MAGIC,))
    assert [bytes(r) for r in records(data, "inventory.img", images.INVENTORY_MAGIC)] == [b"body"]


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_records_come_back_as_they_were(messages: list[bytes]) -> None:
    got = records(image(*messages), "x.img", images.COMMON_MAGIC, images.PSTREE_MAGIC)
    assert [bytes(record) for record in got] == messages


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_do_more_than_be_refused(data: bytes, framed: bool) -> None:
    hostile = image(data) if framed else data
    for read in (
        lambda: process_tree({"pstree.img": hostile}.__getitem__),
        lambda: dump_statistics(hostile),
        lambda: restore_statistics(image(data, magic=(images.SERVICE_MAGIC, images.STATS_MAGIC))),
    ):
        try:
            read()
        except ImagesDirectoryError:
            continue


def test_statistics_are_in_seconds_and_pages() -> None:
    entry = pb.StatisticsEntry(
        dump=pb.DumpStatistics(
            freezing_time=75, frozen_time=35_000, pages_scanned=9, pages_written=5, shared_pages_written=2
        )
    )
    data = image(entry.SerializeToString(), magic=(images.SERVICE_MAGIC, images.STATS_MAGIC))
    got = dump_statistics(data)
    assert got is not None
    assert (got.freezing_seconds, got.frozen_seconds) == (75e-6, 0.035)
    assert (got.pages_scanned, got.pages_written) == (9, 7)
    assert restore_statistics(data) is None
