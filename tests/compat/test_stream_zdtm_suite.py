"""criu's own zdtm.py, unmodified, with `--stream` and our executable under upstream's name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import fetch_zdtm
from scripts.fetch_criu import TARGET, FetchError
from tests.compat.streamlib import EXECUTABLE

# Tests that zdtm runs as root: it runs the others as another user, whose limits criu can read with
# CAP_SYS_RESOURCE only. All of these pass here without --stream too.
TESTS = ("chroot", "cmdlinenv00", "cow00", "cow01", "different_creds", "fd01", "groups", "maps01")
TESTS += ("pty01", "sched_prio00", "shmemfd", "shmemfd-priv", "sk-unix01", "sockets00")


@pytest.fixture(scope="module")
def zdtm() -> Path:
    if os.geteuid() != 0:
        pytest.skip("criu needs root, and these tests run as another user")
    fetched = subprocess.run(
        [sys.executable, "-m", "scripts.fetch_criu", "trixie"],
        cwd=TARGET.parent,
        capture_output=True,
        text=True,
    )
    assert fetched.returncode == 0, fetched.stderr
    try:
        fetch_zdtm.install_build_packages()
        return fetch_zdtm.fetch()
    except FetchError as error:
        pytest.skip(f"criu's test suite is not to be had here: {error}")


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(240)
def test_zdtm_passes_with_stream_and_our_executable(zdtm: Path, tmp_path: Path) -> None:
    streamer = tmp_path / "bin"
    streamer.mkdir()
    (streamer / "criu-image-streamer").symlink_to(EXECUTABLE)
    suite = TARGET / "trixie"
    environment = {
        **os.environ,
        # zdtm starts itself again through `env python3`, with the criu package's modules.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(suite / "usr/lib/python3/dist-packages"),
    }
    command = [sys.executable, "./zdtm.py", "run", "--stream", "--keep-going", "-p", "2", "-f", "h"]
    command += ["--criu-bin", str(suite / "bin/criu"), "--crit-bin", str(suite / "bin/crit")]
    command += ["--criu-image-streamer-dir", str(streamer)]
    for name in TESTS:
        command += ["-t", f"zdtm/static/{name}"]
    done = subprocess.run(
        command, cwd=zdtm, env=environment, capture_output=True, text=True, errors="replace"
    )
    passed = {name for name in TESTS if f"Test zdtm/static/{name} PASS" in done.stdout}
    assert passed == set(TESTS), done.stdout[-4000:] + done.stderr[-2000:]
    assert done.returncode == 0
