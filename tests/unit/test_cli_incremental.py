"""The options of incremental checkpoints: what is compared with what, what is said, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuimg
from gpuimg.cli import main
from gpuimg.store.choice import Profile
from gpuimg.store.directory import import_directory
from gpuimg.store.model import BufferObject
from gpuimg.stream.stored import capture
from tests.compat.streamlib import Client
from tests.fixtures.store_data import KIB, MIB, floats, noise

GPUIMG = str(Path(sys.executable).with_name("gpuimg"))
KINDS = (
    "unchanged_bytes",
    "deduplicated_bytes",
    "delta_bytes",
    "coded_bytes",
    "raw_stored_bytes",
    "zero_bytes",
    "inline_bytes",
)
CHUNK = 64 * KIB


class Shell:
    """Runs commands on one store in this process."""

    def __init__(self, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.store, self.capsys = store, capsys
        self.err = ""

    def status(self, *arguments: object) -> int:
        self.capsys.readouterr()
        return main(["--store", str(self.store), *map(str, arguments)])

    def __call__(self, *arguments: object) -> str:
        """What a command prints that succeeds; `err` is what it says on standard error."""
        status = self.status(*arguments)
        out, self.err = self.capsys.readouterr()
        assert status == 0, self.err
        return out

    def json(self, *arguments: object) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(self(*arguments, "--json"))
        assert self.err == ""
        return made

    def refuses(self, status: int, *arguments: object) -> str:
        """The one line of a command that ends with `status` and changes nothing."""
        before = self.json("stats")
        assert self.status(*arguments) == status
        line = self.capsys.readouterr().err
        assert line.startswith("gpuimg: ") and line.count("\n") == 1
        assert self.json("stats") == before
        return line


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    made = Shell(tmp_path / "store", capsys)
    made("init", "--chunk-size", "64KiB")
    return made


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Weights (floating-point numbers), memory with zeros in it, and a small file."""
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "weights").write_bytes(floats(2 * MIB, 1))
    (folder / "pages-1.img").write_bytes(noise(MIB, 2) + bytes(MIB) + noise(MIB, 3))
    (folder / "core-1.img").write_bytes(b"core")
    return folder


def train(images: Path, seed: int = 7) -> None:
    """Change every weight by a little, and a page of the rest entirely."""
    weights = np.fromfile(images / "weights", np.float32)
    weights += np.random.default_rng(seed).normal(0, 1e-6, weights.size).astype(np.float32)
    (images / "weights").write_bytes(weights.tobytes())
    memory = bytearray((images / "pages-1.img").read_bytes())
    memory[40 * KIB : 44 * KIB] = noise(4 * KIB, seed)
    (images / "pages-1.img").write_bytes(memory)


