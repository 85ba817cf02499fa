"""Find a criu that starts on this machine.

A criu that is present need not work: distributions ship versions that newer kernels break, and a copied
binary may miss libraries. So every candidate is started, and what was tried is told when none works.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuimg.errors import NoCriuError, OldCriuError

MINIMUM = (3, 15)
"""The first criu that knows `--stream`."""

ENVIRONMENT_VARIABLE = "GPUIMG_CRIU"

_CHECKOUT = Path(__file__).resolve().parent.parent.parent
# Where distributions put criu; not always on a user's PATH.
_SYSTEM_PLACES = ":/usr/local/sbin:/usr/sbin:/sbin"
_START_SECONDS = 30.0
_REMEDY = (
    "install criu 3.15 or newer, run `make criu` in a source checkout, or name one with --criu or "
    f"{ENVIRONMENT_VARIABLE}"
)


@dataclass(frozen=True, slots=True)
class Criu:
    """A criu that started.

    Attributes
    ----------
    path
        The executable or launcher.
    version
        Its version as numbers, for instance ``(4, 1, 1)``.
    source
        How it was found: ``--criu``, ``GPUIMG_CRIU``, ``checkout`` or ``PATH``.
    """

    path: Path
    version: tuple[int, ...]
    source: str

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))


def find_criu(
    explicit: str | os.PathLike[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    checkout: Path | None = None,
) -> Criu:
    """Return the criu to use.

    One that was named (`explicit`, then the environment variable) is used or refused, never passed over
    for another. Otherwise the newest of the checkout's ``.criu`` folder, then the one on PATH.

    Raises
    ------
    NoCriuError
        None starts; the text names each that was tried and why it failed.
    OldCriuError
        The only ones that start are older than 3.15.
    """
    environment = os.environ if environment is None else environment
    tried: list[str] = []
    too_old: list[Criu] = []
    for group in _candidates(explicit, environment, checkout or _CHECKOUT):
        found: list[Criu] = []
        for path, source in group:
            try:
                criu = Criu(path, probe_version(path), source)
            except NoCriuError as error:
                tried.append(error.what)
                continue
            (found if criu.version >= MINIMUM else too_old).append(criu)
        if found:
            return max(found, key=lambda criu: criu.version)
    if too_old:
        listed = ", ".join(f"{criu.path} is {criu.version_text}" for criu in too_old)
        raise OldCriuError(f"criu is too old for image streaming: {listed}", remedy=_REMEDY)
    raise NoCriuError(
        f"no criu that starts was found ({'; '.join(tried) or 'there is none on PATH'})", remedy=_REMEDY
    )


def probe_version(path: Path) -> tuple[int, ...]:
    """Start the criu at `path` and return its version; NoCriuError says why that failed."""
    try:
        result = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoCriuError(f"{path} does not answer --version", remedy=_REMEDY) from None
    except OSError as error:
        raise NoCriuError(f"{path}: {error.strerror or error}", remedy=_REMEDY) from None
    match = re.search(r"^Version:\s*v?(\d+(?:\.\d+)*)", result.stdout, re.MULTILINE)
    if match:
        return tuple(int(part) for part in match[1].split("."))
    told = (result.stderr.strip() or result.stdout.strip()).splitlines()
    reason = told[-1][:200] if told else "no output"
    if result.returncode < 0:
        reason = f"killed by signal {-result.returncode}"
    raise NoCriuError(f"{path} does not start: {reason}", remedy=_REMEDY)


def _candidates(
    explicit: str | os.PathLike[str] | None, environment: Mapping[str, str], checkout: Path
) -> Iterator[list[tuple[Path, str]]]:
    """Yield the candidates in groups, the best group first."""
    for named, source in (
        (explicit, "--criu"),
        (environment.get(ENVIRONMENT_VARIABLE), ENVIRONMENT_VARIABLE),
    ):
        if named:
            text = os.fspath(named)
            found = text if "/" in text else shutil.which(text, path=environment.get("PATH"))
            if found is None:
                raise NoCriuError(f"there is no {text} on PATH, as {source} asks", remedy=_REMEDY)
            yield [(Path(found).absolute(), source)]
            return
    bundled = sorted((checkout / ".criu").glob("*/bin/criu"))
    yield [(path, "checkout") for path in bundled if not path.parts[-3].startswith(".")]
    on_path = shutil.which("criu", path=environment.get("PATH", os.defpath) + _SYSTEM_PLACES)
    yield [(Path(on_path).absolute(), "PATH")] if on_path else []
