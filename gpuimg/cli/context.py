"""What every command shares: where the store is, how to print, where progress goes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpuimg.errors import (
    GpuimgError,
    IndexBrokenError,
    InputOutputError,
    NewerFormatError,
    NotAStoreError,
    PermissionDeniedError,
)

if TYPE_CHECKING:
    from gpuimg.store.store import Store

F = TypeVar("F", bound=Callable[..., Any])

STORE_ERRORS: tuple[type[GpuimgError], ...] = (
    NotAStoreError,
    NewerFormatError,
    IndexBrokenError,
    PermissionDeniedError,
    InputOutputError,
)
"""What can happen to every command that opens a store."""


@dataclass
class State:
    """The common options of one invocation."""

    store: str | None = None
    as_json: bool = False
    progress_fd: int | None = None

    def store_path(self) -> Path:
        """The store of this invocation: `--store`, then GPUIMG_STORE, then the XDG default."""
        chosen = self.store or os.environ.get("GPUIMG_STORE")
        if chosen:
            return Path(chosen)
        data = os.environ.get("XDG_DATA_HOME", "")
        base = Path(data) if data.startswith("/") else Path("~/.local/share").expanduser()
        return base / "gpuimg" / "store"

    @contextmanager
    def open_store(self) -> Iterator[Store]:
        """The opened store, closed at the end of the block."""
        import gpuimg

        with gpuimg.open_store(self.store_path()) as store:
            yield store


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    state = ctx.find_object(State)
    if state is not None and param.name is not None and value not in (None, False):
        setattr(state, param.name, value)


def _open_fd(ctx: click.Context, param: click.Parameter, value: int | None) -> None:
    if value is not None:
        try:
            os.fstat(value)
        except (OSError, OverflowError):
            raise click.BadParameter(f"file descriptor {value} is not open", ctx, param) from None
    _remember(ctx, param, value)


def common_options(function: F) -> F:
    """Add `--store`, `--json` and `--progress-fd`; they may stand before and after the command's name."""
    for option in (
        click.option(
            "--progress-fd",
            metavar="N",
            type=click.IntRange(min=0),
            expose_value=False,
            callback=_open_fd,
            help="Write progress as lines to this open file descriptor.",
        ),
        click.option(
            "--json",
            "as_json",
            is_flag=True,
            expose_value=False,
            callback=_remember,
            help="Print one JSON object instead of text.",
        ),
        click.option(
            "--store",
            metavar="DIR",
            expose_value=False,
            callback=_remember,
            help="The store; else $GPUIMG_STORE, else ~/.local/share/gpuimg/store.",
        ),
    ):
        function = option(function)
    return function


def _epilog(example: str, errors: tuple[type[GpuimgError], ...]) -> str:
    lines = [
        "\b",
        "Example:",
        *(f"  {line}" for line in example.strip().splitlines()),
        "",
        "\b",
        "Exit status:",
    ]
    rows = {0: "success", 1: "internal error", 2: "the command line makes no sense", 130: "interrupted"}
    for error in errors:
        rows[error.exit_status] = (error.__doc__ or error.name).splitlines()[0].rstrip(".")
    lines += [f"  {status:>3}  {text}" for status, text in sorted(rows.items())]
    return "\n".join(lines)


def command(
    name: str, *, example: str, errors: tuple[type[GpuimgError], ...] = STORE_ERRORS
) -> Callable[[Callable[..., int | None]], click.Command]:
    """A click command that takes the :class:`State` first; has the common options, an example, an exit table.

    The function returns the exit status, or None for success.
    """

    def decorate(function: Callable[..., int | None]) -> click.Command:
        with_state = click.pass_obj(function)
        return click.command(name, epilog=_epilog(example, errors))(common_options(with_state))

    return decorate


def byte_size(text: str) -> int:
    """A size such as 65536, 256K, 256KiB, 1MiB or 4GiB (powers of 1024); a type of click options."""
    short = text.strip().upper().removesuffix("IB").removesuffix("B")
    shift = {"K": 10, "M": 20, "G": 30, "T": 40}.get(short[-1:], 0)
    number = short[:-1] if shift else short
    if not _is_number(number):
        raise click.BadParameter(f"{text!r} is no size; write for instance 256KiB or 4GiB")
    return int(number) << shift


def fd_list(text: str) -> list[int]:
    """File descriptors, separated by commas; a type of click options."""
    parts = text.split(",")
    if not all(_is_number(part) for part in parts):
        raise click.BadParameter(f"{text!r} is no list of file descriptors; write for instance 10,11,12")
    return [int(part) for part in parts]


def ext_files(text: str) -> list[tuple[str, int]]:
    """Pairs NAME:FD, separated by commas; a type of click options."""
    pairs = []
    for part in filter(None, text.split(",")):
        name, _, fd = part.rpartition(":")
        if not name or not _is_number(fd):
            raise click.BadParameter(f"{part!r} is not right; write for instance fs.tar:20")
        pairs.append((name, int(fd)))
    return pairs


def port_pairs(text: str) -> list[tuple[int, int]]:
    """Pairs OLD:NEW of TCP ports, separated by commas; a type of click options."""
    pairs = []
    for part in filter(None, text.split(",")):
        old, _, new = part.partition(":")
        if not all(_is_number(port) and int(port) < 1 << 16 for port in (old, new)):
            raise click.BadParameter(f"{part!r} is not right; write for instance 2000:3000")
        pairs.append((int(old), int(new)))
    return pairs


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19
