"""`show`: where a checkpoint came from, what it holds, how that is stored; as text, JSON or a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuimg.cli import output
from gpuimg.cli.context import State, command
from gpuimg.cli.store import REFERENCE_ERRORS
from gpuimg.errors import NoSpaceError, UnknownReferenceError, UsageError

if TYPE_CHECKING:
    from gpuimg.store.checkpoint import Checkpoint
    from gpuimg.store.model import FileEntry, Process
    from gpuimg.store.reports import CheckpointReport, FileReport, StoredNow
    from gpuimg.store.store import Store

_FILES_SHOWN = 20
_MAP_ENDINGS = (".html", ".png")


def _map_path(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:  # noqa: ARG001
    if value is not None and value.suffix.lower() not in _MAP_ENDINGS:
        raise UsageError(
            f"a map cannot be drawn as {value.name}", remedy="let its name end with .html or with .png"
        )
    return value


@command(
    "show",
    example="gpuimg show before-update\n"
    "gpuimg show 3fa9 --files\n"
    "gpuimg show before-update --map before-update.html",
    errors=(*REFERENCE_ERRORS, NoSpaceError),
)
@click.argument("ref")
@click.option(
    "--files", "list_files", is_flag=True, help="List every file, not only the largest that are in chunks."
)
@click.option(
    "--map",
    "map_path",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_map_path,
    help="Draw how the checkpoint's memory is stored, one cell a chunk; FILE ends with .html or .png.",
)
def show_command(state: State, ref: str, *, list_files: bool, map_path: Path | None) -> None:
    """Show what a checkpoint holds and how it is stored.

    Where it came from, its processes, and of its files and buffer objects: what was unchanged, known already,
    stored as differences, coded or raw when the checkpoint was taken, what that takes now, and how deep the
    chains of differences are (0: every chunk stands alone). REF is a tag, an id, or the start of an id.
    """
    from gpuimg.criu.tree import tree_of_checkpoint
    from gpuimg.store.explain import explain

    with state.open_store() as store:
        checkpoint = store.checkpoint(ref)
        parent = _parent_name(store, checkpoint)
        processes = tree_of_checkpoint(checkpoint)
        report = explain(store, checkpoint)
        if map_path is not None:
            from gpuimg.cli.map import draw_map

            draw_map(store, checkpoint, map_path)
    if state.as_json:
        output.write_json(_as_json(checkpoint, report, processes, map_path, list_files=list_files))
        return
    _write_facts(checkpoint, parent, report)
    for line in _process_tree(processes):
        output.write(line)
    _write_files(checkpoint, report, list_files=list_files)
    if map_path is not None:
        output.write("")
        output.write(f"drew the map {output.printable(str(map_path))}")


def _parent_name(store: Store, checkpoint: Checkpoint) -> str:
    if not checkpoint.parent:
        return ""
    short = checkpoint.parent[:12]
    try:
        tags = store.checkpoint(checkpoint.parent).tags
    except UnknownReferenceError:
        return f"{short}, which has been removed"
    return f"{short} ({', '.join(tags)})" if tags else short


def _as_json(
    checkpoint: Checkpoint,
    report: CheckpointReport,
    processes: tuple[Process, ...],
    map_path: Path | None,
    *,
    list_files: bool,
) -> dict[str, Any]:
    source = checkpoint.source
    explained = {item.entry.name: item for item in report.files}
    made: dict[str, Any] = output.summary(checkpoint)
    made |= {"kernel": source.kernel, "criu_version": source.criu_version}
    made |= {"processes": processes, "now": report.now}
    made |= {"base_chunks": report.base_chunks, "base_bytes": report.base_bytes}
    made["entries"] = [
        _file_json(entry, explained.get(entry.name))
        for entry in checkpoint.files.values()
        if list_files or entry.segments
    ]
    if map_path is not None:
        made["map"] = map_path
    return made


def _file_json(entry: FileEntry, report: FileReport | None) -> dict[str, Any]:
    taken = report.taken if report is not None else None
    return {
        "name": entry.name,
        "size": entry.size,
        "layout": entry.layout,
        "inline": not entry.segments,
        "segments": len(entry.segments),
        "bo": entry.bo,
        "element_size": taken.element_size if taken is not None else 0,
        "taken": taken.statistics if taken is not None else None,
        "now": report.now if report is not None else None,
    }


def _write_facts(checkpoint: Checkpoint, parent: str, report: CheckpointReport) -> None:
    source, stats, now = checkpoint.source, checkpoint.statistics, report.now
    ratio = f", {now.ratio:.2f} to 1" if now.ratio else ""
    bases = f"; rests on {output.size(report.base_bytes)} of other checkpoints" if report.base_chunks else ""
    facts = {
        "checkpoint": checkpoint.id,
        "tags": ", ".join(sorted(checkpoint.tags)) or "none",
        "created": output.moment(checkpoint.created),
        "made by": source.kind.name.lower(),
        "parent": parent,
        "host": " ".join(part for part in (source.hostname, source.kernel) if part),
        "criu": source.criu_version,
        "files": f"{len(checkpoint.files)}, {output.size(stats.raw_bytes)}",
        "taken": output.taken(stats),
        "added": f"{output.size(stats.new_bytes)} in {stats.new_chunks} chunks, {stats.seconds:.2f} s",
        "stored": f"{output.size(now.stored_bytes)} in {now.chunks} chunks{ratio}{bases}",
        "codecs": ", ".join(f"{name} {output.size(item.raw_bytes)}" for name, item in now.codecs.items()),
        "depth": f"{now.max_depth} at most, {now.mean_depth:.2f} on average" if now.max_depth else "",
        "lost": f"{now.lost_chunks} chunks; see `gpuimg verify {checkpoint.id[:12]}`"
        if now.lost_chunks
        else "",
    }
    for name, text in facts.items():
        if text:
            output.write(f"{name:<11} {output.printable(text)}")


def _process_tree(processes: tuple[Process, ...]) -> list[str]:
    """The processes, each below its parent."""
    known = {process.pid for process in processes}
    lines: list[str] = []

    def add(process: Process, depth: int) -> None:
        threads = f", {process.threads} threads" if process.threads > 1 else ""
        title = "processes" if not lines else ""
        lines.append(f"{title:<11} {'  ' * depth}{process.pid} {output.printable(process.comm)}{threads}")
        for child in processes:
            if child.ppid == process.pid and child.pid != process.pid:
                add(child, depth + 1)

    for process in processes:
        if process.ppid not in known or process.ppid == process.pid:
            add(process, 0)
    return lines


def _write_files(checkpoint: Checkpoint, report: CheckpointReport, *, list_files: bool) -> None:
    explained = {item.entry.name: item for item in report.files}
    by_size = sorted(explained.values(), key=lambda item: item.entry.size, reverse=True)
    largest = {item.entry.name for item in by_size[:_FILES_SHOWN]}
    shown = [
        (entry, explained.get(entry.name))
        for entry in checkpoint.files.values()
        if list_files or entry.name in largest
    ]
    if not shown:
        return
    output.write("")
    output.table(
        (
            "file",
            "buffer object",
            ">size",
            ">unchanged",
            ">known",
            ">differences",
            ">coded",
            ">raw",
            ">zero",
            ">inline",
            ">stored",
            ">ratio",
            ">depth",
        ),
        (_file_row(entry, report) for entry, report in shown),
        drop_empty=True,
    )
    if not list_files and len(explained) > len(largest):
        output.write(f"and {len(explained) - len(largest)} smaller ones; --files lists them all")


def _file_row(entry: FileEntry, report: FileReport | None) -> list[str]:
    from gpuimg.store.model import Statistics

    row = [entry.name, output.bo_title(entry.bo), output.size(entry.size)]
    if report is None:
        return [*row, "", "", "", "", "", "", output.size(entry.size), "", "", ""]
    stats = report.taken.statistics if report.taken is not None else Statistics()
    numbers = (
        stats.unchanged_bytes,
        stats.deduplicated_bytes,
        stats.delta_bytes,
        stats.coded_bytes,
        stats.raw_stored_bytes,
        stats.zero_bytes,
    )
    return [*row, *map(output.amount, numbers), "", *_now(report.now)]


def _now(now: StoredNow | None) -> tuple[str, str, str]:
    if now is None:
        return ("recipe lost", "", "")
    depth = f"{now.max_depth} ({now.mean_depth:.2f})" if now.max_depth else ""
    return (output.size(now.stored_bytes), f"{now.ratio:.2f}" if now.ratio else "", depth)
