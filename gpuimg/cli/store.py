"""`init`, `ls`, `show`, `diff`, `stats`: make a store and look into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpuimg.cli import output
from gpuimg.cli.context import STORE_ERRORS, State, byte_size, command
from gpuimg.errors import (
    AmbiguousReferenceError,
    DamagedError,
    MissingObjectError,
    NoSpaceError,
    PermissionDeniedError,
    StoreExistsError,
    UnknownReferenceError,
)

if TYPE_CHECKING:
    from gpuimg.store.model import FileEntry, Process

REFERENCE_ERRORS = (*STORE_ERRORS, UnknownReferenceError, AmbiguousReferenceError, DamagedError)


@command(
    "init",
    example="gpuimg --store /srv/checkpoints init\ngpuimg init --chunk-size 512KiB",
    errors=(StoreExistsError, PermissionDeniedError, NoSpaceError),
)
@click.option(
    "--chunk-size",
    type=byte_size,
    metavar="SIZE",
    default="256KiB",
    show_default=True,
    help="Size of fixed chunks: a power of two from 64KiB to 1MiB.",
)
def init_command(state: State, chunk_size: int) -> None:
    """Make an empty store."""
    import gpuimg

    path = state.store_path()
    gpuimg.init_store(path, chunk_size=chunk_size).close()
    if state.as_json:
        output.write_json({"store": path, "chunk_size": chunk_size})
    else:
        output.write(f"made the store {path}")


@command("ls", example="gpuimg ls\ngpuimg ls --json", errors=(*STORE_ERRORS, DamagedError))
def ls_command(state: State) -> None:
    """List the checkpoints, newest last."""
    with state.open_store() as store:
        found = [output.summary(checkpoint) for checkpoint in store.checkpoints()]
    if state.as_json:
        output.write_json({"checkpoints": found})
        return
    output.table(
        ("id", "tags", "created", "kind", ">files", ">raw", ">new"),
        (
            (
                item["id"][:12],
                ", ".join(item["tags"]),
                output.moment(item["created_unix"]),
                item["kind"],
                str(item["files"]),
                output.size(item["raw_bytes"]),
                output.size(item["new_bytes"]),
            )
            for item in found
        ),
    )


@command("show", example="gpuimg show before-update\ngpuimg show 3fa9 --files", errors=REFERENCE_ERRORS)
@click.argument("ref")
@click.option(
    "--files", "list_files", is_flag=True, help="List every file with its size and how it is stored."
)
def show_command(state: State, ref: str, list_files: bool) -> None:
    """Show where a checkpoint came from and what it holds.

    REF is a tag, an id, or the start of an id.
    """
    from gpuimg.criu.tree import tree_of_checkpoint

    with state.open_store() as store:
        checkpoint = store.checkpoint(ref)
        source = checkpoint.source
        processes = tree_of_checkpoint(checkpoint)
        report = output.summary(checkpoint)
        report |= {"kernel": source.kernel, "criu_version": source.criu_version}
        report["processes"] = output.plain(processes)
        files = list(checkpoint.files.values())
    if state.as_json:
        if list_files:
            report["entries"] = [_file_json(entry) for entry in files]
        output.write_json(report)
        return
    output.write(f"checkpoint  {report['id']}")
    facts = {
        "tags": ", ".join(report["tags"]) or "none",
        "created": output.moment(report["created_unix"]),
        "made by": report["kind"],
        "host": " ".join(part for part in (source.hostname, source.kernel) if part),
        "criu": source.criu_version,
        "files": f"{report['files']}, {output.size(report['raw_bytes'])}",
        "added": f"{output.size(report['new_bytes'])} in {report['new_chunks']} chunks, "
        f"{report['seconds']:.2f} s",
        "saved": f"{output.size(report['deduplicated_bytes'])} known already, "
        f"{output.size(report['zero_bytes'])} zero, {output.size(report['inline_bytes'])} inline",
    }
    for name, text in facts.items():
        if text:
            output.write(f"{name:<11} {output.printable(text)}")
    for line in _process_tree(processes):
        output.write(line)
    if list_files:
        output.write("")
        output.table(
            ("file", ">size", "stored", ">segments"),
            ((e.name, output.size(e.size), _how_stored(e), str(len(e.segments) or "")) for e in files),
        )


def _how_stored(entry: FileEntry) -> str:
    return f"{entry.layout.name.lower()} chunks" if entry.segments else "inline"


def _file_json(entry: FileEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "size": entry.size,
        "layout": output.plain(entry.layout),
        "inline": not entry.segments,
        "segments": len(entry.segments),
    }


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


@command(
    "diff", example="gpuimg diff before-update after-update", errors=(*REFERENCE_ERRORS, MissingObjectError)
)
@click.argument("a")
@click.argument("b")
def diff_command(state: State, a: str, b: str) -> None:
    """Say which files of two checkpoints differ, and by how much."""
    with state.open_store() as store:
        files = list(store.diff(a, b))
    if state.as_json:
        output.write_json({"a": a, "b": b, "files": files})
        return
    differing = [item for item in files if item.change.value != "equal"]
    if differing:
        output.table(
            ("file", "change", ">size in A", ">size in B", ">changed", ">new"),
            (
                (
                    item.name,
                    item.change.value,
                    output.size(item.size_a),
                    output.size(item.size_b),
                    output.size(item.changed_bytes),
                    output.size(item.new_bytes),
                )
                for item in differing
            ),
        )
    output.write(f"{len(differing)} of {len(files)} files differ")


@command("stats", example="gpuimg stats\ngpuimg stats --json", errors=(*STORE_ERRORS, DamagedError))
def stats_command(state: State) -> None:
    """Say what the store holds and what that saves."""
    with state.open_store() as store:
        stats = store.stats()
    if state.as_json:
        report = output.plain(stats)
        for item in report["checkpoints"]:
            item["created"] = output.moment(item["created"], iso=True)
        output.write_json(report)
        return
    ratio = f", {stats.raw_bytes / stats.stored_bytes:.2f} to 1" if stats.stored_bytes else ""
    output.write(f"checkpoints  {len(stats.checkpoints)}, {output.size(stats.raw_bytes)}")
    output.write(f"stored       {output.size(stats.stored_bytes)}{ratio}")
    output.write(f"chunks       {stats.unique_chunks} unique, in {stats.packs} packs")
    output.write(f"condemned    {stats.condemned_packs} packs that wait for a gc")
    output.write(f"index        {output.size(stats.index_bytes)}")
    if stats.codecs:
        output.write("")
        output.table(
            ("codec", ">chunks", ">raw", ">stored", ">ratio"),
            (
                (
                    name,
                    str(codec.chunks),
                    output.size(codec.raw_bytes),
                    output.size(codec.stored_bytes),
                    f"{codec.raw_bytes / codec.stored_bytes:.2f}" if codec.stored_bytes else "",
                )
                for name, codec in stats.codecs.items()
            ),
        )
    if stats.checkpoints:
        output.write("")
        output.table(
            ("checkpoint", "tags", "created", ">files", ">raw", ">new"),
            (
                (
                    item.id[:12],
                    ", ".join(item.tags),
                    output.moment(item.created),
                    str(item.files),
                    output.size(item.raw_bytes),
                    output.size(item.new_bytes),
                )
                for item in stats.checkpoints
            ),
        )
