"""A user's mistake gives one line with the remedy and its own exit status, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gpuimg
from gpuimg.cli import app, main
from gpuimg.cli.context import State
from gpuimg.errors import GpuimgError, NoSpaceError

GPUIMG = str(Path(sys.executable).with_name("gpuimg"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with the checkpoints `a` and `b`."""
    path = tmp_path / "store"
    images = tmp_path / "images"
    images.mkdir()
    (images / "core-1.img").write_bytes(b"core")
    (images / "pages-1.img").write_bytes(os.urandom(300_000))
    assert main(["--store", str(path), "init"]) == 0
    for tag in ("a", "b"):
        assert main(["--store", str(path), "import", str(images), "--tag", tag]) == 0
    return path


Capture = pytest.CaptureFixture[str]


def _fails(capsys: Capture, arguments: list[str], status: int) -> str:
    capsys.readouterr()
    assert main(arguments) == status
    shown = capsys.readouterr()
    assert shown.err.startswith("gpuimg: ")
    assert shown.err.count("\n") == 1
    assert "Traceback" not in shown.err
    assert "; " in shown.err, "the remedy is missing"
    assert shown.out == ""
    return shown.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus"],
        ["ls", "--bogus"],
        ["show"],
        ["dump", "--tag", "x"],
        ["dump", "-t", "none", "--tag", "x"],
        ["dump", "-t", "0", "--tag", "x"],
        ["dump", "-t", "1", "--tag", "x", "stray"],
        ["init", "--chunk-size", "3 cows"],
        ["serve", "a", "-D", "/tmp", "--tcp-listen-remap", "1:x"],
        ["serve", "a", "-D", "/tmp", "--tcp-listen-remap", "1:99999"],
        ["capture", "-D", "/tmp", "--ext-file-fds", "name"],
        ["extract", "--shard-fds", "a,b"],
        ["export", "a"],
        ["export", "a", "/tmp/x", "--shard-fds", "1"],
        ["tag", "name"],
        ["tag", "name", "--delete", "name"],
        ["ls", "--progress-fd", "987"],
        ["ls", "--progress-fd", "99999999999999999999"],
    ],
)
def test_a_command_line_that_makes_no_sense_is_status_2(arguments: list[str], capsys: Capture) -> None:
    _fails(capsys, arguments, 2)


@pytest.mark.parametrize("command", ["ls", "stats", "gc", "verify", "repair", "tag"])
def test_no_store_is_status_3(command: str, tmp_path: Path, capsys: Capture) -> None:
    _fails(capsys, ["--store", str(tmp_path / "none"), command], 3)
    _fails(capsys, ["--store", str(tmp_path), command], 3)


def test_init_twice_is_status_4(store: Path, capsys: Capture) -> None:
    _fails(capsys, ["--store", str(store), "init"], 4)


def test_a_newer_store_is_status_5(store: Path, capsys: Capture) -> None:
    config = store / "config"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"format": 2}))
    _fails(capsys, ["--store", str(store), "ls"], 5)


@pytest.mark.parametrize("command", [["show"], ["rm"], ["verify"], ["tag", "x"], ["diff", "a"]])
def test_an_unknown_reference_is_status_6(command: list[str], store: Path, capsys: Capture) -> None:
    _fails(capsys, ["--store", str(store), *command, "nothing"], 6)


def test_an_ambiguous_reference_is_status_7(store: Path, capsys: Capture) -> None:
    with gpuimg.open_store(store) as opened:
        known: dict[str, str] = {}
        prefix = ""
        while not prefix:
            with opened.ingest() as session:
                checkpoint = session.commit().id
            if checkpoint[:4] in known:
                prefix = checkpoint[:4]
            known[checkpoint[:4]] = checkpoint
    _fails(capsys, ["--store", str(store), "show", prefix], 7)


@pytest.mark.parametrize("name", ["a/b", "..", "", "-x", "new\nline"])
def test_a_bad_tag_is_status_8(name: str, store: Path, capsys: Capture) -> None:
    _fails(capsys, ["--store", str(store), "tag", "--", name, "a"], 8)


def test_a_missing_images_directory_is_status_18(store: Path, tmp_path: Path, capsys: Capture) -> None:
    _fails(capsys, ["--store", str(store), "import", str(tmp_path / "none"), "--tag", "x"], 18)
    _fails(capsys, ["--store", str(store), "import", str(store / "config"), "--tag", "x"], 18)


def test_faults_are_status_24_and_are_named(store: Path, capsys: Capture) -> None:
    pack = max(store.glob("packs/*/*.pack"), key=lambda path: path.stat().st_size)
    damaged = bytearray(pack.read_bytes())
    damaged[1000] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(damaged)
    capsys.readouterr()
    assert main(["--store", str(store), "verify"]) == 24
    shown = capsys.readouterr()
    assert "damaged-chunk" in shown.out
    assert "pages-1.img" in shown.out
    assert "offset 0" in shown.out
    assert shown.err.count("\n") == 1
    assert main(["--store", str(store), "verify", "--json"]) == 24
    report = json.loads(capsys.readouterr().out.splitlines()[0])
    assert not report["clean"]
    assert {fault["kind"] for fault in report["faults"]} >= {"damaged-chunk"}


def test_json_tells_the_error_as_an_object(tmp_path: Path, capsys: Capture) -> None:
    assert main(["--store", str(tmp_path / "none"), "ls", "--json"]) == 3
    shown = capsys.readouterr()
    error = json.loads(shown.out)
    assert error["error"] == "not-a-store"
    assert error["what"]
    assert error["remedy"]
    assert shown.err.startswith("gpuimg: ")


def _raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (NoSpaceError("the disk\nis full", remedy="free some"), 12, "gpuimg: the disk is full; free some\n"),
        (KeyboardInterrupt(), 130, "gpuimg: interrupted\n"),
        (ValueError("odd"), 1, "please report it"),
    ],
)
def test_whatever_is_raised_becomes_one_line(
    error: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(State, "open_store", _raising(error))
    assert main(["ls"]) == status
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


def test_an_internal_error_shows_where_it_happened_only_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "open_store", _raising(ValueError("odd")))
    monkeypatch.setenv("GPUIMG_DEBUG", "1")
    with pytest.raises(ValueError, match="odd"):
        main(["ls"])


def test_every_error_is_reported_with_its_own_status(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    kinds = [GpuimgError, *GpuimgError.__subclasses__()]
    for kind in kinds:
        monkeypatch.setattr(State, "open_store", _raising(kind("what", remedy="remedy")))
        assert main(["ls"]) == kind.exit_status
        assert capsys.readouterr().err == "gpuimg: what; remedy\n"


def test_a_reader_that_goes_away_ends_the_command_quietly(store: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; '{GPUIMG}' --store '{store}' ls | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "141")


def test_a_full_standard_output_is_status_25(store: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([GPUIMG, "--store", str(store), "ls"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 25
    assert done.stderr.decode().count("\n") == 1


def test_the_store_is_found_by_option_then_environment_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUIMG_STORE", "/from/environment")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert State(store="/given").store_path() == Path("/given")
    assert State().store_path() == Path("/from/environment")
    monkeypatch.delenv("GPUIMG_STORE")
    assert State().store_path() == Path("/data/gpuimg/store")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert State().store_path() == Path("/home/someone/.local/share/gpuimg/store")


def test_every_command_has_its_function() -> None:
    for name in app.COMMANDS:
        command = app.root.get_command(app.click.Context(app.root), name)
        assert command is not None
        assert command.name == name
