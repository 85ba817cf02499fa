"""Stores in memory, so that hundreds of crashes take seconds; real processes and criu as in the e2e tests."""

from __future__ import annotations

import os
import shutil
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
