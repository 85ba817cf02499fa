"""Serve: answers `criu restore --stream` from an image source.

Every request is answered at once and every large file is sent by a thread of its own: the processes of a
restore share one connection and read several files alternately, so nobody may wait for another one's pipe.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

from gpuimg.errors import GpuimgError, InputOutputError
from gpuimg.stream import pipes, protocol
from gpuimg.stream.seams import ImageSource, ServedFile
from gpuimg.stream.session import Session

PIPE_CAPACITY = pipes.MIB
INLINE = 32 * 1024
"""Bytes that surely fit into criu's fresh pipe (64 KiB) however they are split; sent without a thread."""


class _AbortedError(Exception):
    """Ends the sending threads of an aborted session."""


class Serve(Session):
    """One restore.

    Under ``gpuimg restore``: `start`, run criu, `wait_delivered` at its post-restore stage, `wait`.
    Standalone: `run`.

    A file whose source fails is cut off and the connection closed, since criu takes a short file for a
    whole one; the error is raised by `run`, `wait` and `wait_delivered`.

    Parameters
    ----------
    images_dir
        Where criu looks for the socket.
    source
        Answers the requests.
    """

    def __init__(self, images_dir: Path, source: ImageSource) -> None:
        self._source = source
        self._active = 0
        self.delivered = 0
        """Requests whose file was sent to its last byte."""
        self.closed_early = 0
        """Requests whose reader had enough before the end of the file."""
        self.missing = 0
        """Requests for files that the image does not have."""
        super().__init__(images_dir, protocol.SERVE_SOCKET)

    def wait_delivered(self, timeout: float) -> None:
        """Wait until no file is being sent, and raise the error of the first one that failed.

        StalledError after `timeout` seconds without progress. Returns only if every file that was asked for
        was sent whole, or its reader had enough of it.
        """
        self._wait_until(lambda: self._active == 0, timeout)

    def _converse(self, connection: socket.socket) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while (name := protocol.receive_request(connection)) is not None:
                file = self._source.lookup(name)
                if file is None:
                    self.missing += 1
                    protocol.send_reply(connection, False)
                else:
                    self._answer(connection, name, file)
        with self._changed:
            self._changed.wait_for(lambda: self._active == 0 or self._aborted)

    def _answer(self, connection: socket.socket, name: str, file: ServedFile) -> None:
        # Counted before criu hears of it, so that a file that criu has been promised is always waited for.
        with self._changed:
            self._active += 1
        try:
            protocol.send_reply(connection, True)
            pipe = protocol.receive_pipe(connection, writable=True)
        except BaseException:
            with self._changed:
                self._active -= 1
            raise
        self._begin(name, file, pipe)

    def _begin(self, name: str, file: ServedFile, pipe: int) -> None:
        if file.size <= INLINE:
            self._send(name, file, pipe)
            return
        pipes.try_capacity(pipe, PIPE_CAPACITY)
        threading.Thread(target=self._send, args=(name, file, pipe), name=f"send {name}", daemon=True).start()

    def _send(self, name: str, file: ServedFile, pipe: int) -> None:
        delivered = closed_early = 0
        try:
            file.send(pipe, self._moved)
            delivered = 1
        except BrokenPipeError:
            closed_early = 1
        except _AbortedError:
            pass
        except GpuimgError as error:
            self._fail(error)
        except Exception as error:
            self._fail(InputOutputError(f"cannot send {name}: {error}"))
        # Only now may the reader see the end: whoever it tells must find the failure recorded.
        os.close(pipe)
        with self._changed:
            self.delivered += delivered
            self.closed_early += closed_early
            self._active -= 1
            self._changed.notify_all()

    def _fail(self, error: GpuimgError) -> None:
        self._keep(error)
        self._hang_up()

    def _moved(self, count: int) -> None:
        if self._aborted:
            raise _AbortedError
        with self._changed:
            self.bytes_moved += count
