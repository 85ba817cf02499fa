"""What a disk holds after a power cut: a model of the calls that make files and names durable.

Only what was synced surely survives: the bytes of a file by fsync of the file, a name that was made, moved
or removed by fsync of its folder. What was not synced may survive as well, so there are two extremes.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """A folder, watched from now on; what is there already is durable.

    Parameters
    ----------
    root
        The store. Its index is left out: LMDB syncs each transaction by itself.
    attic
        An empty folder on the same file system; keeps every file, whatever becomes of its names.
    event
        Called after each call that changes what a power cut would leave, with its name and path.
    """

    def __init__(
        self,
        root: Path,
        attic: Path,
        patch: pytest.MonkeyPatch,
        event: Callable[[str, Path], None],
    ) -> None:
        self.root = root
        self.log: list[tuple[str, str]] = []
        self._attic = attic
        self._event = event
        self._lock = threading.RLock()
        self._kept: dict[int, Path] = {}
        self._synced: dict[int, bool] = {}
        self._now: dict[Path, int] = {}
        self._folders: set[Path] = {path for path in root.rglob("*") if path.is_dir()}
        for path in root.rglob("*"):
            if self._watched(path) and path.is_file():
                self._now[path] = self._keep(path, synced=True)
        self._durable = dict(self._now)
        self._durable_folders = set(self._folders)
        self._patch(patch)

    def _watched(self, path: Path) -> bool:
        return path.is_relative_to(self.root) and not path.is_relative_to(self.root / "index")

    def _keep(self, path: Path, *, synced: bool) -> int:
        number = path.stat().st_ino
        self._kept[number] = self._attic / str(number)
        self._synced[number] = synced
        os.link(path, self._kept[number])
        return number

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        real = {name: getattr(os, name) for name in ("open", "fsync", "rename", "unlink", "mkdir")}

        def after(name: str, path: Path) -> None:
            self.log.append((name, path.relative_to(self.root).as_posix()))
            self._event(name, path)

        def open_(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            found = Path(os.fspath(path)) if not isinstance(path, int) else Path("/")
            if not (flags & os.O_CREAT and self._watched(found)):
                return int(real["open"](path, flags, *rest, **options))
            with self._lock:
                fd: int = real["open"](path, flags, *rest, **options)
                if found not in self._now:
                    self._now[found] = self._keep(found, synced=False)
                return fd

        def dirtying(name: str) -> Callable[..., Any]:
            function = getattr(os, name)

            def call(fd: int, *rest: Any) -> Any:
                number = os.fstat(fd).st_ino
                if number in self._synced:
                    self._synced[number] = False
                return function(fd, *rest)

            return call

        def fsync(fd: int) -> None:
            real["fsync"](fd)
            path = Path(f"/proc/self/fd/{fd}").readlink()
            if not self._watched(path):
                return
            with self._lock:
                if stat.S_ISDIR(os.fstat(fd).st_mode):
                    self._sync_names(path)
                else:
                    self._synced[os.fstat(fd).st_ino] = True
                after("fsync", path)

        def rename(source: Any, target: Any) -> None:
            if not self._watched(Path(source)):
                real["rename"](source, target)
                return
            with self._lock:
                real["rename"](source, target)
                self._now[Path(target)] = self._now.pop(Path(source))
                after("rename", Path(target))

        def unlink(path: Any, **options: Any) -> None:
            if options or not self._watched(Path(path)):
                real["unlink"](path, **options)
                return
            with self._lock:
                real["unlink"](path)
                if self._now.pop(Path(path), None) is not None:
                    after("unlink", Path(path))

        def mkdir(path: Any, *rest: Any, **options: Any) -> None:
            if options or not self._watched(Path(path)):
                real["mkdir"](path, *rest, **options)
                return
            with self._lock:
                real["mkdir"](path, *rest)
                self._folders.add(Path(path))
                after("mkdir", Path(path))

        for name, call in (
            ("open", open_),
            ("fsync", fsync),
            ("rename", rename),
            ("unlink", unlink),
            ("mkdir", mkdir),
        ):
            patch.setattr(os, name, call)
        for name in ("write", "pwrite", "writev", "pwritev", "ftruncate"):
            patch.setattr(os, name, dirtying(name))

    def _sync_names(self, folder: Path) -> None:
        for names in (self._durable, self._now):
            for path in [path for path in names if path.parent == folder]:
                if path in self._now:
                    self._durable[path] = self._now[path]
                else:
                    del self._durable[path]
        self._durable_folders |= {path for path in self._folders if path.parent == folder}

    def after_power_cut(self, target: Path, *, kept_only: bool) -> Path:
        """Build the folder that the next boot finds, without its index.

        kept_only
            Only what surely survives; otherwise all that may, which is both old and new names.
        """
        with self._lock:
            names = dict(self._durable) if kept_only else {**self._now, **self._durable}
            folders = self._durable_folders if kept_only else self._folders
        target.mkdir()
        (target / "index").mkdir()
        for folder in sorted(folders):
            if self._watched(folder):
                (target / folder.relative_to(self.root)).mkdir(parents=True, exist_ok=True)
        for path, number in names.items():
            copy = target / path.relative_to(self.root)
            if path.parent != self.root and path.parent not in folders:
                continue
            shutil.copyfile(self._kept[number], copy)
            if not self._synced[number]:
                # The size may be durable before the bytes are.
                copy.write_bytes(bytes(copy.stat().st_size))
        return target
