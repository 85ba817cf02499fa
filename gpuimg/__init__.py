"""gpuimg: keep, move and restore the state of GPU processes.

The library's entrance: `gpuimg.init_store`, `gpuimg.open_store`, `gpuimg.repair_store`. They are
imported when first used, so that `import gpuimg` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Store", "__version__", "init_store", "open_store", "repair_store"]

if TYPE_CHECKING:
    from gpuimg.store.store import Store, init_store, open_store, repair_store


def __getattr__(name: str) -> Any:
    if name in __all__:
        from gpuimg.store import store

        return getattr(store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
