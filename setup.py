"""The compiled part; everything else about the package stands in pyproject.toml.

Without a compiler the package installs all the same and does the work in numpy, more slowly.
"""

from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("gpuimg/store/kernel")

setup(
    ext_modules=[
        Extension(
            "gpuimg.store._kernel",
            sources=sorted(str(path) for path in FOLDER.glob("*.c")),
            depends=sorted(str(path) for path in FOLDER.glob("*.h")),
            extra_compile_args=["-O3", "-std=gnu11", "-fno-math-errno", "-Wall", "-Wextra"],
            optional=True,
        )
    ]
)
