"""Stores in memory, so that hundreds of crashes take seconds; real processes and criu as in the e2e tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import criu, native, start

__all__ = ["criu", "native", "start"]


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A folder that is fast to write; on disk where there is no /dev/shm."""
    if not os.access("/dev/shm", os.W_OK | os.X_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="gpuimg-test-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class SmallDisk:
    """A file system of a few MiB."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.path)], check=True)

    def resize(self, mib: int) -> None:
        self.remount(f"size={mib}m")

    def fill(self, leave: int = 0) -> Path:
        """Take all space but `leave` bytes; returns the file that holds it."""
        ballast = self.path / "ballast"
        free = os.statvfs(self.path).f_bavail * os.statvfs(self.path).f_bsize - leave
        if free > 0:
            fd = os.open(ballast, os.O_WRONLY | os.O_CREAT)
            os.posix_fallocate(fd, 0, free)
            os.close(fd)
        return ballast


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """An empty disk of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root, and these tests run as another user")
    path = tmp_path / "small"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "gpuimg-test", str(path)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
