"""A real process lives on whatever goes wrong before its checkpoint is durable; a checkpoint that is
damaged never becomes a process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpuimg
from gpuimg.criu.images import process_tree
from gpuimg.criu.locate import Criu
from gpuimg.errors import DamagedError, InputOutputError, MissingObjectError, NoSpaceError
from gpuimg.store.index import Place
from gpuimg.store.store import Store
from tests.e2e.conftest import ROOT, Start, Victim, children, state, until

from .conftest import SmallDisk

pytestmark = pytest.mark.root

with_one_criu = pytest.mark.parametrize("criu", ["trixie"], indirect=True)

Gpuimg = Callable[..., "subprocess.CompletedProcess[str]"]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "import sys; from gpuimg.cli import main; sys.exit(main())"] + [
        str(argument) for argument in arguments
    ]


@pytest.fixture
def environment(criu: Criu, tmp_path: Path) -> dict[str, str]:
    runtime = tmp_path / "run"
    runtime.mkdir()
    return {**os.environ, "GPUIMG_CRIU": str(criu.path), "XDG_RUNTIME_DIR": str(runtime)}


@pytest.fixture
def cli(environment: dict[str, str]) -> Gpuimg:
    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments), env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT
        )

    return call


def assert_failed(done: subprocess.CompletedProcess[str], status: int, *parts: str) -> None:
    """It says why in one sentence."""
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    assert done.stderr.startswith("gpuimg: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr, done.stderr


def assert_clean(cli: Gpuimg, root: Path) -> None:
    done = cli("--store", root, "verify")
    assert done.returncode == 0, done.stdout + done.stderr


def assert_dumps_and_restores(cli: Gpuimg, root: Path, victim: Victim) -> None:
    done = cli("--store", root, "dump", "-t", victim.pid, "--tag", "later", "--json")
    assert done.returncode == 0, done.stderr
    victim.assert_gone()
    assert_clean(cli, root)
    done = cli("--store", root, "restore", "later", "--detach")
    assert done.returncode == 0, done.stderr
    victim.assert_runs()
    victim.assert_whole()


def make_store(path: Path) -> Path:
    gpuimg.init_store(path).close()
    return path


# The disk fills


def test_a_disk_that_fills_during_the_dump_lets_the_process_run_on(
    start: Start, cli: Gpuimg, small_disk: SmallDisk
) -> None:
    root = make_store(small_disk.path / "store")
    victim = start("native", mib=16)
    done = cli("--store", root, "dump", "-t", victim.pid, "--tag", "full")
    assert_failed(done, NoSpaceError.exit_status, "No space left on device")
    victim.assert_runs()
    assert_clean(cli, root)
    assert json.loads(cli("--store", root, "ls", "--json").stdout)["checkpoints"] == []
    small_disk.resize(64)
    assert_dumps_and_restores(cli, root, victim)


@pytest.mark.slow
@with_one_criu
def test_a_disk_that_is_full_to_any_degree_lets_the_process_run_on(
    start: Start, cli: Gpuimg, small_disk: SmallDisk
) -> None:
    """The last byte may go at any step: opening, lease, packs, index, manifest, tag."""
    root = make_store(small_disk.path / "store")
    victim = start("native", mib=1)
    refused = 0
    for leave in [*range(0, 64, 4), *range(64, 2048, 128)]:
        ballast = small_disk.fill(leave * 1024)
        done = cli("--store", root, "dump", "-t", victim.pid, "--tag", "full")
        if done.returncode == 0:
            victim.assert_gone()
            break
        assert_failed(done, NoSpaceError.exit_status)
        refused += 1
        victim.assert_runs()
        ballast.unlink()
        assert_clean(cli, root)
    assert refused > 5
    ballast.unlink()
    assert_clean(cli, root)
    assert cli("--store", root, "restore", "full", "--detach").returncode == 0
    victim.assert_runs()
    victim.assert_whole()


# gpuimg dies


@pytest.mark.slow
@with_one_criu
def test_a_gpuimg_killed_at_any_moment_lets_the_process_run_on(
    start: Start, cli: Gpuimg, environment: dict[str, str], tmp_path: Path
) -> None:
    root = make_store(tmp_path / "store")
    victim = start("native", mib=24)
    rng = random.Random(7)
    # Until it has begun a dump there is nothing to hit.
    work = Path(environment["XDG_RUNTIME_DIR"])
    before = after = 0
    full = 0.4
    for attempt in range(26):
        dump = subprocess.Popen(
            command("--store", root, "dump", "-t", victim.pid, "--tag", f"k{attempt}"),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        begun = time.monotonic()
        until(lambda: any(work.glob("gpuimg-*/criu.log")), "criu has begun")
        time.sleep(rng.uniform(0, full))
        dump.send_signal(signal.SIGKILL)
        killed = dump.wait() == -signal.SIGKILL
        for folder in work.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
        with gpuimg.open_store(root) as store:
            assert not store.verify(quick=True).faults
            committed = f"k{attempt}" in store.tags()
        if killed and not committed:
            before += 1
            victim.assert_runs()
            continue
        # The commit came first: whatever became of the process, it is in the store.
        after += 1
        full = min(full, time.monotonic() - begun)
        settle(victim)
        if not victim.alive():
            victim.assert_gone()
            assert cli("--store", root, "restore", f"k{attempt}", "--detach").returncode == 0
        victim.assert_runs()
    assert before >= 8, (before, after)
    victim.assert_whole()
    assert_clean(cli, root)
    assert_dumps_and_restores(cli, root, victim)


def settle(victim: Victim) -> None:
    """Wait until criu has ended the process or let it go."""

    def settled() -> bool:
        if not victim.alive():
            return True
        before = victim.count()
        time.sleep(0.2)
        return victim.count() > before

    until(settled, "criu is done with it")


# The commit fails


@contextlib.contextmanager
def file_in_place_of(folder: Path) -> Iterator[None]:
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_bytes(b"")
    try:
        yield
    finally:
        folder.unlink()
        aside.rename(folder)


@pytest.mark.parametrize("folder", ["manifests", "tmp", "leases"])
def test_a_store_that_cannot_take_the_commit_lets_the_process_run_on(
    start: Start, cli: Gpuimg, tmp_path: Path, folder: str
) -> None:
    root = make_store(tmp_path / "store")
    victim = start()
    with file_in_place_of(root / folder):
        done = cli("--store", root, "dump", "-t", victim.pid, "--tag", "x")
        assert_failed(done, InputOutputError.exit_status, "Not a directory")
    victim.assert_runs()
    assert_clean(cli, root)
    with gpuimg.open_store(root) as store:
        assert store.checkpoints() == [] and store.tags() == {}
    assert_dumps_and_restores(cli, root, victim)


def test_a_tag_that_cannot_be_written_lets_the_process_run_on(
    start: Start, cli: Gpuimg, tmp_path: Path
) -> None:
    root = make_store(tmp_path / "store")
    victim = start()
    (root / "tags" / "x").mkdir()
    done = cli("--store", root, "dump", "-t", victim.pid, "--tag", "x")
    assert_failed(done, InputOutputError.exit_status, "x")
    victim.assert_runs()
    (root / "tags" / "x").rmdir()
    assert_clean(cli, root)
    with gpuimg.open_store(root) as store:
        assert store.checkpoints() == []
    assert_dumps_and_restores(cli, root, victim)


# Verify on read


@pytest.fixture
def dumped(cli: Gpuimg, tmp_path: Path) -> Iterator[tuple[Path, Victim, list[int]]]:
    """A store with the checkpoint "t" of a process whose images are too large for the manifest."""
    root = make_store(tmp_path / "store")
    folder = tmp_path / "process"
    folder.mkdir()
    program = Path(__file__).with_name("many_mappings.py")
    victim = Victim(folder, [sys.executable, "-I", "-S", str(program), str(folder), "4"])
    done = cli("--store", root, "dump", "-t", victim.pid, "--tag", "t")
    assert done.returncode == 0, done.stderr
    victim.assert_gone()
    with gpuimg.open_store(root) as store:
        checkpoint = store.checkpoint("t")
        pids = [process.pid for process in process_tree(checkpoint.read)]
    yield root, victim, pids
    victim.kill()


def pack_path(store: Store, place: Place) -> Path:
    entry = store._context.index.pack(place.pack)
    assert entry is not None
    return store._context.folder.pack(entry.id)


def places(store: Store, file: str) -> Iterator[tuple[int, Place]]:
    """Offset in the file and place in the packs of all its chunks."""
    offset = 0
    for ref in store.checkpoint("t").entry(file).segments:
        for entry in store._context.reader.segment(ref).entries():
            if entry.id is not None:
                place = store._context.index.lookup([entry.id])[0]
                assert place is not None
                yield offset, place
            offset += entry.length


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def assert_nothing_restored(pids: list[int], folder: Path) -> None:
    until(lambda: not any(map(state, pids)), f"no process {pids} is left")
    assert not children(os.getpid()) or all(pid not in pids for pid in children(os.getpid()))
    before = (folder / "count").read_text()
    time.sleep(0.1)
    assert (folder / "count").read_text() == before, "it has run"


@pytest.mark.slow
@with_one_criu
def test_damage_in_any_file_never_reaches_a_process(
    dumped: tuple[Path, Victim, list[int]], cli: Gpuimg
) -> None:
    root, victim, pids = dumped
    with gpuimg.open_store(root) as store:
        checkpoint = store.checkpoint("t")
        targets = []
        for name, entry in checkpoint.files.items():
            found = list(places(store, name))
            # The first and the last chunk of every file that is not in the manifest.
            for offset, place in {found[0], found[-1]} if found else ():
                targets.append((name, offset, pack_path(store, place), place))
            offset = 0
            for ref in entry.segments:
                segment = store._context.index.lookup([ref.id])[0]
                assert segment is not None
                targets.append((name, offset, pack_path(store, segment), segment))
                offset += ref.size
    names = {name.split("-")[0] for name, *_ in targets}
    assert {"pages", "pagemap", "mm"} <= names
    for number, (name, offset, path, place) in enumerate(targets):
        flip(path, place.offset + place.stored // 2)
        done = cli("--store", root, "restore", "t", *(["--detach"] if number % 2 else []))
        assert_failed(done, DamagedError.exit_status, "checkpoint t", name)
        assert f"at offset {offset}: " in done.stderr, done.stderr
        assert_nothing_restored(pids, victim.folder)
        flip(path, place.offset + place.stored // 2)
    assert cli("--store", root, "restore", "t", "--detach").returncode == 0
    victim.assert_runs()
    victim.assert_whole()


def test_damage_of_the_manifest_never_reaches_a_process(
    dumped: tuple[Path, Victim, list[int]], cli: Gpuimg
) -> None:
    root, victim, pids = dumped
    [manifest] = (root / "manifests").iterdir()
    for offset in range(0, manifest.stat().st_size, manifest.stat().st_size // 5):
        flip(manifest, offset)
        done = cli("--store", root, "restore", "t")
        assert_failed(done, DamagedError.exit_status, manifest.name[:12])
        assert_nothing_restored(pids, victim.folder)
        flip(manifest, offset)


def test_a_lost_pack_never_makes_half_a_process(dumped: tuple[Path, Victim, list[int]], cli: Gpuimg) -> None:
    root, victim, pids = dumped
    packs = sorted((root / "packs").glob("*/*.pack"))
    assert packs
    for path in packs:
        aside = path.with_suffix(".aside")
        path.rename(aside)
        done = cli("--store", root, "restore", "t", "--detach")
        assert_failed(done, MissingObjectError.exit_status, "checkpoint t", ".img", "at offset ")
        assert_nothing_restored(pids, victim.folder)
        aside.rename(path)
    assert cli("--store", root, "restore", "t", "--detach").returncode == 0
    victim.assert_runs()


def test_a_pack_cut_short_never_makes_half_a_process(
    dumped: tuple[Path, Victim, list[int]], cli: Gpuimg
) -> None:
    root, victim, pids = dumped
    with gpuimg.open_store(root) as store:
        _, place = list(places(store, "pages-1.img"))[-1]
        path = pack_path(store, place)
    os.truncate(path, place.offset + place.stored - 1)
    done = cli("--store", root, "restore", "t")
    assert_failed(done, DamagedError.exit_status, "checkpoint t", "at offset ", "cut short")
    assert_nothing_restored(pids, victim.folder)
