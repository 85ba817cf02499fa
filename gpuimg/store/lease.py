"""Leases of writers and the store's lock (docs/store-format.md, "Order of writes").

Both are flock(2) locks: the kernel lets them go when the process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from gpuimg.errors import BusyError
from gpuimg.store import files
from gpuimg.store.layout import StoreFolder

_LEASE_SIZE = 16
_LOCK_SECONDS = 120.0
_POLL_SECONDS = 0.02


class Lease:
    """A live writer's lease. `id` (16 bytes) also stands in the headers of its packs."""

    def __init__(self, folder: StoreFolder) -> None:
        self.id = os.urandom(_LEASE_SIZE)
        self._path = folder.leases / self.id.hex()
        # Locked under a name that gc does not read, so that gc never sees it unlocked.
        temporary = folder.temporary("lease")
        self._fd = files.create_private(temporary)
        try:
            files.write_all(self._fd, f"pid {os.getpid()}\n".encode())
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            temporary.rename(self._path)
        except OSError:
            os.close(self._fd)
            temporary.unlink(missing_ok=True)
            raise

    def release(self) -> None:
        """End the lease; it may be called again."""
        if self._fd < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        os.close(self._fd)
        self._fd = -1


def live_leases(folder: StoreFolder) -> set[bytes]:
    """Ids of the leases whose writers live; those of dead ones are removed."""
    live = set()
    for path in folder.leases.iterdir():
        try:
            lease_id = bytes.fromhex(path.name)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (ValueError, FileNotFoundError):
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            live.add(lease_id)
        finally:
            os.close(fd)
    return live


@contextlib.contextmanager
def shared_lock(folder: StoreFolder) -> Iterator[None]:
    """Hold off collectors; many may hold this at once."""
    with _lock(folder.lock, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def exclusive_lock(folder: StoreFolder) -> Iterator[None]:
    """Hold off commits, index catch-up and other collectors."""
    with _lock(folder.lock, fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def _lock(path: Path, mode: int) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(fd, mode | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BusyError(
                        f"another process has held {path} for {_LOCK_SECONDS:.0f} seconds",
                        remedy="wait for the gc, repair or dump that runs on this store, and try again",
                    ) from None
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(fd)
