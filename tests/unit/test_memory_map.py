"""The map of a checkpoint's memory: what its cells say, and what the two kinds of pictures show of it."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import struct
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest

import gpuimg
from gpuimg.cli import main, stroke_font
from gpuimg.cli.map import BACKGROUND, COLOURS, MEANING, compose
from gpuimg.cli.map_html import render_html
from gpuimg.cli.map_png import encode_png, render_png
from gpuimg.store.memory_map import MAX_CELLS, Kind, memory_map
from gpuimg.store.model import BufferObject
from tests.fixtures.store_data import KIB, MIB, floats, noise, text

CHUNK = 64 * KIB
FIGURES = {
    Kind.ZERO: "zero_bytes",
    Kind.UNCHANGED: "unchanged_bytes",
    Kind.KNOWN: "deduplicated_bytes",
    Kind.DELTA: "delta_bytes",
    Kind.CODED: "coded_bytes",
    Kind.RAW: "raw_stored_bytes",
}
HOSTILE = "</script><script>alert(1)<!--\"'&\x1b[31m"


@pytest.fixture
def store(tmp_path):
    with gpuimg.init_store(tmp_path / "store", chunk_size=CHUNK) as opened:
        yield opened


def put(store, files, tag=None, parent=None, bos=None):
    with store.ingest(parent=parent) as session:
        for name, data in files.items():
            file = session.file(name, bo=(bos or {}).get(name))
            file.write(data)
            file.close()
        return session.commit(tag=tag)


def job(store):
    """A full checkpoint of a job, another that is nobody's parent, and a child of the first that has chunks
    of every kind."""
    weights, rest = floats(MIB, 1), noise(MIB, 2)
    bos = {"weights": BufferObject(0x1A2B, 7, 0x7F00_0000_0000, MIB, 0)}
    first = put(store, {"weights": weights, "pages-1.img": rest + bytes(MIB), "s": b"1"}, "first", bos=bos)
    put(store, {"cache": noise(MIB, 5)}, "other")
    step = np.random.default_rng(3).normal(0, 1e-6, MIB // 4).astype(np.float32)
    files = {
        "weights": (np.frombuffer(weights, np.float32) + step).tobytes(),
        "pages-1.img": rest + bytes(MIB),
        "cache": noise(MIB, 5)[: 8 * CHUNK] + noise(CHUNK, 6) * 3 + floats(5 * CHUNK, 7),
        "s": b"2",
    }
    return first, put(store, files, "child", first, bos)


def by_name(found):
    return {block.name: block for block in found.blocks}


def test_a_map_agrees_with_the_figures_of_its_checkpoint(store):
    for checkpoint in job(store):
        found = memory_map(store, checkpoint)
        for kind, figure in FIGURES.items():
            total = found.totals[kind].raw_bytes if kind in found.totals else 0
            assert total == getattr(checkpoint.statistics, figure), kind
        own = sum(total.stored_bytes for total in found.totals.values())
        assert own == checkpoint.statistics.stored_bytes
        assert (found.inline_files, found.inline_bytes) == (1, 1)
        assert not found.is_parent_gone
    assert set(found.totals) == set(Kind) - {Kind.LOST}


def test_there_is_a_cell_for_every_chunk_in_the_order_of_the_file(store):
    _, child = job(store)
    blocks = by_name(memory_map(store, child))
    assert list(blocks) == ["cache", "pages-1.img", "weights"]
    for name, block in blocks.items():
        assert block.size == sum(cell.length for cell in block.cells) == child.files[name].size
        assert all(cell.share == cell.chunks == 1 and cell.length <= 16 * CHUNK for cell in block.cells)
    assert [cell.kind for cell in blocks["cache"].cells] == [
        *[Kind.KNOWN] * 8,
        Kind.RAW,
        *[Kind.KNOWN] * 2,
        *[Kind.CODED] * 5,
    ]
    weights = blocks["weights"]
    assert {(cell.kind, cell.coding, cell.depth) for cell in weights.cells} == {
        (Kind.DELTA, "float_planes/4+base", 1)
    }
    assert weights.stored_bytes == sum(cell.stored for cell in weights.cells)
    assert weights.stored_bytes == child.figures["weights"].statistics.stored_bytes
    assert (weights.max_depth, weights.bo) == (1, child.files["weights"].bo)
    # Memory as it was: a megabyte of noise, then zeros in cells as large as chunks.
    kinds = [cell.kind for cell in blocks["pages-1.img"].cells]
    first_zero = kinds.index(Kind.ZERO)
    assert set(kinds[:first_zero]) == {Kind.UNCHANGED}
    assert kinds[first_zero:] == [Kind.ZERO] * (MIB // CHUNK)
    # Of three equal chunks in a row the first is new, and all three are one in the store.
    assert blocks["cache"].stored_bytes == sum(
        cell.stored for number, cell in enumerate(blocks["cache"].cells) if number not in (9, 10)
    )


def test_what_was_unchanged_is_drawn_as_it_is_stored_when_the_parent_is_gone(store):
    first, child = job(store)
    before = memory_map(store, child).totals
    store.remove(first.id)
    store.gc()
    found = memory_map(store, store.checkpoint("child"))
    assert found.is_parent_gone
    assert Kind.UNCHANGED not in found.totals
    assert found.totals[Kind.RAW].raw_bytes == before[Kind.RAW].raw_bytes + before[Kind.UNCHANGED].raw_bytes
    assert found.totals[Kind.KNOWN].raw_bytes == before[Kind.KNOWN].raw_bytes
    assert any("has been removed" in label.text for label in compose(child, found).labels)


def test_what_moved_in_a_page_image_is_unchanged_and_elsewhere_known(store):
    memory = noise(4 * MIB, 1)
    files = {"pages-1.img": memory, "other": memory[:MIB]}
    first = put(store, files)
    moved = {"pages-1.img": noise(5 * 4 * KIB, 2) + memory, "other": noise(CHUNK, 3) + memory[: MIB - CHUNK]}
    child = put(store, moved, parent=first)
    assert child.statistics.unchanged_bytes > 3 * MIB
    found = memory_map(store, child)
    for kind, figure in FIGURES.items():
        total = found.totals[kind].raw_bytes if kind in found.totals else 0
        assert total == getattr(child.statistics, figure), kind
    assert {cell.kind for cell in by_name(found)["other"].cells[1:]} == {Kind.KNOWN}


def test_a_large_map_has_cells_of_several_chunks_and_says_so(store):
    _, child = job(store)
    exact = memory_map(store, child)
    count = sum(len(block.cells) for block in exact.blocks)
    found = memory_map(store, child, max_cells=count // 3)
    assert found.chunks_per_cell == 4
    assert sum(len(block.cells) for block in found.blocks) <= count // 3 + len(found.blocks)
    assert found.totals == exact.totals
    for block, whole in zip(found.blocks, exact.blocks, strict=True):
        assert sum(cell.length for cell in block.cells) == block.size
        assert sum(cell.chunks for cell in block.cells) == len(whole.cells)
        assert sum(cell.stored for cell in block.cells) == sum(cell.stored for cell in whole.cells)
        assert (block.stored_bytes, block.max_depth) == (whole.stored_bytes, whole.max_depth)
    # Two known chunks, one that is new and known again: most are known.
    mixed = by_name(found)["cache"].cells[2]
    assert (mixed.kind, mixed.chunks, mixed.share) == (Kind.KNOWN, 4, 0.5)
    assert any(
        label.text.startswith("One cell stands for 4 chunks") for label in compose(child, found).labels
    )


def test_the_number_of_cells_is_bounded_for_huge_files(store):
    zeros = bytes(64 * MIB)
    with store.ingest() as session:
        file = session.file("huge")
        for _ in range(24):
            file.write(zeros)
        file.close()
        checkpoint = session.commit()
    assert 24 * len(zeros) // CHUNK > MAX_CELLS
    found = memory_map(store, checkpoint)
    assert found.chunks_per_cell == 2
    assert MAX_CELLS / 2 < len(found.blocks[0].cells) <= MAX_CELLS
    html = render_html(compose(checkpoint, found))
    assert len(html) < 2 * MIB


def test_of_very_many_files_the_small_ones_share_a_block(store):
    files = {f"bo-{number:03}": noise(CHUNK + number, number) for number in range(200)}
    checkpoint = put(store, files)
    found = memory_map(store, checkpoint)
    *own, rest = found.blocks
    assert [block.name for block in own] == [f"bo-{number:03}" for number in range(40, 200)]
    assert (rest.name, rest.files) == ("40 smaller files", 40)
    assert rest.size == sum(cell.length for cell in rest.cells) == sum(CHUNK + n for n in range(40))


def test_what_is_lost_is_shown_as_lost(store):
    _, child = job(store)
    index = store._context.index
    (recipe,) = child.files["pages-1.img"].segments
    (weights,) = child.files["weights"].segments
    base = index.lookup(store._context.reader.segment(weights).chunk_ids())[3].base

    def action(txn):
        for chunk_id in (recipe.id, base):
            assert txn.delete(chunk_id, db=index._chunks)

    index._write(action)
    blocks = by_name(memory_map(store, child))
    assert {cell.kind for cell in blocks["pages-1.img"].cells} == {Kind.LOST}
    assert sum(cell.length for cell in blocks["pages-1.img"].cells) == 2 * MIB
    kinds = [cell.kind for cell in blocks["weights"].cells]
    assert kinds == [*[Kind.DELTA] * 3, Kind.LOST, *[Kind.DELTA] * 12]


def test_checkpoints_without_chunks_have_a_map_too(store):
    for files in ({}, {"s": b"1"}):
        checkpoint = put(store, files)
        picture = compose(checkpoint, memory_map(store, checkpoint))
        assert picture.grids == []
        assert "<svg" in render_html(picture)
        assert decoded(render_png(picture)).shape[1] == 2 * picture.width


# The pictures


def composed(store):
    _, child = job(store)
    return child, compose(child, memory_map(store, child))


def test_a_picture_names_the_checkpoint_and_every_kind_with_bytes_and_share(store):
    child, picture = composed(store)
    texts = [label.text for label in picture.labels]
    assert "checkpoint child" in texts
    for kind in set(Kind) - {Kind.LOST}:
        assert kind.value in texts and MEANING[kind] in texts
    (row,) = [label.y for label in picture.labels if label.text == "delta"]
    assert [label.text for label in picture.labels if label.y == row][1:3] == ["1.0 MiB", "25.0 %"]
    assert {"weights", "gpu 0x1a2b #7 at 0x7f0000000000"} <= set(texts)
    assert any(child.parent[:12] in text for text in texts)


def test_nothing_in_a_picture_overlaps_or_leaves_it(store):
    _, picture = composed(store)
    boxes = []
    for grid in picture.grids:
        rows = -(-len(grid.block.cells) // grid.columns)
        boxes.append(
            (grid.x, grid.y, grid.x + grid.columns * grid.step, grid.y + rows * grid.step),
        )
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= picture.width
        assert 0 <= top < bottom <= picture.height
    for one, other in itertools.combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    for label in picture.labels:
        width = stroke_font.measure(label.text, label.size, bold=label.bold)
        left = label.x - width if label.at_end else label.x
        assert left >= 0 and left + width <= picture.width, label.text
        assert not any(box[1] < label.y < box[3] and box[0] < left + width < box[2] for box in boxes)


class Page(HTMLParser):
    """What a page is made of."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.data, self.script = [], [], "", ""
        self._inside = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("text", "script", "title"):
            self._inside.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if self._inside and self._inside[-1][0] == tag:
            self._inside.pop()

    def handle_data(self, data):
        tag, attrs = self._inside[-1] if self._inside else ("", {})
        if tag == "text":
            self.texts.append(data)
        elif tag == "script" and attrs.get("id") == "data":
            self.data += data
        elif tag == "script":
            self.script += data


