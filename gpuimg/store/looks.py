"""Quick looks at samples of a chunk, for the choice of its coding."""

from __future__ import annotations

from gpuimg.store.kernel_loader import kernel


def repeats(data: memoryview) -> float:
    """The share, from 0 to 1, of positions whose next six bytes stood in the data before."""
    native = kernel()
    if native is not None:
        share: float = native.repeats(data)
        return share
    import numpy as np

    if len(data) < 8:
        return 0.0
    words = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, dtype=np.uint8), 6)
    wide = np.zeros((len(words), 8), dtype=np.uint8)
    wide[:, :6] = words
    return 1 - len(np.unique(wide.view(np.uint64))) / len(words)


def looks_random(data: memoryview) -> bool:
    """Whether the bytes are as evenly spread as random ones (chi-square)."""
    native = kernel()
    if native is not None:
        found: bool = native.looks_random(data)
        return found
    import numpy as np

    counts = np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)
    # 255 is expected of random bytes, and 400 is six deviations above.
    return bool(np.dot(counts, counts) * 256 < len(data) * (len(data) + 400))
