"""Drawing the map of a checkpoint's memory: what goes where, in which colour, with which words.

The picture is composed here, in units of which a screen shows one a pixel; map_html and map_png put it into
files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpuimg.cli import output
from gpuimg.cli.stroke_font import measure
from gpuimg.store.files import os_errors
from gpuimg.store.memory_map import Block, Kind, MemoryMap, memory_map

if TYPE_CHECKING:
    from gpuimg.store.checkpoint import Checkpoint
    from gpuimg.store.store import Store

BACKGROUND = "#ffffff"
INK = "#1c2733"
FAINT = "#66727f"
FRAME = "#d5dae0"

# Pale is what cost nothing, strong what was written. Told apart with each kind of colour blindness.
COLOURS: dict[Kind, str] = {
    Kind.ZERO: "#e6e8ec",
    Kind.UNCHANGED: "#a9c6ea",
    Kind.KNOWN: "#4fb3a1",
    Kind.DELTA: "#1f5fae",
    Kind.CODED: "#f2a83a",
    Kind.RAW: "#9b2d5f",
    Kind.LOST: "#111111",
}
MEANING: dict[Kind, str] = {
    Kind.ZERO: "zeros, not stored",
    Kind.UNCHANGED: "as in the parent, there or moved",
    Kind.KNOWN: "in an older checkpoint, or twice in this one",
    Kind.DELTA: "stored as differences to other chunks",
    Kind.CODED: "compressed, without a base",
    Kind.RAW: "stored as it is",
    Kind.LOST: "missing or damaged: see gpuimg verify",
}

WIDTH = 1200
_MARGIN = 32
_INNER = WIDTH - 2 * _MARGIN
_GUTTER = 16
# A tile is as wide as one, two or all four of the map's columns.
_TILES = 4
_TILE = (_INNER - (_TILES - 1) * _GUTTER) // _TILES
_BAR_HEIGHT = 22
_LEGEND_LINE = 21
# Cells of a checkpoint, up to which a tile has so many of them in a row.
_DENSITY = ((1_000, 16), (4_000, 24), (10_000, 32), (1 << 62, 40))
# Rows of cells, up to which a block goes into one tile or into two.
_ROWS_IN_ONE, _ROWS_IN_TWO = 12, 16
# Height of what is above the cells of a block.
_HEAD = 36


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text; (x, y) is where its baseline begins or, if `at_end`, ends."""

    x: float
    y: float
    text: str
    size: float = 13
    colour: str = INK
    bold: bool = False
    at_end: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of a block, row by row. `step` is from one cell to the next, `gap` of it is left free."""

    x: int
    y: int
    step: int
    gap: int
    columns: int
    block: Block


@dataclass(slots=True)
class Picture:
    """Everything that is drawn."""

    title: str
    width: int = WIDTH
    height: int = 0
    chunks_per_cell: int = 1
    bars: list[Bar] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)


def draw_map(store: Store, checkpoint: Checkpoint, path: Path) -> None:
    """Draw how a checkpoint's memory is stored into `path`, whose ending (.html or .png) says how."""
    picture = compose(checkpoint, memory_map(store, checkpoint))
    if path.suffix.lower() == ".png":
        from gpuimg.cli.map_png import render_png

        data = render_png(picture)
    else:
        from gpuimg.cli.map_html import render_html

        data = render_html(picture).encode()
    with os_errors(f"writing the map {path}"):
        path.write_bytes(data)


def compose(checkpoint: Checkpoint, found: MemoryMap) -> Picture:
    """Lay out the picture of a checkpoint."""
    picture = Picture(f"checkpoint {checkpoint.name}", chunks_per_cell=found.chunks_per_cell)
    y = _heading(picture, checkpoint, found)
    y = _overview(picture, found, y)
    y = _blocks(picture, found, y)
    picture.height = y + _MARGIN
    return picture


def _heading(picture: Picture, checkpoint: Checkpoint, found: MemoryMap) -> int:
    stats, source = checkpoint.statistics, checkpoint.source
    by = f" by {source.kind.name.lower()}" if source.kind else ""
    origin = [checkpoint.id[:12], f"taken {output.moment(checkpoint.created)}{by}"]
    if source.hostname:
        origin.append(f"on {source.hostname}")
    origin.append(f"{output.size(stats.raw_bytes)} in {len(checkpoint.files)} files")
    origin.append(f"{output.size(stats.new_bytes)} new in the store")
    if not checkpoint.parent:
        parent = "A full checkpoint, compared with no other."
    elif found.is_parent_gone:
        parent = (
            f"Compared with {checkpoint.parent[:12]}, which has been removed: "
            "what was unchanged is drawn as it is stored."
        )
    else:
        parent = f"Compared with its parent {checkpoint.parent[:12]}."
    depth = max((block.max_depth for block in found.blocks), default=0)
    if depth:
        parent += f" Chains of differences are up to {depth} deep."
    picture.labels += [
        Label(_MARGIN, 56, picture.title, 26, bold=True),
        Label(_MARGIN, 84, "  ·  ".join(origin), 13, FAINT),
        Label(_MARGIN, 104, parent, 13, FAINT),
    ]
    return 126


