"""The commands on a store: what they print for people and for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.generate import write_set
from gpuimg.cli import main, output
from gpuimg.cli.progress import Reporter

Capture = pytest.CaptureFixture[str]
GPUIMG = str(Path(sys.executable).with_name("gpuimg"))
STATISTICS = {
    "raw_bytes",
    "new_bytes",
    "zero_bytes",
    "inline_bytes",
    "unchanged_bytes",
    "deduplicated_bytes",
    "delta_bytes",
    "coded_bytes",
    "raw_stored_bytes",
    "stored_bytes",
    "chunks",
    "new_chunks",
    "seconds",
}


class Shell:
    """Runs commands on one store in this process."""

    def __init__(self, store: Path, capsys: Capture) -> None:
        self.store, self.capsys = store, capsys

    def __call__(self, *arguments: str) -> str:
        self.capsys.readouterr()
        assert main(["--store", str(self.store), *arguments]) == 0, self.capsys.readouterr().err
        return self.capsys.readouterr().out

    def json(self, *arguments: str) -> dict[str, Any]:
        text = self(*arguments, "--json")
        assert text.count("\n") == 1
        made: dict[str, Any] = json.loads(text)
        return made


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_set("kv-cache", tmp_path / "images", 8 << 20)
    return tmp_path / "images"


@pytest.fixture
def shell(tmp_path: Path, capsys: Capture) -> Shell:
    made = Shell(tmp_path / "store", capsys)
    assert made.json("init", "--chunk-size", "128KiB") == {
        "store": str(tmp_path / "store"),
        "chunk_size": 131072,
    }
    return made


def _same(one: Path, other: Path) -> bool:
    def read(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    return read(one) == read(other)


def test_import_reports_what_it_added_and_export_gives_the_bytes_back(
    shell: Shell, images: Path, tmp_path: Path
) -> None:
    raw = sum(path.stat().st_size for path in images.iterdir())
    first = shell.json("import", str(images), "--tag", "one")
    assert first.keys() == {"checkpoint", "tag", "parent", "full_because"} | STATISTICS
    assert first["parent"] is first["full_because"] is None
    taken = ("zero", "inline", "unchanged", "deduplicated", "delta", "coded", "raw_stored")
    assert sum(first[f"{kind}_bytes"] for kind in taken) == raw
    assert (first["tag"], first["raw_bytes"]) == ("one", raw)
    assert 0 < first["new_bytes"] < raw
    second = shell.json("import", str(images), "--tag", "two")
    assert second["checkpoint"] != first["checkpoint"]
    assert second["new_bytes"] == second["new_chunks"] == 0
    exported = shell.json("export", "one", str(tmp_path / "out"))
    assert exported == {"checkpoint": first["checkpoint"], "files": 10, "raw_bytes": raw}
    assert _same(images, tmp_path / "out")


def test_looking_into_the_store(shell: Shell, images: Path) -> None:
    one = shell.json("import", str(images), "--tag", "one")
    (images / "core-100.img").write_bytes(b"changed")
    two = shell.json("import", str(images), "--tag", "two")
    listed = shell.json("ls")["checkpoints"]
    assert [item["id"] for item in listed] == [one["checkpoint"], two["checkpoint"]]
    assert [item["tags"] for item in listed] == [["one"], ["two"]]
    assert {item["kind"] for item in listed} == {"import"}
    shown = shell.json("show", one["checkpoint"][:8], "--files")
    assert shown["id"] == one["checkpoint"]
    assert {entry["name"] for entry in shown["entries"]} == {path.name for path in images.iterdir()}
    assert shown["processes"] == []
    changes = {item["name"]: item["change"] for item in shell.json("diff", "one", "two")["files"]}
    assert [name for name, change in changes.items() if change != "equal"] == ["core-100.img"]
    stats = shell.json("stats")
    assert stats["raw_bytes"] == one["raw_bytes"] + two["raw_bytes"]
    assert stats["unique_chunks"] > 0
    assert 0 < stats["stored_bytes"] < stats["raw_bytes"]
    listed = stats["checkpoints"][0]
    assert listed.keys() == {"id", "tags", "created", "files", "parent"} | STATISTICS
    assert {name: listed[name] for name in STATISTICS} == {name: one[name] for name in STATISTICS}


def test_the_same_for_people(shell: Shell, images: Path) -> None:
    assert "checkpoint " in shell("import", str(images), "--tag", "one")
    (head, line) = shell("ls").splitlines()
    assert head.split() == ["id", "tags", "created", "kind", "files", "raw", "new"]
    assert "one" in line.split()
    assert "kind" not in shell("show", "one")
    assert "amdgpu-pages-100-1a2b.img" in shell("show", "one", "--files")
    assert shell("diff", "one", "one") == "0 of 10 files differ\n"
    assert "unique" in shell("stats")
    assert shell("verify").startswith("clean: 1 checkpoints")


def test_tags_are_given_moved_listed_and_removed(shell: Shell, images: Path) -> None:
    one = shell.json("import", str(images), "--tag", "one")["checkpoint"]
    two = shell.json("import", str(images), "--tag", "two")["checkpoint"]
    assert shell.json("tag", "stable", "one") == {"tag": "stable", "checkpoint": one}
    assert shell.json("tag", "stable", two[:9]) == {"tag": "stable", "checkpoint": two}
    assert shell.json("tag") == {"tags": {"one": one, "two": two, "stable": two}}
    assert shell.json("tag", "--delete", "stable") == {"deleted": "stable"}
    assert shell.json("tag") == {"tags": {"one": one, "two": two}}


def test_rm_gc_verify_repair(shell: Shell, images: Path) -> None:
    one = shell.json("import", str(images), "--tag", "one")["checkpoint"]
    assert shell.json("rm", "one", one[:10]) == {"removed": [one]}
    shell.json("gc")
    assert shell.json("stats")["unique_chunks"] == 0
    assert shell.json("verify")["clean"]
    assert shell.json("verify", "--quick")["faults"] == []
    assert shell.json("repair")["hurt"] == []


def test_a_checkpoint_goes_through_a_shard_stream(shell: Shell, images: Path) -> None:
    one = shell.json("import", str(images), "--tag", "one")
    program = f'"{GPUIMG}" --store "{shell.store}"'
    done = subprocess.run(
        ["bash", "-c", f"{program} export one --shard-fds 1 | {program} extract --tag two --json"],
        capture_output=True,
        check=True,
    )
    two = json.loads(done.stdout)
    assert two["raw_bytes"] == one["raw_bytes"]
    assert two["new_bytes"] == 0
    assert shell("diff", "one", "two") == "0 of 10 files differ\n"


def test_progress_comes_as_json_lines(shell: Shell, images: Path) -> None:
    reader, writer = os.pipe()
    shell("import", str(images), "--tag", "one", "--progress-fd", str(writer))
    os.close(writer)
    with os.fdopen(reader) as stream:
        events = [json.loads(line) for line in stream]
    assert events[0] == {"event": "start", "command": "import"}
    assert events[-1]["event"] == "end"
    assert all(event["total"] >= event["done"] for event in events[1:-1])


def test_progress_that_nobody_reads_does_no_harm(shell: Shell, images: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    shell("import", str(images), "--tag", "one", "--progress-fd", str(writer))
    os.close(writer)


def test_options_may_stand_before_and_after_the_command(shell: Shell, images: Path) -> None:
    shell("import", str(images), "--tag", "one")
    shell.capsys.readouterr()
    assert main(["--json", "ls", "--store", str(shell.store)]) == 0
    assert len(json.loads(shell.capsys.readouterr().out)["checkpoints"]) == 1


def test_names_from_images_cannot_drive_the_terminal(capsys: Capture) -> None:
    output.table(("file",), [("evil\x1b[31m[bold]\n.img",)])
    assert capsys.readouterr().out == "file\nevil\\x1b[31m[bold]\\n.img\n"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB")]
)
def test_sizes_are_readable(number: int, text: str) -> None:
    assert output.size(number) == text


def test_a_failure_is_told_on_the_progress_descriptor() -> None:
    from gpuimg.cli.context import State
    from gpuimg.errors import NoSpaceError

    reader, writer = os.pipe()
    with pytest.raises(NoSpaceError), Reporter(State(progress_fd=writer), "gc"):
        raise NoSpaceError("full")
    os.close(writer)
    with os.fdopen(reader) as stream:
        assert json.loads(stream.readlines()[-1]) == {"event": "error", "error": "no-space"}
