"""`dump` and `restore`: running processes into the store and back, through criu."""

from __future__ import annotations

from pathlib import Path

import click

from gpuimg.cli import output
from gpuimg.cli.context import State, command
from gpuimg.cli.incremental import Wish, announce, parent_options
from gpuimg.cli.progress import Reporter
from gpuimg.cli.store import REFERENCE_ERRORS
from gpuimg.errors import (
    BadNameError,
    CriuFailedError,
    IncompleteDumpError,
    MissingObjectError,
    NoCriuError,
    NoSpaceError,
    NoSuchProcessError,
    OldCriuError,
    SocketPathError,
    StalledError,
)

CRIU_ERRORS = (NoCriuError, OldCriuError, CriuFailedError, SocketPathError, StalledError)


def _criu_option(help_text: str) -> str:
    return f"{help_text}; else $GPUIMG_CRIU, else the one `make criu` fetched, else from PATH."


def _criu_arguments(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> list[str]:
    if value and not value[0].startswith("-"):
        raise click.BadParameter(f"{value[0]!r} is unexpected; options for criu go behind `--`", ctx, param)
    return list(value)


@command(
    "dump",
    example="gpuimg dump -t 4711 --tag before-update\n"
    "gpuimg dump -t 4711 --tag live --leave-running --incremental\n"
    "gpuimg dump -t 4711 --tag live --leave-running -- --tcp-established --shell-job",
    errors=(
        *REFERENCE_ERRORS,
        *CRIU_ERRORS,
        BadNameError,
        NoSpaceError,
        IncompleteDumpError,
        NoSuchProcessError,
    ),
)
@click.option(
    "-t", "--tree", "pid", metavar="PID", type=click.IntRange(min=1), required=True, help="Root process."
)
@click.option("--tag", metavar="NAME", required=True, help="Name the checkpoint.")
@parent_options
@click.option("--leave-running", is_flag=True, help="Let the processes run on afterwards.")
@click.option("--criu", metavar="PATH", help=_criu_option("The criu to run"))
@click.argument("criu_arguments", metavar="[-- CRIU OPTIONS]", nargs=-1, callback=_criu_arguments)
def dump_command(
    state: State,
    *,
    pid: int,
    tag: str,
    wish: Wish,
    leave_running: bool,
    criu: str | None,
    criu_arguments: list[str],
) -> None:
    """Checkpoint a process and its children into the store.

    The processes end only after the checkpoint is durable; whatever goes wrong before lets them run on.
    """
    from gpuimg.criu.dump import dump

    with state.open_store() as store:
        against = wish.against(store, tag)
        announce(against, as_json=state.as_json)
        with Reporter(state, "dump") as reporter:
            checkpoint = dump(
                store,
                pid,
                tag=tag,
                parent=against.parent,
                profile=wish.profile,
                leave_running=leave_running,
                criu=criu,
                extra_args=criu_arguments,
                watch=lambda session: reporter.watch(lambda: session.raw_bytes, lambda: 0),
            )
        output.write_made(checkpoint, tag, against, as_json=state.as_json)


@command(
    "restore",
    example="gpuimg restore before-update\n"
    "gpuimg restore before-update --detach --pidfile job.pid -- --tcp-established",
    errors=(*REFERENCE_ERRORS, MissingObjectError, *CRIU_ERRORS),
)
@click.argument("ref")
@click.option(
    "--detach", is_flag=True, help="Return when the processes run, instead of waiting for their end."
)
@click.option("--pidfile", metavar="FILE", type=click.Path(path_type=Path), help="Write the PID here.")
@click.option("--criu", metavar="PATH", help=_criu_option("The criu to run"))
@click.argument("criu_arguments", metavar="[-- CRIU OPTIONS]", nargs=-1, callback=_criu_arguments)
def restore_command(
    state: State, *, ref: str, detach: bool, pidfile: Path | None, criu: str | None, criu_arguments: list[str]
) -> int:
    """Bring the processes of the checkpoint REF back.

    Without --detach, ends with the restored process and with its exit status (128 and the signal's
    number if a signal ended it).
    """
    from gpuimg.criu.restore import restore

    with state.open_store() as store, Reporter(state, "restore"):
        result = restore(store, ref, detach=detach, pidfile=pidfile, criu=criu, extra_args=criu_arguments)
    if state.as_json:
        output.write_json({"pid": result.pid, "exit_status": result.exit_status})
    elif detach:
        output.write(f"process {result.pid} runs")
    status = result.exit_status or 0
    return status if status >= 0 else 128 - status
