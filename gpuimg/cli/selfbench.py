"""The measurements behind `gpuimg bench`: an import, a second one and an export in a private store."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xxhash import xxh3_128_digest

import gpuimg
from gpuimg.cli.generate import PAGE_FILES, write_set
from gpuimg.errors import NoSpaceError, PermissionDeniedError

if TYPE_CHECKING:
    from gpuimg.store.ingest import Session
    from gpuimg.store.store import Store

_PIECE = 256 << 10


@dataclass(frozen=True, slots=True)
class Timing:
    """Something done to all the data: seconds, bytes per second, CPU seconds per 10^9 bytes.

    For a whole operation `seconds` are wall-clock seconds, for a stage CPU seconds of all threads.
    """

    name: str
    seconds: float
    rate: float
    cpu_per_gb: float


@dataclass(frozen=True, slots=True)
class Report:
    """What `gpuimg bench` found."""

    data_set: str
    raw_bytes: int
    stored_bytes: int
    whole: tuple[Timing, ...]
    stages: tuple[Timing, ...]


def measure(data_set: str, size: int, directory: Path | None) -> Report:
    """Generate data and measure; everything is below a private folder that is removed at the end."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="gpuimg-bench-", dir=directory))
    except OSError as error:
        raise PermissionDeniedError(
            f"no folder can be made in {directory or tempfile.gettempdir()}: {error.strerror}",
            remedy="name another one with --directory",
        ) from error
    try:
        return _measure(data_set, size, folder)
    except OSError as error:
        raise NoSpaceError(
            f"the data cannot be written to {folder.parent}: {error.strerror}",
            remedy="name a folder with more space with --directory, or a smaller --size",
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(data_set: str, size: int, folder: Path) -> Report:
    source = folder / "source"
    raw = write_set(data_set, source, size)
    with gpuimg.init_store(folder / "store") as store:
        whole = []
        with store.ingest() as session:
            whole.append(_timed("import", raw, lambda: _take_in(session, source)))
            stages = _stages(session, raw, whole[0])
        stored = store.stats().stored_bytes
        whole.append(_timed("import of the same again", raw, lambda: _again(store, source)))
        whole.append(_timed("export", raw, lambda: store.checkpoint("bench").export(folder / "out")))
    stages.insert(1, _fingerprint(source / PAGE_FILES[0], raw))
    return Report(data_set, raw, stored, tuple(whole), tuple(stages))


def _timed(name: str, raw: int, action: Callable[[], object]) -> Timing:
    cpu, started = time.process_time(), time.monotonic()
    action()
    seconds = time.monotonic() - started
    return Timing(name, seconds, raw / seconds, (time.process_time() - cpu) / (raw / 1e9))


def _take_in(session: Session, source: Path) -> None:
    for path in sorted(source.iterdir()):
        session.add_path(path.name, path)
    session.commit(tag="bench")


def _again(store: Store, source: Path) -> None:
    with store.ingest() as session:
        _take_in(session, source)


def _stages(session: Session, raw: int, whole: Timing) -> list[Timing]:
    """CPU seconds of each stage, and what the import needed beside them."""
    found = dataclasses.asdict(session.stages)
    found["other"] = max(whole.cpu_per_gb * raw / 1e9 - sum(found.values()), 0.0)
    return [_stage(name, seconds, raw) for name, seconds in found.items()]


def _stage(name: str, seconds: float, raw: int) -> Timing:
    return Timing(name, seconds, raw / max(seconds, 1e-9), seconds / (raw / 1e9))


def _fingerprint(path: Path, raw: int) -> Timing:
    """XXH3-128 of one file piece by piece, scaled to all the data: what an incremental dump adds."""
    data = memoryview(path.read_bytes())
    started = time.thread_time()
    for offset in range(0, len(data), _PIECE):
        xxh3_128_digest(data[offset : offset + _PIECE], seed=1)
    return _stage("fingerprint", (time.thread_time() - started) * raw / max(len(data), 1), raw)