def test_the_page_has_every_cell_and_tells_of_it(store):
    _, picture = composed(store)
    page = Page(render_html(picture))
    data = json.loads(page.data)
    assert len(data["grids"]) == len(picture.grids)
    for told, grid in zip(data["grids"], picture.grids, strict=True):
        assert (told["name"], told["x"], told["y"]) == (grid.block.name, grid.x, grid.y)
        assert len(told["cells"]) == len(grid.block.cells)
        for (length, kind, coding, depth, stored), cell in zip(told["cells"], grid.block.cells, strict=True):
            assert data["kinds"][kind].startswith(f"{cell.kind}: ")
            assert (length, data["codings"][coding], depth, stored) == (
                cell.length,
                cell.coding,
                cell.depth,
                cell.stored,
            )
    drawn = dict.fromkeys(COLOURS.values(), 0)
    for tag, attrs in page.tags:
        if tag == "path":
            drawn[attrs["fill"]] += attrs["d"].count("M")
    for kind, colour in COLOURS.items():
        assert drawn[colour] == sum(cell.kind is kind for grid in picture.grids for cell in grid.block.cells)


def test_the_page_needs_nothing_but_itself_and_allows_nothing_else(store):
    _, picture = composed(store)
    text = render_html(picture)
    page = Page(text)
    for tag, attrs in page.tags:
        assert not {"src", "href", "xlink:href", "onload"} & attrs.keys(), tag
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    assert "url(" not in text and "@import" not in text
    (policy,) = [attrs["content"] for tag, attrs in page.tags if "http-equiv" in attrs]
    digest = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_names_of_files_are_text_and_nothing_else(store):
    checkpoint = put(
        store, {HOSTILE.replace("/", "|"): noise(MIB), "</title>".replace("/", "\\"): noise(CHUNK)}
    )
    picture = compose(checkpoint, memory_map(store, checkpoint))
    # As a hostile image could, past the store's own rules for names.
    block = picture.grids[0].block
    object.__setattr__(block, "name", HOSTILE)
    page = Page(render_html(picture))
    assert [tag for tag, _ in page.tags].count("script") == 2
    names = {grid["name"] for grid in json.loads(page.data)["grids"]}
    assert HOSTILE.replace("\x1b", "\\x1b") in names
    assert not any("\x1b" in text for text in page.texts)


