"""The counter with so many memory mappings that its small images are no longer small:
many_mappings.py FOLDER MIB."""

import mmap
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e" / "processes"))

from counter import main

if __name__ == "__main__":
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    protections = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ)
    kept = [mmap.mmap(-1, mmap.PAGESIZE, private, protections[i % 2]) for i in range(1600)]
    for mapping in kept[::2]:
        mapping[0] = 1
    main(Path(sys.argv[1]), int(sys.argv[2]))
