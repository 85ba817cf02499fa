"""`import` and `export`: directories of images into the store and out of it."""

from __future__ import annotations

from pathlib import Path

import click

from gpuimg.cli import output
from gpuimg.cli.context import State, command, fd_list
from gpuimg.cli.incremental import Wish, announce, parent_options
from gpuimg.cli.progress import Reporter
from gpuimg.cli.store import REFERENCE_ERRORS
from gpuimg.errors import BadNameError, ImagesDirectoryError, MissingObjectError, NoSpaceError


@command(
    "import",
    example="gpuimg import /var/lib/criu/job-17 --tag job-17\n"
    "gpuimg import /var/lib/criu/job-17 --tag job-17 --incremental",
    errors=(*REFERENCE_ERRORS, BadNameError, ImagesDirectoryError, NoSpaceError),
)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--tag", metavar="NAME", help="Name the checkpoint.")
@parent_options
def import_command(state: State, directory: Path, *, tag: str | None, wish: Wish) -> None:
    """Take the files of a directory into the store.

    They become one checkpoint. The files may be images of CRIU or any others.
    """
    from gpuimg.store.directory import image_paths, import_directory

    with state.open_store() as store:
        against = wish.against(store, tag)
        announce(against, as_json=state.as_json)
        with Reporter(state, "import") as reporter:
            total = sum(path.stat().st_size for path in image_paths(directory))
            checkpoint = import_directory(
                store,
                directory,
                tag=tag,
                parent=against.parent,
                profile=wish.profile,
                watch=lambda session: reporter.watch(lambda: session.raw_bytes, lambda: total),
            )
        output.write_made(checkpoint, tag, against, as_json=state.as_json)


@command(
    "export",
    example="gpuimg export job-17 /tmp/images\ngpuimg export job-17 --shard-fds 1 | lz4 > job-17.lz4",
    errors=(*REFERENCE_ERRORS, MissingObjectError, ImagesDirectoryError, NoSpaceError),
)
@click.argument("ref")
@click.argument("directory", type=click.Path(path_type=Path), required=False)
@click.option(
    "--shard-fds",
    type=fd_list,
    metavar="FDS",
    help="Write the stream of criu-image-streamer to these descriptors instead, comma-separated.",
)
def export_command(state: State, ref: str, directory: Path | None, shard_fds: list[int] | None) -> None:
    """Give back the files of a checkpoint, byte for byte.

    Every byte is verified on the way.
    """
    if (directory is None) == (shard_fds is None):
        raise click.UsageError("say where to: either a directory or --shard-fds")
    from gpuimg.store.model import Progress

    progress = Progress()
    with state.open_store() as store, Reporter(state, "export") as reporter:
        checkpoint = store.checkpoint(ref)
        if directory is not None:
            reporter.watch(lambda: progress.done, lambda: progress.total)
            checkpoint.export(directory, progress=progress)
        elif shard_fds is not None:
            from gpuimg.stream.stored import export_shards

            export_shards(checkpoint, shard_fds)
    if shard_fds is not None and 1 in shard_fds:
        return
    raw = checkpoint.statistics.raw_bytes
    if state.as_json:
        output.write_json({"checkpoint": checkpoint.id, "files": len(checkpoint.files), "raw_bytes": raw})
    else:
        where = str(directory) if directory is not None else "the shards"
        output.write(f"wrote {len(checkpoint.files)} files, {output.size(raw)}, to {output.printable(where)}")
