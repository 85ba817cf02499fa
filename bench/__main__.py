"""`python -m bench`: everything measured in one run, on the same data, written to bench/results/."""

from __future__ import annotations

import argparse
import compileall
import datetime
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import incremental, machine, report, streaming
from bench.generate import DEFAULT_SETS, SETS, parse_size
from bench.measure import Command, CommandFailedError, Series, run
from bench.peers import PEERS, Peer, gpuimg_command
from bench.storage import measure_set
from bench.targets import judge

ROOT = Path(__file__).resolve().parent.parent

NOTES = {
    "place": "disk: sources, stores and exports on a disk; tmpfs: all three in memory",
    "source": "sources are written and synced just before: they are read from the page cache, not from disk",
    "import": "an import ends when the store is durable: gpuimg, borg and restic fsync themselves, the "
    "stores of the others are fsynced by the harness within the time",
    "export": "an export ends when the program ends; what it leaves unwritten is left",
    "time": "whole processes, start-up included; CPU and peak memory from wait4",
    "warm": "memory behind files is touched once before, the order of the peers turns with every run",
}


def main() -> int:
    if "--incremental" in sys.argv[1:]:
        return incremental.main([word for word in sys.argv[1:] if word != "--incremental"])
    given = _parse()
    # As an installation does: otherwise every start would compile what has been edited since.
    compileall.compile_dir(ROOT / "gpuimg", quiet=1)
    console = Console(width=None if sys.stdout.isatty() else 160)

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False, markup=False)

    installed = {name: peer.version() for name, peer in PEERS.items()}
    peers = [PEERS[name] for name in given.peers if installed[name]]
    results: dict[str, Any] = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "bench", *sys.argv[1:]],
        "notes": NOTES,
        "machine": machine.describe(),
        "peers": {name: {"version": installed[name], "settings": PEERS[name].settings} for name in PEERS},
        "size": given.size,
        "runs": given.runs,
        "sets": {},
    }
    results["peers"]["criu-image-streamer"] = {"version": shutil.which("criu-image-streamer"), "settings": ""}
    given.disk.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=given.disk) as disk,
        tempfile.TemporaryDirectory(dir=given.tmpfs) as tmpfs,
    ):
        places = {"disk": Path(disk), "tmpfs": Path(tmpfs)}
        say("touching memory, measuring the machine's limits")
        for place in places.values():
            machine.warm(place, 5 * given.size)
        results["limits"] = machine.limits(places["disk"], places["tmpfs"], given.size)
        results["help"] = _start_up()
        _storage(results, places, peers, given, say)
        if not given.no_stages:
            results["stages"] = {name: _stages(name, given.size, places["disk"]) for name in given.sets}
        if not given.no_streaming:
            machine.warm(places["disk"], 2 * given.stream_size)
            results["streaming"] = streaming.measure(
                places["disk"] / "streaming", size=given.stream_size, runs=given.runs, say=say
            )
    results["machine"]["load_at_end"] = os.getloadavg()[0]
    targets = judge(results)
    results["targets"] = [
        {"name": t.name, "wanted": t.wanted, "got": t.got, "reached": t.reached} for t in targets
    ]
    report.show(results, console)
    path = given.json or ROOT / "bench" / "results" / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    console.print(f"results: {path}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--size", type=parse_size, default=1 << 30, help="bytes per set (1GiB)")
    parser.add_argument("--sets", nargs="+", choices=sorted(SETS), default=list(DEFAULT_SETS))
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--places", nargs="+", choices=["disk", "tmpfs"], default=["disk", "tmpfs"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--stream-size", type=parse_size, help="bytes that are captured and served (4 × size)"
    )
    parser.add_argument("--no-streaming", action="store_true", help="leave capture and serve out")
    parser.add_argument("--no-stages", action="store_true", help="leave the cost of the stages out")
    parser.add_argument("--disk", type=Path, default=ROOT / ".cache", help="a folder on a disk")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder on a tmpfs")
    parser.add_argument("--json", type=Path, help="where the results go (bench/results/<time>.json)")
    parser.add_argument(
        "--incremental",
        action="store_true",
        help="measure the next checkpoint of a job instead (other options: --incremental --help)",
    )
    given = parser.parse_args()
    if given.runs < 1 or given.size < 1 << 20:
        parser.error("--runs must be at least 1 and --size at least 1MiB")
    given.stream_size = given.stream_size or 4 * given.size
    return given


def _storage(
    results: dict[str, Any], places: dict[str, Path], peers: list[Peer], given: argparse.Namespace, say: Any
) -> None:
    for name in given.sets:
        results["sets"][name] = {"places": {}}
        for place in given.places:
            say(f"{name} on {place}")
            folder = places[place] / "set"
            folder.mkdir()
            raw, outcomes = measure_set(name, folder, size=given.size, runs=given.runs, peers=peers, say=say)
            results["sets"][name]["raw_bytes"] = raw
            results["sets"][name]["places"][place] = {
                peer: outcome.report(raw) for peer, outcome in outcomes.items()
            }
            shutil.rmtree(folder)


def _stages(name: str, size: int, folder: Path) -> dict[str, Any]:
    """What `gpuimg bench` says about the stages."""
    target = folder / "stages.json"
    argv = [
        gpuimg_command(),
        "bench",
        "--json",
        "--set",
        name,
        "--size",
        str(size),
        "--directory",
        str(folder),
    ]
    try:
        run(Command(["sh", "-c", 'exec "$@" > "$0"', str(target), *argv]))
        made: dict[str, Any] = json.loads(target.read_text())
    except (CommandFailedError, ValueError) as error:
        return {"failure": str(error)}
    return made


def _start_up() -> dict[str, float]:
    """Seconds of `gpuimg --help`."""
    series = Series([run(Command([gpuimg_command(), "--help"])) for _ in range(11)])
    seconds = [cost.seconds for cost in series.costs]
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


if __name__ == "__main__":
    sys.exit(main())
