"""Change detection: what of a slab is as the parent had it, and what changed in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gpuimg.store.chunking import Cut, is_zero, make_cutter
from gpuimg.store.hashing import fingerprint
from gpuimg.store.model import Layout, Piece


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
            chunks.append(_against(data, cut.before, cut.fingerprint or fingerprint(data, seed)))
    return chunks


def _against(data: memoryview, before: Piece, mark: bytes) -> Chunk:
    if mark == before.fingerprint:
        return Chunk(data, before.id, mark, unchanged=True)
    if is_zero(data):
        return Chunk(data)
    return Chunk(data, fingerprint=mark, base=before.id or b"", is_unknown=True)


def _once_zero(data: memoryview, file: File) -> list[Chunk]:
    """What is now where the parent had zeros."""
    if is_zero(data):
        return [Chunk(data)]
    cuts, _ = make_cutter(file.layout, file.chunk_size).cut(data, last=True)
    return [Chunk(data[cut.offset : cut.offset + cut.length], is_unknown=not cut.zero) for cut in cuts]
