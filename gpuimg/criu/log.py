"""Turn the log of a failed criu into a sentence and a remedy."""

from __future__ import annotations

import re
from pathlib import Path

from gpuimg.errors import CriuFailedError

_TAIL_BYTES = 4 << 20
_QUOTED = 3
# "Unable to interrupt" ends a dump, and criu only warns of it.
_ERROR = re.compile(
    r"(?:\(\d+\.\d+\) )?\s*(?:pie: )?(?:\d+: )?"
    r"(?:Error \([^)]*\): |Warn +\([^)]*\): (?=Unable to interrupt))(.*)"
)

# Lines that are no cause: what a privileged run in a container meets without harm, and what criu says
# after every failure.
_NOISE = (
    "rlimit: Can't setup RLIMIT_NOFILE",
    "One of more action scripts failed",
    "Dumping FAILED",
    "Restoring FAILED",
    "Unable to detach from",
)

# Pattern of a message -> what to do. The first pattern that fits decides, so the narrow ones come first.
_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"image streamer socket", "the streamer was not listening in the work folder"),
    (
        r"dangling tty|not a session leader|--shell-job",
        "the process belongs to a terminal session: add `-- --shell-job`",
    ),
    (
        r"session leader of .* outside of its pid namespace",
        "its session began outside this container: start it as the leader of one (setsid)",
    ),
    (
        r"sockets: Can't get \d+:\d+ opt: Operation not supported",
        "this kernel no longer answers what this criu asks about sockets: use criu 4.2 or newer",
    ),
    (
        r"Connected TCP socket",
        "it has open TCP connections: add `-- --tcp-established`, at dump and at restore",
    ),
    (r"--file-locks", "it holds file locks: add `-- --file-locks`, at dump and at restore"),
    (
        r"ip6?tables|nft|[Ll]ock(?:ing)? (?:the )?(?:network|TCP)|[Nn]etwork.?lock",
        "criu cannot lock the network here: add `-- --network-lock skip`, or install iptables or nftables",
    ),
    (
        r"[Ee]xternal socket|name-less external",
        "it is connected to a process outside its tree: dump a tree that holds both, "
        "or add `-- --ext-unix-sk`, at dump and at restore",
    ),
    (r"ghost file .*limit", "it holds a large deleted file open: add `-- --ghost-limit SIZE`"),
    (r"link-remap", "it holds a deleted file open that has another name: add `-- --link-remap`"),
    (
        r"external mount|enable-external-masters|fuse mount but not external|proper root mount|"
        r"FS mnt .* unsupported",
        "a mount comes from outside: name it with `-- --external mnt[PATH]:KEY`",
    ),
    (
        r"Can't fork for \d+: File exists|Pid \d+ do not match|[Pp]id \d+ .*(?:exists|busy)",
        "a PID of the checkpoint is in use: end the process that has it, or restore in another PID namespace",
    ),
    (
        r"File .* has bad (?:size|mode)|build-?id",
        "a file that was open is not what it was at the dump: put the old one back",
    ),
    (r"Can't open file .* on restore", "a file that was open is missing: put it back where it was"),
    (
        r"cpu: CPU",
        "this processor lacks what that of the dump had: restore on another machine, "
        "or add `-- --cpu-cap none`",
    ),
    (r"--unprivileged", "run as root, or accept criu's limits with `-- --unprivileged`"),
    (
        r"[Ss]eize|SEIZE|being traced|Unable to interrupt",
        "another program traces it, a debugger perhaps, or ptrace is forbidden here: see `gpuimg doctor`",
    ),
    (
        r"CAP_[A-Z]+|Operation not permitted|Permission denied",
        "criu lacks a privilege: run as root, and see `gpuimg doctor`",
    ),
    (
        r"kerndat|kernel (?:lacks|is too old)|isn't supported|Function not implemented",
        "this kernel lacks what criu needs: see `gpuimg doctor`",
    ),
    (
        r"Unknown file type|Can't dump file|anon_inode|Can't lookup mount",
        "it has something open that criu cannot dump: close it before the dump, "
        "or give criu the plugin for it",
    ),
    (r"No space left", "make room, or raise the quota"),
    (
        r"vdso: |Restorer fail",
        "this criu cannot restore it here: use the one that dumped it (`gpuimg show`), or a newer one",
    ),
)


def read_errors(path: Path) -> list[str]:
    """Return the error messages in the log at `path`, oldest first; the last 4 MiB are looked at."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    found = [match[1].strip() for line in text.splitlines() if (match := _ERROR.match(line))]
    return [line for line in dict.fromkeys(found) if line and not any(noise in line for noise in _NOISE)]


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def remedy_for(errors: list[str]) -> str:
    """Return what to do about these errors: the first that is well known decides."""
    for line in errors:
        for pattern, remedy in _REMEDIES:
            if re.search(pattern, line):
                return remedy
    return "look it up in criu's documentation; `gpuimg doctor` checks the machine"


def failure(verb: str, status: int, log: Path, stderr: Path) -> CriuFailedError:
    """Describe a criu that ended with `status` (negative: a signal) while it was to `verb`."""
    errors = read_errors(log)
    if not errors:
        # Before its log is open criu tells of bad options and the like on standard error.
        errors = read_errors(stderr) or _lines(stderr)
    ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    quoted = "; ".join(f'"{line[:300]}"' for line in errors[:_QUOTED])
    told = f": {quoted}" if quoted else " and told no reason"
    return CriuFailedError(f"criu {verb} {ended}{told}", remedy=remedy_for(errors))
