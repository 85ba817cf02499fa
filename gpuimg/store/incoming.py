"""Files on their way in: streams that are filled piece by piece, regular files that workers read.

Both cut what they have into chunks, slab by slab, and hand the slabs to the pipeline.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gpuimg.errors import InputOutputError, UsageError
from gpuimg.store import files
from gpuimg.store.choice import Chooser
from gpuimg.store.chunking import Cut, Cutter, make_cutter
from gpuimg.store.figures import Counts
from gpuimg.store.model import BufferObject, Layout, Run
from gpuimg.store.parent import ParentCutter, ParentFile
from gpuimg.store.pool import SLAB_SIZE, Pool, Slab
from gpuimg.store.recipe import INLINE_LIMIT, RecipeBuilder
from gpuimg.store.workers import Job, StageTimes, Workers

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


class Pipeline(Protocol):
    """What files need of the session they belong to."""

    pool: Pool
    workers: Workers

    def check(self) -> None:
        """Raise what made the session fail."""
        ...

    def took(self, count: int) -> None:
        """Count bytes taken in."""
        ...

    def slab_for(self, file: FileIngest) -> Slab:
        """A slab for a stream file, which holds it until it hands it over."""
        ...

    def forget_holder(self, file: FileIngest) -> None:
        """The file holds no slab any more."""
        ...

    def process(self, worker: int, file: FileIngest, part: int, slab: Slab, cuts: list[Cut]) -> None:
        """Hash, look up, code and write the chunks of one slab, and put them into the file's recipe."""
        ...

    def finish_small(self, file: FileIngest, data: bytes) -> None:
        """The file is complete and small enough to stand in the manifest."""
        ...

    def stages_of(self, worker: int) -> StageTimes:
        """Where a worker counts its time."""
        ...


class FileIngest:
    """One open file of a session. All stream files of a session are driven by one thread."""

    def __init__(
        self,
        session: Pipeline,
        name: str,
        layout: Layout,
        chunk_size: int,
        *,
        bo: BufferObject | None = None,
        parent: ParentFile | None = None,
    ) -> None:
        self.name = name
        self.size = 0
        self.layout = layout
        self.bo = bo
        self.parent = parent
        self.closed = False
        self.recipe = RecipeBuilder()
        self.counts = Counts()
        self.chooser = Chooser(element_size=parent.element_size if parent else 0)
        self.chunk_size = chunk_size
        self.cutter = self.cutter_from(0)
        self._session = session
        self._parts = 0
        self._slab: Slab | None = None
        self._filled = 0
        self._tail = b""

    def fill(self, fd: int, limit: int | None = None) -> int:
        """Read once from `fd`, at most `limit` bytes; returns the count, 0 at the end of the file.

        BlockingIOError passes through; other OSErrors of the read become GpuimgErrors.
        """
        self._refuse_closed()
        slab = self._open_slab()
        end = SLAB_SIZE if limit is None else min(SLAB_SIZE, self._filled + limit)
        try:
            count = os.readv(fd, [slab.view[self._filled : end]])
        except BlockingIOError:
            raise
        except OSError as error:
            raise files.describe_os_error(error, f"reading {self.name}") from error
        self._advance(count)
        return count

    def write(self, data: Buffer) -> None:
        """Append bytes."""
        self._refuse_closed()
        view = memoryview(data).cast("B")
        while view:
            slab = self._open_slab()
            count = min(len(view), SLAB_SIZE - self._filled)
            slab.view[self._filled : self._filled + count] = view[:count]
            view = view[count:]
            self._advance(count)

    def close(self) -> None:
        """The file is complete."""
        if self.closed:
            return
        self.closed = True
        if self.size <= INLINE_LIMIT:
            data = bytes(self._slab.view[: self._filled]) if self._slab else self._tail
            self.drop()
            self._session.finish_small(self, data)
        elif self._slab or self._tail:
            self._open_slab()
            self._submit(last=True)

    def drop(self) -> None:
        """Give the slab back, and what is in it up."""
        if self._slab:
            self._session.forget_holder(self)
            self._session.pool.release(self._slab)
            self._slab = None

    def spill(self) -> None:
        """Hand over what can be cut and give the slab back; the rest moves to private memory."""
        if self._slab:
            self._submit(last=False)

    def cutter_from(self, start: int) -> Cutter:
        """What cuts the file from `start` on."""
        if self.parent is None:
            return make_cutter(self.layout, self.chunk_size)
        return ParentCutter(self.parent, self.layout, self.chunk_size, self.parent.pieces(start))

    def next_part(self) -> int:
        """Numbers the parts handed to workers, in file order."""
        self._parts += 1
        return self._parts - 1

    def _refuse_closed(self) -> None:
        if self.closed:
            raise UsageError(f"the file {self.name} is complete", remedy="write before it is closed")

    def _open_slab(self) -> Slab:
        self._session.check()
        if self._slab is None:
            self._slab = self._session.slab_for(self)
            self._filled = len(self._tail)
            self._slab.view[: self._filled] = self._tail
            self._tail = b""
        return self._slab

    def _advance(self, count: int) -> None:
        self._filled += count
        self.size += count
        self._session.took(count)
        if self._filled == SLAB_SIZE:
            self._submit(last=False)

    def _submit(self, *, last: bool) -> None:
        slab = self._slab
        assert slab is not None
        self._session.forget_holder(self)
        self._slab = None
        cuts, covered = self.cutter.cut(slab.view[: self._filled], last=last)
        self._tail = bytes(slab.view[covered : self._filled])
        self._session.workers.submit(_SlabJob(self._session, self, self.next_part(), slab, cuts))


