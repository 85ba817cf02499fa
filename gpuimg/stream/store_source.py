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

_COPIED_OUT = re.compile(r"(?:amdgpu-)?pages-[^/]*\.img")
"""Images that their reader takes out of the pipe with read(2). Others may be spliced onward, and then a page
of ours would be looked at long after it has left the pipe: those are always copied in."""


def _lend(pipe: int, buffer: memoryview) -> None:
    """Put a writable, page-aligned buffer into a pipe without copying it."""
    if not buffer:
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    done = 0
    while done < len(buffer):
        done += pipes.vmsplice(pipe, address + done, len(buffer) - done)


def _wait_for_room(pipe: int, allowed: int) -> None:
    """Wait until the pipe holds at most `allowed` bytes; BrokenPipeError if its reader goes away.

    Hardly ever waits: where `allowed` is at least the pipe's capacity the bytes before are out already.
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
        """Write everything, page images mostly without copying.

        A lent view stays in use until its bytes have left the pipe, so the stream keeps the view before the
        current one. The last bytes, as many as the pipe holds, are copied: once the file is closed nothing
        can be observed any more.
        """
        capacity = pipes.capacity(pipe)
        if _COPIED_OUT.fullmatch(self._name) is None or self.size <= 2 * capacity:
            for view in self._checkpoint.stream(self._name):
                pipes.write_all(pipe, view)
                moved(len(view))
            return
        position = lent_until = 0
        for view in self._checkpoint.stream(self._name, keep=1):
            lent = max(0, min(len(view), self.size - capacity - position)) & -pipes.PAGE
            _lend(pipe, view[:lent])
            pipes.write_all(pipe, view[lent:])
            lent_until += lent
            position += len(view)
            # What may stay in the pipe at the next step: this view, and at the end what was copied.
            _wait_for_room(pipe, len(view) if position < self.size else self.size - lent_until)
            moved(len(view))


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
