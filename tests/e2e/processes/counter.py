"""A process that counts and holds memory: counter.py FOLDER MIB.

`FOLDER/count` holds how far it is. Its memory is a pattern that only it knows the seed of; when
`FOLDER/check` appears it compares every byte and writes the outcome to `FOLDER/checked`.
"""

import hashlib
import os
import sys
import time
from pathlib import Path


def pattern(seed: bytes, size: int) -> bytes:
    return hashlib.shake_256(seed).digest(size)


def put(path: Path, text: str) -> None:
    """Write so that a reader sees all or nothing."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.rename(path)


def main(folder: Path, mib: int) -> None:
    seed = os.urandom(16)
    blocks = [bytearray(pattern(seed + bytes([i % 256, i // 256]), 1 << 20)) for i in range(mib)]
    count = 0
    put(folder / "pid", str(os.getpid()))
    # Always open, always of one size: a checkpoint of any moment can be restored more than once.
    counter = os.open(folder / "count", os.O_RDWR | os.O_CREAT, 0o600)
    while True:
        count += 1
        os.pwrite(counter, b"%020d" % count, 0)
        if (folder / "check").exists():
            (folder / "check").unlink()
            good = all(
                block == pattern(seed + bytes([i % 256, i // 256]), 1 << 20) for i, block in enumerate(blocks)
            )
            put(folder / "checked", f"{'good' if good else 'bad'} {count}")
        if (folder / "exit").exists():
            sys.exit(int((folder / "exit").read_text()))
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
