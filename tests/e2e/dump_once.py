"""A gpuimg to be killed: dump_once.py CRIU PID prints "start", then "committed"."""

import sys
import time
from pathlib import Path

from gpuimg.criu.folder import work_folder
from gpuimg.criu.locate import find_criu
from gpuimg.criu.runner import Watch, run_dump
from tests.e2e.memory_streamer import MemoryCapture


def main(path: str, pid: int) -> None:
    criu = find_criu(Path(path))
    with work_folder() as folder:
        capture = MemoryCapture(folder, slow=0.002)

        def commit() -> None:
            capture.complete()
            # Long enough that a signal often comes before the commit.
            time.sleep(0.2)
            print("committed", flush=True)

        print("start", flush=True)
        watch = Watch(progress=lambda: capture.progress, abort=capture.abort)
        run_dump(criu, pid, folder, on_post_dump=commit, watch=watch)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
