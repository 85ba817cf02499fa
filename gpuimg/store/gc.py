"""Collecting garbage beside live writers and readers (docs/store-format.md, "Order of writes", gc)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from gpuimg.errors import (
    BusyError,
    DamagedError,
    MissingObjectError,
    NewerFormatError,
    NoSpaceError,
    StoredDataError,
    UnknownReferenceError,
)
from gpuimg.store import files
from gpuimg.store.context import Context
from gpuimg.store.hashing import checksum
from gpuimg.store.index import PackEntry
from gpuimg.store.layout import StoreFolder, parse_id
from gpuimg.store.lease import Lease, exclusive_lock, live_leases
from gpuimg.store.pack import OBJECT_HEADER_SIZE, PackInfo, object_size
from gpuimg.store.packset import load_pack, trashed
from gpuimg.store.packwriter import PackWriter
from gpuimg.store.reports import GcReport

# A pack is rewritten when this much of it is dead.
_DEAD_SHARE = 0.5
_OLD_SECONDS = 3600.0


@contextlib.contextmanager
def only_collector(folder: StoreFolder) -> Iterator[None]:
    """Hold off other collectors and repairs.

    Raises
    ------
    BusyError
    """
    fd = os.open(folder.root / "collector", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"another gc or repair runs on the store {folder.root}", remedy="try again when it has ended"
            ) from None
        yield
    finally:
        os.close(fd)


class _Marks:
    """Which objects of which packs are live: pack number → one byte per object."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.packs: dict[int, PackEntry] = {}
        self.live: dict[int, bytearray] = {}
        self.epoch = b""
        self._seen: set[bytes] = set()

    def restart(self) -> None:
        """Forget everything: places have changed."""
        self.epoch = self._context.index.epoch()
        self.live = {}
        self._seen = set()

    def restart_if_stale(self) -> None:
        """Restart if another process has removed entries since the marks were made."""
        if self._context.index.epoch() != self.epoch:
            self.restart()

    def mark_new(self) -> None:
        """Mark what the manifests refer to that were not marked before."""
        self.packs = self._context.index.packs()
        for checkpoint_id in self._context.catalogue.ids():
            if checkpoint_id not in self._seen:
                self._mark_checkpoint(checkpoint_id)
                self._seen.add(checkpoint_id)

    def _mark_checkpoint(self, checkpoint_id: bytes) -> None:
        name = checkpoint_id.hex()[:12]
        try:
            manifest = self._context.catalogue.load(checkpoint_id)
            for entry in manifest.files:
                self._mark([ref.id for ref in entry.segments])
                for ref in entry.segments:
                    self._mark(self._context.reader.segment(ref).chunk_ids())
        except UnknownReferenceError:
            # Removed since the checkpoints were listed.
            return
        except StoredDataError as error:
            raise DamagedError(
                f"gc cannot tell what checkpoint {name} needs and has removed nothing: {error.what}",
                remedy=f"run `gpuimg repair`; if that does not help, give it up with `gpuimg rm {name}`",
            ) from None

    def _mark(self, chunk_ids: list[bytes]) -> None:
        """Mark chunks and all that they are coded against."""
        while chunk_ids:
            bases: list[bytes] = []
            for place in self._context.index.lookup(chunk_ids):
                # A chunk that is lost already holds nothing back.
                if place is None:
                    continue
                flags = self.live.get(place.pack)
                if flags is None:
                    entry = self.packs.get(place.pack) or self._context.index.pack(place.pack)
                    flags = self.live[place.pack] = bytearray(entry.objects if entry else place.ordinal + 1)
                if place.ordinal >= len(flags):
                    raise MissingObjectError("the index contradicts itself", remedy="run `gpuimg repair`")
                # What is marked already has its bases marked; a chain without end comes back to itself.
                if place.base and not flags[place.ordinal]:
                    bases.append(place.base)
                flags[place.ordinal] = 1
            chunk_ids = bases


def collect(context: Context) -> GcReport:
    """Remove what no checkpoint and no live writer needs.

    Raises
    ------
    BusyError
        Another gc or repair runs.
    DamagedError
        A manifest or recipe cannot be read, so that it is unknown what is garbage.
    """
    with files.os_errors("collecting garbage"), only_collector(context.folder):
        leftovers = _remove_leftovers(context.folder)
        marks = _Marks(context)
        marks.restart()
        marks.mark_new()
        rewritten = _rewrite_if_it_fits(context, marks)
        if rewritten != 0:
            marks.restart()
            marks.mark_new()
        with exclusive_lock(context.folder):
            marks.restart_if_stale()
            marks.mark_new()
            # A manifest must not come back, after a power cut, when its packs are gone.
            files.sync_folder(context.folder.manifests)
            condemned = _condemn(context, marks)
            deleted, freed, waiting = _delete(context.folder)
    return GcReport(
        deleted_packs=deleted,
        freed_bytes=freed,
        condemned_packs=condemned,
        waiting_packs=waiting,
        rewritten_packs=rewritten or 0,
        removed_leftovers=leftovers,
    )


