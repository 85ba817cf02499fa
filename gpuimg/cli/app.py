"""The root command: finds commands when they are needed, turns every failure into one line and a status."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from gpuimg import __version__
from gpuimg.cli import output
from gpuimg.cli.context import State, common_options
from gpuimg.errors import GpuimgError, UsageError

OUTPUT_CLOSED = 141
"""Exit status when whoever read standard output has gone, as a shell shows it for SIGPIPE."""

COMMANDS: dict[str, str] = {
    "init": "store",
    "ls": "store",
    "show": "show",
    "diff": "store",
    "stats": "store",
    "tag": "tags",
    "rm": "tags",
    "gc": "keep",
    "verify": "keep",
    "repair": "keep",
    "dump": "process",
    "restore": "process",
    "capture": "streamer",
    "serve": "streamer",
    "extract": "streamer",
    "import": "directory",
    "export": "directory",
    "doctor": "doctor",
    "bench": "bench",
}
"""Command name to its module in gpuimg.cli; there it is the attribute `<name>_command`."""


class _EndedError(BaseException):
    """A signal asks for the end. Like an interrupt it passes everything that catches errors."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _end(number: int, _: object) -> NoReturn:
    # Whoever asks a second time does not want to wait for the cleaning up.
    signal.signal(number, signal.SIG_DFL)
    raise _EndedError(number)


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"gpuimg.cli.{COMMANDS[cmd_name]}")
        found = getattr(module, f"{cmd_name}_command")
        assert isinstance(found, click.Command)
        return found


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="""\b
Example:
  gpuimg --store /srv/checkpoints init
  gpuimg --store /srv/checkpoints dump -t 4711 --tag before-update
  gpuimg --store /srv/checkpoints restore before-update

Every error has an exit status of its own: see `gpuimg COMMAND --help`.""",
)
@click.version_option(__version__, prog_name="gpuimg", message="%(prog)s %(version)s")
@common_options
def root() -> None:
    """Keep, move and restore the state of GPU processes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; never raises for what a user can do wrong."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # numpy's linear algebra is not used here, and starting its threads would take 50 ms.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        status = root.main(given, prog_name="gpuimg", standalone_mode=False, obj=State())
        return status if isinstance(status, int) else 0
    except output.OutputClosedError:
        return OUTPUT_CLOSED
    except (click.Abort, KeyboardInterrupt):
        print("gpuimg: interrupted", file=sys.stderr)
        return 130
    except _EndedError as error:
        print(f"gpuimg: ended by {signal.Signals(error.number).name}", file=sys.stderr)
        return 128 + error.number
    except click.ClickException as error:
        return _fail(_from_click(error), given)
    except GpuimgError as error:
        return _fail(error, given)
    except Exception as error:
        if os.environ.get("GPUIMG_DEBUG") == "1":
            raise
        return _fail(
            GpuimgError(
                f"internal error, {type(error).__name__}: {error}",
                remedy="please report it with the command you ran; GPUIMG_DEBUG=1 shows where it happened",
            ),
            given,
        )


def run() -> NoReturn:
    """The console script: `main`, then out.

    The interpreter's own way out visits every object twice more, which takes longer than many a command:
    everything is closed and flushed when `main` returns, so it is left out.
    """
    gc.set_threshold(100_000)  # imports make many objects and no garbage
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP, and so it stays
            signal.signal(number, _end)
    status = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = status or OUTPUT_CLOSED
    os._exit(status)


def _from_click(error: click.ClickException) -> UsageError:
    """click's complaint about the command line in our form."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    path = ctx.command_path if ctx is not None else "gpuimg"
    return UsageError(error.format_message().rstrip("."), remedy=f"see `{path} --help`")


def _fail(error: GpuimgError, given: list[str]) -> int:
    own = given[: given.index("--")] if "--" in given else given
    line = " ".join(f"gpuimg: {error}".split())
    try:
        if "--json" in own:
            report = {"error": error.name, "what": error.what, "remedy": error.remedy}
            print(json.dumps(report, ensure_ascii=False), flush=True)
        print(line, file=sys.stderr, flush=True)
    except OSError:
        output.abandon()
    return error.exit_status
