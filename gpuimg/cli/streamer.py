"""`capture`, `serve`, `extract`: the image streamer on a store, for criu that somebody else runs."""

from __future__ import annotations

from pathlib import Path

import click

from gpuimg.cli import output
from gpuimg.cli.context import State, command, ext_files, fd_list, port_pairs
from gpuimg.cli.incremental import Wish, announce, parent_options
from gpuimg.cli.store import REFERENCE_ERRORS
from gpuimg.errors import (
    BadNameError,
    BadStreamError,
    ImagesDirectoryError,
    IncompleteDumpError,
    MissingObjectError,
    NoSpaceError,
    SocketPathError,
    StalledError,
)

_IMAGES_DIR = click.option(
    "-D",
    "--images-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    required=True,
    help="Where the socket goes: the directory criu is given with --images-dir.",
)
_EXT_FILE_FDS = click.option(
    "--ext-file-fds",
    type=ext_files,
    metavar="NAME:FD,...",
    default="",
    help="Further files, each from (capture) or to (serve) an open pipe.",
)


@command(
    "capture",
    example="gpuimg capture -D /tmp/images --tag job-17 &\n"
    "criu dump --stream --images-dir /tmp/images --tree 4711",
    errors=(
        *REFERENCE_ERRORS,
        BadNameError,
        NoSpaceError,
        BadStreamError,
        IncompleteDumpError,
        SocketPathError,
        ImagesDirectoryError,
        StalledError,
    ),
)
@_IMAGES_DIR
@click.option("--tag", metavar="NAME", help="Name the checkpoint.")
@parent_options
@_EXT_FILE_FDS
def capture_command(
    state: State, *, images_dir: Path, tag: str | None, wish: Wish, ext_file_fds: list[tuple[str, int]]
) -> None:
    """Take what `criu dump --stream` sends.

    criu ends the dumped processes without waiting for the checkpoint to be durable; `gpuimg dump` waits.
    """
    from gpuimg.stream.stored import capture

    with state.open_store() as store:
        against = wish.against(store, tag)
        announce(against, as_json=state.as_json)
        checkpoint = capture(
            store,
            images_dir,
            tag=tag,
            parent=against.parent,
            profile=wish.profile,
            ext_files=ext_file_fds,
            progress_fd=state.progress_fd,
        )
        output.write_made(checkpoint, tag, against, as_json=state.as_json)


@command(
    "serve",
    example="gpuimg serve job-17 -D /tmp/images &\ncriu restore --stream --images-dir /tmp/images",
    errors=(
        *REFERENCE_ERRORS,
        MissingObjectError,
        BadStreamError,
        SocketPathError,
        ImagesDirectoryError,
        StalledError,
    ),
)
@click.argument("ref")
@_IMAGES_DIR
@_EXT_FILE_FDS
@click.option(
    "--tcp-listen-remap",
    type=port_pairs,
    metavar="OLD:NEW,...",
    default="",
    help="Restore listening TCP sockets on other ports.",
)
def serve_command(
    state: State,
    *,
    ref: str,
    images_dir: Path,
    ext_file_fds: list[tuple[str, int]],
    tcp_listen_remap: list[tuple[int, int]],
) -> None:
    """Give a checkpoint to `criu restore --stream`."""
    from gpuimg.stream.stored import serve

    with state.open_store() as store:
        checkpoint = store.checkpoint(ref)
        serve(
            checkpoint,
            images_dir,
            ext_files=ext_file_fds,
            tcp_listen_remap=tcp_listen_remap,
            progress_fd=state.progress_fd,
        )
    if state.as_json:
        output.write_json({"checkpoint": checkpoint.id, "raw_bytes": checkpoint.statistics.raw_bytes})


@command(
    "extract",
    example="criu-image-streamer -D /tmp/images capture | gpuimg extract --tag job-17\n"
    "lz4 -d job-17.lz4 - | gpuimg extract --tag job-17",
    errors=(*REFERENCE_ERRORS, BadNameError, NoSpaceError, BadStreamError, IncompleteDumpError),
)
@click.option("--tag", metavar="NAME", help="Name the checkpoint.")
@parent_options
@click.option(
    "--shard-fds",
    type=fd_list,
    metavar="FDS",
    default="0",
    show_default=True,
    help="Read the shards from these descriptors, comma-separated.",
)
def extract_command(state: State, *, tag: str | None, wish: Wish, shard_fds: list[int]) -> None:
    """Take a stream of criu-image-streamer into the store."""
    from gpuimg.stream.stored import extract

    with state.open_store() as store:
        against = wish.against(store, tag)
        announce(against, as_json=state.as_json)
        checkpoint = extract(
            store,
            shard_fds,
            tag=tag,
            parent=against.parent,
            profile=wish.profile,
            progress_fd=state.progress_fd,
        )
        output.write_made(checkpoint, tag, against, as_json=state.as_json)
