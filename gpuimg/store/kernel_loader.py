"""The compiled kernel, where there is one.

`gpuimg/store/_kernel` is built when the package is installed on a machine with a C compiler. Without it, or
with the environment variable GPUIMG_KERNEL set to `off`, numpy does the same work, several times more slowly.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType


@functools.cache
def kernel() -> ModuleType | None:
    """The kernel, or None."""
    if os.environ.get("GPUIMG_KERNEL") == "off":
        return None
    try:
        from gpuimg.store import _kernel
    except ImportError:
        return None
    return _kernel
