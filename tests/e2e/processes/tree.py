"""A process tree with what real programs have: threads, pipes, sockets, shared memory, open files.

tree.py FOLDER. The root asks its child over a pipe, the child answers over a socket pair with a number that
both keep in shared memory and that a thread of the child counts up; a file that is open and one that is open
and deleted are written as it goes. `FOLDER/count` holds the last number that passed through everything;
`FOLDER/checked` says "bad" once anything did not fit.
"""

import mmap
import os
import socket
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

WORD = struct.Struct("<Q")


def put(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.rename(path)


def child(questions: int, answers: socket.socket, shared: mmap.mmap) -> None:
    ask = threading.Semaphore(0)
    done = threading.Semaphore(0)

    def work() -> None:
        while True:
            ask.acquire()
            WORD.pack_into(shared, 0, WORD.unpack_from(shared, 0)[0] + 1)
            done.release()

    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    while os.read(questions, 1):
        ask.release()
        done.acquire()
        answers.sendall(WORD.pack(WORD.unpack_from(shared, 0)[0]))


def main(folder: Path) -> None:
    shared = mmap.mmap(-1, 4 << 20)
    shared[4096 : 4096 + (1 << 20)] = os.urandom(1 << 20)
    twin = bytes(shared[4096 : 4096 + (1 << 20)])
    reader, writer = os.pipe()
    here, there = socket.socketpair()
    if os.fork() == 0:
        os.close(writer)
        here.close()
        child(reader, there, shared)
        os._exit(0)
    os.close(reader)
    there.close()
    log = (folder / "log").open("w+", buffering=1)
    # Deleted files are kept by criu inside the image, up to a limit.
    deleted = tempfile.TemporaryFile("w+", dir=folder)
    deleted.write("still here")
    deleted.flush()
    put(folder / "pid", str(os.getpid()))
    count = 0
    # Always open, always of one size: a checkpoint of any moment can be restored more than once.
    counter = os.open(folder / "count", os.O_RDWR | os.O_CREAT, 0o600)
    while True:
        os.write(writer, b"?")
        (answer,) = WORD.unpack(here.recv(WORD.size, socket.MSG_WAITALL))
        count += 1
        log.write(f"{answer}\n")
        deleted.seek(0)
        good = answer == count and deleted.read() == "still here"
        if count % 25 == 0:
            good = good and shared[4096 : 4096 + (1 << 20)] == twin
        if not good:
            put(folder / "checked", f"bad {count} {answer}")
        os.pwrite(counter, b"%020d" % count, 0)
        if (folder / "check").exists():
            (folder / "check").unlink()
            good = shared[4096 : 4096 + (1 << 20)] == twin
            if not (folder / "checked").exists():
                put(folder / "checked", f"{'good' if good else 'bad'} {count}")
        if (folder / "exit").exists():
            sys.exit(int((folder / "exit").read_text()))
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
