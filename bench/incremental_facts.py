"""What two checkpoints have in common, and how few bytes coding by planes could take for the second.

The bound is that of an ideal order-0 entropy coder for each byte plane of each run of 256 KiB, taken for the
rotated elements (the sign moved behind the exponent) and for the zig-zag integer differences to the bytes at
the same place before; runs that did not change count nothing. No real coder that treats bytes one by one
can be below it; one that sees runs or repeats can.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

Bytes = npt.NDArray[np.uint8]

RUN = 256 << 10
LINE = 64
PAGE = 4096
_CHUNK = 1 << 20
_RUNS = 1024
_UNSIGNED = {2: np.uint16, 4: np.uint32}
_SIGNED = {2: np.int16, 4: np.int32}


def compare(before: Path, after: Path) -> dict[str, Any]:
    """What changed between two directories of images, page files only.

    Returns
    -------
    dict
        `raw_bytes` of the page files of `after`; `changed_bytes`: bytes of the lines of 64 that differ from
        the same place before (lines behind the end of the file before count as changed); `equal_pages` and
        `equal_chunks`: the share of 4 KiB pages and 1 MiB chunks that are the same; `unseen_pages`: the
        share of pages that stood nowhere before.
    """
    seen = {digest for path in page_files(before) for digest in _digests(path)}
    unseen = sum(digest not in seen for path in page_files(after) for digest in _digests(path))
    raw = changed = 0
    equal = {PAGE: 0, _CHUNK: 0}
    count = {PAGE: 0, _CHUNK: 0}
    for path in page_files(after):
        size = path.stat().st_size
        raw += size
        for new, old in itertools.zip_longest(_pieces(path, _CHUNK), _pieces(before / path.name, _CHUNK)):
            if new is None:
                break
            kept = _equal_lines(new, old)
            changed += len(new) - int(kept.sum()) * LINE
            for unit in equal:
                per = np.logical_and.reduceat(kept, range(0, len(kept), unit // LINE)) if len(kept) else kept
                equal[unit] += int(per.sum())
                count[unit] += len(per)
    return {
        "raw_bytes": raw,
        "changed_bytes": changed,
        "equal_pages": equal[PAGE] / max(1, count[PAGE]),
        "equal_chunks": equal[_CHUNK] / max(1, count[_CHUNK]),
        "unseen_pages": unseen / max(1, count[PAGE]),
    }


def page_files(directory: Path) -> list[Path]:
    """The page files of a directory of images."""
    return sorted(path for path in directory.iterdir() if "pages-" in path.name)


def _digests(path: Path) -> Iterator[int]:
    for piece in _pieces(path, _CHUNK):
        for start in range(0, len(piece), PAGE):
            yield xxh3_64_intdigest(piece[start : start + PAGE].data)


def _equal_lines(new: Bytes, old: Bytes | None) -> npt.NDArray[np.bool_]:
    """For every whole line of `new`, whether it stands in `old` at the same place."""
    made = np.zeros(len(new) // LINE, dtype=bool)
    if old is None:
        return made
    common = min(len(new), len(old)) // LINE
    words = (part[: common * LINE].view(np.uint64).reshape(common, -1) for part in (new, old))
    made[:common] = np.equal(*words).all(axis=1)
    return made


def _pieces(path: Path, size: int) -> Iterator[Bytes]:
    if not path.exists():
        return
    with path.open("rb") as stream:
        while data := stream.read(size):
            yield np.frombuffer(data, dtype=np.uint8)


def entropy_bound(before: Path | None, after: Path, elements: tuple[int, ...]) -> dict[str, Any]:
    """The bound for the page files of `after`, from at most 1024 evenly spread runs a file.

    Parameters
    ----------
    elements
        The element sizes that occur; each run is taken by the one that suits it.

    Returns
    -------
    dict
        Bytes: `alone` (rotated elements), `difference` (None without `before`), `best`, run by run the
        smaller of the two.
    """
    total = {"alone": 0.0, "difference": 0.0, "best": 0.0}
    for path in page_files(after):
        old = before / path.name if before else None
        runs = path.stat().st_size // RUN
        if runs == 0:
            continue
        chosen = np.unique(np.linspace(0, runs - 1, min(runs, _RUNS)).astype(np.int64))
        scale = path.stat().st_size / (len(chosen) * RUN)
        for number in chosen:
            new = _run(path, int(number))
            base = _run(old, int(number)) if old and old.exists() else None
            alone = min(_planes(_rotated(new, size)) for size in elements)
            apart = alone
            if base is not None and len(base) == len(new):
                apart = min(_planes(_difference(new, base, size)) for size in elements)
                apart = 0.0 if np.array_equal(new, base) else apart
            total["alone"] += alone * scale
            total["difference"] += apart * scale
            total["best"] += min(alone, apart) * scale
    made: dict[str, Any] = {name: int(value) for name, value in total.items()}
    return made if before else made | {"difference": None}


def _run(path: Path, number: int) -> Bytes:
    with path.open("rb") as stream:
        stream.seek(number * RUN)
        return np.frombuffer(stream.read(RUN), dtype=np.uint8)


def _rotated(data: Bytes, size: int) -> Bytes:
    values = data.view(_UNSIGNED[size])
    turned = np.asarray((values << 1) | (values >> (8 * size - 1)))
    return turned.view(np.uint8).reshape(-1, size)


def _difference(data: Bytes, base: Bytes, size: int) -> Bytes:
    apart = (data.view(_UNSIGNED[size]) - base.view(_UNSIGNED[size])).view(_SIGNED[size])
    zigzag = np.asarray((apart << 1) ^ (apart >> (8 * size - 1)))
    return zigzag.view(np.uint8).reshape(-1, size)


def _planes(elements: Bytes) -> float:
    """Bytes that an order-0 coder needs for the columns of a table of bytes."""
    return sum(_entropy(np.ascontiguousarray(column)) for column in elements.T)


def _entropy(plane: Bytes) -> float:
    counts = np.bincount(plane, minlength=256)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / len(plane))).sum()) / 8
