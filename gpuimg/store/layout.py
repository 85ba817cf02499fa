"""Where things lie in a store folder, and the store's configuration file.

Format: docs/store-format.md, "Folder".
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuimg.errors import (
    DamagedError,
    NewerFormatError,
    NotAStoreError,
    StoreExistsError,
    UsageError,
)
from gpuimg.store import files

FORMAT = 1
MIN_CHUNK_SIZE = 64 * 1024
MAX_CHUNK_SIZE = 1024 * 1024
DEFAULT_CHUNK_SIZE = 256 * 1024
_FOLDERS = ("packs", "manifests", "tags", "leases", "trash", "damaged", "tmp", "index")
_DIGITS = frozenset("0123456789abcdef")
_MAX_CONFIG_SIZE = 64 * 1024


@dataclass(frozen=True, slots=True)
class Config:
    """What `init` fixed for the store's life."""

    id: bytes
    chunk_size: int
    fingerprint_seed: int


class StoreFolder:
    """The paths of one store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config"
        self.lock = root / "lock"
        self.packs = root / "packs"
        self.manifests = root / "manifests"
        self.tags = root / "tags"
        self.leases = root / "leases"
        self.trash = root / "trash"
        self.damaged = root / "damaged"
        self.tmp = root / "tmp"
        self.index = root / "index"

    def pack(self, pack_id: bytes) -> Path:
        name = pack_id.hex()
        return self.packs / name[:2] / f"{name}.pack"

    def trashed_pack(self, pack_id: bytes) -> Path:
        return self.trash / f"{pack_id.hex()}.pack"

    def waits(self, pack_id: bytes) -> Path:
        return self.trash / f"{pack_id.hex()}.waits"

    def manifest(self, checkpoint_id: bytes) -> Path:
        return self.manifests / checkpoint_id.hex()

    def temporary(self, kind: str) -> Path:
        """A name in tmp/ that nobody else uses."""
        return self.tmp / f"{kind}-{os.urandom(8).hex()}"

    def list_packs(self) -> list[bytes]:
        """Ids of the packs in packs/, by file name; foreign files are left out."""
        found: list[bytes] = []
        for folder in sorted(self.packs.iterdir()):
            if len(folder.name) == 2 and folder.is_dir():
                found.extend(
                    pack_id
                    for path in sorted(folder.iterdir())
                    if (pack_id := parse_id(path.name, ".pack")) and path.name.startswith(folder.name)
                )
        return found

    def list_manifests(self) -> list[bytes]:
        """Ids of the manifests, by file name."""
        return [found for path in sorted(self.manifests.iterdir()) if (found := parse_id(path.name))]


def parse_id(name: str, suffix: str = "") -> bytes | None:
    """The id in a file name `<64 digits><suffix>`, or None if the name is not of that form."""
    digits = name.removesuffix(suffix)
    if len(name) != 64 + len(suffix) or len(digits) != 64 or not set(digits) <= _DIGITS:
        return None
    return bytes.fromhex(digits)


def create(root: Path, chunk_size: int) -> Config:
    """Make a new store folder.

    Raises
    ------
    UsageError
        The chunk size is no power of two from 64 KiB to 1 MiB.
    StoreExistsError
        A store, or anything else, is at `root` already.
    """
    if chunk_size & (chunk_size - 1) or not MIN_CHUNK_SIZE <= chunk_size <= MAX_CHUNK_SIZE:
        raise UsageError(
            f"a chunk size of {chunk_size} bytes is not possible",
            remedy="choose a power of two from 64 KiB to 1 MiB",
        )
    with files.os_errors(f"creating the store {root}"):
        _refuse_occupied(root)
        root.parent.mkdir(parents=True, exist_ok=True)
        files.make_folder(root)
        folder = StoreFolder(root)
        for name in _FOLDERS:
            files.make_folder(root / name)
        if not folder.lock.exists():
            os.close(files.create_private(folder.lock))
        config = Config(os.urandom(16), chunk_size, int.from_bytes(os.urandom(8), "little"))
        text = {
            "format": FORMAT,
            "id": config.id.hex(),
            "chunk_size": chunk_size,
            "fingerprint_seed": config.fingerprint_seed,
            "requires": [],
        }
        temporary = root / "config.tmp"
        temporary.unlink(missing_ok=True)
        files.write_durably(folder.config, (json.dumps(text, indent=2) + "\n").encode(), temporary)
        files.sync_folder(root.parent)
    return config


def _refuse_occupied(root: Path) -> None:
    if not root.exists():
        return
    if not root.is_dir():
        raise StoreExistsError(f"{root} is a file", remedy="choose another place for the store")
    present = {path.name for path in root.iterdir()}
    if "config" in present:
        raise StoreExistsError(
            f"there is a store at {root} already",
            remedy="use it as it is, or choose another place",
        )
    # What a crash inside init leaves may be finished; anything else is somebody's data.
    if present - {*_FOLDERS, "lock", "config.tmp"}:
        raise StoreExistsError(f"{root} is not empty", remedy="choose an empty or new folder")


def load(root: Path) -> Config:
    """Read the configuration of the store at `root`.

    Raises
    ------
    NotAStoreError, NewerFormatError, DamagedError
    """
    not_a_store = NotAStoreError(
        f"there is no gpuimg store at {root}",
        remedy=f"create one with `gpuimg --store {root} init`, or name another with --store",
    )
    with files.os_errors(f"opening the store {root}"):
        try:
            with (root / "config").open("rb") as stream:
                raw = stream.read(_MAX_CONFIG_SIZE + 1)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise not_a_store from None
    damaged = DamagedError(
        f"the configuration file {root / 'config'} cannot be understood",
        remedy="restore that file from a backup; packs and manifests are not affected",
    )
    try:
        text: Any = json.loads(raw)
    except (ValueError, RecursionError):
        raise damaged from None
    if not isinstance(text, dict) or "format" not in text or "id" not in text:
        raise damaged
    version, requires = text["format"], text.get("requires", [])
    # `type`: JSON's true and false are integers to Python.
    if type(version) is not int or version < 1 or not isinstance(requires, list):
        raise damaged
    if version > FORMAT or requires:
        wanted = f"format {version}" + (f" with {', '.join(map(str, requires))}" if requires else "")
        raise NewerFormatError(
            f"the store at {root} has {wanted}, and this gpuimg knows only format {FORMAT}",
            remedy="use a newer gpuimg",
        )
    try:
        config = Config(bytes.fromhex(text["id"]), text["chunk_size"], text["fingerprint_seed"])
        valid = (
            len(config.id) == 16
            and type(config.chunk_size) is int
            and MIN_CHUNK_SIZE <= config.chunk_size <= MAX_CHUNK_SIZE
            and not config.chunk_size & (config.chunk_size - 1)
            and type(config.fingerprint_seed) is int
            and 0 <= config.fingerprint_seed < 2**64
        )
    except (KeyError, TypeError, ValueError):
        raise damaged from None
    if not valid:
        raise damaged
    return config
