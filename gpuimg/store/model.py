"""The store's plain data: what checkpoints are and what the store's operations report.

Sizes are in bytes, times in seconds since the epoch (UTC).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class CheckpointStats:
    """One line of `stats`. `parent` is the id of the checkpoint it was compared with, or empty."""

    id: str
    tags: tuple[str, ...]
    created: float
    files: int
    parent: str
    statistics: Statistics

    @property
    def raw_bytes(self) -> int:
        return self.statistics.raw_bytes

    @property
    def new_bytes(self) -> int:
        return self.statistics.new_bytes


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds. `stored_bytes` counts packs and manifests, condemned packs included.

    `codecs` and `depths` cover every chunk of the index but the checkpoints' recipes, which are `recipes`.
    """

    raw_bytes: int
    stored_bytes: int
    unique_chunks: int
    packs: int
    condemned_packs: int
    index_bytes: int
    codecs: dict[str, CodecStats]
    recipes: CodecStats
    depths: tuple[DepthStats, ...]
    checkpoints: tuple[CheckpointStats, ...]


@dataclass(frozen=True, slots=True)
class CodecStats:
    """How much lies in the store under one codec."""

    chunks: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class DepthStats:
    """How many chunks are `depth` differences away from one that stands alone; such a one is at depth 0."""

    depth: int
    chunks: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class StoredNow:
    """How the chunks of a file or checkpoint lie in the store now, each of them counted once.

    `stored_bytes` are payloads, headers not counted. `ratio` is the size of the file or checkpoint, by
    `stored_bytes` and what stands in the manifest; 0 where nothing is stored. `mean_depth` is weighted by raw
    bytes. `lost_chunks` are not in the store, or rest on one that is not; they are in no other figure.
    """

    chunks: int
    raw_bytes: int
    stored_bytes: int
    ratio: float
    codecs: dict[str, CodecStats]
    depths: tuple[DepthStats, ...]
    max_depth: int
    mean_depth: float
    lost_chunks: int


@dataclass(frozen=True, slots=True)
class FileReport:
    """A file with chunks, explained: as it was taken, and as it is stored now.

    `taken` is None where the checkpoint does not tell, `now` where the file's recipe cannot be read.
    """

    entry: FileEntry
    taken: FileFigures | None
    now: StoredNow | None


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """A checkpoint, explained; `files` are those with chunks, sorted by name.

    `base_chunks` and `base_bytes` (stored) are of chunks of other checkpoints that some of its own rest on.
    """

    now: StoredNow
    base_chunks: int
    base_bytes: int
    files: tuple[FileReport, ...]


@dataclass(frozen=True, slots=True)
class GcReport:
    """What a collection did. Packs that wait are deleted by a later gc, when their leases have ended."""

    deleted_packs: int
    freed_bytes: int
    condemned_packs: int
    waiting_packs: int
    rewritten_packs: int
    removed_leftovers: int


@dataclass(slots=True)
class Progress:
    """How far a long operation has come, in bytes; written by it, read by whoever watches."""

    done: int = 0
    total: int = 0


class FaultKind(enum.StrEnum):
    """What is wrong; the expected diagnoses of tests/fixtures/broken-* use these names."""

    DAMAGED_CHUNK = "damaged-chunk"
    MISSING_CHUNK = "missing-chunk"
    DAMAGED_RECIPE = "damaged-recipe"
    DAMAGED_MANIFEST = "damaged-manifest"
    DAMAGED_PACK = "damaged-pack"
    DANGLING_TAG = "dangling-tag"
    STALE_INDEX = "stale-index"
    FOREIGN_FILE = "foreign-file"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault found by `verify`. `checkpoint`, `file` and `offset` are empty where it hurts none."""

    kind: FaultKind
    what: str
    remedy: str
    checkpoint: str = ""
    file: str = ""
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The outcome of `verify`; the store is clean if there are no faults."""

    checkpoints: int
    packs: int
    objects: int
    raw_bytes: int
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What `repair` did. `hurt` names checkpoints that still lack data."""

    packs: int
    rebuilt_packs: int
    salvaged_objects: int
    lost_objects: int
    set_aside: tuple[str, ...]
    hurt: tuple[str, ...]


class Change(enum.StrEnum):
    """How a file differs between two checkpoints."""

    EQUAL = "equal"
    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class FileDiff:
    """One file of `diff A B`.

    `changed_bytes` counts bytes of B that are not at the same place in A; `new_bytes` those that are nowhere
    in A's version of the file; `ranges` are (offset, length) in B. `name_a` is A's name of a BO's file where
    that is another one.

    The changed bytes are zeros now, moved within the file, stored as differences to chunks of A (or to what
    those rest on), as differences to other chunks, or without a base; the rest is lost. `stored_bytes` is
    what the last three take, each chunk counted once.
    """

    name: str
    change: Change
    size_a: int
    size_b: int
    changed_bytes: int
    new_bytes: int
    ranges: tuple[tuple[int, int], ...] = field(default=())
    bo: BufferObject | None = None
    name_a: str = ""
    zero_bytes: int = 0
    moved_bytes: int = 0
    delta_bytes: int = 0
    other_delta_bytes: int = 0
    alone_bytes: int = 0
    stored_bytes: int = 0
