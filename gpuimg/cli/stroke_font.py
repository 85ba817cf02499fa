"""A small font for pictures that are drawn without a font library: every letter is a few strokes of a pen.

Coordinates count tenths of the font's size to the right and upwards from the baseline: capitals are 7 high,
small letters 5. A glyph is its width, then its strokes, separated by ";". A stroke is a list of points "x,y":
joined by straight lines; by a curve that the points pull towards them, if it begins with "~"; by a closed
curve, if it begins with "o".
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import numpy.typing as npt

Coverage = npt.NDArray[np.float32]
_Points = list[tuple[float, float]]

_UNITS = 10
_SPACE_BETWEEN = 1.55
_PEN, _BOLD_PEN = 0.86, 1.32
_ABOVE, _BELOW = 8.5, 3.0
_ROUNDS = 4

_GLYPHS = {
    " ": "1.4",
    "!": "0.4 0.2,7 0.2,2.2; 0.2,0 0.2,0.1",
    '"': "1.8 0.1,7 0.1,5; 1.7,7 1.7,5",
    "#": "4.6 1.4,0 2.2,7; 3,0 3.8,7; 0.4,2.4 4.4,2.4; 0.6,4.7 4.6,4.7",
    "$": "4.2 ~3.9,5.4 3.4,6.3 2.1,6.3 0.2,6.3 0.2,3.7 2.1,3.4 4.1,3.1 4.1,0.5 2.1,0.5 0.6,0.5 0.1,1.6;"
    "2.1,7.3 2.1,-0.6",
    "%": "6.2 o0,7 2.4,7 2.4,3.9 0,3.9; o3.8,3.1 6.2,3.1 6.2,0 3.8,0; 1,0 5.2,7",
    "&": "5.4 ~5.3,0 1.3,4.4 0.4,5.4 0.6,7 2.1,7 3.5,7 3.5,5.2 2.3,4.2 0,3 0,0 2.1,0 3.9,0 4.9,1.6 4.9,3",
    "'": "0.3 0.1,7 0.1,5",
    "(": "1.6 ~1.6,7.6 0,5.6 0,0.2 1.6,-1.8",
    ")": "1.6 ~0,7.6 1.6,5.6 1.6,0.2 0,-1.8",
    "*": "3 1.5,6.8 1.5,3.6; 0.1,6 2.9,4.4; 0.1,4.4 2.9,6",
    "+": "4 2,4.9 2,0.9; 0,2.9 4,2.9",
    ",": "0.8 ~0.6,0.3 0.6,-0.6 0,-1.5",
    "-": "2.4 0.1,2.6 2.3,2.6",
    ".": "0.4 0.2,0 0.2,0.1",
    "/": "3 0,-1 3,7.4",
    "0": "4.2 o0,7 4.2,7 4.2,0 0,0",
    "1": "4.2 0.9,5.6 2.5,7 2.5,0",
    "2": "4.2 ~0.2,5.3 0.3,7 2.1,7 4.1,7 4.2,4.6 2.9,3.1 0.1,0; 0.1,0 4.2,0",
    "3": "4.2 ~0.3,6 0.8,7 2.1,7 4,7 4,3.8 1.7,3.8; ~1.7,3.8 4.3,3.8 4.3,0 2,0 0.5,0 0,1.2",
    "4": "4.2 3.3,0 3.3,7 0,2 4.3,2",
    "5": "4.2 3.8,7 0.7,7 0.4,3.8; ~0.4,3.8 1.1,4.5 2.1,4.5 4.3,4.5 4.3,0 2,0 0.5,0 0,1.1",
    "6": "4.2 ~3.7,6.2 3.2,7 2.2,7 0,7 0,3.4 0,2.2; o0,4.4 4.2,4.4 4.2,0 0,0",
    "7": "4.2 0,7 4.2,7 1.5,0",
    "8": "4.2 o0.3,7 3.9,7 3.9,3.8 0.3,3.8; o0,3.8 4.2,3.8 4.2,0 0,0",
    "9": "4.2 ~0.5,0.8 1,0 2,0 4.2,0 4.2,3.6 4.2,4.8; o0,7 4.2,7 4.2,2.6 0,2.6",
    ":": "0.4 0.2,4 0.2,4.1; 0.2,0 0.2,0.1",
    ";": "0.8 0.5,4 0.5,4.1; ~0.6,0.3 0.6,-0.6 0,-1.5",
    "<": "3.6 3.5,5.2 0.2,2.9 3.5,0.6",
    "=": "4 0,3.9 4,3.9; 0,1.9 4,1.9",
    ">": "3.6 0.1,5.2 3.4,2.9 0.1,0.6",
    "?": "3.6 ~0,5.6 0.3,7 1.8,7 3.6,7 3.8,4.8 1.8,4.2 1.7,2.2; 1.7,0 1.7,0.1",
    "@": "7 o1.9,4.9 4.7,4.9 4.7,1.5 1.9,1.5; ~4.6,4.7 4.5,1.5 5.2,1.4 7,1.4 7,3.3 7,6.6 3.6,6.6 0,6.6 0,2.9 "
    "0,-1 3.6,-1 4.9,-1 5.6,-0.5",
    "A": "5 0,0 2.5,7 5,0; 0.9,2.4 4.1,2.4",
    "B": "4.5 0,0 0,7; ~0,7 2.1,7 4.1,7 4.1,3.8 2.1,3.8 0,3.8; ~0,3.8 2.3,3.8 4.6,3.8 4.6,0 2.3,0 0,0",
    "C": "4.8 ~4.8,5.4 4.2,7 2.7,7 0.1,7 0.1,3.5 0.1,0 2.7,0 4.2,0 4.8,1.6",
    "D": "4.8 0,0 0,7; ~0,7 1.9,7 4.9,7 4.9,3.5 4.9,0 1.9,0 0,0",
    "E": "4 4,7 0,7 0,0 4,0; 0,3.7 3.5,3.7",
    "F": "3.9 3.9,7 0,7 0,0; 0,3.6 3.4,3.6",
    "G": "5 ~4.8,5.4 4.2,7 2.7,7 0.1,7 0.1,3.5 0.1,0 2.7,0 4.9,0 4.9,1.6 4.9,3.3; 2.9,3.3 4.9,3.3",
    "H": "4.6 0,0 0,7; 4.6,0 4.6,7; 0,3.7 4.6,3.7",
    "I": "0.4 0.2,0 0.2,7",
    "J": "3 ~3,7 3,1.8 3,0 1.5,0 0.2,0 0,1.6",
    "K": "4.4 0,0 0,7; 4.3,7 0,2.5; 1.5,4.1 4.4,0",
    "L": "3.8 0,7 0,0 3.8,0",
    "M": "5.6 0,0 0,7 2.8,1.8 5.6,7 5.6,0",
    "N": "4.6 0,0 0,7 4.6,0 4.6,7",
    "O": "5.2 o0,7 5.2,7 5.2,0 0,0",
    "P": "4.3 0,0 0,7; ~0,7 2.2,7 4.4,7 4.4,3.2 2.2,3.2 0,3.2",
    "Q": "5.2 o0,7 5.2,7 5.2,0 0,0; 3.1,1.8 5.1,-0.5",
    "R": "4.5 0,0 0,7; ~0,7 2.2,7 4.4,7 4.4,3.3 2.2,3.3 0,3.3; 2.3,3.3 4.5,0",
    "S": "4.4 ~4.2,5.4 3.7,7 2.2,7 0.1,7 0.1,3.9 2.2,3.6 4.5,3.3 4.5,0 2.2,0 0.5,0 0,1.6",
    "T": "4.8 0,7 4.8,7; 2.4,7 2.4,0",
    "U": "4.6 ~0,7 0,4 0,2 0,0 2.3,0 4.6,0 4.6,2 4.6,4 4.6,7",
    "V": "4.8 0,7 2.4,0 4.8,7",
    "W": "6.8 0,7 1.7,0 3.4,6.2 5.1,0 6.8,7",
    "X": "4.6 0,0 4.5,7; 0.1,7 4.6,0",
    "Y": "4.6 0,7 2.3,3.4 4.6,7; 2.3,3.4 2.3,0",
    "Z": "4.4 0.1,7 4.3,7 0,0 4.4,0",
    "[": "1.4 1.4,7.5 0,7.5 0,-1.6 1.4,-1.6",
    "\\": "3 0,7.4 3,-1",
    "]": "1.4 0,7.5 1.4,7.5 1.4,-1.6 0,-1.6",
    "^": "3.2 0,4.4 1.6,7 3.2,4.4",
    "_": "4.4 -0.3,-1.2 4.7,-1.2",
    "`": "1.2 0,7.4 1.1,6.1",
    "a": "3.6 3.6,5 3.6,0; o0,5 3.6,5 3.6,0 0,0",
    "b": "3.7 0,7.4 0,0; o0,5 3.7,5 3.7,0 0,0",
    "c": "3.3 ~3.3,3.9 2.9,5 1.9,5 0,5 0,2.5 0,0 1.9,0 2.9,0 3.3,1.1",
    "d": "3.6 3.6,7.4 3.6,0; o0,5 3.6,5 3.6,0 0,0",
    "e": "3.6 0.1,2.7 3.6,2.7; ~3.6,2.7 3.6,5 1.8,5 0,5 0,2.5 0,0 1.9,0 3,0 3.5,1.1",
    "f": "2.3 ~2.5,7.2 0.9,7.8 0.9,5.6 0.9,0; 0,5 2.2,5",
    "g": "3.6 ~3.6,5 3.6,1 3.6,-0.6 3.6,-2.2 1.8,-2.2 0.7,-2.2 0.2,-1.5; o0,5 3.6,5 3.6,0 0,0",
    "h": "3.5 0,7.4 0,0; ~0,2.9 0.2,5 2,5 3.5,5 3.5,3.2 3.5,0",
    "i": "0.4 0.2,5 0.2,0; 0.2,7 0.2,7.1",
    "j": "0.9 ~0.7,5 0.7,0.6 0.7,-1 0.7,-2.3 -0.5,-2.1; 0.7,7 0.7,7.1",
    "k": "3.3 0,7.4 0,0; 3.1,5 0,1.8; 1.2,3.1 3.3,0",
    "l": "0.4 0.2,7.4 0.2,0",
    "m": "5.8 0,5 0,0; ~0,2.9 0.2,5 1.7,5 2.9,5 2.9,3.4 2.9,0; ~2.9,2.9 3.1,5 4.6,5 5.8,5 5.8,3.4 5.8,0",
    "n": "3.5 0,5 0,0; ~0,2.9 0.2,5 2,5 3.5,5 3.5,3.2 3.5,0",
    "o": "3.8 o0,5 3.8,5 3.8,0 0,0",
    "p": "3.7 0,5 0,-2; o0,5 3.7,5 3.7,0 0,0",
    "q": "3.6 3.6,5 3.6,-2; o0,5 3.6,5 3.6,0 0,0",
    "r": "2.1 0,5 0,0; ~0,2.9 0.2,5 1.6,5 2.1,4.8",
    "s": "3.1 ~2.9,4.1 2.6,5 1.5,5 0.1,5 0.1,2.8 1.5,2.5 3.2,2.2 3.2,0 1.5,0 0.3,0 0,1",
    "t": "2.2 ~0.9,6.6 0.9,1.6 0.9,0 2.3,0.1; 0,5 2.2,5",
    "u": "3.5 3.5,5 3.5,0; ~0,5 0,1.8 0,0 1.5,0 3.3,0 3.5,2.1",
    "v": "3.6 0,5 1.8,0 3.6,5",
    "w": "5.4 0,5 1.35,0 2.7,4.5 4.05,0 5.4,5",
    "x": "3.5 0,0 3.4,5; 0.1,5 3.5,0",
    "y": "3.6 0,5 1.8,0; ~3.6,5 2,0.6 1.3,-2.1 0.1,-2",
    "z": "3.3 0.1,5 3.2,5 0,0 3.3,0",
    "{": "2 ~2,7.5 0.9,7.5 0.9,5.2 0.9,3.2 0,3; ~0,3 0.9,2.8 0.9,0.8 0.9,-1.6 2,-1.6",
    "|": "0.3 0.1,7.6 0.1,-1.8",
    "}": "2 ~0,7.5 1.1,7.5 1.1,5.2 1.1,3.2 2,3; ~2,3 1.1,2.8 1.1,0.8 1.1,-1.6 0,-1.6",
    "~": "4 ~0,2.3 0.6,4 2,2.9 3.4,1.8 4,3.5",
    "·": "0.6 0.3,2.8 0.3,2.9",
    "…": "4.4 0.2,0 0.2,0.1; 2.2,0 2.2,0.1; 4.2,0 4.2,0.1",
    "→": "5.2 0,2.9 5,2.9; 3.3,4.7 5.2,2.9 3.3,1.1",
    "\N{REPLACEMENT CHARACTER}": "4 0,0 0,7 4,7 4,0 0,0",
}


def measure(text: str, size: float, *, bold: bool = False) -> float:
    """The width of a line of text in pixels."""
    pen = _BOLD_PEN if bold else _PEN
    return sum(_glyph(letter)[0] + _SPACE_BETWEEN + pen - _PEN for letter in text) * size / _UNITS


def draw(
    image: npt.NDArray[np.uint8],
    x: float,
    y: float,
    text: str,
    *,
    size: float,
    colour: tuple[int, int, int],
    bold: bool = False,
) -> None:
    """Draw a line of text into `image` (height, width, 3); its baseline begins at (x, y)."""
    top = round(y - _ABOVE * size / _UNITS)
    for letter in text:
        # A quarter of a pixel is as finely as letters need to be placed.
        whole, quarter = divmod(round(x * 4), 4)
        covered = _rendered(letter, size, quarter, bold)
        left = whole - 1
        rows = slice(max(0, top), min(len(image), top + covered.shape[0]))
        columns = slice(max(0, left), min(image.shape[1], left + covered.shape[1]))
        if rows.start < rows.stop and columns.start < columns.stop:
            part = covered[
                rows.start - top : rows.stop - top, columns.start - left : columns.stop - left, None
            ]
            under = image[rows, columns].astype(np.float32)
            image[rows, columns] = np.rint(under + (np.array(colour, np.float32) - under) * part)
        x += measure(letter, size, bold=bold)


@functools.cache
def _glyph(letter: str) -> tuple[float, tuple[tuple[tuple[float, float], ...], ...]]:
    """Width and strokes of a letter; of a box for what the font lacks."""
    text = _GLYPHS.get(letter) or _GLYPHS["\N{REPLACEMENT CHARACTER}"]
    width, _, strokes = text.partition(" ")
    return float(width), tuple(tuple(_stroke(part.strip())) for part in strokes.split(";") if part.strip())


def _stroke(text: str) -> _Points:
    kind = text[0] if text[0] in "~o" else ""
    points = [(float(x), float(y)) for x, y in (pair.split(",") for pair in text[len(kind) :].split())]
    if not kind:
        return points
    closed = kind == "o"
    for _ in range(_ROUNDS):
        points = _rounded(points, closed=closed)
    return [*points, points[0]] if closed else points


def _rounded(points: _Points, *, closed: bool) -> _Points:
    """Cut every corner (Chaikin's algorithm, which comes to a smooth curve)."""
    ends = [*points[1:], points[0]] if closed else points[1:]
    made: _Points = []
    for (x0, y0), (x1, y1) in zip(points, ends, strict=False):
        made += [
            (0.75 * x0 + 0.25 * x1, 0.75 * y0 + 0.25 * y1),
            (0.25 * x0 + 0.75 * x1, 0.25 * y0 + 0.75 * y1),
        ]
    return made if closed else [points[0], *made[1:-1], points[-1]]


@functools.cache
def _rendered(letter: str, size: float, quarter: int, bold: bool) -> Coverage:
    """How much of each pixel a letter covers, 0 to 1, with a pixel free at the left."""
    width, strokes = _glyph(letter)
    unit = size / _UNITS
    pen = (_BOLD_PEN if bold else _PEN) * unit / 2
    shape = (round((_ABOVE + _BELOW) * unit) + 2, int((width + 2) * unit) + 4)
    # Distances are taken from the centres of the pixels.
    y, x = np.mgrid[: shape[0], : shape[1]].astype(np.float32) + 0.5
    nearest = np.full(shape, np.inf, np.float32)
    for stroke in strokes:
        placed = [(1 + quarter / 4 + (px + _PEN / 2) * unit, (_ABOVE - py) * unit) for px, py in stroke]
        for (x0, y0), (x1, y1) in itertools.pairwise(placed):
            dx, dy = x1 - x0, y1 - y0
            along = np.clip(((x - x0) * dx + (y - y0) * dy) / max(dx * dx + dy * dy, 1e-9), 0, 1)
            nearest = np.minimum(nearest, np.hypot(x - x0 - along * dx, y - y0 - along * dy))
    covered: Coverage = np.clip(pen + 0.5 - nearest, 0, 1).astype(np.float32)
    return covered
