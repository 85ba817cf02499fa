"""A checkpoint of the store as the source of a restore.

Every chunk is verified before a byte of it goes out, and decoded ahead on all cores.
"""

from __future__ import annotations

import ctypes
import re
import select
import time
from collections.abc import Set
from typing import TYPE_CHECKING

from gpuimg.stream import pipes
from gpuimg.stream.seams import Moved

if TYPE_CHECKING:
    from gpuimg.store.checkpoint import Checkpoint

LENT_CAPACITY = 256 * 1024
"""Bytes of pipe for lent pages: small beside a slab, since as much of each slab has to be copied."""
_COPIED_OUT = re.compile(r"(?:amdgpu-)?pages-[^/]*\.img")
"""Images that their reader takes out of the pipe with read(2). Others may be spliced onward, and then a page
of ours would be looked at long after it has left the pipe: those are always copied in."""


def _lend(pipe: int, buffer: memoryview, capacity: int) -> None:
    """Put a writable buffer into a pipe, most of it without copying; on return it may be reused.

    The last bytes, as many as the pipe holds, are written with a copy. Once they are in, everything before
    them has been taken out.
    """
    # The end of the copied part lies on a page boundary, so that it fills the pipe's slots to the last.
    lent = max(0, len(buffer) - capacity) & -pipes.PAGE
    if lent:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        done = 0
        while done < lent:
            done += pipes.vmsplice(pipe, address + done, lent - done)
    pipes.write_all(pipe, buffer[lent:])
    if lent:
        _wait_for_room(pipe, len(buffer) - lent)


def _wait_for_room(pipe: int, allowed: int) -> None:
    """Wait until the pipe holds at most `allowed` bytes; BrokenPipeError if its reader goes away.

    Hardly ever waits: only where the kernel has found room for more than the capacity says.
    """
    poll = select.poll()
    poll.register(pipe, 0)
    while pipes.readable_bytes(pipe) > allowed:
        if poll.poll(0):
            raise BrokenPipeError
        time.sleep(0.0001)


class StoredFile:
    """A `ServedFile` of a checkpoint."""

    __slots__ = ("_checkpoint", "_name", "size")

    def __init__(self, checkpoint: Checkpoint, name: str, size: int) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self.size = size

    def send(self, pipe: int, moved: Moved) -> None:
        """Write everything."""
        lend = _COPIED_OUT.fullmatch(self._name) is not None and self.size > 2 * LENT_CAPACITY
        if lend:
            pipes.try_capacity(pipe, LENT_CAPACITY)
        capacity = pipes.capacity(pipe)
        for buffer in self._checkpoint.stream(self._name):
            if lend and not buffer.readonly:
                _lend(pipe, buffer, capacity)
            else:
                pipes.write_all(pipe, buffer)
            moved(len(buffer))


class StoreSource:
    """An `ImageSource`.

    Parameters
    ----------
    checkpoint
        What is restored.
    hidden
        Names that are answered as missing.
    """

    def __init__(self, checkpoint: Checkpoint, *, hidden: Set[str] = frozenset()) -> None:
        self._checkpoint = checkpoint
        self._hidden = hidden

    def lookup(self, name: str) -> StoredFile | None:
        """The file of that name."""
        entry = self._checkpoint.files.get(name)
        if entry is None or name in self._hidden:
            return None
        return StoredFile(self._checkpoint, name, entry.size)
