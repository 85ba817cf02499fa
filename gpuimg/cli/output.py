"""Printing: tables and plain lines for people, one JSON object for programs."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuimg.errors import InputOutputError

if TYPE_CHECKING:
    from gpuimg.cli.incremental import Against
    from gpuimg.store.checkpoint import Checkpoint
    from gpuimg.store.model import BufferObject, Statistics


class OutputClosedError(Exception):
    """Whoever read standard output has gone (`gpuimg ls | head -1`)."""


def write(text: str) -> None:
    """Print `text` and a line end on standard output, now."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        abandon()
        raise OutputClosedError from None
    except OSError as error:
        abandon()
        raise InputOutputError(
            f"standard output cannot be written: {error.strerror}", remedy="look at where it goes"
        ) from error


def note(text: str) -> None:
    """Print a line for people on standard error; nobody needs to read it."""
    with contextlib.suppress(OSError):
        print(f"gpuimg: {printable(text)}", file=sys.stderr, flush=True)


def abandon() -> None:
    """Let what standard output still buffers vanish, so that Python does not fail on it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_json(value: object) -> None:
    """Print one JSON object on one line."""
    write(json.dumps(plain(value), ensure_ascii=False, separators=(", ", ": ")))


def plain(value: Any) -> Any:
    """Data classes, enumerations, bytes and paths as what JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.IntEnum):
        return value.name.lower()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def printable(text: str) -> str:
    """`text` with control characters escaped: names come from images and must not drive the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(number: int) -> str:
    """1536 as "1.5 KiB"."""
    value, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{number} B" if unit == "B" else f"{value:.1f} {unit}"


def amount(number: int) -> str:
    """A size, or nothing for nothing."""
    return size(number) if number else ""


def bo_title(bo: BufferObject | None) -> str:
    """What people know a buffer object by: GPU, handle, address."""
    return f"gpu {bo.gpu_id:#x} #{bo.handle} at {bo.address:#x}" if bo is not None else ""


def moment(seconds: float, *, iso: bool = False) -> str:
    """A time for people (local) or, with `iso`, for programs (UTC, ISO 8601)."""
    if iso:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, drop_empty: bool = False) -> None:
    """Print a table. A column whose name starts with ">" is aligned right.

    With `drop_empty`, columns in which no row has anything are left out.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if drop_empty:
        rows = list(rows)
        kept = [number for number in range(len(columns)) if any(row[number] for row in rows)]
        columns = [columns[number] for number in kept]
        rows = [[row[number] for number in kept] for row in rows]
    terminal = sys.stdout.isatty()
    text = io.StringIO()
    # A terminal wraps what is too long for it; figures that are cut off would be worth nothing.
    console = Console(file=text, highlight=False, force_terminal=terminal, width=1 << 14)
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(
            column.removeprefix(">"), justify="right" if column[0] == ">" else "left", no_wrap=True
        )
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    console.print(made)
    write("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """One checkpoint as commands report it in JSON."""
    source = checkpoint.source
    return {
        "id": checkpoint.id,
        "tags": sorted(checkpoint.tags),
        "created": moment(checkpoint.created, iso=True),
        "created_unix": checkpoint.created,
        "kind": plain(source.kind),
        "hostname": source.hostname,
        "parent": checkpoint.parent or None,
        "files": len(checkpoint.files),
        **plain(checkpoint.statistics),
    }


def taken(stats: Statistics) -> str:
    """What became of a checkpoint's bytes when it was taken, as far as there are any of a kind."""
    parts = {
        "unchanged": stats.unchanged_bytes,
        "known already": stats.deduplicated_bytes,
        "differences": stats.delta_bytes,
        "coded": stats.coded_bytes,
        "raw": stats.raw_stored_bytes,
        "zero": stats.zero_bytes,
        "inline": stats.inline_bytes,
    }
    return ", ".join(f"{name} {size(number)}" for name, number in parts.items() if number) or "nothing"


def write_made(checkpoint: Checkpoint, tag: str | None, against: Against, *, as_json: bool) -> None:
    """Say what a dump, capture, import or extract has added to the store."""
    stats = checkpoint.statistics
    if as_json:
        write_json(
            {
                "checkpoint": checkpoint.id,
                "tag": tag,
                "parent": checkpoint.parent or None,
                "full_because": against.full_because or None,
                **plain(stats),
            }
        )
        return
    named = f" as {printable(tag)}" if tag else ""
    amount = f"{size(stats.raw_bytes)} in {len(checkpoint.files)} files"
    speed = f", {size(int(stats.raw_bytes / stats.seconds))}/s" if stats.seconds > 0 else ""
    write(f"checkpoint {checkpoint.id[:12]}{named}: {amount}{speed}")
    if against.parent is not None:
        write(f"compared with checkpoint {against.parent.id[:12]}")
    write(f"new in the store {size(stats.new_bytes)}; {taken(stats)}")
