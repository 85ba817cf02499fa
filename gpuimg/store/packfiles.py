"""Open pack files for reading: a bounded set of descriptors shared by all threads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator

from gpuimg.errors import MissingObjectError
from gpuimg.store.files import os_errors
from gpuimg.store.index import Index
from gpuimg.store.layout import StoreFolder

_KEEP_OPEN = 64


class PackFiles:
    """Descriptors of packs by pack number."""

    def __init__(self, folder: StoreFolder, index: Index) -> None:
        self._folder = folder
        self._index = index
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._used: dict[int, list[int]] = {}

    @contextlib.contextmanager
    def open(self, number: int) -> Iterator[int]:
        """The descriptor of a pack, for preads within the block.

        Raises
        ------
        MissingObjectError
            The pack is lost.
        """
        fd = self._acquire(number)
        try:
            yield fd
        finally:
            self._release(number)

    def _acquire(self, number: int) -> int:
        with self._lock:
            if number in self._used:
                self._used[number][1] += 1
                return self._used[number][0]
            fd = self._idle.pop(number, -1)
            if fd < 0:
                fd = self._open(number)
            self._used[number] = [fd, 1]
            return fd

    def _release(self, number: int) -> None:
        with self._lock:
            entry = self._used[number]
            entry[1] -= 1
            if entry[1]:
                return
            del self._used[number]
            self._idle[number] = entry[0]
            while len(self._idle) > _KEEP_OPEN:
                os.close(self._idle.popitem(last=False)[1])

    def _open(self, number: int) -> int:
        entry = self._index.pack(number)
        if entry is None:
            raise MissingObjectError(
                f"the index names a pack number {number} that it does not know",
                remedy="run `gpuimg repair`, which rebuilds the index",
            )
        path = self._folder.pack(entry.id)
        with os_errors(f"opening the pack {path}"):
            try:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise MissingObjectError(
                    f"the pack {path} is lost",
                    remedy="bring it back from a backup, or run `gpuimg verify` to see what it hurts",
                ) from None

    def close(self) -> None:
        """Close what nobody uses."""
        with self._lock:
            for fd in self._idle.values():
                os.close(fd)
            self._idle.clear()
