"""Restore in the foreground: restore_files.py CRIU IMAGES [CRIU-OPTION...] exits as the task does."""

import sys
from pathlib import Path

from gpuimg.criu.folder import work_folder
from gpuimg.criu.locate import find_criu
from gpuimg.criu.runner import run_restore
from tests.e2e.memory_streamer import MemoryServe


def main(path: str, images: Path, extra_args: list[str]) -> int:
    files = {entry.name: entry.read_bytes() for entry in images.iterdir()}
    with work_folder() as folder:
        serve = MemoryServe(folder, files)
        result = run_restore(
            find_criu(Path(path)), folder, on_post_restore=lambda: None, extra_args=extra_args
        )
        serve.close()
    return result.exit_status or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