class _SlabJob(Job):
    """Processes one filled and cut slab."""

    def __init__(self, session: Pipeline, file: FileIngest, part: int, slab: Slab, cuts: list[Cut]) -> None:
        self.session = session
        self.file = file
        self.part = part
        self.slab = slab
        self.cuts = cuts

    def run(self, worker: int) -> None:
        try:
            self.session.process(worker, self.file, self.part, self.slab, self.cuts)
        finally:
            self.session.pool.release(self.slab)

    def cancel(self) -> None:
        self.session.pool.release(self.slab)


class PathJob(Job):
    """Reads the next slab of a regular file, queues itself again for the rest, processes the slab."""

    def __init__(
        self, session: Pipeline, file: FileIngest, path: Path, source: _Source | None = None, offset: int = 0
    ) -> None:
        self.session = session
        self.file = file
        self.path = path
        self.source = source
        self.offset = offset
        self.tail = b""

    def run(self, worker: int) -> None:
        if self.source is None:
            with files.os_errors(f"reading {self.path}"):
                self.source = _Source(self.path)
            parent = self.file.parent
            if parent is not None and parent.size == self.source.size > INLINE_LIMIT:
                self.session.workers.submit(_RunJob(self.session, self.file, self.source, parent), first=True)
                return
        stages = self.session.stages_of(worker)
        # Waiting here could be for ever: every slab may lie in a job behind this one.
        slab = self.session.pool.acquire_or_add()
        try:
            try:
                with files.os_errors(f"reading {self.path}"), stages.measure("read"):
                    filled, last = self._fill(self.source, slab)
                self.file.size += filled - len(self.tail)
                self.session.took(filled - len(self.tail))
                if last and self.file.size <= INLINE_LIMIT:
                    self._close()
                    self.session.finish_small(self.file, bytes(slab.view[:filled]))
                    return
                with stages.measure("cut"):
                    cuts, covered = self.file.cutter.cut(slab.view[:filled], last=last)
            except BaseException:
                self._close()
                raise
            self.tail = bytes(slab.view[covered:filled])
            part = self.file.next_part()
            # From here on another worker may run this job for the next slab.
            if last:
                self._close()
            else:
                self.session.workers.submit(self, first=True)
            self.session.process(worker, self.file, part, slab, cuts)
        finally:
            self.session.pool.release(slab)

    def cancel(self) -> None:
        self._close()

    def _fill(self, source: _Source, slab: Slab) -> tuple[int, bool]:
        """Fill the slab behind the tail; returns the bytes in it and whether the file ends there."""
        filled = len(self.tail)
        slab.view[:filled] = self.tail
        count = source.read(slab.view[filled:], self.offset)
        self.offset += count
        return filled + count, filled + count < SLAB_SIZE

    def _close(self) -> None:
        self.file.closed = True
        if self.source is not None:
            self.source.release()


class _Source:
    """An open regular file that several jobs read; closed with the last of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size
        self._users = 1
        self._lock = threading.Lock()

    def read(self, target: memoryview, offset: int) -> int:
        """Fill `target` from `offset`; returns the bytes read, fewer only at the end of the file."""
        filled = 0
        while filled < len(target):
            count = os.preadv(self._fd, [target[filled:]], offset + filled)
            if not count:
                break
            filled += count
        return filled

    def share(self) -> None:
        """Count one more user."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Count one user less."""
        with self._lock:
            self._users -= 1
            if not self._users:
                os.close(self._fd)


class _RunJob(Job):
    """Takes the next run of the parent's file, queues itself again for the rest, and reads what is there now.

    Where the parent was cut is known beforehand, so that the runs of a file can be read by all workers at
    once. When the contents turn out to have moved, a PathJob goes on from there.
    """

    def __init__(self, session: Pipeline, file: FileIngest, source: _Source, parent: ParentFile) -> None:
        self.session = session
        self.file = file
        self.source = source
        self.parent = parent
        self.runs = parent.runs()
        self.end = 0
        self.moved = False
        self.misses = 0

    def run(self, worker: int) -> None:
        try:
            run = None if self.moved else next(self.runs, None)
        except BaseException:
            self.cancel()
            raise
        if run is None:
            self._hand_over()
            return
        self.end = run.offset + run.length
        self.file.size = self.end
        part = self.file.next_part()
        self.source.share()
        try:
            # From here on another worker may run this job for the next run.
            self.session.workers.submit(self, first=True)
            self._take(worker, run, part)
        finally:
            self.source.release()

    def cancel(self) -> None:
        self.file.closed = True
        self.source.release()

    def _hand_over(self) -> None:
        if self.end == self.source.size:
            self.cancel()
            return
        self.file.cutter = self.file.cutter_from(self.end)
        rest = PathJob(self.session, self.file, self.source.path, self.source, self.end)
        self.session.workers.submit(rest, first=True)

    def _take(self, worker: int, run: Run, part: int) -> None:
        slab = self.session.pool.acquire_or_add()
        try:
            with (
                files.os_errors(f"reading {self.source.path}"),
                self.session.stages_of(worker).measure("read"),
            ):
                count = self.source.read(slab.view[: run.length], run.offset)
            if count < run.length:
                raise InputOutputError(
                    f"{self.source.path} became shorter while it was read",
                    remedy="import it when nobody writes to it any more",
                )
            self.session.took(count)
            cutter = ParentCutter(self.parent, self.file.layout, self.file.chunk_size, iter(run.pieces))
            cutter.misses = self.misses
            with self.session.stages_of(worker).measure("cut"):
                cuts, _ = cutter.cut(slab.view[: run.length], last=True)
            self.moved |= cutter.moved
            self.misses = cutter.misses
            self.session.process(worker, self.file, part, slab, cuts)
        finally:
            self.session.pool.release(slab)
