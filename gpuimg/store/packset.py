"""The packs in a store's folder: reading them whole, catching the index up, bringing them back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from gpuimg.errors import DamagedError, NewerFormatError
from gpuimg.store import files
from gpuimg.store.context import Context
from gpuimg.store.index import Index, PackEntry
from gpuimg.store.layout import Config, StoreFolder, parse_id
from gpuimg.store.model import FileEntry
from gpuimg.store.pack import MAX_CHAIN, PackInfo, read_pack


def load_pack(path: Path, config: Config, pack_id: bytes) -> PackInfo:
    """Read the structure of a pack file.

    Raises
    ------
    DamagedError, NewerFormatError, FileNotFoundError
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_pack(fd, config.id, pack_id)
    finally:
        os.close(fd)


def catch_up(folder: StoreFolder, config: Config, index: Index) -> None:
    """Index packs that a crash kept out of the index, forget those that are lost. Hold the shared lock.

    A writer that found a chunk in a lost pack would not store it again. Damaged packs are left for
    `verify` and `repair`.
    """
    packs = index.packs()
    known = {entry.id for entry in packs.values()}
    present = folder.list_packs()
    lost = known.difference(present)
    if lost:
        _forget_lost(
            folder, config, index, {n: entry for n, entry in packs.items() if entry.id in lost}, present
        )
    added = []
    for pack_id in present:
        if pack_id not in known:
            with contextlib.suppress(DamagedError, NewerFormatError, FileNotFoundError):
                info = load_pack(folder.pack(pack_id), config, pack_id)
                # Its writer may have been killed before its name was durable.
                files.sync_folder(folder.pack(pack_id).parent)
                files.sync_folder(folder.packs)
                index.add_pack(info)
                added.append(info)
    if len(added) > 1:
        index.settle(added)


def _forget_lost(
    folder: StoreFolder, config: Config, index: Index, lost: dict[int, PackEntry], present: list[bytes]
) -> None:
    others = []
    for pack_id in present:
        with contextlib.suppress(DamagedError, NewerFormatError, FileNotFoundError):
            others.append(load_pack(folder.pack(pack_id), config, pack_id))
    index.forget_lost(lost, others)


def trashed(folder: StoreFolder) -> list[bytes]:
    """Ids of the condemned packs."""
    return [found for path in sorted(folder.trash.iterdir()) if (found := parse_id(path.name, ".pack"))]


def rescue(context: Context, entries: list[FileEntry]) -> None:
    """Bring back from the trash what these files need and the index lacks. Hold the shared lock.

    The caller's lease keeps collectors from deleting what it may need.
    """
    segments = [ref for entry in entries for ref in entry.segments]
    _rescue_chunks(context, [ref.id for ref in segments])
    for ref in segments:
        _rescue_chunks(context, context.reader.segment(ref).chunk_ids())


def _rescue_chunks(context: Context, chunk_ids: Collection[bytes]) -> None:
    """Bring back chunks, and all that they are coded against."""
    for _ in range(MAX_CHAIN + 1):
        missing = _unknown(context, chunk_ids)
        if missing:
            _bring_back(context, missing)
        places = context.index.lookup(chunk_ids)
        chunk_ids = {place.base for place in places if place is not None and place.base}


def _bring_back(context: Context, missing: set[bytes]) -> None:
    # A collector that was killed may have left them unindexed where they were; a repair may have
    # overlooked a pack that came while it ran.
    folder = context.folder
    catch_up(folder, context.config, context.index)
    missing = _unknown(context, missing)
    for pack_id in trashed(folder):
        try:
            info = load_pack(folder.trashed_pack(pack_id), context.config, pack_id)
        except (DamagedError, NewerFormatError, FileNotFoundError):
            continue
        if missing.isdisjoint(info.toc.ids()):
            continue
        # Another committer may have brought it back a moment ago.
        with contextlib.suppress(FileNotFoundError):
            folder.trashed_pack(pack_id).rename(folder.pack(pack_id))
        files.sync_folder(folder.pack(pack_id).parent)
        files.sync_folder(folder.trash)
        context.index.add_pack(info)
        folder.waits(pack_id).unlink(missing_ok=True)
    lost = _unknown(context, missing)
    if lost:
        raise DamagedError(
            f"{len(lost)} chunks that this checkpoint shares with others have vanished from the store",
            remedy="take the checkpoint again; run `gpuimg verify` if this comes again",
        )


def _unknown(context: Context, chunk_ids: Collection[bytes]) -> set[bytes]:
    known = context.index.contains(chunk_ids)
    return {chunk_id for chunk_id, found in zip(chunk_ids, known, strict=True) if not found}
