"""Ingest: files in, a committed checkpoint out.

A session holds a lease. Bytes flow through slabs: filled from a descriptor, cut into chunks, and
handed to workers that hash them, look them up, code the new ones and append them to packs. Nothing is
visible before :meth:`Session.commit` returns; an abandoned session leaves garbage for gc.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gpuimg.errors import BadNameError, GpuimgError, IndexBrokenError, UsageError
from gpuimg.store import files, manifest
from gpuimg.store.bases import Bases
from gpuimg.store.catalogue import check_tag
from gpuimg.store.changes import Chunk, compare
from gpuimg.store.choice import Profile
from gpuimg.store.chunking import Cut, layout_for
from gpuimg.store.codec import RAW, Coding
from gpuimg.store.effort import Effort
from gpuimg.store.figures import Counts
from gpuimg.store.hashing import NO_ID, fingerprint, identify
from gpuimg.store.incoming import FileIngest, PathJob
from gpuimg.store.index import Index
from gpuimg.store.layout import Config, StoreFolder, parse_id
from gpuimg.store.lease import Lease, shared_lock
from gpuimg.store.memory import keep_freed_memory
from gpuimg.store.model import BufferObject, FileEntry, FileFigures, SegmentRef, Source, Statistics
from gpuimg.store.names import check_name
from gpuimg.store.packwriter import PackWriter, Sealer
from gpuimg.store.parent import UNREADABLE, Matcher, ParentFile
from gpuimg.store.pool import Pool, Slab
from gpuimg.store.reader import ChunkReader
from gpuimg.store.recipe import Entry, encode_segment
from gpuimg.store.workers import StageTimes, Workers, cores

if TYPE_CHECKING:
    from gpuimg.store.checkpoint import Checkpoint


class Session:
    """One writer of a store; also a context manager that abandons what was not committed."""

    def __init__(
        self,
        folder: StoreFolder,
        config: Config,
        index: Index,
        *,
        rescue: Callable[[list[FileEntry]], None],
        load: Callable[[bytes], Checkpoint],
        set_tag: Callable[[str, bytes], None],
        reader: ChunkReader,
        parent: Checkpoint | None = None,
        profile: Profile = Profile.BALANCED,
    ) -> None:
        self._folder = folder
        self._config = config
        self._index = index
        self._rescue = rescue
        self._load = load
        self._set_tag = set_tag
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._unsealed: set[bytes] = set()
        self._writers: list[PackWriter] = []
        self._files: dict[str, FileIngest] = {}
        self._small: dict[str, FileEntry] = {}
        self.raw_bytes = 0
        """Bytes taken in so far; grows while the session makes progress."""
        self._holders: dict[FileIngest, None] = {}
        self._ended = False
        with files.os_errors("taking a lease on the store"):
            self._lease = Lease(folder)
        self._epoch = index.epoch()
        keep_freed_memory()
        self.pool = Pool()
        self._stages = [StageTimes() for _ in range(cores())]
        self._effort = Effort(profile, len(self._stages))
        self._sealer = Sealer(index, self._sealed, self._effort.sank)
        self._bases = Bases(index, reader, self.pool)
        self._reader = reader
        self._parent = parent
        self._matcher = Matcher(parent.files.values() if parent else ())
        self.workers = Workers(len(self._stages))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    # Files

    def file(self, name: str, *, bo: BufferObject | None = None) -> FileIngest:
        """Open a new file of the checkpoint; `bo` says which buffer object's contents it holds.

        Raises
        ------
        BadNameError
            The name is not allowed, or the session has a file of that name.
        """
        check_name(name)
        self.check()
        if name in self._files or name in self._small:
            raise BadNameError(
                f"the file {name} arrived twice", remedy="give every file of a checkpoint a name of its own"
            )
        file = FileIngest(
            self, name, layout_for(name), self._config.chunk_size, bo=bo, parent=self._parent_file(name, bo)
        )
        self._files[name] = file
        return file

    def _parent_file(self, name: str, bo: BufferObject | None) -> ParentFile | None:
        entry = self._matcher.match(name, bo)
        if entry is None or self._parent is None or entry.layout is not layout_for(name):
            return None
        figures = self._parent.figures.get(entry.name)
        element_size = figures.element_size if figures else 0
        return ParentFile(self._reader, self._index, entry, element_size, self._config.fingerprint_seed)

    def add_path(self, name: str, path: Path) -> None:
        """Add a regular file; it is read while other calls go on, at the latest in commit."""
        self.check()
        self.workers.submit(PathJob(self, self.file(name), path))

    def small_file(self, name: str) -> bytes:
        """The bytes of a complete file that is small enough to stand in the manifest.

        Raises
        ------
        KeyError
            There is no such file, or it is larger.
        """
        return self._small[name].data

    @property
    def stages(self) -> StageTimes:
        """CPU seconds of the workers so far, by stage."""
        total = StageTimes()
        for stages in self._stages:
            total.add(stages)
        return total

    def check(self) -> None:
        """Raise what made the session fail, if anything did, or that it has ended."""
        failure = self.workers.failure
        if isinstance(failure, OSError):
            raise files.describe_os_error(failure, "writing to the store") from failure
        self.workers.check()
        if self._ended:
            raise UsageError("this session has ended", remedy="begin another one")

    # Slabs

    def slab_for(self, file: FileIngest) -> Slab:
        """A slab for a stream file. Half of the pool stays free for the workers: when too many files
        hold one, the file that has waited longest spills."""
        if len(self._holders) >= self.pool.size // 2:
            next(iter(self._holders)).spill()
        slab = self.pool.acquire()
        self._holders[file] = None
        return slab

    def forget_holder(self, file: FileIngest) -> None:
        self._holders.pop(file, None)

    def took(self, count: int) -> None:
        with self._lock:
            self.raw_bytes += count

    def finish_small(self, file: FileIngest, data: bytes) -> None:
        """Keep a complete small file by its entry alone: there may be very many."""
        with self._lock:
            self._small[file.name] = FileEntry(file.name, file.size, file.layout, data, ())
            del self._files[file.name]

    def stages_of(self, worker: int) -> StageTimes:
        return self._stages[worker]

    # Work, on the workers' threads

    def process(self, worker: int, file: FileIngest, part: int, slab: Slab, cuts: list[Cut]) -> None:
        """Take the chunks of one slab through all stages, and put them into the file's recipe."""
        stages = self._stages[worker]
        seed = self._config.fingerprint_seed
        with stages.measure("fingerprint"):
            chunks = compare(slab.view, cuts, file, seed)
        counts = Counts()
        unknown = [chunk for chunk in chunks if chunk.is_unknown]
        with stages.measure("hash"):
            for chunk in unknown:
                chunk.id = identify(chunk.data)
        with stages.measure("fingerprint"):
            for chunk in unknown:
                chunk.fingerprint = chunk.fingerprint or fingerprint(chunk.data, seed)
        with stages.measure("look"):
            fresh = self._claim([chunk.id for chunk in unknown if chunk.id is not None])
        new: list[Chunk] = []
        for chunk in unknown:
            if chunk.id in fresh:
                fresh.remove(chunk.id)
                new.append(chunk)
            else:
                counts.deduplicated_bytes += chunk.length
        for chunk in chunks:
            if chunk.id is None:
                counts.zero_bytes += chunk.length
        counts.unchanged_bytes = sum(chunk.length for chunk in chunks if chunk.unchanged)
        counts.chunks = sum(chunk.id is not None for chunk in chunks)
        counts.new_chunks = len(new)
        if new:
            self._store(stages, file, new, counts)
        file.counts.add(counts)
        entries = [Entry(chunk.length, chunk.id, chunk.fingerprint) for chunk in chunks]
        for number, segment in file.recipe.add(part, entries):
            file.recipe.segments[number] = self._store_segment(segment)

    def _claim(self, ids: list[bytes]) -> set[bytes]:
        """Those of the ids that neither the store nor this session has; they are this caller's to write."""
        with self._lock:
            mine = set(ids) - self._unsealed
            self._unsealed |= mine
        wanted = list(mine)
        known = [
            chunk_id
            for chunk_id, found in zip(wanted, self._index.contains_whole(wanted), strict=True)
            if found
        ]
        if known:
            with self._lock:
                self._unsealed.difference_update(known)
            mine.difference_update(known)
        return mine

    def _store(self, stages: StageTimes, file: FileIngest, new: list[Chunk], counts: Counts) -> None:
        """Code chunks of a slab and append them to a pack."""
        file.chooser.profile = self._effort.profile
        coded: list[tuple[Chunk, Coding, bytes | memoryview, bytes]] = []
        started = time.thread_time()
        with contextlib.ExitStack() as held:
            bases = self._bases_of(stages, file, new, held)
            with stages.measure("code"):
                for chunk in new:
                    base = bases.get(chunk.base)
                    coding, payload = file.chooser.encode(chunk.data, base[1] if base else None)
                    if payload is None:
                        counts.raw_stored_bytes += chunk.length
                    elif coding.needs_base:
                        counts.delta_bytes += chunk.length
                    else:
                        counts.coded_bytes += chunk.length
                    base_id = base[0] if base and coding.needs_base else NO_ID
                    coded.append((chunk, coding, payload or chunk.data, base_id))
        seconds = time.thread_time() - started
        counts.stored_bytes = sum(len(payload) for _, _, payload, _ in coded)
        begun = time.monotonic()
        with stages.measure("write"), self._writer() as writer:
            for chunk, coding, data, base_id in coded:
                assert chunk.id is not None
                writer.add(chunk.id, chunk.length, coding, data, base_id)
            # The slab is used again as soon as this is done.
            writer.flush()
        self._effort.wrote(begun)
        self._effort.coded(sum(chunk.length for chunk in new), seconds)

    def _bases_of(
        self, stages: StageTimes, file: FileIngest, new: list[Chunk], held: contextlib.ExitStack
    ) -> dict[bytes, tuple[bytes, memoryview]]:
        """What to code new chunks against (id, bytes), by the id of the parent's chunk at the same place."""
        before = list(dict.fromkeys(chunk.base for chunk in new if chunk.base))
        if not before or not file.chooser.wants_base():
            return {}
        with stages.measure("base"):
            found = held.enter_context(self._bases.read(before))
        return {chunk_id: base for chunk_id, base in zip(before, found, strict=True) if base is not None}

    def _store_segment(self, entries: list[Entry]) -> SegmentRef:
        data = encode_segment(entries)
        chunk_id = identify(data)
        if self._claim([chunk_id]):
            with self._writer() as writer:
                writer.add(chunk_id, len(data), RAW, data)
        elif self._index.contains([chunk_id])[0]:
            self._heal(chunk_id, data)
        return SegmentRef(chunk_id, sum(entry.length for entry in entries))

    def _heal(self, chunk_id: bytes, data: bytes) -> None:
        """Store a segment anew if the store's copy cannot be read: a gigabyte of a file may hang on it."""
        try:
            self._reader.chunk(chunk_id)
        except UNREADABLE:
            writer = PackWriter(self._folder, self._config.id, self._lease.id)
            try:
                writer.add(chunk_id, len(data), RAW, data)
                writer.seal(self._index, moves=True)
            except BaseException:
                writer.abandon()
                raise

    @contextlib.contextmanager
    def _writer(self) -> Iterator[PackWriter]:
        """A pack that nobody else writes to now; few are begun if few threads write at once."""
        with self._lock:
            writer = self._writers.pop() if self._writers else None
        if writer is None:
            writer = PackWriter(self._folder, self._config.id, self._lease.id)
        try:
            yield writer
        except BaseException:
            writer.abandon()
            raise
        if writer.full:
            self._sealer.submit(writer)
        else:
            with self._lock:
                self._writers.append(writer)

    def _sealed(self, chunk_ids: list[bytes]) -> None:
        """The chunks are in the index now."""
        with self._lock:
            self._unsealed.difference_update(chunk_ids)

    # The end

    def commit(self, *, tag: str | None = None, source: Source | None = None) -> Checkpoint:
        """Make everything durable and visible as a checkpoint, and move the tag to it.

        Raises
        ------
        GpuimgError
            Whatever failed; then there is no new checkpoint and the tag is where it was.
        """
        try:
            self.check()
            if tag is not None:
                check_tag(tag)
            with files.os_errors("committing the checkpoint"):
                checkpoint_id = self._commit(tag, source or Source())
        finally:
            self.abandon()
        return self._load(checkpoint_id)

    def _commit(self, tag: str | None, source: Source) -> bytes:
        unfinished = [name for name, file in list(self._files.items()) if not file.closed]
        self.workers.drain()
        self.check()
        unfinished = [name for name in unfinished if name in self._files and not self._files[name].closed]
        if unfinished:
            raise GpuimgError(f"the file {unfinished[0]} is not complete", remedy="close it before commit")
        entries = [*self._small.values(), *(self._file_entry(file) for file in self._files.values())]
        while self._writers:
            self._sealer.submit(self._writers.pop())
        self._sealer.finish()
        data, checkpoint_id = manifest.encode(
            store_id=self._config.id,
            created=time.time_ns(),
            nonce=os.urandom(16),
            source=source,
            statistics=self._statistics(entries),
            files=entries,
            parent=bytes.fromhex(self._parent.id) if self._parent else b"",
            figures=self._figures(),
        )
        with shared_lock(self._folder):
            if self._index.replaced():
                raise IndexBrokenError(
                    "the store's index was made anew while this checkpoint was being taken",
                    remedy="take the checkpoint again",
                )
            if self._index.epoch() != self._epoch:
                self._rescue(entries)
            temporary = self._folder.temporary(f"{self._lease.id.hex()}-manifest")
            files.write_durably(self._folder.manifest(checkpoint_id), data, temporary)
            if tag is not None:
                try:
                    self._set_tag(tag, checkpoint_id)
                except BaseException:
                    self._take_back(tag, checkpoint_id)
                    raise
        return checkpoint_id

    def _take_back(self, tag: str, checkpoint_id: bytes) -> None:
        """Without its tag there is no checkpoint; if the tag got there, it stays."""
        manifest_path = self._folder.manifest(checkpoint_id)
        with contextlib.suppress(OSError):
            if parse_id(self._read_tag(tag)) != checkpoint_id:
                manifest_path.unlink()
                files.sync_folder(manifest_path.parent)

    def _read_tag(self, tag: str) -> str:
        try:
            return (self._folder.tags / tag).read_text().strip()
        except OSError:
            return ""

    def _file_entry(self, file: FileIngest) -> FileEntry:
        for number, segment in file.recipe.finish():
            file.recipe.segments[number] = self._store_segment(segment)
        segments = tuple(file.recipe.segments[number] for number in range(len(file.recipe.segments)))
        return FileEntry(file.name, file.size, file.layout, b"", segments, file.bo)

    def _figures(self) -> dict[str, FileFigures]:
        return {
            name: FileFigures(file.counts.statistics(raw_bytes=file.size), file.chooser.element_size)
            for name, file in self._files.items()
        }

    def _statistics(self, entries: list[FileEntry]) -> Statistics:
        total = Counts()
        for file in self._files.values():
            total.add(file.counts)
        return total.statistics(
            raw_bytes=sum(entry.size for entry in entries),
            new_bytes=self._sealer.totals.bytes,
            inline_bytes=sum(len(entry.data) for entry in entries),
            seconds=time.monotonic() - self._start,
        )

    def abandon(self) -> None:
        """End the session; what was not committed is given up. May be called again."""
        if self._ended:
            return
        self._ended = True
        self.workers.close()
        for file in self._files.values():
            file.drop()
        for writer in self._writers:
            writer.abandon()
        with contextlib.suppress(GpuimgError, OSError):
            self._sealer.finish()
        with contextlib.suppress(OSError):
            self._lease.release()
