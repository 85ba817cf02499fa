"""Look at this machine and say what a dump or restore would miss, each with its remedy.

Every check is a function of its own that returns a :class:`Finding` and never raises: a doctor that falls
ill at the first symptom is of no use.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from gpuimg.criu.locate import MINIMUM, Criu, find_criu
from gpuimg.errors import GpuimgError
from gpuimg.store.kernel_loader import kernel

_CHECK_SECONDS = 60.0
_GOOD_PIPE_SIZE = 1 << 20

CAPABILITIES = {
    "CAP_CHECKPOINT_RESTORE": 40,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_SYS_PTRACE": 19,
}
"""What criu uses, by the bit numbers of the kernel."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    name
        What was looked at, in a word or two.
    ok
        Whether dump and restore work with it as it is.
    detail
        What was found.
    remedy
        What to do; empty if nothing needs to be done.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def examine(
    criu_path: str | os.PathLike[str] | None = None, *, store: Path | None = None, proc: Path = Path("/proc")
) -> list[Finding]:
    """Run all checks; `store` is where checkpoints are or will be kept."""
    findings: list[Finding] = []
    try:
        criu = find_criu(criu_path)
    except GpuimgError as error:
        findings.append(Finding("criu", False, error.what, error.remedy))
    else:
        findings.append(Finding("criu", True, f"{criu.version_text} at {criu.path} ({criu.source})"))
        findings.append(check_streaming(criu))
        findings.append(check_criu(criu))
    findings += [
        check_privilege(proc),
        check_kernel(),
        check_pipe_size(proc),
        check_pipe_pages(proc),
        check_ptrace(proc),
    ]
    if store is not None:
        findings.append(check_store(store))
    findings.append(check_coding())
    findings.extend(check_packages())
    return findings


def check_streaming(criu: Criu) -> Finding:
    """See that this criu knows `--stream`: a build can lack what its version promises."""
    result = _run(criu, "--help")
    if result is not None and "--stream" in result.stdout:
        return Finding("streaming", True, f"criu {criu.version_text} knows --stream")
    minimum = ".".join(map(str, MINIMUM))
    return Finding("streaming", False, "this criu does not list --stream", f"use a criu from {minimum} on")