def _overview(picture: Picture, found: MemoryMap, y: int) -> int:
    """One bar of all bytes, and the legend below it."""
    whole = sum(total.raw_bytes for total in found.totals.values())
    x = float(_MARGIN)
    for kind, total in found.totals.items():
        width = _INNER * total.raw_bytes / whole
        picture.bars.append(Bar(x, y, width, _BAR_HEIGHT, COLOURS[kind]))
        x += width
    y += _BAR_HEIGHT + 26
    for kind, total in found.totals.items():
        picture.bars.append(Bar(_MARGIN, y - 11, 14, 14, COLOURS[kind]))
        takes = f"takes {output.size(total.stored_bytes)}" if total.stored_bytes else ""
        picture.labels += [
            Label(_MARGIN + 24, y, kind.value, bold=True),
            Label(_MARGIN + 200, y, output.size(total.raw_bytes), at_end=True),
            Label(_MARGIN + 270, y, _percent(total.raw_bytes, whole), at_end=True),
            Label(_MARGIN + 400, y, takes, at_end=True),
            Label(_MARGIN + 426, y, MEANING[kind], colour=FAINT),
        ]
        y += _LEGEND_LINE
    for line in _notes(found):
        picture.labels.append(Label(_MARGIN, y + 6, line, 12, FAINT))
        y += 18
    return y + 18


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole
    return "< 0.1 %" if 0 < share < 0.1 else f"{share:.1f} %"


def _notes(found: MemoryMap) -> list[str]:
    if found.chunks_per_cell > 1:
        cell = (
            f"One cell stands for {found.chunks_per_cell} chunks one after the other, in the colour of most "
            "of their bytes."
        )
    else:
        cell = "One cell is one chunk, in the order of the file."
    notes = [f"{cell} Beside a name: the file's size, and → what its chunks take in the store."]
    if found.inline_files:
        noun = "file" if found.inline_files == 1 else "files"
        notes.append(
            f"Not drawn: {found.inline_files} small {noun}, {output.size(found.inline_bytes)}, "
            "in the manifest itself."
        )
    return notes


def _blocks(picture: Picture, found: MemoryMap, y: int) -> int:
    """Blocks in order, side by side where they are small."""
    cells = sum(len(block.cells) for block in found.blocks)
    in_tile = next(count for limit, count in _DENSITY if cells <= limit)
    step = _TILE // in_tile
    gap = 2 if step >= 11 else 1
    used = height = 0
    for block in found.blocks:
        tiles = _tiles_of(len(block.cells), in_tile)
        if used + tiles > _TILES:
            y += height + 24
            used = height = 0
        x = _MARGIN + used * (_TILE + _GUTTER)
        width = tiles * (_TILE + _GUTTER) - _GUTTER
        columns = width // step
        _block_head(picture, block, x, y, width)
        picture.grids.append(Grid(x, y + _HEAD, step, gap, columns, block))
        height = max(height, _HEAD + -(-len(block.cells) // columns) * step)
        used += tiles
    return y + height


def _tiles_of(cells: int, in_tile: int) -> int:
    if cells <= in_tile * _ROWS_IN_ONE:
        return 1
    return 2 if cells <= 2 * in_tile * _ROWS_IN_TWO else _TILES


def _block_head(picture: Picture, block: Block, x: int, y: int, width: int) -> None:
    """Two lines: name and size, identity and what the chunks take."""
    lines = (
        (output.printable(block.name), output.size(block.size), 13.0, INK, True),
        (output.bo_title(block.bo), f"→ {output.size(block.stored_bytes)}", 11.0, FAINT, False),
    )
    for number, (left, right, size, colour, bold) in enumerate(lines):
        baseline = y + 12 + 16 * number
        room = width - _text_width(right, 12) - 8
        picture.labels += [
            Label(x, baseline, _shortened(left, room, size, bold=bold), size, colour, bold),
            Label(x + width, baseline, right, 12, FAINT, at_end=True),
        ]


def _text_width(text: str, size: float, *, bold: bool = False) -> float:
    # The letters of a browser's font may be a little wider.
    return 1.08 * measure(text, size, bold=bold)


def _shortened(text: str, room: float, size: float, *, bold: bool) -> str:
    """The text, without its middle if it is longer than `room`."""
    kept = len(text)
    shown = text
    while kept > 2 and _text_width(shown, size, bold=bold) > room:
        kept -= 1
        shown = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
    return shown
