"""Change detection: what of a slab is as the parent had it, what changed in place, and what only moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gpuimg.store.chunking import Cut, PageCutter, is_zero, make_cutter
from gpuimg.store.hashing import fingerprint, identify
from gpuimg.store.index import Index
from gpuimg.store.model import Layout

# Chunks that are looked for in the store to find out whether contents moved, and how many must be there.
_PROBED = 4
_FOUND = 2


@dataclass(slots=True)
class Chunk:
    """A chunk of a slab on its way into the store, or a run of zeros (`id` None and not to be identified).

    `base` is the id of the parent's chunk at the same place, where that is another one; else empty.
    """

    data: memoryview
    id: bytes | None = None
    fingerprint: bytes = b""
    base: bytes = b""
    unchanged: bool = False
    is_unknown: bool = False

    @property
    def length(self) -> int:
        return len(self.data)


class File(Protocol):
    """What change detection needs to know of the file that is taken in."""

    layout: Layout
    chunk_size: int

    def leave_parent(self) -> None:
        """Cut for itself what follows."""
        ...


def compare(view: memoryview, cuts: list[Cut], file: File, seed: int) -> list[Chunk]:
    """The chunks of a slab; those that the parent has at the same place, by fingerprint, are known."""
    chunks: list[Chunk] = []
    for cut in cuts:
        data = view[cut.offset : cut.offset + cut.length]
        if cut.zero:
            chunks.append(Chunk(data))
        elif cut.before is None:
            chunks.append(Chunk(data, is_unknown=True))
        elif cut.before.id is None:
            chunks += _once_zero(data, file)
        else:
            chunks.append(_against(data, cut.before.id, cut.before.fingerprint, seed))
    return chunks


def _against(data: memoryview, before: bytes, mark: bytes, seed: int) -> Chunk:
    found = fingerprint(data, seed)
    if found == mark:
        return Chunk(data, before, found, unchanged=True)
    if is_zero(data):
        return Chunk(data)
    return Chunk(data, fingerprint=found, base=before, is_unknown=True)


def _once_zero(data: memoryview, file: File) -> list[Chunk]:
    """What is now where the parent had zeros."""
    if is_zero(data):
        return [Chunk(data)]
    cuts, _ = make_cutter(file.layout, file.chunk_size).cut(data, last=True)
    return [Chunk(data[cut.offset : cut.offset + cut.length], is_unknown=not cut.zero) for cut in cuts]


def moved_contents(view: memoryview, chunks: list[Chunk], file: File, index: Index) -> list[Chunk]:
    """The same chunks or, if their contents have moved rather than changed, others that the store may have.

    What changed is cut by content and looked up. If it is there, the rest of the file is cut like that too.
    """
    first = next(number for number, chunk in enumerate(chunks) if chunk.base)
    last = len(chunks) - next(number for number, chunk in enumerate(reversed(chunks)) if chunk.base)
    start = sum(chunk.length for chunk in chunks[:first])
    region = view[start : start + sum(chunk.length for chunk in chunks[first:last])]
    cuts, _ = PageCutter().cut(region, last=True)
    # The first one begins where no cut by content does.
    pieces = [region[cut.offset : cut.offset + cut.length] for cut in cuts if not cut.zero][1 : _PROBED + 1]
    ids = {identify(piece) for piece in pieces}
    if sum(index.contains(ids)) < _FOUND:
        return chunks
    file.leave_parent()
    recut = [Chunk(region[cut.offset : cut.offset + cut.length], is_unknown=not cut.zero) for cut in cuts]
    return [*chunks[:first], *recut, *chunks[last:]]
