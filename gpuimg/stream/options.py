"""The command line of criu-image-streamer, option by option.

By hand, because its rules are those of another program: options come before the subcommand, lists add up,
and a usage error has status 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpuimg.errors import UsageError

OPERATIONS = {
    "capture": "Capture a CRIU image",
    "serve": "Serve a captured CRIU image to CRIU",
    "extract": "Extract a captured CRIU image to --images-dir",
}

HELP = """\
Stream CRIU images through pipes

Usage: {program} [OPTIONS] --images-dir <IMAGES_DIR> <COMMAND>

Commands:
  capture  take an image from `criu dump --stream` and write it to the shards
  serve    read an image from the shards and serve it to `criu restore --stream`
  extract  read an image from the shards and write its files into --images-dir

Options (before the command):
  -D, --images-dir <IMAGES_DIR>   directory of the sockets, and of the files with extract;
                                  the same that CRIU is given
  -s, --shard-fds <FD,...>        pipes that carry the image [default: 1 for capture, else 0]
  -e, --ext-file-fds <NAME:FD,...>
                                  pipes with more files for the image, or to take them out of it
  -p, --progress-fd <FD>          where progress lines go [default: 2]
      --tcp-listen-remap <OLD:NEW,...>
                                  other ports for listening TCP sockets; only with serve
  -h, --help                      print this
  -V, --version                   print the version
"""

COMMAND_HELP = """\
{about}

Usage: {program} [OPTIONS] --images-dir <IMAGES_DIR> {command}

Options:
  -h, --help  print this
"""


@dataclass(slots=True)
class Options:
    """What the command line says.

    `operation` is a key of `OPERATIONS`; the file descriptors are as given, not looked at.
    """

    images_dir: Path = field(default_factory=Path)
    operation: str = ""
    shard_fds: list[int] = field(default_factory=list)
    ext_file_fds: list[tuple[str, int]] = field(default_factory=list)
    tcp_listen_remap: list[tuple[int, int]] = field(default_factory=list)
    progress_fd: int | None = None


class HelpRequested(Exception):  # noqa: N818 - not an error
    """Carries the text to print instead of doing anything."""


def _number(text: str, what: str, limit: int) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > limit:
        raise UsageError(f"{text!r} is no {what}")
    return int(text)


def _fd(text: str) -> int:
    return _number(text, "file descriptor", 2**31 - 1)


def _pair(text: str, form: str) -> tuple[str, str]:
    left, colon, right = text.partition(":")
    if not left or not colon or ":" in right:
        raise UsageError(f"{text!r} is not of the form {form}")
    return left, right


def _ext_file(text: str) -> tuple[str, int]:
    name, fd = _pair(text, "NAME:FD")
    return name, _fd(fd)


def _ports(text: str) -> tuple[int, int]:
    old, new = _pair(text, "OLD:NEW")
    return _number(old, "port", 65535), _number(new, "port", 65535)


_SHORT = {"D": "images-dir", "s": "shard-fds", "e": "ext-file-fds", "p": "progress-fd"}


def _take(options: Options, seen: set[str], name: str, value: str) -> None:
    """Store the value of one option."""
    if name == "shard-fds":
        options.shard_fds += map(_fd, value.split(","))
    elif name == "ext-file-fds":
        options.ext_file_fds += map(_ext_file, value.split(","))
    elif name == "tcp-listen-remap":
        options.tcp_listen_remap += map(_ports, value.split(","))
    else:
        if name in seen:
            raise UsageError(f"--{name} is given twice")
        if not value:
            raise UsageError(f"--{name} needs a value")
        if name == "images-dir":
            options.images_dir = Path(value)
        else:
            options.progress_fd = _fd(value)
    seen.add(name)


_LONG = ("images-dir", "shard-fds", "ext-file-fds", "progress-fd", "tcp-listen-remap")


def parse(arguments: list[str], program: str, version: Callable[[], str]) -> Options:
    """Parse a command line without the program's name.

    UsageError if it makes no sense; HelpRequested for --help and --version, with the text for stdout.
    """
    options = Options()
    seen: set[str] = set()
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        argument = rest.pop(0)
        if argument in ("-h", "--help"):
            raise HelpRequested(HELP.format(program=program))
        if argument in ("-V", "--version"):
            raise HelpRequested(version())
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
        else:
            name, value = _SHORT.get(argument[1], ""), argument[2:].removeprefix("=")
            equals = argument[2:]
        if name not in _LONG:
            raise UsageError(f"unknown option {argument}", remedy="see --help")
        if not equals:
            if not rest:
                raise UsageError(f"{argument} needs a value")
            value = rest.pop(0)
        _take(options, seen, name, value)
    if not rest:
        raise UsageError(f"a command is required: {', '.join(OPERATIONS)}", remedy="see --help")
    options.operation = rest.pop(0)
    if options.operation not in OPERATIONS:
        raise UsageError(f"unknown command {options.operation}", remedy=f"use {', '.join(OPERATIONS)}")
    if rest and rest[0] in ("-h", "--help"):
        about = OPERATIONS[options.operation]
        raise HelpRequested(COMMAND_HELP.format(about=about, program=program, command=options.operation))
    if rest:
        raise UsageError(f"unexpected {rest[0]!r} after {options.operation}; options come before the command")
    if "images-dir" not in seen:
        raise UsageError("--images-dir is required")
    return options
