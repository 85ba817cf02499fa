"""How much work goes into coding: a fixed profile, or one that follows the speed of the sink."""

from __future__ import annotations

import threading
import time

from gpuimg.store.choice import Profile

_LADDER = (Profile.RAW, Profile.FAST, Profile.BALANCED, Profile.DENSE)
# Bytes coded between two decisions.
_WINDOW = 64 << 20
# Coding may take this share of the time that the sink takes; below the lower one there is time for more.
_TOO_SLOW = 0.9
_TIME_LEFT = 0.25
# Decisions for which a profile that was too slow counts as such.
_REMEMBERED = 16


class Effort:
    """The profile in force. With `Profile.AUTO` it moves between no coding and dense coding.

    Coding runs on all cores beside the sink (packs being written and synced): as long as it needs clearly
    less time than the sink, a smaller output makes the whole faster; when it needs more, coding has become
    the bottleneck and less of it is done.
    """

    def __init__(self, profile: Profile, workers: int) -> None:
        self._adaptive = profile is Profile.AUTO
        self.profile = Profile.BALANCED if self._adaptive else profile
        self._workers = workers
        self._lock = threading.Lock()
        self._raw = 0
        self._coding = 0.0
        self._sinking = 0.0
        self._decisions = 0
        # By profile: what coding cost (seconds a byte) when it was too slow, and which decision that was.
        self._too_slow: dict[Profile, tuple[float, int]] = {}

    def coded(self, raw: int, cpu_seconds: float) -> None:
        """Tell of `raw` bytes that a worker has coded, in seconds of its processor time."""
        if not self._adaptive:
            return
        with self._lock:
            self._raw += raw
            self._coding += cpu_seconds / self._workers
            if self._raw >= _WINDOW:
                self._decide()

    def wrote(self, started: float) -> None:
        """Tell that a worker was writing since `started` (time.monotonic); others may have been as well."""
        self._add((time.monotonic() - started) / self._workers)

    def sank(self, started: float) -> None:
        """Tell that the sink as a whole was at work since `started` (time.monotonic)."""
        self._add(time.monotonic() - started)

    def _add(self, seconds: float) -> None:
        with self._lock:
            self._sinking += seconds

    def _decide(self) -> None:
        self._decisions += 1
        at = _LADDER.index(self.profile)
        if self._coding > _TOO_SLOW * self._sinking:
            self._too_slow[self.profile] = self._coding / self._raw, self._decisions
            at -= 1
        elif self._coding < _TIME_LEFT * self._sinking:
            at += 1
        to = _LADDER[max(0, min(at, len(_LADDER) - 1))]
        if not self._would_be_too_slow(to):
            self.profile = to
        self._raw = 0
        self._coding = self._sinking = 0.0

    def _would_be_too_slow(self, profile: Profile) -> bool:
        """Whether it was not long ago, and the sink has not become slower than coding was then."""
        if profile not in self._too_slow or _LADDER.index(profile) <= _LADDER.index(self.profile):
            return False
        cost, decision = self._too_slow[profile]
        recent = self._decisions - decision <= _REMEMBERED
        return recent and cost * self._raw > _TOO_SLOW * self._sinking
