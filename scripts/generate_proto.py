"""Generate gpuimg/_proto/*_pb2.py from proto/*.proto, or (--check) see that they are fresh."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
TARGET = ROOT / "gpuimg" / "_proto"


def generate(target: Path) -> None:
    names = [path.name for path in sorted(SOURCES.glob("*.proto"))]
    arguments = ["protoc", f"-I{SOURCES}", f"--python_out={target}", f"--pyi_out={target}", *names]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed")


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(TARGET)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        for fresh in sorted(Path(folder).iterdir()):
            committed = TARGET / fresh.name
            if not committed.exists() or committed.read_bytes() != fresh.read_bytes():
                sys.exit(f"gpuimg/_proto/{fresh.name} does not match proto/; run `make proto`")
    print("gpuimg/_proto matches proto/")


if __name__ == "__main__":
    main()