def same(one: Path, other: Path) -> bool:
    def read(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    return read(one) == read(other)


def test_the_first_incremental_checkpoint_of_a_tag_is_a_full_one_and_says_so(
    shell: Shell, images: Path
) -> None:
    told = shell("import", images, "--tag", "job", "--incremental")
    assert shell.err == "gpuimg: there is no checkpoint with the tag job yet; this checkpoint is a full one\n"
    assert "compared with" not in told
    other = shell.json("import", images, "--tag", "other", "--incremental")
    assert other["parent"] is None
    assert other["full_because"] == "there is no checkpoint with the tag other yet"
    assert other["unchanged_bytes"] == 0


def test_an_incremental_checkpoint_is_compared_with_the_tags_current_one(shell: Shell, images: Path) -> None:
    first = shell.json("import", images, "--tag", "job", "--full")
    assert (first["parent"], first["full_because"]) == (None, None)
    second = shell.json("import", images, "--tag", "job", "--incremental")
    assert second["parent"] == first["checkpoint"]
    assert second["unchanged_bytes"] == 4 * MIB
    assert second["new_bytes"] == second["deduplicated_bytes"] == 0
    train(images)
    told = shell("import", images, "--tag", "job", "--incremental")
    assert f"compared with checkpoint {second['checkpoint'][:12]}\n" in told
    assert shell.err == ""


def test_the_figures_of_every_checkpoint_add_up(shell: Shell, images: Path) -> None:
    made = [shell.json("import", images, "--tag", "job")]
    for seed in range(3):
        train(images, seed)
        made.append(shell.json("import", images, "--tag", "job", "--incremental"))
    for report in made:
        assert sum(report[kind] for kind in KINDS) == report["raw_bytes"]
    for report in made[1:]:
        # All weights have changed and are stored as differences, for much less than in full.
        assert report["delta_bytes"] >= 2 * MIB
        assert report["unchanged_bytes"] > 1.5 * MIB
        assert report["stored_bytes"] < 0.5 * made[0]["stored_bytes"]
    listed = shell.json("stats")["checkpoints"]
    for report, line in zip(made, listed, strict=True):
        assert {kind: line[kind] for kind in KINDS} == {kind: report[kind] for kind in KINDS}
        assert line["parent"] == report["parent"]


def test_a_parent_may_be_named(shell: Shell, images: Path) -> None:
    one = shell.json("import", images, "--tag", "one")["checkpoint"]
    shell("import", images, "--tag", "two")
    for reference in ("one", one, one[:8]):
        report = shell.json("import", images, "--parent", reference)
        assert (report["parent"], report["tag"]) == (one, None)
        assert report["unchanged_bytes"] == 4 * MIB


def test_without_the_option_no_checkpoint_has_a_parent(shell: Shell, images: Path) -> None:
    shell("import", images, "--tag", "job")
    again = shell.json("import", images, "--tag", "job")
    assert again["parent"] is None
    assert (again["unchanged_bytes"], again["deduplicated_bytes"]) == (0, 4 * MIB)


def test_a_parent_may_be_removed_at_any_time(shell: Shell, images: Path, tmp_path: Path) -> None:
    first = shell.json("import", images, "--tag", "job")["checkpoint"]
    train(images)
    report = shell.json("import", images, "--tag", "job", "--incremental")
    assert report["delta_bytes"]
    shell("rm", first)
    shell("gc")
    shell("gc")
    assert shell.json("verify")["clean"]
    shell("export", "job", tmp_path / "out")
    assert same(tmp_path / "out", images)
    assert "which has been removed" in shell("show", "job")
    train(images, 8)
    assert shell.json("import", images, "--tag", "job", "--incremental")["parent"] == report["checkpoint"]


@pytest.mark.parametrize("command", ["import", "dump", "capture", "extract"])
def test_options_that_contradict_each_other_are_refused(shell: Shell, tmp_path: Path, command: str) -> None:
    arguments: list[object] = {
        "import": [tmp_path],
        "dump": ["-t", "1"],
        "capture": ["-D", tmp_path],
        "extract": [],
    }[command]
    line = shell.refuses(2, command, *arguments, "--tag", "t", "--incremental", "--full")
    assert "exclude each other" in line
    shell.refuses(2, command, *arguments, "--tag", "t", "--parent", "x", "--full")
    shell.refuses(2, command, *arguments, "--tag", "t", "--parent", "x", "--incremental")
    shell.refuses(2, command, *arguments, "--tag", "t", "--profile", "tiny")
    if command != "dump":
        line = shell.refuses(2, command, *arguments, "--incremental")
        assert "--tag" in line and "--parent" in line
    assert "profile" in shell(command, "--help")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("import", ["."]),
        ("dump", ["-t", "1", "--tag", "t"]),
        ("capture", ["-D", ".", "--tag", "t"]),
        ("extract", ["--tag", "t"]),
    ],
)
def test_an_unknown_parent_is_refused_before_anything_is_done(
    shell: Shell, command: str, arguments: list[str]
) -> None:
    # `dump` would complain of criu or of process 1, `capture` would wait, `extract` would read.
    line = shell.refuses(6, command, *arguments, "--parent", "nothing")
    assert "no checkpoint or tag 'nothing'" in line


def test_a_tag_is_not_taken_for_the_start_of_an_id(shell: Shell, images: Path) -> None:
    made = shell.json("import", images)["checkpoint"]
    report = shell.json("import", images, "--tag", made[:8], "--incremental")
    assert report["parent"] is None and report["full_because"]


def test_a_damaged_checkpoint_of_the_tag_does_not_stand_in_the_way_of_a_new_one(
    shell: Shell, images: Path
) -> None:
    first = shell.json("import", images, "--tag", "job")["checkpoint"]
    path = shell.store / "manifests" / first
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    report = shell.json("import", images, "--tag", "job", "--incremental")
    assert report["parent"] is None
    assert "cannot be read" in report["full_because"]
    # One that was asked for by name must be there.
    (shell.store / "tags" / "broken").write_text(first + "\n")
    assert shell.status("import", images, "--parent", "broken") == 9


