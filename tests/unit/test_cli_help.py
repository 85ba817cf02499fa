"""Every command explains itself, at once."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuimg import errors
from gpuimg.cli import main
from gpuimg.cli.app import COMMANDS

GPUIMG = str(Path(sys.executable).with_name("gpuimg"))
OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_has_an_example_and_its_exit_statuses(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Example:" in text
    assert f"gpuimg {name}" in text or f"--store /srv/checkpoints {name}" in text
    assert "Exit status:" in text
    for option in ("--json", "--store", "--progress-fd"):
        assert option in text


def test_root_help_lists_every_command_with_an_untruncated_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        (line,) = re.findall(rf"^  {name} .*$", text, re.MULTILINE)
        assert not line.endswith("...")


def test_help_takes_less_than_150_milliseconds() -> None:
    def seconds() -> float:
        started = time.monotonic()
        subprocess.run([GPUIMG, "--help"], check=True, capture_output=True)
        return time.monotonic() - started

    assert statistics.median(seconds() for _ in range(9)) < 0.150


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from gpuimg.cli import main; main(['--help']); "
        "print(sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    for heavy in ("numpy", "rich", "lmdb", "google", "zstandard", "numcodecs", "blake3"):
        assert f"'{heavy}'" not in done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"gpuimg \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_the_documented_exit_statuses_are_those_of_the_errors() -> None:
    documented = dict(re.findall(r"^\| (\d+) \| ([a-z-]+) \|", OPERATIONS.read_text(), re.MULTILINE))
    found = {
        str(kind.exit_status): kind.name
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.GpuimgError) and "name" in vars(kind)
    }
    assert documented == found


def test_the_operations_page_names_every_command() -> None:
    table = OPERATIONS.read_text()
    for name in COMMANDS:
        assert re.search(rf"`{name}[` ]", table), name
