"""Run `criu dump` and `criu restore` with image streaming, so that no task is lost.

The streamer is not this module's business: it listens in the work folder before criu starts, and what has
to be decided comes in as functions. What this module promises:

* a dump ends the tasks only after `on_post_dump` returned; everything else (an exception there, gpuimg
  killed or interrupted, criu failing, a stall) lets them run on;
* a restore leaves tasks behind only if `on_post_restore` returned;
* it never waits without end: the streamer's progress and criu's own log are watched, and when both stand
  still for too long the run is given up.

criu runs in a session of its own, out of reach of the terminal's signals, and is not killed when gpuimg
dies: it notices (a broken pipe, no verdict) and cleans up behind itself. Nor does this module ever kill a
criu that dumps: struck in the instant in which it runs its own code inside a task, it would take the task
with it. One that does not end is left alone and told of.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpuimg.criu import images, log
from gpuimg.criu.control import Control, Question
from gpuimg.criu.family import Family, subreaper
from gpuimg.criu.folder import check_socket_path
from gpuimg.criu.locate import Criu
from gpuimg.errors import (
    ImagesDirectoryError,
    IncompleteDumpError,
    InputOutputError,
    NoCriuError,
    NoSuchProcessError,
    PermissionDeniedError,
    StalledError,
    UsageError,
)

_S = TypeVar("_S")

STALL_SECONDS = 120.0
"""How long neither the streamer nor criu's log may stand still."""

_TICK = 0.02
_GRACE_SECONDS = 15.0
"""How long criu may take to clean up after it was given up."""

_PF_KTHREAD = 0x00200000

_LOG = "criu.log"
_STDERR = "criu.stderr"
_MARK = "GPUIMG_RUN"

# What gpuimg sets itself, and what makes a streamed image worthless without criu saying so.
_OWN = {"--images-dir", "-D", "--work-dir", "-W", "--log-file", "-o", "--tree", "-t", "--stream", "--pidfile"}
_OWN |= {"--restore-detached", "-d", "--restore-sibling", "-S"}
_HARMFUL = {
    "--page-server",
    "--lazy-pages",
    "--auto-dedup",
    "--prev-images-dir",
    "--track-mem",
    "--parent-path",
}


@dataclass(frozen=True, slots=True)
class DumpResult:
    """A dump that was committed and that criu finished.

    Attributes
    ----------
    pid
        The root of the dumped tree.
    seconds
        From starting criu to its end.
    statistics
        What criu counted, or None if it left no statistics.
    """

    pid: int
    seconds: float
    statistics: images.DumpStatistics | None


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """A restore that succeeded.

    Attributes
    ----------
    pid
        The root of the restored tree.
    exit_status
        As `subprocess` gives it (negative: the signal) if it was waited for, None when detached.
    seconds
        From starting criu until the tasks ran.
    statistics
        What criu counted, or None if it left no statistics.
    """

    pid: int
    exit_status: int | None
    seconds: float
    statistics: images.RestoreStatistics | None


@dataclass(frozen=True, slots=True)
class Watch:
    """What the runner sees of the streamer.

    Attributes
    ----------
    progress
        A number that grows as bytes move.
    abort
        Closes all pipes and sockets towards criu, so that a criu that has to end does.
    fault
        The streamer's own failure, if it had one: the cause behind what criu then reports.
    stall_seconds
        How long neither progress nor criu's log may stand still.
    """

    progress: Callable[[], int] = lambda: 0
    abort: Callable[[], None] = lambda: None
    fault: Callable[[], BaseException | None] = lambda: None
    stall_seconds: float = STALL_SECONDS


def run_dump(
    criu: Criu,
    pid: int,
    work_folder: Path,
    *,
    on_post_dump: Callable[[], None],
    leave_running: bool = False,
    extra_args: Sequence[str] = (),
    watch: Watch | None = None,
) -> DumpResult:
    """Dump the tree of `pid` to the streamer that listens in `work_folder`.

    Parameters
    ----------
    work_folder
        Made by :func:`gpuimg.criu.folder.work_folder`; ``streamer-capture.sock`` in it listens already.
    on_post_dump
        Called in this thread when criu has written everything and the tasks still stand. It makes the
        checkpoint durable; if it raises, the tasks run on and the exception leaves this function.
    leave_running
        Let the tasks run on after a good dump too.
    extra_args
        Further options for criu, as given after ``--``.

    Raises
    ------
    NoSuchProcessError, PermissionDeniedError, UsageError
        Before criu was started.
    CriuFailedError, StalledError, IncompleteDumpError
        The dump is no good; the tasks run on.
    """
    check_extra_args(extra_args)
    check_process(pid)
    check_privilege(criu)
    arguments = ["dump", "--tree", str(pid)]
    if leave_running:
        arguments.append("--leave-running")

    def decide(_: Question) -> None:
        on_post_dump()

    run = _Run(criu, work_folder, "dump", "post-dump", watch or Watch())
    seconds = run.conduct([*arguments, *extra_args], decide, own_session=True)
    return DumpResult(pid, seconds, _told(images.dump_statistics, run.read("stats-dump")))


