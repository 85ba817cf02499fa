"""The command line: one module per command group. Parses, calls, prints; has no logic of its own.

Modules here import nothing heavy at their top (click only), so that `gpuimg --help` answers at once.
"""

from __future__ import annotations

from gpuimg.cli.app import main, run

__all__ = ["main", "run"]
