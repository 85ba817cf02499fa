"""The store: opening it, its checkpoints and tags, and the way to every operation on it.

Operations that most commands do not need are imported by the methods that call them.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gpuimg.errors import DamagedError, NewerFormatError, UnknownReferenceError
from gpuimg.store import files, layout, packset
from gpuimg.store.catalogue import Catalogue, check_tag
from gpuimg.store.checkpoint import Checkpoint, ReadResources
from gpuimg.store.choice import Profile
from gpuimg.store.context import Context
from gpuimg.store.index import Index, remove_unusable
from gpuimg.store.ingest import Session
from gpuimg.store.layout import Config, StoreFolder
from gpuimg.store.lease import exclusive_lock, shared_lock
from gpuimg.store.model import FileEntry, Progress
from gpuimg.store.packfiles import PackFiles
from gpuimg.store.reader import ChunkReader

if TYPE_CHECKING:
    from gpuimg.store.reports import FileDiff, GcReport, RepairReport, StoreStats, VerifyReport


@dataclass(slots=True)
class _OpenIndex:
    index: Index
    users: int = 0


class _OpenIndexes:
    """LMDB allows one environment per process and file, and none that comes through a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int, int], _OpenIndex] = {}

    def acquire(self, folder: StoreFolder, config: Config, *, remake: bool = False) -> Index:
        """The index of a store; `remake` replaces files that cannot be used."""
        with self._lock:
            entry = self._open.get(self._key(folder))
            if entry is None:
                if remake:
                    remove_unusable(folder.index, config.id)
                index = Index(folder.index, config.id)
                entry = self._open[self._key(folder)] = _OpenIndex(index)
            entry.users += 1
            return entry.index

    def release(self, index: Index) -> None:
        with self._lock:
            for key, entry in list(self._open.items()):
                if entry.index is index:
                    entry.users -= 1
                    if not entry.users:
                        del self._open[key]
                        index.close()

    def after_fork(self) -> None:
        """In the child: let go of what the parent has open, so that the child may open it anew."""
        self._lock = threading.Lock()
        for entry in self._open.values():
            entry.index.close()
        self._open.clear()

    @staticmethod
    def _key(folder: StoreFolder) -> tuple[int, int, int]:
        found = folder.root.stat()
        return (os.getpid(), found.st_dev, found.st_ino)


_indexes = _OpenIndexes()
os.register_at_fork(after_in_child=_indexes.after_fork)