def run_restore(
    criu: Criu,
    work_folder: Path,
    *,
    on_post_restore: Callable[[], None],
    detach: bool = False,
    pidfile: str | os.PathLike[str] | None = None,
    extra_args: Sequence[str] = (),
    watch: Watch | None = None,
) -> RestoreResult:
    """Restore from the streamer that listens in `work_folder`.

    Parameters
    ----------
    work_folder
        Made by :func:`gpuimg.criu.folder.work_folder`; ``streamer-serve.sock`` in it listens already.
    on_post_restore
        Called in this thread when criu has restored everything and no task has run yet. If it raises,
        criu ends what it restored and the exception leaves this function.
    detach
        Return as soon as the tasks run. Otherwise the root task becomes a child of this process, and its
        end is waited for, however long that takes; an interrupt of the wait leaves it running.
    pidfile
        Where to write the root's PID; relative to the current folder.

    Raises
    ------
    PermissionDeniedError, UsageError
        Before criu was started.
    CriuFailedError, StalledError
        Nothing was restored, no task is left behind.
    """
    check_extra_args(extra_args)
    check_privilege(criu)
    pidfile = None if pidfile is None else Path(pidfile).absolute()
    arguments = ["restore", "--restore-detached"]
    root = 0

    def decide(question: Question) -> None:
        nonlocal root
        root = question.pid
        on_post_restore()
        if pidfile is not None:
            _write_pidfile(pidfile, root)

    # A job of a terminal takes over criu's session and standard input; any other brings its own.
    shell_job = not {"--shell-job", "-j"}.isdisjoint(extra_args)
    run = _Run(criu, work_folder, "restore", "post-restore", watch or Watch())
    try:
        # criu's own wait for the tasks tells nothing of how they ended. As a subreaper this process
        # inherits the root when criu is gone, and can ask the kernel.
        with contextlib.nullcontext() if detach else subreaper():
            seconds = run.conduct([*arguments, *extra_args], decide, own_session=not shell_job)
    except BaseException:
        if pidfile is not None and root:
            pidfile.unlink(missing_ok=True)
        raise
    statistics = _told(images.restore_statistics, run.read("stats-restore"))
    return RestoreResult(root, None if detach else _exit_status(root), seconds, statistics)


def check_extra_args(extra_args: Sequence[str]) -> None:
    """Refuse options that gpuimg sets itself, and those with which a streamed image cannot be restored."""
    for argument in extra_args:
        if argument.startswith("--") and len(argument) > 2:
            # Like getopt, take a beginning for the whole.
            name = argument.partition("=")[0]
            own, harmful = ({o for o in group if o.startswith(name)} for group in (_OWN, _HARMFUL))
        else:
            own, harmful = {argument[:2]} & _OWN, set()
        for name in own:
            raise UsageError(f"gpuimg sets criu's option {name} itself", remedy="leave it out after --")
        for name in harmful:
            raise UsageError(
                f"criu's option {name} does not work with a streamed image", remedy="leave it out after --"
            )


def check_process(pid: int) -> None:
    """Refuse what is no process, and a tree that holds gpuimg: criu would stop the very program it needs."""
    facts = _status(pid) if pid > 0 else {}
    if not facts or facts.get("State", "").startswith(("Z", "X")):
        raise NoSuchProcessError(f"there is no process {pid}", remedy="look the PID up again")
    if int(facts["Tgid"]) != pid:
        raise NoSuchProcessError(
            f"{pid} is a thread of process {facts['Tgid']}", remedy=f"dump process {facts['Tgid']}"
        )
    if _is_of_the_kernel(pid):
        raise NoSuchProcessError(f"{pid} is a thread of the kernel", remedy="look the PID up again")
    ancestor = os.getpid()
    while ancestor > 0:
        if ancestor == pid:
            raise UsageError(
                f"process {pid} is gpuimg itself, or one of those that started it",
                remedy="start gpuimg from outside the process tree that is to be dumped",
            )
        ancestor = int(_status(ancestor).get("PPid", "0"))


def check_privilege(criu: Criu) -> None:
    """Raise PermissionDeniedError where criu cannot get what it needs."""
    checkpoint_restore, sys_admin = 1 << 40, 1 << 21
    if int(_status(os.getpid()).get("CapEff", "0"), 16) & (checkpoint_restore | sys_admin):
        return
    try:
        os.getxattr(criu.path, "security.capability")
    except OSError:
        raise PermissionDeniedError(
            "criu needs root, or the capability CAP_CHECKPOINT_RESTORE, and this user has neither",
            remedy="run gpuimg as root (sudo)",
        ) from None


