"""The channel by which criu's action script asks gpuimg for a verdict.

criu runs the script at every stage of a dump or restore. One stage matters, and there the script's success
decides over life and death of the tasks. So success needs a connection to this very gpuimg, and its word.
"""

from __future__ import annotations

import os
import shlex
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpuimg.criu.folder import check_socket_path

_SCRIPT = """\
#!/bin/sh
# criu may read the status of a script that a signal ended as success; so the client is no exec, and
# whatever it dies of becomes 1.
[ "$CRTOOLS_SCRIPT_ACTION" = {stage} ] || exit 0
{client} "$CRTOOLS_SCRIPT_ACTION" "${{CRTOOLS_INIT_PID:-0}}" || exit 1
exit 0
"""

_PEER = struct.Struct("3i")
_ASK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Question:
    """What the script tells: the stage, and the root task's PID."""

    stage: str
    pid: int


class Control:
    """Listens in a work folder for the one question of one run of criu.

    Parameters
    ----------
    folder
        The run's private folder; socket and script are made there.
    stage
        The stage at which criu asks: ``post-dump`` or ``post-restore``.
    """

    def __init__(self, folder: Path, stage: str) -> None:
        self.stage = stage
        self.asked = False
        self.script = folder / "action.sh"
        path = folder / "control.sock"
        check_socket_path(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind(os.fspath(path))
        path.chmod(0o600)
        self._socket.listen(4)
        client = [sys.executable, "-I", "-S", str(Path(__file__).with_name("action.py")), str(path)]
        self.script.write_text(_SCRIPT.format(stage=stage, client=shlex.join(client)))
        self.script.chmod(0o700)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Refuse every further question."""
        self._socket.close()

    def answer(self, decide: Callable[[Question], None]) -> BaseException | None:
        """Take one waiting connection; run `decide`; say "ok" unless it raises.

        What it raised is returned, not raised: criu is still to be waited for.
        """
        try:
            channel, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return None
        with channel:
            channel.settimeout(_ASK_SECONDS)
            question = self._read(channel)
            if question is None:
                return None
            # From here on the answer counts, even if another connection came with the same question.
            self.asked = True
            try:
                decide(question)
            except BaseException as error:
                _say(channel, b"no\n")
                return error
            _say(channel, b"ok\n")
        return None

    def _read(self, channel: socket.socket) -> Question | None:
        """Return a well-formed question of a trusted peer that comes for the first time."""
        peer = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        _, uid, _ = _PEER.unpack(peer)
        if uid not in (0, os.geteuid()) or self.asked:
            return None
        line = b""
        try:
            while not line.endswith(b"\n") and len(line) < 64:
                data = channel.recv(64)
                if not data:
                    return None
                line += data
        except OSError:
            return None
        stage, _, pid = line.decode("ascii", "replace").strip().partition(" ")
        return Question(stage, int(pid)) if stage == self.stage and pid.isdecimal() else None


def _say(channel: socket.socket, answer: bytes) -> None:
    try:
        channel.sendall(answer)
    except OSError:
        # The script is gone; criu has seen that, and its exit status will tell.
        return
