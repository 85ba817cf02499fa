"""Fetch criu from Debian's archive into .criu/SUITE/, leaving the system as it is.

criu moves faster than a stable distribution and has to fit the running kernel, so tests and demo bring
their own: the packages of two newer suites, with every library they need down to the C library, are
unpacked into a folder and started through that folder's own dynamic loader. apt runs with a private
configuration (sources, lists, status, cache); of the system's it uses the mirror's address, the proxy
settings and the archive keys.

    python -m scripts.fetch_criu [--force] [trixie] [sid]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / ".criu"
SUITES = ("trixie", "sid")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

# With their dependencies.
COMPLETE = ("criu", "libc6")
# Without: the interpreter and protobuf come from the virtual environment.
BARE = ("python3-pycriu",)

# The loader must be found from where the folder is *now*, so everything hangs on $0. criu starts
# helpers (iptables, tar, ip, the action script) with its own environment: the library path is therefore given
# to the loader as an argument and never put into LD_LIBRARY_PATH.
CRIU_LAUNCHER = """\
#!/bin/sh
self=$(readlink -f -- "$0") && root=${{self%/bin/criu}}
exec "$root/{loader}" --library-path "{libraries}" --argv0 criu "$root/{program}" "$@"
"""

CRIT_LAUNCHER = """\
#!/bin/sh
self=$(readlink -f -- "$0") && root=${{self%/bin/crit}}
python=${{GPUIMG_PYTHON:-$root/../../.venv/bin/python}}
[ -x "$python" ] || python=python3
PYTHONPATH="$root/{modules}" exec "$python" -m crit "$@"
"""


class FetchError(Exception):
    """What went wrong, in a sentence for the user."""


@dataclass(frozen=True)
class Source:
    """One archive that the system's apt is told of."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]