class _Run:
    """One run of criu, from its start until it is gone."""

    def __init__(self, criu: Criu, folder: Path, verb: str, stage: str, watch: Watch) -> None:
        self._criu = criu
        self._folder = folder
        self._verb = verb
        self._stage = stage
        self._watch = watch
        self._verdict: BaseException | None = None

    def read(self, name: str) -> bytes:
        """Return a file that criu left in the work folder; empty if it left none."""
        try:
            return (self._folder / name).read_bytes()
        except OSError:
            return b""

    def conduct(
        self, arguments: list[str], decide: Callable[[Question], None], *, own_session: bool
    ) -> float:
        """Run criu to its end; return the seconds it took. Raises whatever makes the run no good."""
        started = time.monotonic()
        with contextlib.closing(Control(self._folder, self._stage)) as control:
            process = self._start(arguments, control, own_session=own_session)
            with Family(process.pid, f"{_MARK}={self._folder}") as family:
                try:
                    self._wait(process, control, family, decide)
                except BaseException as error:
                    control.close()
                    if not self._end(process, family):
                        raise StalledError(
                            f"criu {self._verb} was given up and does not end: process {process.pid}",
                            remedy="the tasks run on when it ends; killing it may cost the task it works on",
                        ) from error
                    raise
                self._judge(process, control, family)
        return time.monotonic() - started

    def _start(self, arguments: list[str], control: Control, *, own_session: bool) -> subprocess.Popen[bytes]:
        folder = str(self._folder)
        check_socket_path(self._folder / "streamer-capture.sock")
        command = [str(self._criu.path), *arguments, "--stream", "--images-dir", folder, "--work-dir", folder]
        command += ["--log-file", _LOG, "-v4", "--action-script", str(control.script)]
        stdin = subprocess.DEVNULL if own_session else None
        environment = {**os.environ, _MARK: folder}
        try:
            with (self._folder / _STDERR).open("wb") as output:
                os.fchmod(output.fileno(), 0o600)
                return subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=own_session,
                )
        except OSError as error:
            raise NoCriuError(
                f"{self._criu.path} cannot be started: {error.strerror or error}",
                remedy="see `gpuimg doctor`",
            ) from None

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        control: Control,
        family: Family,
        decide: Callable[[Question], None],
    ) -> None:
        """Answer the question, and wait until criu has ended or stands still."""
        poll = select.poll()
        poll.register(control, select.POLLIN)
        ended = os.pidfd_open(process.pid)
        try:
            poll.register(ended, select.POLLIN)
            mark = self._mark()
            moved = time.monotonic()
            while process.poll() is None:
                if self._verb == "restore":
                    family.look()
                ready = {fd for fd, _ in poll.poll(int(_TICK * 1000))}
                if control.fileno() in ready and ended not in ready:
                    if self._verb == "restore":
                        family.look()
                    self._verdict = control.answer(decide) or self._verdict
                    if self._verdict is not None and not isinstance(self._verdict, Exception):
                        raise self._verdict
                    moved = time.monotonic()
                now = self._mark()
                if now != mark:
                    mark, moved = now, time.monotonic()
                elif time.monotonic() - moved > self._watch.stall_seconds:
                    raise self._verdict or StalledError(
                        f"criu {self._verb} made no progress for {self._watch.stall_seconds:g} s",
                        remedy="see whether the tasks hang in the kernel (state D), and try again",
                    )
        finally:
            os.close(ended)

    def _mark(self) -> tuple[int, int]:
        try:
            size = (self._folder / _LOG).stat().st_size
        except OSError:
            size = 0
        return self._watch.progress(), size

    def _end(self, process: subprocess.Popen[bytes], family: Family) -> bool:
        """Have criu end on its own account; False if it does not, and may not be made to."""
        self._watch.abort()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            if self._verb == "dump":
                return False
            family.look()
            process.kill()
            process.wait()
        if self._verb == "restore":
            family.end()
        return True

    def _judge(self, process: subprocess.Popen[bytes], control: Control, family: Family) -> None:
        """Raise unless the verdict was good and criu ended well."""
        status = process.returncode
        failed = status != 0 or self._verdict is not None or not control.asked
        if not failed:
            return
        if self._verb == "restore" or status < 0:
            # A criu that was killed in a dump leaves helpers of its own; the tasks are no family of it.
            family.end()
        if self._verdict is not None:
            raise self._verdict
        fault = self._watch.fault()
        if fault is not None:
            raise fault
        if status != 0:
            raise log.failure(self._verb, status, self._folder / _LOG, self._folder / _STDERR)
        raise IncompleteDumpError(
            f"criu {self._verb} ended without asking whether everything arrived",
            remedy="look for an action-script in criu's configuration files",
        )


def _exit_status(pid: int) -> int | None:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def _told(parse: Callable[[bytes], _S | None], data: bytes) -> _S | None:
    """Statistics are a courtesy: a run is not worse for having left none, or unreadable ones."""
    try:
        return parse(data) if data else None
    except ImagesDirectoryError:
        return None


def _write_pidfile(path: Path, pid: int) -> None:
    try:
        path.write_text(f"{pid}\n")
    except PermissionError as error:
        raise PermissionDeniedError(
            f"the PID file {path} cannot be written: {error.strerror}", remedy="name another with --pidfile"
        ) from None
    except OSError as error:
        raise InputOutputError(
            f"the PID file {path} cannot be written: {error.strerror}", remedy="name another with --pidfile"
        ) from None


def _is_of_the_kernel(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    # The flags are the seventh field behind the name, which may hold anything.
    return bool(int(text[text.rindex(")") + 2 :].split()[6]) & _PF_KTHREAD)


def _status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; empty when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
