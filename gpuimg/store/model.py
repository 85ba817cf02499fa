"""The store's plain data: what checkpoints are. (`reports` has what the store's operations report.)

Sizes are in bytes, times in seconds since the epoch (UTC).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Layout(enum.IntEnum):
    """How a file is cut into chunks (docs/store-format.md, "Recipe")."""

    FIXED = 0
    PAGES = 1


class SourceKind(enum.IntEnum):
    """What made a checkpoint."""

    UNKNOWN = 0
    DUMP = 1
    CAPTURE = 2
    IMPORT = 3
    EXTRACT = 4


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the checkpointed tree."""

    pid: int
    ppid: int
    threads: int
    comm: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where a checkpoint came from; for people, never needed to restore."""

    kind: SourceKind = SourceKind.UNKNOWN
    hostname: str = ""
    kernel: str = ""
    criu_version: str = ""
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True)
class Statistics:
    """What taking a checkpoint did (proto/store.proto, Statistics)."""

    raw_bytes: int = 0
    new_bytes: int = 0
    zero_bytes: int = 0
    inline_bytes: int = 0
    unchanged_bytes: int = 0
    deduplicated_bytes: int = 0
    delta_bytes: int = 0
    coded_bytes: int = 0
    raw_stored_bytes: int = 0
    stored_bytes: int = 0
    chunks: int = 0
    new_chunks: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FileFigures:
    """How one file of a checkpoint was taken. `element_size` in bytes, 0 if none was seen."""

    statistics: Statistics
    element_size: int = 0


@dataclass(frozen=True, slots=True)
class BufferObject:
    """What a BO is known by: checkpoints of one process are matched by it."""

    gpu_id: int
    handle: int
    address: int
    size: int
    flags: int


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """A recipe segment of a file: its object id and the bytes of the file it describes."""

    id: bytes
    size: int


class Piece(NamedTuple):
    """A run of a file: a chunk, or (`id` None) zeros. `offset` is its place in the file.

    `fingerprint` is empty where none is known.
    """

    offset: int
    length: int
    id: bytes | None
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pieces that fit into one slab; `offset` and `length` in the file."""

    offset: int
    length: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint; either `data` is the whole file or `segments` describe it."""

    name: str
    size: int
    layout: Layout
    data: bytes
    segments: tuple[SegmentRef, ...]
    bo: BufferObject | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """A parsed manifest. `created` in nanoseconds since the epoch; `files` sorted by name.

    `parent` is empty for a full checkpoint; `figures` has the files with segments, by name.
    """

    store_id: bytes
    created: int
    nonce: bytes
    root: bytes
    parent: bytes
    source: Source
    statistics: Statistics
    files: tuple[FileEntry, ...]
    figures: Mapping[str, FileFigures]


@dataclass(slots=True)
class Progress:
    """How far a long operation has come, in bytes; written by it, read by whoever watches."""

    done: int = 0
    total: int = 0
