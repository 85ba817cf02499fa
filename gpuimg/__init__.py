"""gpuimg: keep, move and restore the state of GPU processes."""

__version__ = "0.1.0"
