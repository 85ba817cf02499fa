"""The results as tables on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.storage import STEPS
from bench.targets import Target, judge


def show(results: dict[str, Any], console: Console) -> None:
    """Print everything that was measured, the targets last."""
    show_machine(results["machine"], console)
    limits = ", ".join(f"{name} {made['median'] / 1e6:.0f}" for name, made in results["limits"].items())
    console.print(f"limits in MB/s: {limits}")
    show_peers(results["peers"], console)
    for name, made in results["sets"].items():
        for place, peers in made["places"].items():
            title = f"{name}, {place}, {made['raw_bytes'] / 2**20:.0f} MiB: MB/s, median (min–max)"
            show_table(console, title, _storage_table(made["raw_bytes"], peers), failures(peers))
    if results.get("stages"):
        for name, report in results["stages"].items():
            title = f"stages of an import, CPU of all threads, {name}"
            failed = [report["failure"]] if "failure" in report else []
            show_table(console, title, _stage_table(report), failed)
    if results.get("streaming"):
        streaming = results["streaming"]
        title = f"image streamer, {streaming['bytes'] / 2**30:g} GiB, start of the program included"
        kinds = {kind: streaming.get(kind, {}) for kind in ("raw", "coded")}
        show_table(console, title, _streaming_table(kinds), failures(kinds))
    show_targets(judge(results), console)


def show_machine(machine: dict[str, Any], console: Console) -> None:
    """What machine it was, and how busy."""
    console.print(
        f"\n[bold]{machine['cpu']}[/], {machine['cores']} cores, Linux {machine['kernel']}, "
        f"Python {machine['python']}, {machine['memory'] / 2**30:.0f} GiB"
    )
    console.print(f"load {machine['load']:.1f} at the start, {machine['load_at_end']:.1f} at the end")


def show_peers(peers: dict[str, dict[str, Any]], console: Console) -> None:
    """The versions of the programs compared."""
    console.print(f"peers: {', '.join(_peer(name, peer) for name, peer in peers.items())}")


def show_targets(targets: list[Target], console: Console) -> None:
    """The table of targets."""
    table = Table()
    for column in ("what", "to reach", "got", ""):
        table.add_column(column)
    for target in targets:
        verdict = {True: "[green]reached[/]", False: "[red]not reached[/]", None: ""}[target.reached]
        table.add_row(target.name, target.wanted, target.got, verdict)
    show_table(console, "targets", table, [])


def show_table(console: Console, title: str, table: Table, failed: list[str]) -> None:
    """A titled table, and below it what failed."""
    console.print(f"\n[bold]{title}[/]", highlight=False)
    if table.row_count:
        console.print(table)
    for failure in failed:
        console.print(failure, style="red", markup=False, highlight=False)


def failures(made: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each program that failed."""
    return [f"{name} failed: {report['failure']}" for name, report in made.items() if "failure" in report]


def _peer(name: str, peer: dict[str, Any]) -> str:
    return peer["version"] or f"{name} (not installed)"


def _storage_table(raw: int, peers: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("")
    for step in ("first import", "second copy", "export"):
        table.add_column(step, justify="right")
    for column in ("× borg", "CPU s/GB", "peak MiB", "store MiB", "+ second"):
        table.add_column(column, justify="right")
    borg = peers.get("borg")
    for name, made in peers.items():
        if "failure" in made:
            continue
        versus = "-"
        if borg and "failure" not in borg:
            ratios = (made[s]["bytes_per_second"] / borg[s]["bytes_per_second"] for s in STEPS)
            versus = " / ".join(f"{ratio:.1f}" for ratio in ratios)
        table.add_row(
            name,
            *(_rate(made[step], raw) for step in STEPS),
            versus,
            " / ".join(f"{made[step]['median_cpu'] / (raw / 1e9):.1f}" for step in STEPS),
            f"{max(made[step]['max_rss'] for step in STEPS) / 2**20:.0f}",
            f"{made['stored_bytes'] / 2**20:.1f}",
            f"{(made['stored_bytes_after_second'] - made['stored_bytes']) / 2**20:.1f}",
        )
    return table


def _rate(step: dict[str, Any], raw: int) -> str:
    low, high = raw / step["max_seconds"] / 1e6, raw / step["min_seconds"] / 1e6
    return f"{raw / step['median_seconds'] / 1e6:.0f} ({low:.0f}–{high:.0f})"


def _stage_table(report: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("stage")
    table.add_column("MB/s", justify="right")
    table.add_column("CPU s/GB", justify="right")
    for stage in report.get("stages", []):
        table.add_row(stage["name"], f"{stage['rate'] / 1e6:.0f}", f"{stage['cpu_per_gb']:.3f}")
    return table


def _streaming_table(kinds: dict[str, dict[str, Any]]) -> Table:
    table = Table()
    for column in ("chunks", "program", "step"):
        table.add_column(column)
    for column in ("MB/s", "CPU s/GB", "peak MiB"):
        table.add_column(column, justify="right")
    for kind, made in kinds.items():
        upstream = "criu-image-streamer"
        for program, report in (("gpuimg", made), (upstream, made.get(upstream, {}))):
            for step in ("capture", "serve"):
                if step in report:
                    table.add_row(
                        kind,
                        program,
                        step,
                        f"{report[step]['bytes_per_second'] / 1e6:.0f}",
                        f"{report[step]['cpu_per_gb']:.2f}",
                        f"{report[step]['max_rss'] / 2**20:.0f}",
                    )
    return table
