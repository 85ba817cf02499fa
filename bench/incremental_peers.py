"""The programs compared on two checkpoints of one job, the second taken with what each knows of the first."""

from __future__ import annotations

from pathlib import Path

from bench.measure import Command, tree_size
from bench.peers import PEERS, Gpuimg, Peer, Zstd, gpuimg_command


class Contender:
    """A peer, how it takes the next checkpoint, and what its store then holds."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def next(self, store: Path, source: Path, before: Path, report: Path) -> Command:
        """Store `source`, of which `before` is the checkpoint before (stored as "a").

        `report` is where what the program says of it may be written, as JSON.
        """
        del before, report
        return self.peer.take_in(store, source, "b")

    def sizes(self, store: Path) -> dict[str, int]:
        """Bytes on disk, by part of the store."""
        return {"data": tree_size(store)}


class Incremental(Contender):
    """gpuimg, told that a checkpoint follows another."""

    settings = "import --incremental, defaults"

    def __init__(self) -> None:
        super().__init__(Gpuimg())

    def next(self, store: Path, source: Path, before: Path, report: Path) -> Command:
        del before
        return take_next(store, source, "a", report)

    def sizes(self, store: Path) -> dict[str, int]:
        """`data` is everything but the index, which can be rebuilt from it."""
        index = tree_size(store / "index")
        return {"data": tree_size(store) - index, "index": index}


class Patch(Contender):
    """zstd, given the file of the same name of the checkpoint before."""

    settings = "-1 --patch-from the file of the checkpoint before, file by file"

    def __init__(self) -> None:
        super().__init__(Zstd())

    def next(self, store: Path, source: Path, before: Path, report: Path) -> Command:
        del report
        (store / "b").mkdir()
        files = sorted(item.name for item in source.iterdir())
        script = (
            'store=$0; before=$1; shift; for file; do zstd -1 -q --patch-from="$before/$file" "$file" '
            '-o "$store/b/$file.zst" || exit 1; done'
        )
        return Command(["sh", "-c", script, str(store), str(before), *files], source)


def take_next(store: Path, source: Path, tag: str, report: Path, *options: str) -> Command:
    """`gpuimg import --incremental` onto a tag; what it prints goes to the file `report`."""
    argv = [gpuimg_command(), "--store", str(store), "import", str(source), "--tag", tag]
    return Command(["sh", "-c", 'exec "$@" > "$0"', str(report), *argv, "--incremental", "--json", *options])


def contenders(names: list[str]) -> dict[str, Contender]:
    """Those of the named peers that are installed."""
    special = {"gpuimg": Incremental, "zstd": Patch}
    found = [name for name in names if PEERS[name].version()]
    return {name: special[name]() if name in special else Contender(PEERS[name]) for name in found}


def describe(names: list[str]) -> dict[str, dict[str, str | None]]:
    """Version (None: not installed) and settings of peers, for the results."""
    settings = {"gpuimg": Incremental.settings, "zstd": Patch.settings}
    return {
        name: {"version": PEERS[name].version(), "settings": settings.get(name, PEERS[name].settings)}
        for name in names
    }
