"""Progress lines, as criu-image-streamer writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from gpuimg.stream import pipes


class Progress:
    """Writes progress lines; nobody has to read them.

    Parameters
    ----------
    fd
        Where to; None for nowhere. The caller's to close.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def line(self, text: str) -> None:
        """Write one line, or not."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                pipes.write_all(self._fd, f"{text}\n".encode())

    def shards(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """The statistics, as one line of JSON: bytes and milliseconds of each shard."""
        each = (
            f'{{"size":{size},"transfer_duration_millis":{int(duration * 1000)}}}'
            for size, duration in zip(sizes, seconds, strict=True)
        )
        self.line(f'{{"shards":[{",".join(each)}]}}')
