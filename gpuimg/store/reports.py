"""What the store's operations report: plain data, apart from `model` because most commands need none of it.

Sizes are in bytes, times in seconds since the epoch (UTC).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from gpuimg.store.model import BufferObject, FileEntry, FileFigures, Statistics


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