class Store:
    """An open store. Use `gpuimg.open_store` and `gpuimg.init_store` to get one."""

    def __init__(self, root: Path) -> None:
        self.path = root
        self._closed = False
        self.config = layout.load(root)
        self._folder = StoreFolder(root)
        with files.os_errors(f"opening the store {root}"):
            index = _indexes.acquire(self._folder, self.config)
            try:
                with shared_lock(self._folder):
                    packset.catch_up(self._folder, self.config, index)
            except BaseException:
                _indexes.release(index)
                raise
        packs = PackFiles(self._folder, index)
        self._context = Context(
            self._folder,
            self.config,
            index,
            packs,
            ChunkReader(index, packs),
            Catalogue(self._folder, self.config),
        )
        self._resources = ReadResources(self._context.reader)

    def close(self) -> None:
        """Let go of the store; its checkpoints cannot be read any more. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._resources.close()
        self._context.packs.close()
        _indexes.release(self._context.index)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Writing

    def ingest(self, *, parent: Checkpoint | None = None, profile: Profile = Profile.BALANCED) -> Session:
        """Begin to write a checkpoint; what it shares with its parent costs next to nothing."""
        return Session(
            self._folder,
            self.config,
            self._context.index,
            rescue=self._rescue,
            load=self._load,
            set_tag=self._context.catalogue.set_tag,
            reader=self._context.reader,
            parent=parent,
            profile=profile,
        )

    def _rescue(self, entries: list[FileEntry]) -> None:
        packset.rescue(self._context, entries)

    # Reading

    def checkpoint(self, reference: str) -> Checkpoint:
        """The checkpoint that a tag, id or unique id prefix means.

        Raises
        ------
        UnknownReferenceError, AmbiguousReferenceError, DamagedError, NewerFormatError
        """
        return self._load(self._context.catalogue.resolve(reference))

    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints, oldest first; those whose manifest cannot be read are left to `verify`."""
        found = []
        for checkpoint_id in self._context.catalogue.ids():
            try:
                found.append(self._load(checkpoint_id))
            except (DamagedError, NewerFormatError, UnknownReferenceError):
                # The last: removed since it was listed.
                continue
        return sorted(found, key=lambda item: item.created)

    def _load(self, checkpoint_id: bytes) -> Checkpoint:
        catalogue = self._context.catalogue
        manifest = catalogue.load(checkpoint_id)
        return Checkpoint(checkpoint_id, manifest, catalogue.tags_of(checkpoint_id), self._resources)

    # Keeping

    def tags(self) -> dict[str, str]:
        """Checkpoint ids by tag."""
        return {name: target.hex() for name, target in self._context.catalogue.tags().items()}

    def set_tag(self, name: str, reference: str) -> None:
        """Point a tag at a checkpoint."""
        check_tag(name)
        checkpoint_id = self._context.catalogue.resolve(reference)
        with files.os_errors(f"writing the tag {name}"), shared_lock(self._folder):
            self._context.catalogue.load(checkpoint_id)
            self._context.catalogue.set_tag(name, checkpoint_id)

    def remove_tag(self, name: str) -> None:
        """Remove a tag; the checkpoint stays."""
        self._context.catalogue.remove_tag(name)

    def remove(self, reference: str) -> str:
        """Remove a checkpoint and its tags; returns its id. `gc` frees the space."""
        checkpoint_id = self._context.catalogue.resolve(reference)
        with files.os_errors(f"removing {reference}"), exclusive_lock(self._folder):
            # No tag may come to it meanwhile, nor leave it.
            self._context.catalogue.remove(checkpoint_id)
        return checkpoint_id.hex()

    def gc(self) -> GcReport:
        """Remove what no checkpoint and no live writer needs (see `gpuimg.store.gc.collect`)."""
        from gpuimg.store.gc import collect

        return collect(self._context)

    def verify(
        self, reference: str | None = None, *, quick: bool = False, progress: Progress | None = None
    ) -> VerifyReport:
        """Check the store, or one checkpoint, down to the bytes; `quick` leaves the bytes out."""
        from gpuimg.store.verify import verify

        checkpoint_id = None if reference is None else self._context.catalogue.resolve(reference)
        return verify(self._context, checkpoint_id, quick=quick, progress=progress)

    def stats(self) -> StoreStats:
        """Figures of the store."""
        from gpuimg.store.stats import stats

        return stats(self._context)

    def diff(self, old: str, new: str) -> list[FileDiff]:
        """What differs between two checkpoints."""
        from gpuimg.store.diff import diff

        return diff(self._context, self.checkpoint(old), self.checkpoint(new))


def init_store(path: str | os.PathLike[str], *, chunk_size: int = layout.DEFAULT_CHUNK_SIZE) -> Store:
    """Make a store and open it (see `gpuimg.store.layout.create` for the errors)."""
    root = Path(path)
    layout.create(root, chunk_size)
    return Store(root)


def open_store(path: str | os.PathLike[str]) -> Store:
    """Open a store.

    Raises
    ------
    NotAStoreError, NewerFormatError, DamagedError, IndexBrokenError, PermissionDeniedError
    """
    return Store(Path(path))


def repair_store(path: str | os.PathLike[str]) -> RepairReport:
    """Repair a store that may be too broken to open (see `gpuimg.store.repair.repair`)."""
    from gpuimg.store.gc import only_collector
    from gpuimg.store.repair import repair

    root = Path(path)
    config = layout.load(root)
    folder = StoreFolder(root)
    with files.os_errors(f"repairing the store {root}"), only_collector(folder):
        files.make_folder(folder.index)
        index = _indexes.acquire(folder, config, remake=True)
        try:
            return repair(folder, config, index)
        finally:
            _indexes.release(index)
