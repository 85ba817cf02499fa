"""Threads that run the stages of ingest, and what each stage cost them.

The stages (hash, code, write) run in C and let the interpreter lock go, so as many threads as there
are cores keep all cores busy.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from gpuimg.errors import StalledError

STALL_SECONDS = 600.0


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(slots=True)
class StageTimes:
    """CPU seconds of all workers, by stage.

    `look` covers index look-ups, `base` reading the chunks that others are coded against.
    """

    read: float = 0.0
    cut: float = 0.0
    fingerprint: float = 0.0
    hash: float = 0.0
    look: float = 0.0
    base: float = 0.0
    code: float = 0.0
    write: float = 0.0

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the calling thread's CPU time within the block to a stage."""
        start = time.thread_time()
        try:
            yield
        finally:
            setattr(self, stage, getattr(self, stage) + time.thread_time() - start)

    def add(self, other: StageTimes) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


def stalled() -> StalledError:
    """What to raise when nothing has moved for STALL_SECONDS."""
    return StalledError(
        f"the store made no progress for {STALL_SECONDS:.0f} seconds",
        remedy="check the disk and the kernel log",
    )


class Job(ABC):
    """Something a worker does."""

    @abstractmethod
    def run(self, worker: int) -> None:
        """Do it, on the thread of that number."""

    @abstractmethod
    def cancel(self) -> None:
        """Give up what it holds; called instead of `run` after a failure."""


class Workers:
    """A fixed set of threads with one queue. The first exception stops everything and is kept."""

    def __init__(self, count: int, name: str = "gpuimg-work") -> None:
        self.count = count
        self.failure: BaseException | None = None
        self.finished_jobs = 0
        self._queue: deque[Job] = deque()
        self._condition = threading.Condition()
        self._unfinished = 0
        self._closing = False
        self._threads = [
            threading.Thread(target=self._loop, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, *, first: bool = False) -> None:
        """Queue a job; `first` puts it before the others."""
        with self._condition:
            if first:
                self._queue.appendleft(job)
            else:
                self._queue.append(job)
            self._unfinished += 1
            self._condition.notify()

    def fail(self, error: BaseException) -> None:
        """Record a failure met outside the workers."""
        with self._condition:
            if self.failure is None:
                self.failure = error

    def check(self) -> None:
        """Raise the first failure, if there was one."""
        if self.failure is not None:
            raise self.failure

    def drain(self) -> None:
        """Wait until every job is done; raises the first failure."""
        with self._condition:
            done = self.finished_jobs
            while self._unfinished:
                if not self._condition.wait(STALL_SECONDS):
                    if self.finished_jobs == done:
                        raise stalled()
                    done = self.finished_jobs
        self.check()

    def close(self) -> None:
        """Cancel what is queued and end the threads."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _loop(self, number: int) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._closing:
                    self._condition.wait()
                if not self._queue:
                    return
                job = self._queue.popleft()
                stopped = self._closing or self.failure is not None
            try:
                if stopped:
                    job.cancel()
                else:
                    job.run(number)
            except BaseException as error:
                self.fail(error)
            with self._condition:
                self._unfinished -= 1
                self.finished_jobs += 1
                if not self._unfinished:
                    self._condition.notify_all()


def run_on_all_cores(step: Callable[[], bool], count: int) -> None:
    """Call `step` from `count` threads until it returns False in each; raises the first exception."""
    failure: list[BaseException] = []

    def loop() -> None:
        try:
            while not failure and step():
                pass
        except BaseException as error:
            failure.append(error)

    threads = [threading.Thread(target=loop, name="gpuimg-read", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failure:
        raise failure[0]
