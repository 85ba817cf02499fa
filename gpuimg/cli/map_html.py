"""The map of a checkpoint as one HTML file: the picture as SVG, and a few lines of script that tell what is
under the pointer. It loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from html import escape
from typing import Any

from gpuimg.cli import output
from gpuimg.cli.map import BACKGROUND, COLOURS, FRAME, INK, MEANING, Grid, Label, Picture
from gpuimg.store.memory_map import Kind

_KINDS = list(Kind)

_STYLE = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0; background: {BACKGROUND}; color: {INK};
  font-family: system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }}
svg {{ display: block; width: 100%; max-width: 1600px; height: auto; margin: 0 auto;
  font-variant-numeric: tabular-nums; }}
#tip {{ position: fixed; left: 0; top: 0; max-width: 32em; padding: 8px 12px; pointer-events: none;
  background: {BACKGROUND}; border: 1px solid {FRAME}; border-radius: 6px;
  box-shadow: 0 4px 16px rgb(20 30 40 / 0.18); font-size: 13px; line-height: 1.5; white-space: pre-line; }}
#tip b {{ display: block; }}
#mark {{ fill: none; stroke: {INK}; stroke-width: 1.5; pointer-events: none; }}
"""

_SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const svg = document.querySelector("svg");
const tip = document.getElementById("tip");
const mark = document.getElementById("mark");

function size(bytes) {
  let unit = "B";
  for (const larger of ["KiB", "MiB", "GiB", "TiB"]) {
    if (bytes < 1024) break;
    bytes /= 1024;
    unit = larger;
  }
  return (unit === "B" ? bytes : bytes.toFixed(1)) + " " + unit;
}

function cellAt(event) {
  const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  for (const grid of data.grids) {
    const column = Math.floor((point.x - grid.x) / grid.step);
    const row = Math.floor((point.y - grid.y) / grid.step);
    const number = row * grid.columns + column;
    if (column >= 0 && column < grid.columns && row >= 0 && number < grid.cells.length) {
      return {grid, row, column, number};
    }
  }
  return null;
}

function describe({grid, number}) {
  const [length, kind, coding, depth, stored, share, chunks] = grid.cells[number];
  const lines = [];
  if (grid.bo) lines.push(grid.bo);
  if (grid.files === 1) {
    let offset = 0;
    for (let before = 0; before < number; before++) offset += grid.cells[before][0];
    lines.push("offset 0x" + offset.toString(16) + " (" + size(offset) + "), length " + size(length));
  } else {
    lines.push("length " + size(length));
  }
  if (chunks > 1) lines.push(chunks + " chunks, " + share + " % of the bytes are:");
  lines.push(data.kinds[kind]);
  if (data.codings[coding]) {
    lines.push(data.codings[coding] + ", depth " + depth + ", " + size(stored) + " in the store");
  }
  return lines.join("\\n");
}

svg.addEventListener("mousemove", (event) => {
  const found = cellAt(event);
  tip.hidden = !found;
  mark.setAttribute("visibility", found ? "visible" : "hidden");
  if (!found) return;
  const {grid, row, column} = found;
  mark.setAttribute("x", grid.x + column * grid.step - 1);
  mark.setAttribute("y", grid.y + row * grid.step - 1);
  mark.setAttribute("width", grid.step - grid.gap + 2);
  mark.setAttribute("height", grid.step - grid.gap + 2);
  const name = document.createElement("b");
  name.textContent = grid.name;
  tip.replaceChildren(name, describe(found));
  const left = event.clientX + 16 + tip.offsetWidth > innerWidth;
  const above = event.clientY + 16 + tip.offsetHeight > innerHeight;
  tip.style.left = Math.max(0, event.clientX + (left ? -tip.offsetWidth - 12 : 16)) + "px";
  tip.style.top = Math.max(0, event.clientY + (above ? -tip.offsetHeight - 12 : 16)) + "px";
});
svg.addEventListener("mouseleave", () => {
  tip.hidden = true;
  mark.setAttribute("visibility", "hidden");
});
"""


def render_html(picture: Picture) -> str:
    """The whole file."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = escape(picture.title)
    # Names come from images: nothing in them may end the element.
    data = json.dumps(_data(picture), separators=(",", ":")).replace("<", "\\u003c")
    shapes = [
        *(
            f'<rect x="{bar.x:.2f}" y="{bar.y}" width="{bar.width:.2f}" height="{bar.height}" '
            f'fill="{bar.colour}"/>'
            for bar in picture.bars
        ),
        *(path for grid in picture.grids for path in _cells(grid)),
        *map(_text, picture.labels),
    ]
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{title}</title>",
            f"<style>{_STYLE}</style>",
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {picture.width} {picture.height}" '
            f'role="img" aria-label="How the memory of {title} is stored">',
            *shapes,
            '<rect id="mark" visibility="hidden"/>',
            "</svg>",
            '<div id="tip" hidden></div>',
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>{_SCRIPT}</script>",
            "</html>",
            "",
        )
    )


def _cells(grid: Grid) -> list[str]:
    """The cells of a block, one path for each colour."""
    side = grid.step - grid.gap
    paths: dict[Kind, list[str]] = defaultdict(list)
    for number, cell in enumerate(grid.block.cells):
        row, column = divmod(number, grid.columns)
        x, y = grid.x + column * grid.step, grid.y + row * grid.step
        paths[cell.kind].append(f"M{x} {y}h{side}v{side}h-{side}z")
    return [f'<path fill="{COLOURS[kind]}" d="{"".join(parts)}"/>' for kind, parts in paths.items()]


def _text(label: Label) -> str:
    weight = ' font-weight="600"' if label.bold else ""
    anchor = ' text-anchor="end"' if label.at_end else ""
    return (
        f'<text x="{label.x:g}" y="{label.y:g}" font-size="{label.size:g}" fill="{label.colour}"'
        f'{weight}{anchor} xml:space="preserve">{escape(label.text)}</text>'
    )


def _data(picture: Picture) -> dict[str, Any]:
    """What the script needs: per cell length, kind, coding, depth, stored bytes, share (%) and chunks; the
    last two where a cell stands for several chunks."""
    codings = sorted({cell.coding for grid in picture.grids for cell in grid.block.cells})
    numbers = {coding: number for number, coding in enumerate(codings)}
    grids = []
    for grid in picture.grids:
        cells: list[list[int]] = []
        for cell in grid.block.cells:
            row = [cell.length, _KINDS.index(cell.kind), numbers[cell.coding], cell.depth, cell.stored]
            if picture.chunks_per_cell > 1:
                row += [round(100 * cell.share), cell.chunks]
            cells.append(row)
        grids.append(
            {
                "name": output.printable(grid.block.name),
                "bo": output.bo_title(grid.block.bo),
                "files": grid.block.files,
                "x": grid.x,
                "y": grid.y,
                "step": grid.step,
                "gap": grid.gap,
                "columns": grid.columns,
                "cells": cells,
            }
        )
    return {"kinds": [f"{kind}: {MEANING[kind]}" for kind in _KINDS], "codings": codings, "grids": grids}
