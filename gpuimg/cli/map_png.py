"""The map of a checkpoint as a PNG file, written with numpy and zlib alone."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

from gpuimg.cli import stroke_font
from gpuimg.cli.map import BACKGROUND, COLOURS, Bar, Grid, Picture

_SCALE = 2
"""Pixels per unit of the picture, so that it is sharp on screens with small pixels."""
# Pictures that would be higher than this are drawn at half the size.
_MAX_HEIGHT = 10_000
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UP = 2

Image = npt.NDArray[np.uint8]


def render_png(picture: Picture) -> bytes:
    """The whole file: 8 bits each of red, green and blue."""
    scale = _SCALE if picture.height * _SCALE <= _MAX_HEIGHT else 1
    image = np.empty((picture.height * scale, picture.width * scale, 3), np.uint8)
    image[:] = _rgb(BACKGROUND)
    for bar in picture.bars:
        _draw_bar(image, bar, scale)
    for grid in picture.grids:
        _draw_cells(image, grid, scale)
    for label in picture.labels:
        size = label.size * scale
        x = label.x * scale
        if label.at_end:
            x -= stroke_font.measure(label.text, size, bold=label.bold)
        stroke_font.draw(
            image, x, label.y * scale, label.text, size=size, colour=_rgb(label.colour), bold=label.bold
        )
    return encode_png(image)


def encode_png(image: Image) -> bytes:
    """A PNG of an image (height, width, 3)."""
    height, width, _ = image.shape
    rows = image.reshape(height, width * 3)
    # Rows are like those above them, all the more in a picture of rectangles.
    filtered = np.empty((height, 1 + width * 3), np.uint8)
    filtered[:, 0] = _UP
    filtered[0, 1:] = rows[0]
    filtered[1:, 1:] = rows[1:] - rows[:-1]
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"".join(
        (
            _SIGNATURE,
            _chunk(b"IHDR", head),
            _chunk(b"IDAT", zlib.compress(filtered.tobytes(), 6)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue


def _draw_bar(image: Image, bar: Bar, scale: int) -> None:
    left, top = round(bar.x * scale), round(bar.y * scale)
    # What there is very little of stays visible.
    right = max(left + 1, round((bar.x + bar.width) * scale))
    image[top : round((bar.y + bar.height) * scale), left:right] = _rgb(bar.colour)


def _draw_cells(image: Image, grid: Grid, scale: int) -> None:
    side = (grid.step - grid.gap) * scale
    for number, cell in enumerate(grid.block.cells):
        row, column = divmod(number, grid.columns)
        x, y = (grid.x + column * grid.step) * scale, (grid.y + row * grid.step) * scale
        image[y : y + side, x : x + side] = _rgb(COLOURS[cell.kind])
