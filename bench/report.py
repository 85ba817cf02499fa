"""The results as tables on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.storage import STEPS
from bench.targets import judge


def show(results: dict[str, Any], console: Console) -> None:
    """Print everything that was measured, the targets last."""
    machine = results["machine"]
    console.print(
        f"\n[bold]{machine['cpu']}[/], {machine['cores']} cores, Linux {machine['kernel']}, "
        f"Python {machine['python']}, {machine['memory'] / 2**30:.0f} GiB"
    )
    limits = ", ".join(f"{name} {made['median'] / 1e6:.0f}" for name, made in results["limits"].items())
    console.print(f"limits in MB/s: {limits}")
    console.print(f"peers: {', '.join(_peer(name, peer) for name, peer in results['peers'].items())}")
    for name, made in results["sets"].items():
        for place, peers in made["places"].items():
            console.print(_storage_table(f"{name}, {place}", made["raw_bytes"], peers))
    if results.get("stages"):
        for name, report in results["stages"].items():
            if "failure" in report:
                console.print(f"stages of {name}: {report['failure']}")
            else:
                console.print(_stage_table(name, report))
    if results.get("streaming"):
        console.print(_streaming_table(results["streaming"]))
    table = Table(title="targets", title_justify="left")
    for column in ("what", "to reach", "got", ""):
        table.add_column(column)
    for target in judge(results):
        verdict = {True: "[green]reached[/]", False: "[red]not reached[/]", None: ""}[target.reached]
        table.add_row(target.name, target.wanted, target.got, verdict)
    console.print(table)


def _peer(name: str, peer: dict[str, Any]) -> str:
    return peer["version"] or f"{name} (not installed)"


def _storage_table(title: str, raw: int, peers: dict[str, Any]) -> Table:
    table = Table(title=f"{title}, {raw / 2**20:.0f} MiB: MB/s, median (min–max)", title_justify="left")
    table.add_column("")
    for step in ("first import", "second copy", "export"):
        table.add_column(step, justify="right")
    for column in ("× borg", "CPU s/GB", "peak MiB", "store MiB", "+ second"):
        table.add_column(column, justify="right")
    borg = peers.get("borg")
    for name, made in peers.items():
        if "failure" in made:
            table.add_row(name, f"failed: {made['failure']}"[:100])
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


def _stage_table(name: str, report: dict[str, Any]) -> Table:
    table = Table(title=f"stages of an import, one thread, {name}", title_justify="left")
    table.add_column("stage")
    table.add_column("MB/s", justify="right")
    table.add_column("CPU s/GB", justify="right")
    for stage in report["stages"]:
        table.add_row(stage["name"], f"{stage['rate'] / 1e6:.0f}", f"{stage['cpu_per_gb']:.3f}")
    return table


def _streaming_table(streaming: dict[str, Any]) -> Table:
    title = f"image streamer, {streaming['bytes'] / 2**30:g} GiB"
    table = Table(title=title, title_justify="left")
    for column in ("chunks", "program", "step"):
        table.add_column(column)
    for column in ("MB/s", "CPU s/GB", "peak MiB"):
        table.add_column(column, justify="right")
    for kind in ("raw", "coded"):
        made = streaming.get(kind, {})
        if "failure" in made:
            table.add_row(kind, "gpuimg", f"failed: {made['failure']}")
            continue
        for program, report in (
            ("gpuimg", made),
            ("criu-image-streamer", made.get("criu-image-streamer", {})),
        ):
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