def check_criu(criu: Criu) -> Finding:
    """Have criu itself look at the kernel."""
    result = _run(criu, "check")
    if result is None:
        return Finding("criu check", False, "it does not run, or does not end", "try another criu")
    lines = [line.strip() for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    if result.returncode == 0:
        return Finding("criu check", True, next((line for line in lines if "good" in line), "passed"))
    errors = [re.sub(r"^Error \([^)]*\): ", "", line) for line in lines if line.startswith("Error")] or lines
    detail = "; ".join(errors[:3]) or f"status {result.returncode}"
    return Finding(
        "criu check", False, detail, "run as root; if it still fails the kernel lacks what criu needs"
    )


def check_privilege(proc: Path) -> Finding:
    """See whether this process may do what criu does."""
    held = int(_field(proc / "self/status", "CapEff") or "0", 16)
    names = [name for name, bit in CAPABILITIES.items() if held >> bit & 1]
    who = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    detail = f"{who} with {', '.join(names) or 'no capability that criu uses'}"
    missing = [name for name in CAPABILITIES if name not in names]
    if "CAP_SYS_ADMIN" in names:
        # SYS_ADMIN implies the narrower CHECKPOINT_RESTORE; what else lacks limits some dumps only.
        missing = [name for name in missing if name not in ("CAP_CHECKPOINT_RESTORE", "CAP_SYS_RESOURCE")]
    if not missing:
        return Finding("privilege", True, detail)
    return Finding(
        "privilege", False, detail, f"run as root; in a container also grant {' and '.join(missing)}"
    )


def check_kernel() -> Finding:
    """criu needs facilities that every kernel since 3.11 can be built with; the processor must be known."""
    release = platform.release()
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None or (int(match[1]), int(match[2])) < (3, 11):
        return Finding("kernel", False, release, "criu needs Linux 3.11 or newer; 5.9 or newer is better")
    return Finding("kernel", True, f"{release} {platform.machine()}")


def check_pipe_size(proc: Path) -> Finding:
    """Large pipes are what makes streaming fast."""
    size = _number(proc / "sys/fs/pipe-max-size")
    if size is None:
        return Finding("pipe size", False, "fs.pipe-max-size cannot be read", "mount /proc")
    detail = f"up to {size >> 10} KiB"
    if size >= _GOOD_PIPE_SIZE or os.geteuid() == 0:
        return Finding("pipe size", True, detail)
    return Finding("pipe size", False, detail, f"sysctl fs.pipe-max-size={_GOOD_PIPE_SIZE}")


def check_pipe_pages(proc: Path) -> Finding:
    """A user over the soft limit gets pipes of two pages: streaming works then, at a crawl."""
    soft = _number(proc / "sys/fs/pipe-user-pages-soft")
    if soft is None:
        return Finding("pipe pages", False, "fs.pipe-user-pages-soft cannot be read", "mount /proc")
    page = os.sysconf("SC_PAGE_SIZE")
    detail = "without limit" if soft == 0 else f"{soft * page >> 20} MiB per user"
    # A dump has some dozens of pipes open at a time; a capable process is not bound by the limit.
    if soft == 0 or soft * page >= 16 * _GOOD_PIPE_SIZE or os.geteuid() == 0:
        return Finding("pipe pages", True, detail)
    return Finding("pipe pages", False, detail, "sysctl fs.pipe-user-pages-soft=0")


def check_ptrace(proc: Path) -> Finding:
    """Yama can forbid the tracing on which criu rests."""
    scope = _number(proc / "sys/kernel/yama/ptrace_scope")
    if scope is None:
        return Finding("ptrace", True, "not restricted")
    if scope == 3:
        return Finding(
            "ptrace", False, "forbidden to all (scope 3)", "reboot with kernel.yama.ptrace_scope=0"
        )
    if scope == 0 or os.geteuid() == 0:
        return Finding("ptrace", True, f"allowed (scope {scope})")
    return Finding("ptrace", False, f"restricted (scope {scope})", "run as root")


def check_store(store: Path) -> Finding:
    """See that the store, or the folder in which it would be made, can be written."""
    place = store
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return Finding("store", False, f"{place} is no folder", "name another place with --store")
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding(
            "store", False, f"{place} cannot be written", "change its owner, or name another --store"
        )
    try:
        space = os.statvfs(place)
    except OSError as error:
        return Finding("store", False, f"{place}: {error.strerror}", "name another place with --store")
    free = space.f_bavail * space.f_frsize / 1e9
    detail = f"{store}, {free:.1f} GB free" + ("" if place == store else ", not made yet")
    if space.f_bavail == 0:
        return Finding("store", False, detail, "make room")
    return Finding("store", True, detail)


def check_coding() -> Finding:
    """See whether chunks are coded by the compiled kernel."""
    if kernel() is not None:
        return Finding("coding", True, "the compiled kernel is there")
    return Finding(
        "coding",
        True,
        "without the compiled kernel: several times slower, the stores are the same",
        "install gcc and Python's headers (gcc libc6-dev python3-dev), then gpuimg anew",
    )


def check_packages() -> list[Finding]:
    """Compare the Python packages with what gpuimg asks for."""
    try:
        wanted = metadata.requires("gpuimg") or []
    except metadata.PackageNotFoundError:
        return [Finding("packages", False, "gpuimg is not installed", "run `make venv`, or pip install it")]
    return [_package(line) for line in wanted if "extra ==" not in line]


def _package(requirement: str) -> Finding:
    match = re.match(r"([A-Za-z0-9._-]+)\s*(.*)", requirement)
    assert match is not None
    name, bounds = match[1], match[2].partition(";")[0].strip(" ()")
    remedy = f"pip install '{name}{bounds}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", remedy)
    ok = all(_within(version, bound.strip()) for bound in bounds.split(",") if bound.strip())
    return Finding(name, ok, version, "" if ok else remedy)


def _within(version: str, bound: str) -> bool:
    def parts(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", text)[:3])

    if bound.startswith(">="):
        return parts(version) >= parts(bound)
    if bound.startswith("<"):
        return parts(version) < parts(bound)
    return True


def healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.ok for finding in findings)


def _run(criu: Criu, argument: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            [criu.path, argument],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CHECK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _field(path: Path, name: str) -> str | None:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    match = re.search(rf"^{name}:\s*(\S+)", text, re.MULTILINE)
    return match[1] if match else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
