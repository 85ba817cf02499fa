"""Fetch CRIU's own test suite (zdtm) from Debian's source package into .criu/source/.

    python -m scripts.fetch_zdtm

The source is only for running its tests here; nothing of it is part of gpuimg. The compiler and the headers
that its test programs need are installed by package name if they are missing and this is root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from scripts.fetch_criu import KEYRING, TARGET, FetchError, private_apt, run, system_mirror

SOURCE = TARGET / "source"
SUITES = ("trixie", "sid")
BUILD_PACKAGES = ("gcc", "make", "libc6-dev", "libbsd-dev", "libcap-dev", "pkg-config", "iproute2")


def fetch_source(suite: str, folder: Path) -> Path:
    """Download the upstream tarball of a suite's criu; returns its path."""
    environment = private_apt(folder, suite, system_mirror())
    signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
    (folder / "sources.list").write_text(f"deb-src {signed}{system_mirror()} {suite} main\n")
    run(["apt-get", "-qq", "update"], environment)
    # Mirrors may lack the Debian part of the package, which is not needed: only the tarball counts.
    subprocess.run(
        ["apt-get", "-qq", "source", "--download-only", "criu"],
        cwd=folder,
        env=environment,
        capture_output=True,
        check=False,
    )
    found = sorted(folder.glob("criu_*.orig.tar.*"))
    found = [path for path in found if path.suffix != ".asc"]
    if not found:
        raise FetchError(f"the source package of criu in {suite} could not be fetched")
    return found[0]


def fetch() -> Path:
    """Make .criu/source complete; returns the folder of the test suite."""
    if (SOURCE / "test" / "zdtm.py").exists():
        return SOURCE / "test"
    TARGET.mkdir(exist_ok=True)
    failures = []
    for suite in SUITES:
        with tempfile.TemporaryDirectory(prefix=".source-", dir=TARGET) as temporary:
            work = Path(temporary)
            (work / "apt").mkdir()
            try:
                archive = fetch_source(suite, work / "apt")
            except FetchError as error:
                failures.append(str(error))
                continue
            with tarfile.open(archive) as tar:
                tar.extractall(work / "out", filter="fully_trusted")
            (unpacked,) = (work / "out").iterdir()
            # Its own pycriu is unbuilt and would hide the packaged one.
            (unpacked / "test" / "pycriu").unlink(missing_ok=True)
            # zdtm.py would build all of its tests where their library is missing, and each one otherwise.
            run(["make", "-C", str(unpacked / "test" / "zdtm" / "lib")], dict(os.environ))
            unpacked.rename(SOURCE)
            return SOURCE / "test"
    raise FetchError("; ".join(failures))


def install_build_packages() -> None:
    """Install what compiling the test programs needs."""
    if shutil.which("gcc") and shutil.which("make") and Path("/usr/include/bsd/string.h").exists():
        return
    if os.geteuid() != 0:
        raise FetchError(f"missing; run: apt-get install {' '.join(BUILD_PACKAGES)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "-qq", "update"], environment)
    run(["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *BUILD_PACKAGES], environment)


def main() -> None:
    try:
        install_build_packages()
        print(f"zdtm: {fetch()}")
    except FetchError as error:
        sys.exit(f"zdtm: {error}")


if __name__ == "__main__":
    main()