def decoded(png):
    """The pixels of a PNG as encode_png makes it (height, width, 3)."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    chunks = {}
    at = 8
    while at < len(png):
        (size,) = struct.unpack_from(">I", png, at)
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", png, at + 8 + size)[0] == zlib.crc32(kind + data)
        chunks[kind] = data
        at += 12 + size
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert set(rows[:, 0].tolist()) <= {2}
    return np.cumsum(rows[:, 1:], axis=0, dtype=np.uint8).reshape(height, width, 3)


def test_a_png_gives_its_pixels_back():
    image = np.random.default_rng(1).integers(0, 256, (7, 5, 3)).astype(np.uint8)
    assert np.array_equal(decoded(encode_png(image)), image)


def rgb(colour):
    return tuple(bytes.fromhex(colour[1:]))


def test_the_picture_shows_every_cell_in_its_colour_and_every_label(store):
    _, picture = composed(store)
    image = decoded(render_png(picture))
    assert image.shape == (2 * picture.height, 2 * picture.width, 3)
    for grid in picture.grids:
        for number, cell in enumerate(grid.block.cells):
            row, column = divmod(number, grid.columns)
            middle = (grid.step - grid.gap) / 2
            x, y = grid.x + column * grid.step + middle, grid.y + row * grid.step + middle
            assert tuple(image[int(2 * y), int(2 * x)]) == rgb(COLOURS[cell.kind])
            gap = image[int(2 * (grid.y + row * grid.step)), int(2 * (grid.x + (column + 1) * grid.step)) - 1]
            assert tuple(gap) == rgb(BACKGROUND)
    for label in picture.labels:
        if label.text:
            width = stroke_font.measure(label.text, label.size, bold=label.bold)
            left = label.x - width if label.at_end else label.x
            rows = slice(int(2 * (label.y - 0.8 * label.size)), int(2 * label.y) + 2)
            part = image[rows, int(2 * left) : int(2 * (left + width))].astype(int)
            ink = np.abs(part - rgb(BACKGROUND)).max(axis=2) > 60
            assert 0.02 < ink.mean() < 0.6, label.text


def test_the_font_draws_every_character_and_no_two_alike():
    drawn = {}
    for code in range(0x21, 0x7F):
        image = np.full((40, 40, 3), 255, np.uint8)
        stroke_font.draw(image, 6, 28, chr(code), size=24, colour=(0, 0, 0))
        ink = image.min(axis=2) < 128
        assert ink.any(), chr(code)
        # It stays within the line and within its width.
        left, right = np.flatnonzero(ink.any(axis=0))[[0, -1]]
        assert left >= 4 and right <= 6 + stroke_font.measure(chr(code), 24) + 2, chr(code)
        drawn[chr(code)] = image.tobytes()
    assert len(set(drawn.values())) == len(drawn)
    assert stroke_font.measure("ab", 12) == stroke_font.measure("a", 12) + stroke_font.measure("b", 12)
    assert stroke_font.measure("日", 12) > 0


def test_text_that_leaves_the_picture_is_cut_off():
    image = np.full((20, 20, 3), 255, np.uint8)
    for x, y in ((-500, 10), (15, 10), (3, -50), (3, 400), (3, 2), (3, 22)):
        stroke_font.draw(image, x, y, "Wide text", size=20, colour=(0, 0, 0))
    assert image.min() == 0


# Linear light as people without one kind of cones see it (Machado, Oliveira, Fernandes 2009).
SIGHT = {
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no blue": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour, sight):
    value = np.array(rgb(colour)) / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(np.maximum(XYZ @ np.clip(np.array(sight) @ linear, 0, 1), 1e-4) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHT)
def test_the_colours_are_told_apart_by_everybody(sight):
    seen = {kind: lab(colour, SIGHT[sight]) for kind, colour in COLOURS.items()}
    for one, other in itertools.combinations(Kind, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 18, (one, other)
    paper = lab(BACKGROUND, SIGHT[sight])
    assert all(np.linalg.norm(colour - paper) > 7 for colour in seen.values())


# The command


@pytest.fixture
def command(store, tmp_path, capsys):
    put(store, {"weights": floats(MIB, 1), "text": text(MIB, 2)}, "t")

    def run(*arguments):
        capsys.readouterr()
        status = main(["--store", str(tmp_path / "store"), "show", "t", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize(("name", "start"), [("m.html", b"<!doctype html>"), ("M.PNG", b"\x89PNG")])
def test_show_draws_the_map_into_a_file(command, tmp_path, name, start):
    path = tmp_path / name
    status, out, _ = command("--map", path)
    assert status == 0
    assert out.endswith(f"drew the map {path}\n")
    assert path.read_bytes().startswith(start)
    status, out, _ = command("--map", path, "--json")
    assert json.loads(out)["map"] == str(path)


@pytest.mark.parametrize("name", ["m.svg", "m", "png", ".html.gz"])
def test_a_map_of_another_kind_is_refused(command, tmp_path, name):
    status, _, err = command("--map", tmp_path / name)
    assert status == 2
    assert ".html" in err and ".png" in err
    assert not (tmp_path / name).exists()


def test_a_map_that_cannot_be_written_is_an_error_with_a_sentence(command, tmp_path):
    (tmp_path / "folder.png").mkdir()
    assert command("--map", tmp_path / "folder.png")[0] == 2
    status, _, err = command("--map", tmp_path / "missing" / "m.png")
    assert status == 25
    assert err.startswith("gpuimg: ") and "missing" in err
