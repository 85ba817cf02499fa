"""What capture and serve have in common: one socket, one connection, one thread, errors kept for the
caller.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from gpuimg.errors import InputOutputError, StalledError
from gpuimg.stream import protocol


class Session(ABC):
    """One run of criu, from listening to the end of its connection.

    The socket listens as soon as the object exists. Use either `run` in the calling thread, or `start` and
    `wait`.

    Parameters
    ----------
    images_dir
        Where the socket is made; the directory is made if it is missing.
    socket_name
        Its name there.
    """

    def __init__(self, images_dir: Path, socket_name: str) -> None:
        protocol.prepare_directory(images_dir)
        self._listener = protocol.Listener(images_dir / socket_name)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._connection: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._aborted = False
        self._ended = False
        self._changed = threading.Condition()
        self.bytes_moved = 0
        """Bytes of image files that went through so far; grows while there is progress."""

    @property
    def ended(self) -> bool:
        """Whether the connection has ended and everything is closed."""
        return self._ended

    @property
    def error(self) -> BaseException | None:
        """The first error of the session, if there was one."""
        return self._error

    @abstractmethod
    def _converse(self, connection: socket.socket) -> None:
        """Do everything there is to do on the connection."""

    def run(self) -> None:
        """Wait for criu, serve it to its end, and raise the first error of the session."""
        try:
            connection = self._listener.accept(self._wake)
            if connection is not None:
                with connection:
                    with self._changed:
                        self._connection = connection
                        if self._aborted:
                            self._hang_up()
                    self._converse(connection)
        except OSError as error:
            self._keep(InputOutputError(f"the image streamer failed: {error.strerror or error}"))
        except BaseException as error:
            self._keep(error)
        finally:
            self._listener.close()
            with self._changed:
                self._ended = True
                os.close(self._wake)
                self._changed.notify_all()
        self._raise_error()

    def start(self) -> None:
        """Do the same in a thread; ask for the outcome with `wait`."""

        def body() -> None:
            with contextlib.suppress(BaseException):  # kept, and raised to whoever waits
                self.run()

        self._thread = threading.Thread(target=body, name=type(self).__name__, daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> None:
        """Wait for the end of the session and raise its error; StalledError after `timeout` s without
        progress.
        """
        self._wait_until(lambda: self._ended, timeout)

    def abort(self) -> None:
        """End the session from another thread; criu sees closed pipes and a closed socket."""
        with self._changed:
            if self._ended:
                return
            self._aborted = True
            os.eventfd_write(self._wake, 1)
            self._hang_up()
            self._changed.notify_all()

    def close(self, timeout: float = 10.0) -> None:
        """Abort if need be, and wait until the session's thread no longer touches sink or source.

        After `timeout` seconds it is left behind; a thread that is blocked in a sink can take that long.
        """
        self.abort()
        if self._thread is None:
            self._listener.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _hang_up(self) -> None:
        """Close the connection under a thread that may be blocked on it."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _keep(self, error: BaseException) -> None:
        """Remember the first error; after an abort errors are only its echo."""
        with self._changed:
            if self._error is None and not self._aborted:
                self._error = error
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait_until(self, done: Callable[[], bool], timeout: float) -> None:
        """Wait until `done` or an error; the time starts anew whenever bytes have moved."""
        with self._changed:
            moved, deadline = self.bytes_moved, time.monotonic() + timeout
            while not done():
                self._raise_error()
                if self._ended:
                    return
                now = time.monotonic()
                if self.bytes_moved != moved:
                    moved, deadline = self.bytes_moved, now + timeout
                if now >= deadline:
                    raise StalledError(
                        f"no byte of the image has moved for {timeout:g} s",
                        remedy="see in criu's log what it waits for",
                    )
                self._changed.wait(min(deadline - now, 1.0))
            self._raise_error()