def test_a_profile_decides_how_much_is_done(shell: Shell, tmp_path: Path) -> None:
    sizes = {}
    for profile in ("fast", "balanced", "dense", "auto"):
        sizes[profile] = []
        for number, data in enumerate((floats(MIB, 1, "bfloat16"), (b"a few words of text, again " * 40000))):
            folder = tmp_path / f"{profile}{number}"
            folder.mkdir()
            (folder / "data").write_bytes(data)
            store = tmp_path / f"store-{profile}{number}"
            assert main(["--store", str(store), "init"]) == 0
            shell.capsys.readouterr()
            assert main(["--store", str(store), "--json", "import", str(folder), "--profile", profile]) == 0
            sizes[profile].append(json.loads(shell.capsys.readouterr().out)["stored_bytes"])
    assert sizes["dense"][0] <= sizes["balanced"][0] < 0.75 * MIB
    # Repeated words need a dictionary, which takes time.
    assert sizes["dense"][1] <= sizes["balanced"][1] < 0.1 * sizes["fast"][1]


def test_a_stream_is_compared_as_well(shell: Shell, images: Path) -> None:
    (images / "inventory.img").write_bytes(b"whole")
    one = shell.json("import", images, "--tag", "one")["checkpoint"]
    program = f'"{GPUIMG}" --store "{shell.store}"'
    done = subprocess.run(
        ["bash", "-c", f"{program} export one --shard-fds 1 | {program} extract --parent one --json"],
        capture_output=True,
        check=True,
    )
    report = json.loads(done.stdout)
    assert report["parent"] == one
    assert report["unchanged_bytes"] == 4 * MIB


def test_a_capture_is_compared_as_well(tmp_path: Path, images: Path) -> None:
    with gpuimg.init_store(tmp_path / "store", chunk_size=CHUNK) as store:
        parent = import_directory(store, images, tag="job")
        train(images)

        def criu() -> None:
            until_listening(tmp_path / "streamer-capture.sock", send)

        def send(path: Path) -> None:
            client = Client(path)
            for image in sorted(images.iterdir()):
                client.put(image.name, image.read_bytes())
            client.put("inventory.img", b"whole")
            client.close()

        thread = threading.Thread(target=criu)
        thread.start()
        made = capture(store, tmp_path, tag="job", parent=parent, profile=Profile.DENSE, progress_fd=None)
        thread.join()
        assert made.parent == parent.id
        assert made.statistics.delta_bytes >= 2 * MIB
        assert made.statistics.unchanged_bytes > 1.5 * MIB
        assert made.read("weights") == (images / "weights").read_bytes()


def until_listening(path: Path, action: Callable[[Path], None]) -> None:
    for _ in range(500):
        if path.exists():
            action(path)
            return
        threading.Event().wait(0.01)


def test_a_library_takes_parent_and_profile(tmp_path: Path, images: Path) -> None:
    with gpuimg.init_store(tmp_path / "store", chunk_size=CHUNK) as store:
        first = import_directory(store, images)
        train(images)
        second = import_directory(store, images, parent=first, profile=Profile.FAST)
        assert (first.parent, second.parent) == ("", first.id)
        assert second.statistics.delta_bytes >= 2 * MIB
        second.export(tmp_path / "out")
    assert same(tmp_path / "out", images)


def test_the_drop_in_streamer_keeps_to_upstreams_command_line(tmp_path: Path) -> None:
    streamer = Path(sys.executable).with_name("gpuimg-image-streamer")
    for option in ("--incremental", "--parent", "--profile"):
        done = subprocess.run(
            [streamer, "-D", tmp_path, option, "x", "capture"], capture_output=True, text=True
        )
        assert done.returncode == 1
        assert f"unknown option {option}" in done.stderr


# What is shown


def columns(table: list[str]) -> list[str]:
    return table[0].split()


