"""What every operation on an open store needs, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from gpuimg.store.catalogue import Catalogue
from gpuimg.store.index import Index
from gpuimg.store.layout import Config, StoreFolder
from gpuimg.store.packfiles import PackFiles
from gpuimg.store.reader import ChunkReader


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of one open store."""

    folder: StoreFolder
    config: Config
    index: Index
    packs: PackFiles
    reader: ChunkReader
    catalogue: Catalogue
