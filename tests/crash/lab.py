"""What the crash tests share: data, jobs that run in processes of their own, kill points, and the check
that a store has kept its promises."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import random
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpuimg
from gpuimg.errors import GpuimgError
from gpuimg.store import pack
from gpuimg.store.directory import import_directory
from gpuimg.store.index import Index
from gpuimg.store.store import Store, repair_store

Files = dict[str, bytes]

PAGE = 4096
SMALL_PACK = 192 * 1024
"""Packs of the jobs are ended early, so that a small import writes several."""

# Jobs are forked from a server that has loaded everything and opened nothing.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.crash.lab", "gpuimg", "gpuimg.cli.app", "gpuimg.store.store"])


# Data


def random_pages(seed: object, pages: int) -> bytes:
    return random.Random(repr(seed)).randbytes(pages * PAGE)


def contents(number: int, *, pages: int = 160) -> Files:
    """The files of checkpoint `number`: some of their data is its own, some its neighbours have too."""
    shared = [random_pages(("shared", number // 2 + i), pages // 4) for i in range(2)]
    own = random_pages(("own", number), pages // 2)
    text = b"".join(b"%d: a line that compresses\n" % (number * 7 + i) for i in range(3000))
    return {
        # Chunks end where zeros begin, so that the shared parts become the same chunks everywhere.
        "pages-1.img": bytes(40 * PAGE).join([shared[0], own, shared[1]]),
        "buffer.bin": shared[1] + text,
        "core-1.img": b"core %d" % number,
        "empty.img": b"",
    }


def following(files: Mapping[str, bytes], seed: int = 0) -> Files:
    """What becomes of files until the next checkpoint: one word in twenty changes a little."""
    changed = {}
    for name, data in files.items():
        new = bytearray(data)
        for at in random.Random(f"{seed} {name}").sample(range(len(new) // 4), len(new) // 80):
            new[4 * at] ^= 1
        changed[name] = bytes(new)
    return changed


def write_files(directory: Path, files: Mapping[str, bytes]) -> Path:
    directory.mkdir(parents=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return directory


def small_packs() -> None:
    """Have this process end its packs early."""
    pack.TARGET_SIZE = SMALL_PACK


def one_pack() -> None:
    """Have this process put all that it imports into one pack."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pack.TARGET_SIZE = 1 << 30


def take(
    store: Store, files: Mapping[str, bytes], *, tag: str | None = None, parent: str | None = None
) -> str:
    """Put files into a store in this process; returns the checkpoint's id."""
    with store.ingest(parent=store.checkpoint(parent) if parent else None) as session:
        for name, data in files.items():
            file = session.file(name)
            file.write(data)
            file.close()
        return session.commit(tag=tag).id


