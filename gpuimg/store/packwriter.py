"""Writing packs: objects are gathered, written in large runs, sealed durably and indexed.

A worker owns one writer at a time; full packs are sealed (fsync, rename, index) by a thread of
their own, so that no worker waits for the disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpuimg.store import files, pack
from gpuimg.store.codec import Coding
from gpuimg.store.hashing import NO_ID, checksum
from gpuimg.store.index import Index
from gpuimg.store.layout import StoreFolder
from gpuimg.store.workers import STALL_SECONDS, Job, Workers, stalled

_FLUSH_BYTES = 2 * 1024 * 1024
_FLUSH_PARTS = 512
# The disk should have work while a pack is being filled, and little left to do when it is sealed.
_WRITE_BACK_BYTES = 8 * 1024 * 1024
_PADDING = [bytes(n) for n in range(pack.ALIGNMENT)]


@dataclass(slots=True)
class PackTotals:
    """What a set of writers wrote: pack files' bytes."""

    packs: int = 0
    bytes: int = 0


class PackWriter:
    """One pack being written in tmp/."""

    def __init__(self, folder: StoreFolder, store_id: bytes, lease: bytes) -> None:
        self.folder = folder
        self.header = pack.encode_pack_header(store_id, lease)
        self.path = folder.temporary(f"{lease.hex()}-pack")
        self.fd = files.create_private(self.path)
        self.chunk_ids: list[bytes] = []
        self.end = pack.HEADER_SIZE
        self._written = 0
        # Up to where the kernel has been asked to write to the disk.
        self._begun = 0
        self._toc: list[bytes] = []
        self._parts: list[bytes | memoryview] = [self.header]

    @property
    def full(self) -> bool:
        return self.end >= pack.TARGET_SIZE

    def add(
        self,
        chunk_id: bytes,
        raw_size: int,
        coding: Coding,
        payload: bytes | memoryview,
        base: bytes = NO_ID,
    ) -> None:
        """Append an object, coded against the chunk `base` if that is given.

        A memoryview payload must stay unchanged until `flush`.
        """
        self.add_object(
            pack.ObjectHeader(
                chunk_id,
                coding.codec,
                coding.element_size,
                pack.HAS_BASE if base != NO_ID else 0,
                raw_size,
                len(payload),
                base,
                checksum(payload),
            ),
            payload,
        )

    def add_object(self, header: pack.ObjectHeader, payload: bytes | memoryview) -> None:
        """Append an object with its header as given."""
        encoded = pack.encode_header(header)
        self._toc.append(pack.toc_entry(self.end, encoded))
        self.chunk_ids.append(header.id)
        self._parts += (encoded, payload, _PADDING[-header.stored % pack.ALIGNMENT])
        self.end += pack.object_size(header.stored)
        if self.end - self._written >= _FLUSH_BYTES or len(self._parts) >= _FLUSH_PARTS:
            self.flush()

    def flush(self) -> None:
        """Hand everything added so far to the kernel."""
        parts: list[bytes | memoryview] = [part for part in self._parts if len(part)]
        self._parts = []
        while parts:
            count = os.pwritev(self.fd, parts, self._written)
            self._written += count
            if self._written - self._begun >= _WRITE_BACK_BYTES:
                files.begin_write_back(self.fd, self._begun, self._written - self._begun)
                self._begun = self._written
            while parts and count >= len(parts[0]):
                count -= len(parts.pop(0))
            if count:
                parts[0] = memoryview(parts[0])[count:]

    def seal(self, index: Index, *, moves: bool = False) -> pack.PackInfo:
        """Make the pack durable, give it its name and index it (Index.add_pack)."""
        toc_offset = self.end
        tail, pack_id = pack.encode_tail(self.header, b"".join(self._toc), toc_offset)
        self._parts.append(tail)
        self.flush()
        os.fsync(self.fd)
        info = pack.read_pack(self.fd, self.header[16:32], pack_id)
        os.close(self.fd)
        self.fd = -1
        target = self.folder.pack(pack_id)
        files.make_folder(target.parent)
        self.path.rename(target)
        files.sync_folder(target.parent)
        files.sync_folder(self.folder.packs)
        index.add_pack(info, moves=moves)
        return info

    def abandon(self) -> None:
        """Remove the unfinished pack."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(OSError):
            self.path.unlink()


class Sealer:
    """Seals full packs on a thread of its own. At most `_BACKLOG` packs wait."""

    _BACKLOG = 4

    def __init__(
        self, index: Index, sealed: Callable[[list[bytes]], None], worked: Callable[[float], None]
    ) -> None:
        """`sealed` is told the chunks of every sealed pack, `worked` when (time.monotonic) its seal began."""
        self._index = index
        self._sealed = sealed
        self._worked = worked
        self._workers = Workers(1, name="gpuimg-seal")
        self._room = threading.Semaphore(self._BACKLOG)
        self.totals = PackTotals()

    def submit(self, writer: PackWriter) -> None:
        """Take over a writer. Raises what an earlier seal raised."""
        if not self._room.acquire(timeout=STALL_SECONDS):
            raise stalled()
        self._workers.submit(_SealJob(writer, self._seal, self._room))
        self._workers.check()

    def _seal(self, writer: PackWriter) -> None:
        begun = time.monotonic()
        try:
            info = writer.seal(self._index)
        except BaseException:
            writer.abandon()
            raise
        self._worked(begun)
        self.totals.packs += 1
        self.totals.bytes += info.size
        self._sealed(writer.chunk_ids)

    def finish(self) -> None:
        """Wait until all is durable; raises what a seal raised."""
        try:
            self._workers.drain()
        finally:
            self._workers.close()


class _SealJob(Job):
    """Seals one pack, and lets the next come."""

    def __init__(
        self, writer: PackWriter, seal: Callable[[PackWriter], None], room: threading.Semaphore
    ) -> None:
        self._writer = writer
        self._seal = seal
        self._room = room

    def run(self, worker: int) -> None:  # noqa: ARG002
        try:
            self._seal(self._writer)
        finally:
            self._room.release()

    def cancel(self) -> None:
        self._writer.abandon()
        self._room.release()
