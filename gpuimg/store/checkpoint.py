"""A checkpoint as its readers see it: files, ranged reads, read-ahead streams, export."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpuimg.errors import BadNameError, ImagesDirectoryError, StoredDataError, UsageError
from gpuimg.store import files as fs
from gpuimg.store.model import FileEntry, FileFigures, Manifest, Progress, Run, Source, Statistics
from gpuimg.store.pool import Pool, Slab
from gpuimg.store.reader import ChunkReader, file_runs
from gpuimg.store.workers import cores, run_on_all_cores

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

    from _typeshed import WriteableBuffer

_READ_AHEAD = 3


def _refuse_negative(*numbers: int) -> None:
    if min(numbers) < 0:
        raise UsageError(f"an offset or length of {min(numbers)} is not possible", remedy="count from zero")


class ReadResources:
    """What the checkpoints of one open store share: chunk reader, slabs and decoding threads."""

    def __init__(self, reader: ChunkReader) -> None:
        self.reader = reader
        self.pool = Pool()
        self._executor: Executor | None = None
        self._lock = threading.Lock()

    def executor(self) -> Executor:
        """The decoding threads, begun with the first use."""
        from concurrent.futures import ThreadPoolExecutor

        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(cores(), thread_name_prefix="gpuimg-read")
            return self._executor

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown(wait=True)


class Checkpoint:
    """An immutable checkpoint. Reads verify every chunk before a byte of it is given out."""

    def __init__(
        self,
        checkpoint_id: bytes,
        manifest: Manifest,
        tags: tuple[str, ...],
        resources: ReadResources,
    ) -> None:
        self.id = checkpoint_id.hex()
        self.tags = tags
        self.created = manifest.created / 1e9
        self.root = manifest.root.hex()
        self.source: Source = manifest.source
        self.statistics: Statistics = manifest.statistics
        self.parent = manifest.parent.hex()
        self.figures: Mapping[str, FileFigures] = MappingProxyType(dict(manifest.figures))
        self.files: Mapping[str, FileEntry] = MappingProxyType(
            {entry.name: entry for entry in manifest.files}
        )
        self._reader = resources.reader
        self._pool = resources.pool
        self._executor = resources.executor

    @property
    def name(self) -> str:
        """What people call it: its first tag, or the start of its id."""
        return self.tags[0] if self.tags else self.id[:12]

    @property
    def raw_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def entry(self, name: str) -> FileEntry:
        """The file of that name.

        Raises
        ------
        BadNameError
        """
        found = self.files.get(name)
        if found is None:
            raise BadNameError(
                f"checkpoint {self.name} has no file {name!r}",
                remedy=f"see `gpuimg show --files {self.name}` for its files",
            )
        return found

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes [offset, offset + length) of a file, fewer at its end.

        Raises
        ------
        UsageError
            The offset or the length is below zero.
        """
        entry = self.entry(name)
        _refuse_negative(offset, length or 0)
        length = entry.size - offset if length is None else min(length, entry.size - offset)
        if length <= 0:
            return b""
        buffer = bytearray(length)
        self.read_into(name, offset, buffer)
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: WriteableBuffer) -> int:
        """Fill `buffer` from `offset` of a file; returns the bytes filled, fewer at the file's end."""
        entry = self.entry(name)
        _refuse_negative(offset)
        out = memoryview(buffer).cast("B")
        stop = min(entry.size, offset + len(out))
        if offset >= stop:
            return 0
        if not entry.segments:
            out[: stop - offset] = entry.data[offset:stop]
            return stop - offset
        slab = self._pool.acquire_or_add()
        try:
            with self._naming(name):
                for run in file_runs(self._reader, entry, offset, stop):
                    self._reader.read_run(run, slab.view[: run.length])
                    first, last = max(offset, run.offset), min(stop, run.offset + run.length)
                    out[first - offset : last - offset] = slab.view[first - run.offset : last - run.offset]
        finally:
            self._pool.release(slab)
        return stop - offset

    def stream(self, name: str, *, keep: int = 0) -> Iterator[memoryview]:
        """The file's bytes in order, decoded ahead on all cores.

        Each view is valid until `keep` + 1 further steps; they are page-aligned and writable for files that
        have segments.
        """
        entry = self.entry(name)
        if not entry.segments:
            if entry.data:
                yield memoryview(entry.data)
            return
        runs = file_runs(self._reader, entry)
        ahead: deque[tuple[Run, Slab, Future[None]]] = deque()
        kept: deque[Slab] = deque()
        try:
            with self._naming(name):
                while True:
                    self._read_ahead(runs, ahead)
                    if not ahead:
                        return
                    run, slab, future = ahead[0]
                    future.result()
                    ahead.popleft()
                    kept.append(slab)
                    yield slab.view[: run.length]
                    if len(kept) > keep:
                        self._pool.release(kept.popleft())
        finally:
            for slab in kept:
                self._pool.release(slab)
            for _, slab, future in ahead:
                with contextlib.suppress(Exception):
                    future.cancel() or future.result()
                self._pool.release(slab)

    def _read_ahead(self, runs: Iterator[Run], ahead: deque[tuple[Run, Slab, Future[None]]]) -> None:
        """Start reads until enough are under way. Every stream has one slab, more only from plenty."""
        while len(ahead) < _READ_AHEAD:
            slab = self._pool.try_acquire() if ahead else self._pool.acquire_or_add()
            if slab is None:
                return
            run = None
            try:
                run = next(runs, None)
            finally:
                if run is None:
                    self._pool.release(slab)
            if run is None:
                return
            ahead.append(
                (run, slab, self._executor().submit(self._reader.read_run, run, slab.view[: run.length]))
            )

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Add checkpoint, file and offset to what is said about stored data."""
        try:
            yield
        except StoredDataError as error:
            place = f" at offset {error.offset}" if error.offset is not None else ""
            named = type(error)(
                f"checkpoint {self.name} ({self.id[:12]}), file {name}{place}: {error.what}",
                remedy=error.remedy,
            )
            named.offset = error.offset
            raise named from error

    def export(self, directory: Path, *, progress: Progress | None = None) -> None:
        """Write all files into a directory, which is created (0700) if need be.

        Raises
        ------
        ImagesDirectoryError
            A file of that name exists, or the directory cannot be written.
        """
        with fs.os_errors(f"writing to {directory}"):
            directory.parent.mkdir(parents=True, exist_ok=True)
            fs.make_folder(directory)
            if not directory.is_dir():
                raise ImagesDirectoryError(
                    f"{directory} is a file", remedy="export into an empty or new directory"
                )
        for name in self.files:
            if (directory / name).exists() or (directory / name).is_symlink():
                raise ImagesDirectoryError(
                    f"{directory / name} exists already", remedy="export into an empty or new directory"
                )
        _Export(self, directory, progress or Progress()).run()

    def _export_run(self, name: str, run: Run, fd: int) -> None:
        slab = self._pool.acquire_or_add()
        try:
            with self._naming(name):
                self._reader.read_run(run, slab.view[: run.length])
            with fs.os_errors(f"writing {name}"):
                for start, stop in _written_spans(run):
                    done = start
                    while done < stop:
                        done += os.pwrite(fd, slab.view[done:stop], run.offset + done)
        finally:
            self._pool.release(slab)


def _written_spans(run: Run) -> Iterator[tuple[int, int]]:
    """The parts of a run, from its start, that are not zero: zeros stay holes of the file."""
    start = end = 0
    for piece in run.pieces:
        offset = piece.offset - run.offset
        if piece.id is None:
            continue
        if offset != end:
            if end > start:
                yield start, end
            start = offset
        end = offset + piece.length
    if end > start:
        yield start, end


class _Export:
    """Writes the files of a checkpoint with all cores; what was written is removed on failure."""

    def __init__(self, checkpoint: Checkpoint, directory: Path, progress: Progress) -> None:
        self._progress = progress
        progress.total = checkpoint.raw_bytes
        self._checkpoint = checkpoint
        self._directory = directory
        self._lock = threading.Lock()
        self._created: list[Path] = []
        self._fds: dict[int, int] = {}
        self._work = self._all_work()

    def run(self) -> None:
        try:
            run_on_all_cores(self._step, cores())
        except BaseException:
            for path in self._created:
                with contextlib.suppress(OSError):
                    path.unlink()
            raise
        finally:
            for fd in self._fds:
                os.close(fd)

    def _step(self) -> bool:
        with self._lock:
            work = next(self._work, None)
        if work is None:
            return False
        name, fd, run = work
        try:
            # Zeros are holes of the file, which has its size already.
            if any(piece.id is not None for piece in run.pieces):
                self._checkpoint._export_run(name, run, fd)
        finally:
            with self._lock:
                self._progress.done += run.length
                self._release(fd)
        return True

    def _all_work(self) -> Iterator[tuple[str, int, Run]]:
        for name, entry in self._checkpoint.files.items():
            path = self._directory / name
            with fs.os_errors(f"creating {path}"):
                fd = fs.create_private(path)
                self._created.append(path)
                self._fds[fd] = 1
                self._progress.done += len(entry.data)
                os.ftruncate(fd, entry.size)
                if entry.data:
                    fs.write_all(fd, entry.data)
            with self._checkpoint._naming(name):
                for run in file_runs(self._checkpoint._reader, entry):
                    self._fds[fd] += 1
                    yield name, fd, run
            self._release(fd)

    def _release(self, fd: int) -> None:
        """Close a file when its last run is written and no more will come; the lock is held."""
        self._fds[fd] -= 1
        if not self._fds[fd]:
            del self._fds[fd]
            os.close(fd)
