"""The main job in one minute, on a store in a temporary folder.

As root: a real process that counts and holds 256 MiB of bf16 weights is dumped through real criu,
restored, seen to count on, trained and dumped again, incrementally. Otherwise the same on generated images.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPUIMG = ROOT / ".venv" / "bin" / "gpuimg"
MAP = ROOT / "build" / "demo-map.html"
MIB = 1 << 20
SIZE = 256 * MIB
STEP = 16 * MIB
TIMEOUT = 30.0

# The process: counts into a file ten times a second; for each byte on its FIFO it changes the first 16 MiB of
# its memory entirely, and the last place of every thirtieth weight in the rest, and makes another file.
JOB = """
import os, select, sys
import numpy as np
size, step, counter, fifo = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
rng = np.random.default_rng(1)
block = 1 << 19
memory = np.empty(size // 2, np.uint16)
numbers, mask = np.empty(block, np.float32), np.empty(block, np.bool_)
def blocks(start, end):
    for first in range(start // 2, end // 2, block):
        rng.standard_normal(dtype=np.float32, out=numbers)
        yield memory[first : first + block]
def fill(start, end):
    for part in blocks(start, end):
        np.multiply(numbers, np.float32(0.02), out=numbers)
        np.right_shift(numbers.view(np.uint32), 16, out=part, casting="unsafe")
def train():
    fill(0, step)
    for part in blocks(step, size):
        np.greater(numbers, np.float32(1.83), out=mask)
        np.add(part, mask, out=part)
fill(0, size)
train()
orders = os.open(fifo, os.O_RDWR)
count = 0
while True:
    count += 1
    with open(counter + ".new", "w") as file:
        file.write(str(count))
    os.rename(counter + ".new", counter)
    if select.select([orders], [], [], 0.1)[0]:
        os.read(orders, 1)
        train()
        open(counter + ".trained", "w").close()
"""


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


class Demo:
    """The steps share one folder; everything in it goes when the demo ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.counter = folder / "counter"

    def gpuimg(self, *arguments: str | Path) -> None:
        """Show and run one command; the demo ends where it fails."""
        words = [str(word) for word in arguments]
        shown = " ".join(word.replace(str(self.folder), "DEMO") for word in words)
        print(f"$ gpuimg --store DEMO/store {shown}", flush=True)
        done = subprocess.run([GPUIMG, "--store", self.store, *words], check=False)
        if done.returncode:
            sys.exit(f"demo: the command failed with status {done.returncode}")

    def with_a_process(self) -> None:
        say("1. A process counts, and holds 256 MiB of bf16 weights")
        job = self._start()
        print(f"process {job.pid}, counter at {self._count()}")
        self.gpuimg("init")
        say("2. It goes into the store; it ends only when its checkpoint is durable")
        self.gpuimg("dump", "-t", str(job.pid), "--tag", "job")
        job.wait()
        before = self._count()
        time.sleep(0.5)
        print(f"process {job.pid} is gone, counter stands at {self._count()}")
        say("3. It comes back and counts on")
        self._restore("job", job.pid)
        self._wait_for(lambda: self._count() > before, "the counter to go on")
        print(f"process {job.pid} runs again, counter at {self._count()} (it was {before})")
        say(
            "4. It trains: 16 MiB change entirely, the rest of its weights a little. It is dumped running on;"
        )
        print(
            "what has not changed is not stored again, and what has changed a little is stored as differences"
        )
        self.gpuimg("tag", "first", "job")
        (self.folder / "orders").write_text("x")
        self._wait_for((self.folder / "counter.trained").exists, "the process to train")
        self.gpuimg("dump", "-t", str(job.pid), "--tag", "job", "--incremental", "--leave-running")
        after = self._count()
        self._wait_for(lambda: self._count() > after, "the counter to go on")
        os.kill(job.pid, signal.SIGKILL)
        self._show()

    def with_generated_images(self) -> None:
        import numpy as np

        say("1. Generated images: 256 MiB of bf16 weights and a few small files")
        images = self.folder / "images"
        images.mkdir()
        rng = np.random.default_rng(1)
        weights = (rng.standard_normal(SIZE // 2, dtype=np.float32) * 0.02).view(np.uint32) >> 16
        memory = weights.astype(np.uint16)
        (images / "pages-1.img").write_bytes(memory.tobytes())
        (images / "core-1.img").write_bytes(os.urandom(1500))
        self.gpuimg("init")
        say("2. They go into the store")
        self.gpuimg("import", images, "--tag", "job")
        say("3. They come back, byte for byte")
        self.gpuimg("export", "job", self.folder / "back")
        for path in sorted(images.iterdir()):
            if path.read_bytes() != (self.folder / "back" / path.name).read_bytes():
                sys.exit(f"demo: {path.name} came back different")
            print(f"{path.name} is identical")
        say("4. 16 MiB change entirely, the rest a little, and they are taken in again;")
        print(
            "what has not changed is not stored again, and what has changed a little is stored as differences"
        )
        self.gpuimg("tag", "first", "job")
        memory[: STEP // 2] = np.roll(memory[: STEP // 2], 1)
        memory[STEP // 2 :] += rng.random(memory.size - STEP // 2, dtype=np.float32) < 1 / 30
        (images / "pages-1.img").write_bytes(memory.tobytes())
        self.gpuimg("import", images, "--tag", "job", "--incremental")
        self._show()

    def _show(self) -> None:
        say("5. What the store holds")
        self.gpuimg("ls")
        MAP.parent.mkdir(exist_ok=True)
        self.gpuimg("show", "job", "--map", MAP)
        self.gpuimg("diff", "first", "job")
        self.gpuimg("stats")
        say("6. The first checkpoint is not needed by the second")
        self.gpuimg("rm", "first")
        self.gpuimg("gc")
        self.gpuimg("verify")

    def _start(self) -> subprocess.Popen[bytes]:
        os.mkfifo(self.folder / "orders")
        job = subprocess.Popen(
            [sys.executable, "-c", JOB, str(SIZE), str(STEP), str(self.counter), str(self.folder / "orders")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        self._wait_for(self.counter.exists, "the process to start")
        return job

    def _restore(self, tag: str, pid: int) -> None:
        pidfile = self.folder / "pid"
        self.gpuimg("restore", tag, "--detach", "--pidfile", pidfile)
        if int(pidfile.read_text()) != pid:
            sys.exit("demo: the restored process has another PID")

    def _count(self) -> int:
        return int(self.counter.read_text())

    @staticmethod
    def _wait_for(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if time.monotonic() > deadline:
                sys.exit(f"demo: waited {TIMEOUT:.0f} seconds in vain for {what}")
            time.sleep(0.05)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="gpuimg-demo-"))
    demo = Demo(folder)
    try:
        if os.geteuid() == 0:
            demo.with_a_process()
        else:
            print("Not root, so criu cannot run: the demo uses generated images instead of a process.")
            demo.with_generated_images()
        say(f"Done. Look at the map: {MAP}. All else was in a temporary folder and is gone now.")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