def test_people_see_how_a_checkpoint_is_stored(shell: Shell, images: Path) -> None:
    first = shell.json("import", images, "--tag", "first")["checkpoint"]
    train(images)
    shell("import", images, "--tag", "job", "--parent", "first")
    facts, table = (part.splitlines() for part in shell("show", "job").split("\n\n"))
    told = {line[:11].strip(): line[12:] for line in facts}
    assert told["parent"] == f"{first[:12]} (first)"
    assert told["taken"].startswith("unchanged ") and "differences 2." in told["taken"]
    assert told["depth"].startswith("1 at most, 0.")
    assert "float_planes/4+base 2.0 MiB" in told["codecs"]
    assert "of other checkpoints" in told["stored"]
    # Nothing was known already, so there is no column for it; nor for buffer objects.
    assert columns(table) == (
        ["file", "size", "unchanged", "differences", "zero", "stored", "ratio", "depth"]
    )
    assert [line.split()[0] for line in table[1:]] == ["pages-1.img", "weights"]
    assert table[2].split()[-2:] == ["1", "(1.00)"]
    *_, listed = shell("show", "job", "--files").split("\n\n")
    assert [line.split()[0] for line in listed.splitlines()[1:]] == ["core-1.img", "pages-1.img", "weights"]
    *_, full = shell("show", "first").split("\n\n")
    assert "depth" not in columns(full.splitlines()) and "unchanged" not in full


def test_programs_see_the_same(shell: Shell, images: Path) -> None:
    shell("import", images, "--tag", "job")
    train(images)
    made = shell.json("import", images, "--tag", "job", "--incremental")
    shown = shell.json("show", "job")
    assert shown["parent"] == made["parent"]
    assert {kind: shown[kind] for kind in KINDS} == {kind: made[kind] for kind in KINDS}
    pages, weights = shown["entries"]
    assert (pages["name"], weights["name"], weights["inline"]) == ("pages-1.img", "weights", False)
    assert sum(weights["taken"][kind] for kind in KINDS) == weights["size"] == weights["taken"]["raw_bytes"]
    assert weights["element_size"] == 4
    now = weights["now"]
    assert (now["max_depth"], now["mean_depth"], now["lost_chunks"]) == (1, 1.0, 0)
    assert list(now["codecs"]) == ["float_planes/4+base"]
    assert now["ratio"] == weights["size"] / now["stored_bytes"]
    names = [entry["name"] for entry in shell.json("show", "job", "--files")["entries"]]
    assert names == ["core-1.img", "pages-1.img", "weights"]


def test_of_very_many_files_the_largest_are_shown(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(25):
        (folder / f"f{number:02}").write_bytes(noise(8 * KIB + number, number))
    shell("import", folder, "--tag", "many")
    *_, table = shell("show", "many").split("\n\n")
    lines = table.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [f"f{number:02}" for number in range(5, 25)]
    assert lines[-1] == "and 5 smaller ones; --files lists them all"
    assert len(shell("show", "many", "--files").split("\n\n")[-1].splitlines()) == 26


def test_a_difference_and_the_statistics_tell_of_chains(shell: Shell, images: Path) -> None:
    shell("import", images, "--tag", "a")
    train(images)
    (images / "core-1.img").write_bytes(b"more")
    shell("import", images, "--tag", "b", "--parent", "a")
    table = shell("diff", "a", "b").splitlines()
    assert columns(table)[-3:] == ["differences", "alone", "stored"]
    found = {item["name"]: item for item in shell.json("diff", "a", "b")["files"]}
    assert found["weights"]["delta_bytes"] == 2 * MIB
    assert found["pages-1.img"]["changed_bytes"] < MIB
    codecs, depths, checkpoints = shell("stats").split("\n\n")[1:]
    assert any(line.startswith("float_planes/4+base ") for line in codecs.splitlines())
    assert [line.split()[0] for line in depths.splitlines()] == ["depth", "0", "1"]
    assert "differences" in checkpoints.splitlines()[0]
    report = shell.json("stats")
    assert [item["depth"] for item in report["depths"]] == [0, 1]
    assert sum(item["chunks"] for item in report["depths"]) == report["unique_chunks"]


def test_buffer_objects_are_shown_by_what_they_are(shell: Shell) -> None:
    with gpuimg.open_store(shell.store) as store, store.ingest() as session:
        file = session.file("bo", bo=BufferObject(0x1A2B, 7, 0x7F00_0000_0000, MIB, 0x20))
        file.write(noise(MIB))
        file.close()
        session.commit(tag="gpu")
    assert "gpu 0x1a2b #7 at 0x7f0000000000" in shell("show", "gpu")
    (entry,) = shell.json("show", "gpu")["entries"]
    assert entry["bo"] == {
        "gpu_id": 0x1A2B,
        "handle": 7,
        "address": 0x7F00_0000_0000,
        "size": MIB,
        "flags": 0x20,
    }
