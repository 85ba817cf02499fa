"""A gpuimg to be killed: restore_once.py CRIU IMAGES prints "start FOLDER", then "restored"."""

import sys
import time
from pathlib import Path

from gpuimg.criu.folder import work_folder
from gpuimg.criu.locate import find_criu
from gpuimg.criu.runner import Watch, run_restore
from tests.e2e.memory_streamer import MemoryServe


def main(path: str, images: Path) -> None:
    criu = find_criu(Path(path))
    files = {entry.name: entry.read_bytes() for entry in images.iterdir()}
    with work_folder() as folder:
        serve = MemoryServe(folder, files)

        def check() -> None:
            time.sleep(0.1)
            print("restored", flush=True)

        print(f"start {folder}", flush=True)
        watch = Watch(progress=lambda: serve.progress, abort=serve.abort)
        run_restore(criu, folder, on_post_restore=check, detach=True, watch=watch)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
