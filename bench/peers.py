"""The programs compared: how each is told to take a directory in, and to give it back."""

from __future__ import annotations

import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from bench.measure import Command, run


class Peer(ABC):
    """One program. `syncs` says whether it fsyncs what it stores; if not, the harness does, in the time."""

    name: str
    settings: str
    syncs = True

    @abstractmethod
    def version(self) -> str | None:
        """Its version, None if it is not installed."""

    def make_store(self, store: Path) -> None:
        """Make an empty store, outside the time measured."""
        store.mkdir()

    @abstractmethod
    def take_in(self, store: Path, source: Path, name: str) -> Command:
        """Store the directory `source` as `name`."""

    @abstractmethod
    def give_back(self, store: Path, name: str, target: Path) -> Command:
        """Write `name` into the existing, empty directory `target`."""

    def place_of(self, name: str, target: Path) -> Path:
        """Where below `target` the files come out."""
        del name
        return target


def _first_line(*argv: str) -> str | None:
    if shutil.which(argv[0]) is None:
        return None
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).strip().splitlines()[0].strip("* ")


def gpuimg_command() -> str:
    """The console script beside this interpreter, else the one on PATH."""
    own = Path(sys.executable).with_name("gpuimg")
    return str(own) if own.exists() else "gpuimg"


class Gpuimg(Peer):
    name = "gpuimg"
    settings = "defaults"

    def version(self) -> str | None:
        return _first_line(gpuimg_command(), "--version")

    def make_store(self, store: Path) -> None:
        run(Command([gpuimg_command(), "--store", str(store), "init"]))

    def take_in(self, store: Path, source: Path, name: str) -> Command:
        return Command([gpuimg_command(), "--store", str(store), "import", str(source), "--tag", name])

    def give_back(self, store: Path, name: str, target: Path) -> Command:
        return Command([gpuimg_command(), "--store", str(store), "export", name, str(target)])


class Borg(Peer):
    name = "borg"
    settings = "-e none --chunker-params fixed,1048576 -C zstd,1"

    def version(self) -> str | None:
        return _first_line("borg", "--version")

    def _env(self, store: Path) -> dict[str, str]:
        return {
            "BORG_BASE_DIR": str(store.with_name(store.name + "-base")),
            "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
        }

    def make_store(self, store: Path) -> None:
        run(Command(["borg", "init", "-e", "none", str(store)], env=self._env(store)))

    def take_in(self, store: Path, source: Path, name: str) -> Command:
        chunking = ["--chunker-params", "fixed,1048576", "-C", "zstd,1"]
        return Command(["borg", "create", *chunking, f"{store}::{name}", "."], source, self._env(store))

    def give_back(self, store: Path, name: str, target: Path) -> Command:
        return Command(["borg", "extract", f"{store}::{name}"], target, self._env(store))


class Restic(Peer):
    name = "restic"
    settings = "repository version 2, compression auto"

    def version(self) -> str | None:
        return _first_line("restic", "version")

    def _env(self, store: Path) -> dict[str, str]:
        return {
            "RESTIC_PASSWORD": "bench",
            "RESTIC_REPOSITORY": str(store),
            "RESTIC_CACHE_DIR": str(store.with_name(store.name + "-base")),
        }

    def make_store(self, store: Path) -> None:
        run(Command(["restic", "init", "--repository-version", "2"], env=self._env(store)))

    def take_in(self, store: Path, source: Path, name: str) -> Command:
        return Command(["restic", "backup", "--tag", name, "."], source, self._env(store))

    def give_back(self, store: Path, name: str, target: Path) -> Command:
        argv = ["restic", "restore", "latest", "--tag", name, "--target", str(target)]
        return Command(argv, env=self._env(store))


class Casync(Peer):
    name = "casync"
    settings = "make/extract .caidx, default chunks, --without=all"
    syncs = False

    def version(self) -> str | None:
        return _first_line("casync", "--version")

    def take_in(self, store: Path, source: Path, name: str) -> Command:
        argv = ["casync", "make", "--without=all", f"--store={store}/chunks.castr", f"{store}/{name}.caidx"]
        return Command([*argv, str(source)])

    def give_back(self, store: Path, name: str, target: Path) -> Command:
        argv = [
            "casync",
            "extract",
            "--without=all",
            f"--store={store}/chunks.castr",
            f"{store}/{name}.caidx",
        ]
        return Command([*argv, str(target)])


class Zstd(Peer):
    name = "zstd"
    settings = "-1 -T2, file by file, no deduplication"
    syncs = False

    def version(self) -> str | None:
        return _first_line("zstd", "--version")

    def take_in(self, store: Path, source: Path, name: str) -> Command:
        (store / name).mkdir()
        files = sorted(item.name for item in source.iterdir())
        argv = ["zstd", "-1", "-T2", "-q", "--output-dir-flat", str(store / name), *files]
        return Command(argv, source)

    def give_back(self, store: Path, name: str, target: Path) -> Command:
        files = sorted(item.name for item in (store / name).iterdir())
        return Command(["zstd", "-d", "-q", "--output-dir-flat", str(target), *files], store / name)


PEERS: dict[str, Peer] = {peer.name: peer for peer in (Gpuimg(), Borg(), Restic(), Casync(), Zstd())}
