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
    from gpuimg.store import Store

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


class ByteSize(click.ParamType):
    """A size such as 65536, 256K, 256KiB, 1MiB or 4GiB (powers of 1024)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().upper().removesuffix("IB").removesuffix("B")
        shift = {"K": 10, "M": 20, "G": 30, "T": 40}.get(text[-1:], 0)
        number = text[:-1] if shift else text
        if not (number.isascii() and number.isdigit()):
            self.fail(f"{value!r} is no size; write for instance 256KiB or 4GiB", param, ctx)
        return int(number) << shift


class NumberList(click.ParamType):
    """A comma-separated list of file descriptors."""

    name = "fds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        parts = str(value).split(",")
        if not all(part.isascii() and part.isdigit() for part in parts):
            self.fail(f"{value!r} is no list of file descriptors; write for instance 10,11,12", param, ctx)
        return [int(part) for part in parts]


class PairList(click.ParamType):
    """A comma-separated list of LEFT:NUMBER pairs; `numbers` says whether LEFT is a number too."""

    name = "pairs"

    def __init__(self, example: str, *, numbers: bool) -> None:
        self.example = example
        self.numbers = numbers

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        if isinstance(value, list):
            return value
        pairs: list[Any] = []
        for part in filter(None, str(value).split(",")):
            left, colon, right = part.rpartition(":")
            good = colon and left and right.isascii() and right.isdigit()
            if not good or (self.numbers and not (left.isascii() and left.isdigit())):
                self.fail(f"{part!r} is not right; write for instance {self.example}", param, ctx)
            pairs.append((int(left) if self.numbers else left, int(right)))
        return pairs
