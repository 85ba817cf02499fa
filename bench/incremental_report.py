"""The results of `python -m bench --incremental` as tables on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from bench import report
from bench.incremental_targets import judge, percent, rate, share


def show(results: dict[str, Any], console: Console) -> None:
    """Print everything that was measured, the targets last."""
    report.show_machine(results["machine"], console)
    console.print(f"memcpy, one thread, 1 GiB: {rate(results['memcpy'])}", highlight=False)
    report.show_peers(results["peers"], console)
    for what, source in results["sources"].items():
        console.print(f"{what}: {source}", highlight=False)
    for name, case in results["cases"].items():
        if name == "codec":
            _show_codec(case, console)
            continue
        failures = report.failures(case["peers"])
        report.show_table(console, _title(name, case["facts"]), _table(case), failures)
    for name, failure in results["failures"].items():
        console.print(f"{name} failed: {failure}", style="red", markup=False, highlight=False)
    report.show_targets(judge(results), console)


def _title(name: str, facts: dict[str, Any]) -> str:
    title = f"{name}, {facts['raw_bytes'] / 2**20:.0f} MiB"
    if "changed_bytes" in facts:
        changed = percent(facts["changed_bytes"] / facts["raw_bytes"])
        pages, chunks, unseen = (
            percent(facts[fact]) for fact in ("equal_pages", "equal_chunks", "unseen_pages")
        )
        title += (
            f": {changed} changed (lines of 64 bytes); equal: {pages} of pages, {chunks} of 1 MiB chunks; "
            f"{unseen} of pages stood nowhere before"
        )
    return title


def _table(case: dict[str, Any]) -> Table:
    """One line a program; columns are those that the case has."""
    raw, bound = case["facts"]["raw_bytes"], case.get("bound")
    table = Table()
    table.add_column("")
    made = {name: figures for name, figures in case["peers"].items() if "failure" not in figures}
    steps = [
        step
        for step in ("first", "next", "whole", "one", "chain", "full")
        if any(step in x for x in made.values())
    ]
    sizes = [
        size
        for size in ("stored_bytes", "stored_one_bytes", "new_bytes", "new_index_bytes")
        if any(size in x for x in made.values())
    ]
    grown = "new_bytes" in sizes
    for column in (
        *(f"{step}, s" for step in steps),
        *(size.removesuffix("_bytes").replace("_", " ") + ", MiB" for size in sizes),
        *(("of raw", "of the bound") if grown else ()),
    ):
        table.add_column(column, justify="right")
    for name, figures in made.items():
        cells = [_seconds(figures[step]) if step in figures else "-" for step in steps]
        cells += [share(figures[size], 2**20, "{:.2f}".format) if size in figures else "-" for size in sizes]
        if grown:
            new = figures["new_bytes"]["median"]
            cells.append(percent(new / raw))
            cells.append(percent(bound["best"] / new) if bound and bound["best"] and new else "-")
        table.add_row(name, *cells)
    if bound and grown:
        blank = ["-"] * (len(steps) + len(sizes))
        for label, what in (
            ("rotated alone", "alone"),
            ("differences", "difference"),
            ("smaller of both", "best"),
        ):
            blank[len(steps) + sizes.index("new_bytes")] = f"{bound[what] / 2**20:.2f}"
            table.add_row(f"bound: {label}", *blank, percent(bound[what] / raw), "", style="dim")
    return table


def _seconds(step: dict[str, Any]) -> str:
    return f"{step['median_seconds']:.2f} ({step['min_seconds']:.2f}–{step['max_seconds']:.2f})"


def _show_codec(case: dict[str, Any], console: Console) -> None:
    for source, profiles in case["profiles"].items():
        table = Table()
        for column in ("profile", "measured"):
            table.add_column(column)
        rates = ("encode", "decode", "encode_cpu", "decode_cpu")
        for column in ("encode, GB/s", "decode, GB/s", "encode, by CPU time", "decode, by CPU time"):
            table.add_column(column, justify="right")
        for column in ("ratio", "of the bound"):
            table.add_column(column, justify="right")
        failures = {}
        facts, bound = case["facts"][source], case["bound"][source]
        for profile, places in profiles.items():
            for place, made in places.items():
                if "failure" in made:
                    failures[f"{profile}, {place}"] = made
                    continue
                table.add_row(
                    profile,
                    {"process": "whole processes", "threads": "codec, two threads"}[place],
                    *(share(made[name], 1e9, "{:.2f}".format) if name in made else "-" for name in rates),
                    f"{made['ratio']:.3f}",
                    percent(bound["best"] / (facts["raw_bytes"] / made["ratio"])),
                )
        title = f"bf16 weights without a parent, {source}, {facts['raw_bytes'] / 2**20:.0f} MiB"
        report.show_table(console, title, table, report.failures(failures))
