"""Generated images for benchmarks and tests: `python -m bench.generate SET DIRECTORY [SIZE]`."""

from __future__ import annotations

import argparse
from pathlib import Path

import click

from gpuimg.cli.context import byte_size
from gpuimg.cli.generate import BLOCK, DEFAULT_SETS, PAGE_FILES, SETS, blocks, write_set

__all__ = ["BLOCK", "DEFAULT_SETS", "PAGE_FILES", "SETS", "blocks", "parse_size", "write_set"]


def parse_size(text: str) -> int:
    """256MiB as 268435456."""
    try:
        return byte_size(text)
    except click.BadParameter as error:
        raise argparse.ArgumentTypeError(error.message) from None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.generate", description=__doc__)
    parser.add_argument("set", choices=sorted(SETS))
    parser.add_argument("directory", type=Path)
    parser.add_argument("size", type=parse_size, nargs="?", default=256 << 20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    written = write_set(given.set, given.directory, given.size, given.seed)
    print(f"{written} bytes in {given.directory}")


if __name__ == "__main__":
    main()
