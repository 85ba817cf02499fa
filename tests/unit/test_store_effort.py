"""`Profile.AUTO`: coding does as much as the sink leaves time for, and never more."""

from __future__ import annotations

import itertools
import time

import pytest

import gpuimg
from gpuimg.store import effort as effort_module
from gpuimg.store.choice import Chooser, Profile
from gpuimg.store.codec import Codec
from gpuimg.store.effort import Effort
from gpuimg.store.packwriter import PackWriter
from tests.fixtures.incremental import drifted, in_memory, places, put, restored, take
from tests.fixtures.store_data import KIB, MIB, floats

CHUNK = 64 * KIB
LADDER = [Profile.RAW, Profile.FAST, Profile.BALANCED, Profile.DENSE]
FIXED = [profile for profile in Profile if profile is not Profile.AUTO]
WINDOW = effort_module._WINDOW


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still."""
    monkeypatch.setattr(effort_module.time, "monotonic", lambda: 1000.0)


def window(effort, *, coding, writing=0.0, sealing=0.0, workers=2, slabs=32):
    """A window of coding and sinking, in seconds that all workers together (elapsed) and the sealer took."""
    for _ in range(slabs):
        for _ in range(workers):
            effort.wrote(1000.0 - writing / slabs)
        effort.sank(1000.0 - sealing / slabs)
        effort.coded(WINDOW // slabs, coding * workers / slabs)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("workers", [1, 2, 64])
@pytest.mark.parametrize("sink", ["writing", "sealing"])
def test_a_slow_sink_moves_it_step_by_step_to_dense_and_no_further(workers, sink):
    effort = Effort(Profile.AUTO, workers)
    seen = []
    for _ in range(6):
        window(effort, coding=0.1, workers=workers, **{sink: 1.0})
        seen.append(effort.profile)
    assert seen == [Profile.DENSE] * 6


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("workers", [1, 2, 64])
@pytest.mark.parametrize("sink", ["writing", "sealing"])
def test_slow_coding_moves_it_step_by_step_to_raw_and_no_further(workers, sink):
    effort = Effort(Profile.AUTO, workers)
    seen = []
    for _ in range(6):
        window(effort, coding=1.0, workers=workers, **{sink: 0.5})
        seen.append(effort.profile)
    assert seen == [Profile.FAST] + [Profile.RAW] * 5


@pytest.mark.usefixtures("clock")
def test_it_stays_where_coding_fills_the_time_of_the_sink():
    effort = Effort(Profile.AUTO, 2)
    for _ in range(6):
        window(effort, coding=0.5, sealing=1.0)
        assert effort.profile is Profile.BALANCED


@pytest.mark.usefixtures("clock")
def test_it_comes_back_from_either_end():
    effort = Effort(Profile.AUTO, 2)
    for _ in range(4):
        window(effort, coding=1.0, sealing=0.1)
    assert effort.profile is Profile.RAW
    seen = []
    for _ in range(4):
        window(effort, coding=0.01, sealing=9.0)
        seen.append(effort.profile)
    assert seen == [Profile.FAST, Profile.BALANCED, Profile.DENSE, Profile.DENSE]
    for _ in range(4):
        window(effort, coding=1.0, sealing=0.1)
    assert effort.profile is Profile.RAW


@pytest.mark.usefixtures("clock")
def test_a_profile_that_was_too_slow_is_not_tried_at_every_other_window():
    """Storing raw costs next to no coding, which is no reason to begin again what the sink outruns."""
    cost = {Profile.RAW: 0.001, Profile.FAST: 0.5, Profile.BALANCED: 1.0, Profile.DENSE: 3.0}
    effort = Effort(Profile.AUTO, 2)
    seen = []
    for _ in range(60):
        window(effort, coding=cost[effort.profile], sealing=0.2)
        seen.append(effort.profile)
    assert seen.count(Profile.RAW) > 50
    assert Profile.FAST in seen[4:], "but now and then: the machine may have become less busy"


@pytest.mark.usefixtures("clock")
def test_a_window_without_any_sinking_is_one_of_slow_coding():
    effort = Effort(Profile.AUTO, 2)
    window(effort, coding=0.1)
    assert effort.profile is Profile.FAST


@pytest.mark.usefixtures("clock")
def test_whatever_it_is_told_it_is_on_the_ladder():
    effort = Effort(Profile.AUTO, 3)
    times = [0.0, 1e-9, 0.3, 1.0, 1e9]
    for coding, writing, sealing in itertools.product(times, repeat=3):
        before = LADDER.index(effort.profile)
        window(effort, coding=coding, writing=writing, sealing=sealing, workers=3, slabs=1)
        assert effort.profile in LADDER
        assert abs(LADDER.index(effort.profile) - before) <= 1


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("profile", FIXED)
def test_a_fixed_profile_never_moves(profile):
    effort = Effort(profile, 2)
    for coding, sealing in itertools.product([0.0, 1.0, 1e9], repeat=2):
        window(effort, coding=coding, sealing=sealing)
        assert effort.profile is profile


# In sessions


@pytest.fixture
def tmp_path(tmp_path):
    with in_memory(tmp_path) as folder:
        yield folder


@pytest.fixture
def store(tmp_path):
    with gpuimg.init_store(tmp_path / "store", chunk_size=CHUNK) as opened:
        yield opened


@pytest.fixture
def slow_sink(monkeypatch):
    real = PackWriter.flush

    def flush(self):
        time.sleep(0.05)
        real(self)

    monkeypatch.setattr(PackWriter, "flush", flush)
    monkeypatch.setattr(effort_module, "_WINDOW", 2 * MIB)


@pytest.fixture
def slow_coding(monkeypatch):
    real = Chooser.encode

    def encode(self, chunk, base=None):
        if self.profile is not Profile.RAW:
            until = time.thread_time() + 0.004
            while time.thread_time() < until:
                pass
        return real(self, chunk, base)

    monkeypatch.setattr(Chooser, "encode", encode)
    monkeypatch.setattr(effort_module, "_WINDOW", 2 * MIB)


def ended_with(store, files, *, parent=None, profile=Profile.AUTO):
    """The profile in force at the end of a session, and the checkpoint."""
    with store.ingest(parent=parent, profile=profile) as session:
        put(session, files)
        checkpoint = session.commit()
        return session._effort.profile, checkpoint


@pytest.mark.usefixtures("slow_sink")
def test_a_session_with_a_slow_sink_codes_densely(store):
    data = floats(16 * MIB, 1, "bfloat16")
    profile, checkpoint = ended_with(store, {"bo": data})
    assert profile is Profile.DENSE
    assert restored(checkpoint) == {"bo": data}


@pytest.mark.usefixtures("slow_coding")
def test_a_session_with_slow_coding_stores_raw(store):
    data = floats(16 * MIB, 1, "bfloat16")
    profile, checkpoint = ended_with(store, {"bo": data})
    assert profile is Profile.RAW
    codecs = [place.codec for place in places(store, checkpoint, "bo")]
    assert codecs[0] == Codec.FLOAT_PLANES
    assert codecs.count(Codec.RAW) > len(codecs) / 3
    assert restored(checkpoint) == {"bo": data}
    # Against a parent as well.
    profile, second = ended_with(store, {"bo": drifted(data, 2)}, parent=checkpoint)
    assert profile is Profile.RAW
    assert restored(second) == {"bo": drifted(data, 2)}


@pytest.mark.usefixtures("slow_sink")
@pytest.mark.parametrize("profile", FIXED)
def test_a_session_of_a_fixed_profile_keeps_it_whatever_the_sink_does(store, profile):
    ended, checkpoint = ended_with(store, {"bo": floats(6 * MIB, 1)}, profile=profile)
    assert ended is profile
    coded = {place.codec for place in places(store, checkpoint, "bo")}
    assert coded == ({Codec.RAW} if profile is Profile.RAW else {Codec.FLOAT_PLANES})
    assert restored(checkpoint) == {"bo": floats(6 * MIB, 1)}


def test_a_raw_profile_stores_no_differences(store):
    first = take(store, {"bo": floats(MIB, 1)}, profile=Profile.RAW)
    second = take(store, {"bo": drifted(floats(MIB, 1), 2)}, parent=first, profile=Profile.RAW)
    assert second.statistics.raw_stored_bytes == MIB
    assert restored(second) == {"bo": drifted(floats(MIB, 1), 2)}
