"""`init`, `ls`, `diff`, `stats`: make a store and look into it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

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
    from gpuimg.store.reports import CheckpointStats, StoreStats

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


@command(
    "diff", example="gpuimg diff before-update after-update", errors=(*REFERENCE_ERRORS, MissingObjectError)
)
@click.argument("a")
@click.argument("b")
def diff_command(state: State, a: str, b: str) -> None:
    """Say which files of two checkpoints differ, and by how much.

    Of the bytes of B that are not at the same place in A: how many are in chunks that A's file lacks, how
    many of these are stored as differences to other chunks and how many alone, and what they take.
    """
    with state.open_store() as store:
        files = list(store.diff(a, b))
    if state.as_json:
        output.write_json({"a": a, "b": b, "files": files})
        return
    differing = [item for item in files if item.change.value != "equal"]
    if differing:
        output.table(
            (
                "file",
                "buffer object",
                "change",
                ">size in A",
                ">size in B",
                ">changed",
                ">new",
                ">differences",
                ">alone",
                ">stored",
            ),
            (
                (
                    f"{item.name} (in A {item.name_a})" if item.name_a else item.name,
                    output.bo_title(item.bo),
                    item.change.value,
                    output.size(item.size_a),
                    output.size(item.size_b),
                    output.size(item.changed_bytes),
                    output.size(item.new_bytes),
                    output.amount(item.delta_bytes + item.other_delta_bytes),
                    output.amount(item.alone_bytes),
                    output.amount(item.stored_bytes),
                )
                for item in differing
            ),
            drop_empty=True,
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
            item["parent"] = item["parent"] or None
            item.update(item.pop("statistics"))
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
        output.table(("codec", ">chunks", ">raw", ">stored", ">ratio"), _codec_rows(stats))
    if stats.depths and stats.depths[-1].depth:
        output.write("")
        output.table(
            ("depth", ">chunks", ">raw", ">stored"),
            (
                (
                    str(item.depth) if item.depth else "0 (stands alone)",
                    str(item.chunks),
                    output.size(item.raw_bytes),
                    output.size(item.stored_bytes),
                )
                for item in stats.depths
            ),
        )
    if stats.checkpoints:
        output.write("")
        output.table(
            (
                "checkpoint",
                "tags",
                "created",
                ">files",
                ">raw",
                ">new",
                ">unchanged",
                ">known",
                ">differences",
                ">coded",
                ">raw-stored",
                ">zero",
                ">inline",
            ),
            (_checkpoint_row(item) for item in stats.checkpoints),
            drop_empty=True,
        )


def _codec_rows(stats: StoreStats) -> Iterator[tuple[str, ...]]:
    found = {**stats.codecs, "recipes": stats.recipes}
    for name, codec in found.items():
        if codec.chunks:
            yield (
                name,
                str(codec.chunks),
                output.size(codec.raw_bytes),
                output.size(codec.stored_bytes),
                f"{codec.raw_bytes / codec.stored_bytes:.2f}",
            )


def _checkpoint_row(item: CheckpointStats) -> tuple[str, ...]:
    taken = item.statistics
    return (
        item.id[:12],
        ", ".join(item.tags),
        output.moment(item.created),
        str(item.files),
        output.size(taken.raw_bytes),
        output.size(taken.new_bytes),
        *map(
            output.amount,
            (
                taken.unchanged_bytes,
                taken.deduplicated_bytes,
                taken.delta_bytes,
                taken.coded_bytes,
                taken.raw_stored_bytes,
                taken.zero_bytes,
                taken.inline_bytes,
            ),
        ),
    )