# Processes


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: its exit code (negative: a signal) and what it had reported until then."""

    code: int
    reports: list[Any]

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


Job = Callable[..., None]


class Running:
    """A job in a process of its own. It may call `report(object)`, its first argument."""

    def __init__(self, job: Job, *arguments: object, prepare: Iterable[Callable[[], None]] = ()) -> None:
        self._ours, theirs = _server.Pipe(duplex=False)
        self.process = _server.Process(
            target=_run, args=(theirs, tuple(prepare), job, arguments), daemon=True
        )
        self.process.start()
        theirs.close()
        self._reports: list[Any] = []
        assert self._ours.recv() == "begun"

    def next_report(self, seconds: float = 60.0) -> Any:
        assert self._ours.poll(seconds), "the job is silent"
        self._reports.append(self._ours.recv())
        return self._reports[-1]

    def kill(self) -> None:
        self.process.kill()

    def wait(self, seconds: float = 120.0) -> Outcome:
        with contextlib.suppress(EOFError):
            while self._ours.poll(seconds):
                self._reports.append(self._ours.recv())
        self.process.join(seconds)
        code = self.process.exitcode
        assert code is not None, "the job hangs"
        self.process.close()
        self._ours.close()
        return Outcome(code, self._reports)


def _run(
    pipe: multiprocessing.connection.Connection,
    prepare: tuple[Callable[[], None], ...],
    job: Job,
    arguments: tuple[object, ...],
) -> None:
    small_packs()
    pipe.send("begun")
    for step in prepare:
        step()
    try:
        job(pipe.send, *arguments)
    except GpuimgError as error:
        pipe.send(error)
        os._exit(error.exit_status)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


def run(job: Job, *arguments: object, prepare: Iterable[Callable[[], None]] = ()) -> Outcome:
    """Run a job to its end."""
    return Running(job, *arguments, prepare=prepare).wait()


def run_killed_after(seconds: float, job: Job, *arguments: object) -> Outcome:
    """Run a job and kill it that long after its begin."""
    running = Running(job, *arguments)
    time.sleep(seconds)
    running.kill()
    return running.wait()


# Jobs

Report = Callable[[Any], None]


def import_job(
    report: Report, root: Path, directory: Path, tag: str | None, parent: str | None = None
) -> None:
    with gpuimg.open_store(root) as store:
        compared = store.checkpoint(parent) if parent else None
        report(import_directory(store, directory, tag=tag, parent=compared).id)


def gc_job(report: Report, root: Path) -> None:
    with gpuimg.open_store(root) as store:
        report(store.gc())


def repair_job(report: Report, root: Path) -> None:
    report(repair_store(root))


def remove_job(report: Report, root: Path, reference: str) -> None:
    with gpuimg.open_store(root) as store:
        report(store.remove(reference))


def init_job(report: Report, root: Path) -> None:
    gpuimg.init_store(root).close()
    report("made")


# Kill points

CALLS = (
    "open",
    "write",
    "writev",
    "pwrite",
    "pwritev",
    "ftruncate",
    "posix_fallocate",
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
)
"""The functions of `os` by which a store changes."""


@dataclass(frozen=True)
class KillAt:
    """Has a process kill itself at its n-th change of the file system.

    `torn`: the half of a write still gets through.
    """

    number: int
    torn: bool = False

    def __call__(self) -> None:
        left = self.number

        def point(tear: Callable[[], object] = lambda: None) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                if self.torn:
                    tear()
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

        def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **options: Any) -> Any:
                if _changes_a_file(name, args):
                    point(lambda: _tear(name, real, args))
                return real(*args, **options)

            return wrapper

        for name in CALLS:
            setattr(os, name, wrap(name, getattr(os, name)))
        _around_index_writes(point)


def _changes_a_file(name: str, args: tuple[Any, ...]) -> bool:
    if name == "open":
        return bool(args[1] & os.O_CREAT)
    return not isinstance(args[0], int) or not stat.S_ISFIFO(os.fstat(args[0]).st_mode)


def _tear(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Do the first half of a write."""
    if name in ("write", "pwrite"):
        real(args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:])
    elif name in ("writev", "pwritev"):
        parts = list(args[1])
        real(args[0], parts[: max(1, len(parts) // 2)], *args[2:])


def _around_index_writes(point: Callable[[], object]) -> None:
    """Make the moments before and after each transaction of the index kill points too."""
    real = Index._write

    def write(self: Index, action: Callable[[Any], Any]) -> Any:
        point()
        result = real(self, action)
        point()
        return result

    Index._write = write  # type: ignore[method-assign]


def kill_points(limit: int = 2000) -> Iterator[int]:
    """1, 2, 3, ... ; the loop over it ends when a job has lived to its end."""
    yield from range(1, limit)
    raise AssertionError(f"more than {limit} kill points")


# Judgement


def check(root: Path, expected: Mapping[str, Files], work: Path) -> None:
    """A store is clean, and gives back every expected checkpoint bit for bit."""
    with gpuimg.open_store(root) as store:
        report = store.verify()
        assert not report.faults, report.faults
        present = {checkpoint.id for checkpoint in store.checkpoints()}
        assert expected.keys() <= present
        for number, (checkpoint_id, files) in enumerate(expected.items()):
            target = work / f"export-{number}"
            store.checkpoint(checkpoint_id).export(target)
            assert sorted(path.name for path in target.iterdir()) == sorted(files)
            for name, data in files.items():
                assert (target / name).read_bytes() == data, f"{name} of {checkpoint_id[:12]} has changed"
            shutil.rmtree(target)


def leftovers(root: Path) -> list[str]:
    """What lies in tmp/, trash/ and leases/."""
    return sorted(
        f"{folder}/{path.name}" for folder in ("tmp", "trash", "leases") for path in (root / folder).iterdir()
    )


def age(root: Path) -> None:
    """Make what lies in tmp/ look forgotten."""
    for path in (root / "tmp").iterdir():
        os.utime(path, (0, 0))


def collect(root: Path) -> None:
    """gc with no writer alive: nothing half done may remain."""
    age(root)
    with gpuimg.open_store(root) as store:
        store.gc()
    remaining = leftovers(root)
    assert not remaining, remaining


def pack_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "packs").glob("*/*.pack"))


def copy_store(source: Path, target: Path) -> Path:
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target)
    return target
