"""A full disk, and one that may only be read: nothing stored is lost, and the error says what to do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpuimg
from gpuimg.errors import NoSpaceError, PermissionDeniedError
from gpuimg.store import packwriter
from gpuimg.store.store import repair_store

from . import lab
from .conftest import SmallDisk

MIB = 1 << 20


@pytest.fixture
def stored(small_disk: SmallDisk) -> tuple[Path, dict[str, lab.Files]]:
    """A store on the small disk with two checkpoints."""
    root = small_disk.path / "store"
    expected = {}
    with gpuimg.init_store(root) as store:
        for number in (1, 2):
            files = lab.contents(number)
            expected[lab.take(store, files, tag=f"t{number}")] = files
    return root, expected


def noise(number: int, mib: int) -> lab.Files:
    return {"pages-9.img": lab.random_pages(("noise", number), mib * 256), "core-9.img": b"core"}


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = "import sys; from gpuimg.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def assert_failed(done: subprocess.CompletedProcess[str], status: int, text: str) -> None:
    assert done.returncode == status, (done.returncode, done.stderr)
    assert text in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_an_import_that_does_not_fit_changes_nothing_and_gc_gives_the_space_back(
    stored: tuple[Path, dict[str, lab.Files]], tmp_path: Path
) -> None:
    root, expected = stored
    directory = lab.write_files(tmp_path / "images", noise(1, 12))
    packs = lab.pack_bytes(root)
    done = cli("--store", root, "import", directory, "--tag", "t1")
    assert_failed(done, NoSpaceError.exit_status, "No space left on device")
    lab.check(root, expected, tmp_path)
    with gpuimg.open_store(root) as store:
        assert store.checkpoint("t1").id == next(iter(expected))
        assert len(store.checkpoints()) == 2
    assert cli("--store", root, "gc").returncode == 0
    assert lab.pack_bytes(root) == packs
    with gpuimg.open_store(root) as store:
        expected[lab.take(store, noise(2, 2), tag="t1")] = noise(2, 2)
    lab.check(root, expected, tmp_path)


@pytest.mark.slow
def test_an_import_fails_whole_wherever_the_disk_fills(
    stored: tuple[Path, dict[str, lab.Files]], small_disk: SmallDisk, tmp_path: Path
) -> None:
    root, expected = stored
    files = lab.contents(7, pages=64)
    refused = 0
    for leave in [*range(0, 40, 4), *range(40, 600, 40)]:
        ballast = small_disk.fill(leave * 1024)
        made = None
        try:
            with gpuimg.open_store(root) as store:
                made = lab.take(store, files, tag="t1")
        except NoSpaceError:
            refused += 1
        ballast.unlink()
        with gpuimg.open_store(root) as store:
            assert store.tags()["t1"] == (made or next(iter(expected)))
            assert len(store.checkpoints()) == 2 + (made is not None)
        lab.check(root, expected, tmp_path)
        lab.collect(root)
        if made:
            lab.check(root, {**expected, made: files}, tmp_path)
            break
    assert refused > 5 and made


def test_gc_frees_space_on_a_full_disk_though_it_cannot_rewrite(
    small_disk: SmallDisk, tmp_path: Path
) -> None:
    root = small_disk.path / "store"
    with gpuimg.init_store(root) as store:
        lab.take(store, {"pages-1.img": noise(1, 1)["pages-9.img"]}, tag="dead")
        mixed = noise(2, 2)["pages-9.img"]
        lab.take(store, {"pages-1.img": mixed + bytes(MIB) + noise(3, 1)["pages-9.img"]}, tag="mixed")
        kept = {"pages-1.img": bytes(MIB) + noise(3, 1)["pages-9.img"]}
        expected = {lab.take(store, kept, tag="kept"): kept}
        store.remove("dead")
        store.remove("mixed")
        # As full as a failed import leaves it: what follows has room for a few small files only.
        ballast = small_disk.fill(64 * 1024)
        report = store.gc()
        assert report.deleted_packs == 1
        assert report.rewritten_packs == 0
    lab.check(root, expected, tmp_path)
    # Now there is room to rewrite.
    with gpuimg.open_store(root) as store:
        assert store.gc().rewritten_packs == 1
    lab.check(root, expected, tmp_path)
    lab.collect(root)
    assert lab.pack_bytes(root) < 1.2 * MIB
    ballast.unlink()
    lab.check(root, expected, tmp_path)


@pytest.mark.parametrize("leave", [0, 4096, 12288, 32768])
def test_whatever_does_not_fit_on_a_full_disk_loses_nothing(
    stored: tuple[Path, dict[str, lab.Files]], small_disk: SmallDisk, tmp_path: Path, leave: int
) -> None:
    """gc, repair, tag: each does its work or says that there is no space."""
    root, expected = stored
    newest = list(expected)[-1]
    with gpuimg.open_store(root) as store:
        store.remove(lab.take(store, noise(5, 1), tag="dead"))
    ballast = small_disk.fill(leave)
    tags = {"t1": next(iter(expected)), "t2": newest}
    for arguments in (["tag", "t1", "t2"], ["tag", "new", "t2"], ["gc"], ["repair"], ["gc"]):
        done = cli("--store", root, *arguments)
        assert done.returncode in (0, NoSpaceError.exit_status), done.stderr
        assert "internal" not in done.stderr and done.stderr.count("\n") <= 1
        if done.returncode == 0 and arguments[0] == "tag":
            tags[arguments[1]] = newest
    ballast.unlink()
    lab.check(root, expected, tmp_path)
    with gpuimg.open_store(root) as store:
        assert store.tags() == tags
    lab.collect(root)
    lab.check(root, expected, tmp_path)


def test_a_lost_index_on_a_full_disk_is_told_in_words(
    stored: tuple[Path, dict[str, lab.Files]], small_disk: SmallDisk, tmp_path: Path
) -> None:
    root, expected = stored
    for path in (root / "index").iterdir():
        path.unlink()
    ballast = small_disk.fill()
    for command in (["ls"], ["repair"]):
        assert_failed(cli("--store", root, *command), NoSpaceError.exit_status, "o space left on device")
    ballast.unlink()
    lab.check(root, expected, tmp_path)


def test_a_tag_that_does_not_fit_takes_its_checkpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if len(data) == 65:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    with gpuimg.init_store(tmp_path / "store") as store:
        first = lab.take(store, lab.contents(1), tag="t")
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(NoSpaceError):
            lab.take(store, lab.contents(2), tag="t")
        assert [checkpoint.id for checkpoint in store.checkpoints()] == [first]
        assert store.tags() == {"t": first}
        assert not store.verify().faults


def test_a_pack_that_cannot_be_synced_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpuimg.init_store(tmp_path / "store") as store:
        first = lab.take(store, lab.contents(1), tag="t")

        def fsync(_: int) -> None:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        monkeypatch.setattr(packwriter.os, "fsync", fsync)
        with pytest.raises(NoSpaceError, match="quota"):
            lab.take(store, lab.contents(2), tag="t")
        monkeypatch.undo()
        assert store.tags() == {"t": first}
        assert not store.verify().faults
        assert not list((store.path / "tmp").iterdir())


# Read-only


def test_a_read_only_file_system_is_told_in_words(
    stored: tuple[Path, dict[str, lab.Files]], small_disk: SmallDisk, tmp_path: Path
) -> None:
    root, expected = stored
    directory = lab.write_files(tmp_path / "images", lab.contents(3))
    small_disk.remount("ro")
    try:
        for arguments in (
            ["import", directory],
            ["gc"],
            ["repair"],
            ["tag", "x", "t1"],
            ["rm", "t1"],
            ["ls"],
            ["verify"],
        ):
            done = cli("--store", root, *arguments)
            if done.returncode:
                assert_failed(done, PermissionDeniedError.exit_status, "ead-only file system")
        done = cli("--store", root.parent / "new", "init")
        assert_failed(done, PermissionDeniedError.exit_status, "ead-only file system")
    finally:
        small_disk.remount("rw")
    lab.check(root, expected, tmp_path)


def as_nobody(arguments: list[str], root: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as another user, who may not be able to read where gpuimg is installed."""
    program = (
        "import os, shutil, sys\n"
        "from gpuimg.cli import directory, keep, main, store, tags\n"
        "import gpuimg.store.directory, gpuimg.store.repair, gpuimg.store.store\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"sys.exit(main({['--store', str(root), *arguments]!r}))"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("command", ["ls", "gc", "repair", "verify", "stats", "rm t1"])
def test_a_store_of_somebody_else_is_told_in_words(command: str, ram: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    ram.chmod(0o755)
    root = ram / "store"
    with gpuimg.init_store(root) as store:
        expected = {lab.take(store, lab.contents(1), tag="t1"): lab.contents(1)}
    assert_failed(as_nobody(command.split(), root), PermissionDeniedError.exit_status, "Permission denied")
    # Readable, but not to be written.
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    done = as_nobody(command.split(), root)
    if done.returncode:
        assert_failed(done, PermissionDeniedError.exit_status, "ermission denied")
    lab.check(root, expected, ram)


def test_a_repair_that_runs_out_of_space_can_be_run_again(
    stored: tuple[Path, dict[str, lab.Files]], small_disk: SmallDisk, tmp_path: Path
) -> None:
    root, expected = stored
    victim = max((root / "packs").glob("*/*.pack"), key=lambda path: path.stat().st_size)
    with victim.open("r+b") as stream:
        stream.seek(-10, os.SEEK_END)
        stream.write(b"0123456789")
    ballast = small_disk.fill(64 * 1024)
    with pytest.raises(NoSpaceError):
        repair_store(root)
    assert not list((root / "damaged").iterdir())
    ballast.unlink()
    assert repair_store(root).rebuilt_packs == 1
    lab.check(root, expected, tmp_path)
