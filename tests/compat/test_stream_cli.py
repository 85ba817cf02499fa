"""The command-line tests of criu-image-streamer, its option rules and exit statuses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpuimg.errors import UsageError
from gpuimg.stream import options
from tests.compat.streamlib import EXECUTABLE


def run(*arguments, **keywords):
    keywords.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run(
        [EXECUTABLE, *map(str, arguments)], capture_output=True, text=True, timeout=30, **keywords
    )


def parse(*arguments):
    return options.parse(list(arguments), "program", lambda: "1")


def test_capture_basic():
    parsed = parse("--images-dir", "imgdir", "capture")
    assert parsed == options.Options(images_dir=Path("imgdir"), operation="capture")
    assert parsed.progress_fd is None
    assert parsed.shard_fds == parsed.ext_file_fds == parsed.tcp_listen_remap == []


def test_extract_basic():
    assert parse("-D", "imgdir", "extract") == options.Options(images_dir=Path("imgdir"), operation="extract")


def test_extract_serve():
    assert parse("-D", "imgdir", "serve").operation == "serve"


def test_shards_fds():
    assert parse("-D", "d", "--shard-fds", "1,2,3", "capture").shard_fds == [1, 2, 3]


def test_ext_files():
    parsed = parse("-D", "d", "--ext-file-fds", "file1:1,file2:2", "capture")
    assert parsed.ext_file_fds == [("file1", 1), ("file2", 2)]


def test_tcp_listen_remaps():
    parsed = parse("-D", "d", "--tcp-listen-remap", "2000:3000,5000:6000", "serve")
    assert parsed.tcp_listen_remap == [(2000, 3000), (5000, 6000)]


def test_progess_fd():
    assert parse("-D", "d", "--progress-fd", "3", "capture").progress_fd == 3


def test_lists_add_up_and_every_way_to_give_a_value_works():
    parsed = parse("-Ddir", "-s", "1", "-s2,3", "--shard-fds=4", "-e=a:5", "-p=6", "capture")
    assert parsed.images_dir == Path("dir")
    assert parsed.shard_fds == [1, 2, 3, 4]
    assert parsed.ext_file_fds == [("a", 5)]
    assert parsed.progress_fd == 6


@pytest.mark.parametrize(
    "arguments",
    [
        ["capture", "--images-dir", "d"],
        ["-D", "d", "capture", "extra"],
        ["-D", "d", "-D", "e", "capture"],
        ["-D", "", "capture"],
        ["-D"],
        ["-D", "d", "-s", "1,,2", "capture"],
        ["-D", "d", "-s", "-1", "capture"],
        ["-D", "d", "-s", "1²", "capture"],
        ["-D", "d", "-e", "a:1:2", "capture"],
        ["-D", "d", "-e", ":1", "capture"],
        ["-D", "d", "-p", "99999999999", "capture"],
        ["-D", "d", "--tcp-listen-remap", "70000:1", "serve"],
        ["-D", "d", "help"],
        ["-D", "d", "-"],
        [],
    ],
)
def test_senseless_command_lines_are_usage_errors(arguments):
    with pytest.raises(UsageError):
        parse(*arguments)


def test_help_shows_subcommands():
    result = run("--help")
    assert result.returncode == 0
    assert all(word in result.stdout for word in ("capture", "serve", "extract"))


def test_help_shows_options():
    text = run("--help").stdout
    for option in (
        "--images-dir",
        "-D",
        "--shard-fds",
        "--ext-file-fds",
        "--progress-fd",
        "--tcp-listen-remap",
    ):
        assert option in text


@pytest.mark.parametrize("command", ["capture", "serve", "extract"])
def test_subcommand_exists(command):
    assert run("--images-dir", "/tmp", command, "--help").returncode == 0


def test_images_dir_required():
    result = run("capture")
    assert result.returncode == 1
    assert "images-dir" in result.stderr


def test_subcommand_required():
    assert run("--images-dir", "/tmp").returncode == 1


def test_short_option_images_dir():
    long, short = run("--images-dir", "/tmp", "capture", "--help"), run("-D", "/tmp", "capture", "--help")
    assert long.returncode == short.returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--images-dir", "/tmp", "capture"],
        ["--images-dir", "/tmp", "serve"],
        ["--images-dir", "/tmp", "extract"],
    ],
)
def test_readme_example_structure(arguments):
    """README examples 1 (capture, serve) and 2 (extract)."""
    assert run(*arguments, "--help").returncode == 0


def test_readme_example3_shard_fds_parsing():
    text = run("--help").stdout
    assert "--shard-fds" in text
    assert "-s" in text


def test_readme_example4_ext_file_fds_parsing():
    text = run("--help").stdout
    assert "--ext-file-fds" in text
    assert "-e" in text


def test_progress_fd_option():
    text = run("--help").stdout
    assert "--progress-fd" in text
    assert "-p" in text


def test_tcp_listen_remap_option():
    assert "--tcp-listen-remap" in run("--help").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--images-dir", "/tmp", "--ext-file-fds", "invalid_format", "capture"],
        ["--images-dir", "/tmp", "--tcp-listen-remap", "invalid", "serve"],
        ["--images-dir", "/tmp", "--shard-fds", "abc", "capture"],
        ["--images-dir", "/tmp", "--progress-fd", "abc", "capture"],
        ["--images-dir", "/tmp", "unknown"],
        ["--unknown-option"],
    ],
    ids=["ext_file_fds", "tcp_listen_remap", "shard_fds", "progress_fd", "subcommand", "option"],
)
def test_invalid(arguments):
    result = run(*arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_version():
    result = run("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("criu-image-streamer 1.0.0")


def test_shards_must_be_pipes(tmp_path):
    result = run("-D", tmp_path, "serve")
    assert result.returncode == 15
    assert result.stderr.startswith("criu-image-streamer Error: Image shards (input/output) must be pipes.")
    assert "fd 0 is not a pipe" in result.stderr


def test_remap_is_for_serve_only(tmp_path):
    result = run("-D", tmp_path, "--tcp-listen-remap", "1:2", "extract")
    assert result.returncode == 2
    assert "--tcp-listen-remap is only supported when serving the image" in result.stderr


def test_an_ended_stream_without_image_is_an_error(tmp_path):
    result = run("-D", tmp_path, "extract", stdin=None, input="")
    assert result.returncode == 15
    assert "No shards to read from" in result.stderr


def test_a_closed_progress_fd_is_an_error(tmp_path):
    result = run("-D", tmp_path, "-p", "77", "extract", stdin=None, input="")
    assert result.returncode == 25
    assert "Traceback" not in result.stderr


def test_a_socket_path_that_the_kernel_cannot_hold(tmp_path):
    long = tmp_path / ("x" * 100)
    read, write = os.pipe()
    result = run("-D", long, "-s", write, "capture", pass_fds=[write])
    os.close(read)
    os.close(write)
    assert result.returncode == 17


def test_starts_fast():
    """zdtm starts it three times for every test; imports that cost show up here."""
    code = (
        "import sys, gpuimg.stream.upstream_cli, gpuimg.stream.capture, gpuimg.stream.shards, "
        "gpuimg.stream.serve, gpuimg.stream.spool, gpuimg.stream.remap\n"
        "print([m for m in ('numpy', 'click', 'google.protobuf', 'rich', 'lmdb') if m in sys.modules])"
    )
    python = EXECUTABLE.with_name("python")
    assert subprocess.run([python, "-c", code], capture_output=True, text=True).stdout == "[]\n"