def _remove_leftovers(folder: StoreFolder) -> int:
    """Remove files in tmp/ whose writers are dead."""
    # The files are listed before the leases: a writer that comes between has its lease seen.
    found = list(folder.tmp.iterdir())
    live = {lease.hex() for lease in live_leases(folder)}
    count = 0
    for path in found:
        owner = path.name.split("-")[0]
        with contextlib.suppress(FileNotFoundError):
            # Tags and leases in the making belong to nobody; they are there for moments only.
            old = time.time() - path.stat().st_mtime > _OLD_SECONDS
            if owner not in live and (len(owner) == 32 or old):
                path.unlink()
                count += 1
    return count


def _rewrite_if_it_fits(context: Context, marks: _Marks) -> int | None:
    """Rewrite; None if there is no space for it, since gc is what makes space."""
    try:
        return _rewrite(context, marks)
    except NoSpaceError:
        return None
    except OSError as error:
        if isinstance(files.describe_os_error(error, "rewriting packs"), NoSpaceError):
            return None
        raise


def _rewrite(context: Context, marks: _Marks) -> int:
    """Copy live objects out of packs that are mostly dead; returns how many packs that emptied."""
    mostly_dead = []
    for number, flags in marks.live.items():
        entry = marks.packs.get(number)
        if entry is None or not any(flags):
            continue
        try:
            info = load_pack(context.folder.pack(entry.id), context.config, entry.id)
        except (DamagedError, NewerFormatError, FileNotFoundError):
            # `verify` speaks of these; gc leaves them alone.
            continue
        dead = sum(
            object_size(entry.header.stored) for entry, live in zip(info.toc, flags, strict=True) if not live
        )
        if dead >= _DEAD_SHARE * info.size:
            mostly_dead.append((number, info))
    if not mostly_dead:
        return 0
    lease = Lease(context.folder)
    writer: PackWriter | None = None
    emptied = 0
    try:
        for number, info in mostly_dead:
            writer = writer or PackWriter(context.folder, context.config.id, lease.id)
            emptied += _copy_live(context, info, marks.live[number], writer)
            if writer.full:
                full, writer = writer, None
                full.seal(context.index, moves=True)
        if writer is not None:
            last, writer = writer, None
            last.seal(context.index, moves=True)
    finally:
        if writer is not None:
            writer.abandon()
        lease.release()
    return emptied


def _copy_live(context: Context, info: PackInfo, flags: bytearray, writer: PackWriter) -> bool:
    """Append the live objects of a pack; False if one of them is damaged and the pack must stay."""
    objects = []
    with context.folder.pack(info.id).open("rb") as stream:
        for (offset, header), live in zip(info.toc, flags, strict=True):
            if not live:
                continue
            payload = files.pread_exactly(stream.fileno(), header.stored, offset + OBJECT_HEADER_SIZE)
            if checksum(payload) != header.checksum:
                return False
            objects.append((header, payload))
    for header, payload in objects:
        writer.add_object(header, payload)
    return True


def _condemn(context: Context, marks: _Marks) -> int:
    """Take packs without live objects out of the index and into the trash. Hold the exclusive lock."""
    folder = context.folder
    live = live_leases(folder)
    packs: dict[int, PackEntry] = {}
    toc_ids: dict[int, list[bytes]] = {}
    for number, entry in context.index.packs().items():
        if any(marks.live.get(number, b"")):
            continue
        try:
            info = load_pack(folder.pack(entry.id), context.config, entry.id)
        except (DamagedError, NewerFormatError, FileNotFoundError):
            continue
        if info.lease not in live:
            packs[number] = entry
            toc_ids[number] = info.toc.ids()
    if not packs:
        return 0
    context.index.remove_packs(packs, toc_ids)
    waits = "".join(f"{lease.hex()}\n" for lease in live_leases(folder)).encode()
    for entry in packs.values():
        # With nobody to wait for there is nothing to write, perhaps to a full disk. A list that a crash
        # has left names none but the dead.
        if waits:
            files.write_durably(folder.waits(entry.id), waits, folder.temporary("waits"))
        folder.pack(entry.id).rename(folder.trashed_pack(entry.id))
        files.sync_folder(folder.pack(entry.id).parent)
    files.sync_folder(folder.trash)
    return len(packs)


def _delete(folder: StoreFolder) -> tuple[int, int, int]:
    """Delete condemned packs that nobody can count on; returns (deleted, bytes freed, still waiting)."""
    deleted = freed = waiting = 0
    condemned = trashed(folder)
    for path in folder.trash.glob("*.waits"):
        # A crash came before its pack was condemned, or after it was deleted.
        if parse_id(path.name, ".waits") not in condemned:
            path.unlink()
    for pack_id in condemned:
        waits = folder.waits(pack_id)
        live = {lease.hex() for lease in live_leases(folder)}
        try:
            needed_by = set(waits.read_text().split())
        except FileNotFoundError:
            needed_by = live
        if needed_by & live:
            waiting += 1
            continue
        path = folder.trashed_pack(pack_id)
        freed += path.stat().st_size
        path.unlink()
        waits.unlink(missing_ok=True)
        deleted += 1
    files.sync_folder(folder.trash)
    return deleted, freed, waiting
