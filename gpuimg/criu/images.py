"""Read what CRIU's own image files say about a checkpoint: its process tree and its statistics.

A protobuf image is a magic of one or two words followed by records, each a length (u32, little endian)
and a message. Images come from disks and networks, so every length is held against what is really
there before anything is read or parsed.

This module is given bytes; it knows nothing of folders or stores.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from gpuimg._proto import criu_images_pb2 as pb
from gpuimg.errors import ImagesDirectoryError

COMMON_MAGIC = 0x54564319
"""First word of images that describe tasks; the second names the type."""

SERVICE_MAGIC = 0x55105940
"""First word of images about the run itself (statistics)."""

INVENTORY_MAGIC = 0x58313116
PSTREE_MAGIC = 0x50273030
CORE_MAGIC = 0x55053847
STATS_MAGIC = 0x57093306

MAX_RECORD = 64 << 20
"""No record that gpuimg reads comes near this; a longer one is damage."""

_WORD = struct.Struct("<I")

ReadFile = Callable[[str], bytes]
"""Returns the bytes of one image file; raises KeyError when there is none."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a checkpoint.

    Attributes
    ----------
    pid, ppid
        As the tree itself saw them; the root's parent is 0.
    threads
        The ids of all its threads, the main one included.
    comm
        The short name, at most 15 bytes; bytes that are no UTF-8 are shown as escapes.
    """

    pid: int
    ppid: int
    threads: tuple[int, ...]
    comm: str


@dataclass(frozen=True, slots=True)
class DumpStatistics:
    """What criu counted during a dump; times in seconds, memory in pages."""

    freezing_seconds: float
    frozen_seconds: float
    memory_dump_seconds: float
    memory_write_seconds: float
    pages_scanned: int
    pages_written: int


@dataclass(frozen=True, slots=True)
class RestoreStatistics:
    """What criu counted during a restore."""

    forking_seconds: float
    restore_seconds: float
    pages_restored: int


def records(data: bytes | memoryview, name: str, *magic: int) -> Iterator[memoryview]:
    """Yield the records of the image `name` that has to start with the words of `magic`.

    Raises
    ------
    ImagesDirectoryError
        Another magic, or a record that is longer than the rest of the file.
    """
    view = memoryview(data)
    position = 0
    for word in magic:
        if len(view) - position < 4 or _WORD.unpack_from(view, position)[0] != word:
            raise _bad(name, "does not start like an image of its kind")
        position += 4
    while position < len(view):
        if len(view) - position < 4:
            raise _bad(name, f"is cut short inside a length at byte {position}")
        (length,) = _WORD.unpack_from(view, position)
        position += 4
        if length > len(view) - position or length > MAX_RECORD:
            raise _bad(name, f"has a record of {length} bytes at byte {position}, where fewer follow")
        yield view[position : position + length]
        position += length


def process_tree(read: ReadFile) -> list[Process]:
    """Return the processes of a checkpoint, the root first.

    Parameters
    ----------
    read
        Gives the bytes of ``pstree.img`` and ``core-PID.img``; KeyError when a file is missing. A zombie
        has a core file as well; where one is missing the name stays empty.
    """
    name = "pstree.img"
    try:
        data = read(name)
    except KeyError:
        raise _bad(name, "is missing") from None
    processes: list[Process] = []
    seen: set[int] = set()
    for record in records(data, name, COMMON_MAGIC, PSTREE_MAGIC):
        entry = pb.TreeEntry()
        _parse(entry, record, name)
        if entry.pid in seen or (processes and entry.ppid not in seen):
            raise _bad(name, f"has process {entry.pid} twice, or before its parent")
        seen.add(entry.pid)
        processes.append(Process(entry.pid, entry.ppid, tuple(entry.threads), _comm(read, entry.pid)))
    return processes


def dump_statistics(data: bytes) -> DumpStatistics | None:
    """Read a ``stats-dump`` file; None if it is about something else."""
    entry = _statistics(data, "stats-dump")
    if entry is None or not entry.HasField("dump"):
        return None
    dump = entry.dump
    return DumpStatistics(
        freezing_seconds=dump.freezing_time / 1e6,
        frozen_seconds=dump.frozen_time / 1e6,
        memory_dump_seconds=dump.memory_dump_time / 1e6,
        memory_write_seconds=dump.memory_write_time / 1e6,
        pages_scanned=dump.pages_scanned + dump.shared_pages_scanned,
        pages_written=dump.pages_written + dump.shared_pages_written,
    )


def restore_statistics(data: bytes) -> RestoreStatistics | None:
    """Read a ``stats-restore`` file; None if it is about something else."""
    entry = _statistics(data, "stats-restore")
    if entry is None or not entry.HasField("restore"):
        return None
    restore = entry.restore
    return RestoreStatistics(
        forking_seconds=restore.forking_time / 1e6,
        restore_seconds=restore.restore_time / 1e6,
        pages_restored=restore.pages_restored,
    )


def _statistics(data: bytes, name: str) -> pb.StatisticsEntry | None:
    for record in records(data, name, SERVICE_MAGIC, STATS_MAGIC):
        entry = pb.StatisticsEntry()
        _parse(entry, record, name)
        return entry
    return None


def _comm(read: ReadFile, pid: int) -> str:
    name = f"core-{pid}.img"
    try:
        data = read(name)
    except KeyError:
        return ""
    for record in records(data, name, COMMON_MAGIC, CORE_MAGIC):
        entry = pb.CoreEntry()
        _parse(entry, record, name)
        return bytes(entry.task.comm).decode(errors="backslashreplace")
    return ""


def _parse(entry: pb.TreeEntry | pb.CoreEntry | pb.StatisticsEntry, record: memoryview, name: str) -> None:
    try:
        entry.ParseFromString(bytes(record))
    except DecodeError:
        raise _bad(name, "has a record that is no message of its kind") from None


def _bad(name: str, reason: str) -> ImagesDirectoryError:
    return ImagesDirectoryError(f"the image {name} {reason}", remedy="take the checkpoint from another copy")