def one_line_sources(text: str) -> Iterator[Source]:
    """Read the classic format: `deb [options] URI SUITE COMPONENT...`."""
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[[^\]]*\]\s+)?(\S+)\s+(\S+)((?:\s+[^#\s]+)*)", line)
        if match:
            yield Source(match[1], (match[2],), tuple(match[3].split()))


def stanza_sources(text: str) -> Iterator[Source]:
    """Read the deb822 format: stanzas of `Field: value`, continued by indented lines."""
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, list[str]] = {}
        values: list[str] = []
        for line in stanza.splitlines():
            if line[:1].isspace():
                values.extend(line.split())
            elif ":" in line:
                name, _, value = line.partition(":")
                values = fields.setdefault(name.strip().lower(), [])
                values.extend(value.split())
        if "deb" in fields.get("types", []) and fields.get("enabled", ["yes"]) != ["no"]:
            for uri in fields.get("uris", []):
                yield Source(uri, tuple(fields.get("suites", [])), tuple(fields.get("components", [])))


def system_mirror(apt: Path = Path("/etc/apt")) -> str:
    """Return the address from which this system gets Debian itself."""
    lists = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    candidates: list[Source] = []
    for path in lists:
        if path.suffix not in (".list", ".sources") or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        candidates.extend(one_line_sources(text) if path.suffix == ".list" else stanza_sources(text))
    plain = re.compile(r"(?:bookworm|trixie|forky|sid|stable|testing|unstable)$")
    for source in candidates:
        if "main" in source.components and any(plain.match(suite) for suite in source.suites):
            return source.uri
    raise FetchError(
        f"no Debian archive with component main among the apt sources in {apt}; "
        "criu can be fetched on Debian only, elsewhere install it and put it on PATH"
    )


def run(arguments: list[str], environment: dict[str, str], cwd: Path | None = None) -> str:
    try:
        result = subprocess.run(
            arguments, env=environment, cwd=cwd, capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        raise FetchError(f"{arguments[0]} is missing; this needs Debian's apt and dpkg") from None
    if result.returncode != 0:
        told = [line for line in result.stderr.splitlines() if line.startswith("E:")]
        told = told or result.stderr.strip().splitlines()[-3:] or ["no message"]
        raise FetchError(f"`{' '.join(arguments[:3])}` failed: {' '.join(told)}")
    return result.stdout


def private_apt(folder: Path, suite: str, mirror: str) -> dict[str, str]:
    """Lay out an apt of its own in `folder`; return the environment that makes apt-get use it."""
    for name in ("lists/partial", "archives/partial", "parts"):
        (folder / name).mkdir(parents=True)
    for name in ("status", "extended_states", "main", "preferences"):
        (folder / name).touch()
    signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
    (folder / "sources.list").write_text(f"deb {signed}{mirror} {suite} main\n")
    # How to reach the mirror is this machine's business; everything else, hooks above all, stays out.
    dump = run(["apt-config", "dump"], dict(os.environ))
    reach = [line for line in dump.splitlines() if line.startswith("Acquire::") and not line.endswith('"";')]
    settings = {
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::State::extended_states": folder / "extended_states",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": folder / "parts",
        "Dir::Etc::preferences": folder / "preferences",
        "Dir::Etc::preferencesparts": folder / "parts",
        "Dir::Etc::parts": folder / "parts",
        "Dir::Etc::main": folder / "main",
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "false",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
        "Debug::NoLocking": "true",
    }
    own = [f'{name} "{value}";' for name, value in settings.items()]
    (folder / "apt.conf").write_text("\n".join([*reach, *own]) + "\n")
    return {**os.environ, "APT_CONFIG": str(folder / "apt.conf"), "LC_ALL": "C"}


def download(suite: str, mirror: str, folder: Path) -> list[Path]:
    """Fetch the packages of `suite` into `folder`; return their paths."""
    environment = private_apt(folder, suite, mirror)
    run(["apt-get", "-qq", "update"], environment)
    # An empty status makes "install" name everything, the C library included. Nothing is installed.
    run(["apt-get", "-qq", "--download-only", "--yes", "install", *COMPLETE], environment)
    run(["apt-get", "-qq", "download", *BARE], environment, cwd=folder / "archives")
    return sorted((folder / "archives").glob("*.deb"))


def only(root: Path, *patterns: str) -> Path:
    """Return the first file under `root` that fits, relative to it."""
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            if path.is_file():
                return path.relative_to(root)
    raise FetchError(f"the packages hold no {patterns[0]}")


def write_launcher(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def write_launchers(root: Path) -> None:
    loader = only(root, "lib*/ld-linux*.so.*", "usr/lib*/ld-linux*.so.*", "usr/lib/*/ld-linux*.so.*")
    libraries = {
        path.parent.relative_to(root) for path in root.rglob("lib*.so.*") if "gconv" not in path.parts
    }
    text = ":".join(f"$root/{folder}" for folder in sorted(libraries))
    program = only(root, "usr/sbin/criu", "sbin/criu")
    write_launcher(root / "bin/criu", CRIU_LAUNCHER.format(loader=loader, libraries=text, program=program))
    modules = only(root, "usr/lib/python3*/**/pycriu/__init__.py").parent.parent
    write_launcher(root / "bin/crit", CRIT_LAUNCHER.format(modules=modules))


def version_of(root: Path) -> str | None:
    """Return what the fetched criu says its version is; None if it does not start."""
    try:
        result = subprocess.run(
            [root / "bin/criu", "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"Version:\s*(\S+)", result.stdout)
    return match[1] if result.returncode == 0 and match else None


def fetch(suite: str, *, force: bool) -> str:
    """Make .criu/SUITE complete; return the line to print."""
    root = TARGET / suite
    version = None if force else version_of(root)
    if version and (root / "bin/crit").exists():
        return f"criu {version} ({suite}): present"
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{suite}-", dir=TARGET) as temporary:
        work = Path(temporary)
        packages = download(suite, system_mirror(), work / "apt")
        fresh = work / "root"
        fresh.mkdir()
        for package in packages:
            run(["dpkg", "-x", str(package), str(fresh)], dict(os.environ))
        write_launchers(fresh)
        version = version_of(fresh)
        if version is None:
            raise FetchError(f"the criu of {suite} was fetched but does not start on this machine")
        if root.exists():
            root.rename(work / "old")
        fresh.rename(root)
    return f"criu {version} ({suite}): fetched, {len(packages)} packages"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.fetch_criu", description="fetch criu into .criu/"
    )
    parser.add_argument("suites", nargs="*", default=list(SUITES), metavar="SUITE")
    parser.add_argument("--force", action="store_true", help="fetch again what is present")
    options = parser.parse_args()
    if shutil.which("apt-get") is None:
        sys.exit("make criu: apt-get is missing; install criu 3.15 or newer and put it on PATH")
    failed = False
    for suite in options.suites:
        try:
            print(fetch(suite, force=options.force), flush=True)
        except FetchError as error:
            failed = True
            print(f"criu ({suite}): {error}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
