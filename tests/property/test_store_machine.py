"""The store against a dictionary: whatever happens in whatever order, live checkpoints come back."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import gpuimg
from gpuimg.errors import UnknownReferenceError
from gpuimg.store import ingest as ingest_module
from tests.fixtures.mini_reader import MiniStore
from tests.fixtures.store_data import KIB, PAGE, floats, noise

EXAMPLES = int(os.environ.get("GPUIMG_FUZZ_EXAMPLES", "25"))
CHUNK = 64 * KIB
NAMES = ["pages-1.img", "pages-2.img", "weights", "core-1.img", "inventory.img"]
TAGS = ["a", "b", "c"]
Files = dict[str, bytes]


def contents(kind: str, seed: int, size: int) -> bytes:
    if kind == "zero":
        return bytes(size)
    if kind == "bf16":
        return floats(size, seed, "bfloat16")
    if kind == "sparse":
        return noise(size // 3, seed) + bytes(size // 3) + noise(size - 2 * (size // 3), seed)
    return noise(size, seed)


files = st.dictionaries(
    st.sampled_from(NAMES),
    st.builds(
        contents,
        st.sampled_from(["noise", "zero", "bf16", "sparse"]),
        # Few seeds: checkpoints share chunks.
        st.integers(0, 3),
        st.sampled_from([0, 1, PAGE, PAGE + 1, CHUNK, CHUNK + 1, 20 * PAGE, 300_000, 3_000_001]),
    ),
    max_size=4,
)


# Most often numbers change a little, which is what makes chains of bases.
CHANGES = ["trained"] * 8 + ["none", "inserted", "removed", "zeroed", "grown", "shrunk", "replaced"]


def changed(data: bytes, kind: str, seed: int) -> bytes:
    """What the contents of a file are in the next checkpoint."""
    rng = np.random.default_rng(seed)
    place = int(rng.integers(0, len(data) // PAGE + 1)) * PAGE
    if kind == "trained":
        words = np.frombuffer(data[: len(data) // 2 * 2], dtype="<u2")
        return (words + (rng.random(len(words)) < 0.1)).astype("<u2").tobytes() + data[len(words) * 2 :]
    if kind == "inserted":
        return data[:place] + noise(3 * PAGE, seed) + data[place:]
    if kind == "removed":
        return data[:place] + data[place + 2 * PAGE :]
    if kind == "zeroed":
        return (data[:place] + bytes(20 * PAGE) + data[place + 20 * PAGE :])[: len(data)]
    if kind == "grown":
        return data + noise(5000, seed)
    if kind == "shrunk":
        return data[: len(data) // 2]
    return noise(len(data), seed) if kind == "replaced" else data


changes = st.lists(
    st.tuples(st.sampled_from(CHANGES), st.integers(0, 3)), min_size=len(NAMES), max_size=len(NAMES)
)


def following(files_: Files, drawn: list[tuple[str, int]]) -> Files:
    """The files of the next checkpoint: each is changed in its own way, at most up to 4 MB."""
    pairs = zip(files_.items(), drawn, strict=False)
    return {name: changed(data, kind, seed)[:4_000_000] for (name, data), (kind, seed) in pairs}


def ingest(store, files_, *, commit, tag=None, parent=None):
    session = store.ingest(parent=store.checkpoint(parent) if parent else None)
    for name, data in files_.items():
        file = session.file(name)
        file.write(data)
        file.close()
    if commit:
        with session:
            return session.commit(tag=tag)
    session.workers.drain()
    return session


class StoreMachine(RuleBasedStateMachine):
    """`checkpoints` and `tags` are what the store must hold.

    What a crash leaves depends on how threads ran, so that no rule has a precondition: hypothesis wants
    to draw the same again.
    """

    @initialize()
    def begin(self):
        self.folder = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.root = self.folder / "store"
        self.store = gpuimg.init_store(self.root, chunk_size=CHUNK)
        self.checkpoints: dict[str, Files] = {}
        self.tags: dict[str, str] = {}
        # Those that were taken without a parent: they are cut where another full one would be.
        self.full: set[str] = set()
        # What checkpoints held that are gone: some of it may still lie in packs.
        self.past: list[Files] = []
        self.sessions: list[tuple[ingest_module.Session, Files]] = []
        # Most rules want something that is there.
        self.take(
            {"weights": contents("bf16", 0, 300_000), "pages-1.img": contents("sparse", 1, 300_000)}, "a"
        )

    def teardown(self):
        if hasattr(self, "store"):
            for session, _ in self.sessions:
                session.abandon()
            self.store.close()
            shutil.rmtree(self.folder)

    def pick(self, number: int, among: set[str] | None = None) -> str:
        """One of the checkpoints."""
        found = [each for each in self.checkpoints if among is None or each in among]
        return found[number % len(found)]

    # Writing

    @rule(drawn=files, tag=st.sampled_from([None, *TAGS]))
    def take(self, drawn, tag):
        checkpoint = ingest(self.store, drawn, commit=True, tag=tag)
        self.full.add(checkpoint.id)
        self.took(checkpoint, drawn, tag)

    def took(self, checkpoint, drawn, tag):
        self.checkpoints[checkpoint.id] = drawn
        if tag:
            self.tags[tag] = checkpoint.id

    @rule(number=st.integers(0, 99), tag=st.sampled_from([None, *TAGS]))
    def take_again(self, number, tag):
        if not self.full & self.checkpoints.keys():
            return
        again = self.checkpoints[self.pick(number, self.full)]
        checkpoint = ingest(self.store, again, commit=True, tag=tag)
        assert checkpoint.statistics.new_chunks == 0
        self.full.add(checkpoint.id)
        self.took(checkpoint, again, tag)

    @rule(number=st.integers(0, 99), tag=st.sampled_from([None, *TAGS]))
    def take_what_was_there_once(self, number, tag):
        if self.past:
            self.take(self.past[number % len(self.past)], tag)

    @rule(number=st.integers(0, 99), drawn=changes, tag=st.sampled_from([None, *TAGS]))
    def take_incrementally(self, number, drawn, tag):
        if not self.checkpoints:
            return
        parent = self.pick(number)
        after = following(self.checkpoints[parent], drawn)
        checkpoint = ingest(self.store, after, commit=True, tag=tag, parent=parent)
        assert checkpoint.parent == parent
        if after == self.checkpoints[parent]:
            assert checkpoint.statistics.new_chunks == checkpoint.statistics.deduplicated_bytes == 0
        self.took(checkpoint, after, tag)

    @rule(number=st.integers(0, 99), drawn=changes)
    def take_a_series(self, number, drawn):
        """Longer than chains of bases may be."""
        for step in range(6):
            later = [(kind, seed + step) for kind, seed in drawn]
            self.take_incrementally(number if not step else len(self.checkpoints) - 1, later, None)

    @rule(drawn=files)
    def begin_slowly(self, drawn):
        """A writer that goes on for a while: what happens meanwhile must not hurt it."""
        if len(self.sessions) == 3:
            return
        self.sessions.append((ingest(self.store, drawn, commit=False), drawn))

    @rule(number=st.integers(0, 99), drawn=changes)
    def begin_slowly_with_a_parent(self, number, drawn):
        """Whatever becomes of the parent meanwhile."""
        if len(self.sessions) == 3 or not self.checkpoints:
            return
        parent = self.pick(number)
        after = following(self.checkpoints[parent], drawn)
        self.sessions.append((ingest(self.store, after, commit=False, parent=parent), after))

    @rule(number=st.integers(0, 9), tag=st.sampled_from([None, *TAGS]))
    def end_slowly(self, number, tag):
        if not self.sessions:
            return
        session, drawn = self.sessions.pop(number % len(self.sessions))
        with session:
            checkpoint = session.commit(tag=tag)
        self.took(checkpoint, drawn, tag)

    @rule(number=st.integers(0, 9))
    def give_up(self, number):
        if not self.sessions:
            return
        self.sessions.pop(number % len(self.sessions))[0].abandon()

    # Keeping

    @rule(number=st.integers(0, 99), tag=st.sampled_from(TAGS))
    def tag(self, number, tag):
        if not self.checkpoints:
            return
        self.tags[tag] = self.pick(number)
        self.store.set_tag(tag, self.tags[tag])

    @rule(tag=st.sampled_from(TAGS))
    def untag(self, tag):
        if tag in self.tags:
            self.store.remove_tag(tag)
            del self.tags[tag]
        else:
            with pytest.raises(UnknownReferenceError):
                self.store.remove_tag(tag)

    @rule(number=st.integers(0, 99))
    def remove(self, number):
        if self.checkpoints:
            self.gone(self.pick(number))

    def gone(self, chosen: str) -> None:
        self.store.remove(chosen)
        self.past.append(self.checkpoints.pop(chosen))
        self.tags = {tag: target for tag, target in self.tags.items() if target != chosen}

    def parents(self) -> dict[str, str]:
        """The parents, where they are there, by the ids of their children."""
        found = {each: self.store.checkpoint(each).parent for each in self.checkpoints}
        return {child: parent for child, parent in found.items() if parent in self.checkpoints}

    @rule(number=st.integers(0, 99))
    def remove_a_parent_and_collect(self, number):
        if parents := set(self.parents().values()):
            self.gone(self.pick(number, parents))
            self.store.gc()

    @rule(number=st.integers(0, 99))
    def keep_one_file_of_a_child_and_collect(self, number):
        """Packs stay for the sake of a part of what is in them."""
        if not (parents := self.parents()):
            return
        child = self.pick(number, set(parents))
        for name, data in list(self.checkpoints[child].items())[:1]:
            self.take({name: data}, None)
        self.gone(parents[child])
        self.gone(child)
        self.store.gc()

    @rule()
    def collect(self):
        self.store.gc()

    @rule()
    def collect_until_nothing_is_left(self):
        if not self.sessions:
            self.store.gc()
            assert self.store.stats().condemned_packs == 0
            if not self.checkpoints:
                assert not list((self.root / "packs").rglob("*.pack"))

    @rule()
    def repair(self):
        report = gpuimg.repair_store(self.root)
        assert (report.hurt, report.set_aside, report.rebuilt_packs) == ((), (), 0)

    @rule()
    def verify(self):
        report = self.store.verify()
        assert report.faults == ()
        assert report.checkpoints == len(self.checkpoints)

    @rule(delete_index=st.booleans())
    def reopen(self, delete_index):
        for session, _ in self.sessions:
            session.abandon()
        self.sessions = []
        self.store.close()
        if delete_index:
            shutil.rmtree(self.root / "index")
        self.store = gpuimg.open_store(self.root)

    # Crashes: a child does it and is killed in the middle

    @rule(drawn=files, steps=st.integers(0, 60))
    def crash_while_writing(self, drawn, steps):
        self.crash(lambda store: ingest(store, drawn, commit=True).id, steps, drawn)

    @rule(number=st.integers(0, 99), drawn=changes, steps=st.integers(0, 60))
    def crash_while_writing_incrementally(self, number, drawn, steps):
        if not self.checkpoints:
            return
        parent = self.pick(number)
        after = following(self.checkpoints[parent], drawn)
        self.crash(lambda store: ingest(store, after, commit=True, parent=parent).id, steps, after)

    @rule(steps=st.integers(0, 60))
    def crash_while_collecting(self, steps):
        self.crash(lambda store: store.gc(), steps, None)

    @rule(steps=st.integers(0, 60))
    def crash_while_repairing(self, steps):
        self.crash(lambda store: gpuimg.repair_store(store.path), steps, None)

    def crash(self, action, steps, drawn):
        """Run `action` in a child that kills itself at its n-th change of the folder."""
        before = set(self.checkpoints)
        if not (child := os.fork()):
            try:
                with gpuimg.open_store(self.root) as store:
                    _kill_at(steps)
                    action(store)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        found = {path.name for path in (self.root / "manifests").iterdir()}
        assert before <= found
        for made in found - before:
            # Committed, though nobody was told.
            self.checkpoints[made] = drawn
        # The next opening of the store tidies up.
        with gpuimg.open_store(self.root):
            pass

    # What must always hold

    @invariant()
    def the_lists_agree(self):
        if hasattr(self, "store"):
            assert self.store.tags() == self.tags
            assert {each.id for each in self.store.checkpoints()} == set(self.checkpoints)

    @rule(number=st.integers(0, 99), offset=st.integers(0, 3_100_000), length=st.integers(0, 200_000))
    def read(self, number, offset, length):
        if not self.checkpoints:
            return
        chosen = self.pick(number)
        checkpoint = self.store.checkpoint(chosen)
        for name, data in self.checkpoints[chosen].items():
            assert checkpoint.read(name, offset, length) == data[offset : offset + length]
            assert b"".join(bytes(buffer) for buffer in checkpoint.stream(name)) == data

    @rule()
    def everything_comes_back_by_a_reader_that_knows_only_the_format(self):
        mini = MiniStore(self.root)
        assert {chosen.hex() for chosen in mini.checkpoints} == set(self.checkpoints)
        for chosen, files_ in self.checkpoints.items():
            for name, data in files_.items():
                assert mini.read(bytes.fromhex(chosen), name) == data

    @rule()
    def everything_comes_back(self):
        for chosen, files_ in self.checkpoints.items():
            checkpoint = self.store.checkpoint(chosen)
            assert {name: checkpoint.read(name) for name in checkpoint.files} == files_


def _kill_at(steps: int) -> None:
    """Kill this process at the n-th write, rename, unlink or fsync from here, before or after it is done."""
    left = steps // 2
    after = steps % 2

    def counted(real):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **options)
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in ("fsync", "pwritev", "write"):
        setattr(os, name, counted(getattr(os, name)))
    for name in ("rename", "unlink"):
        setattr(Path, name, counted(getattr(Path, name)))


def machine_settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_live_checkpoints_come_back_whatever_happens():
    run_state_machine_as_test(StoreMachine, settings=machine_settings(EXAMPLES, 30))


def test_a_fixed_long_history_ends_well():
    """The same rules in a fixed order, many of them: cheap, and the same in every run."""
    rng = random.Random(7)
    machine = StoreMachine()
    machine.begin()
    try:
        for _ in range(160):
            drawn = {
                name: contents(
                    rng.choice(["noise", "bf16", "sparse"]), rng.randrange(4), rng.choice([1, 5000, 400_000])
                )
                for name in rng.sample(NAMES, 2)
            }
            tag, number = rng.choice([None, *TAGS]), rng.randrange(100)
            steps = [(rng.choice(CHANGES), rng.randrange(4)) for _ in NAMES]
            action = rng.choice(
                [
                    lambda drawn=drawn, tag=tag: machine.take(drawn, tag),
                    lambda drawn=drawn: len(machine.sessions) < 3 and machine.begin_slowly(drawn),
                    lambda number=number, tag=tag: machine.sessions and machine.end_slowly(number, tag),
                    lambda number=number, tag=tag: machine.checkpoints and machine.take_again(number, tag),
                    lambda number=number, steps=steps, tag=tag: machine.take_incrementally(
                        number, steps, tag
                    ),
                    lambda number=number, steps=steps: machine.take_a_series(number, steps),
                    lambda number=number, steps=steps: machine.begin_slowly_with_a_parent(number, steps),
                    lambda number=number: machine.remove_a_parent_and_collect(number),
                    lambda number=number: machine.keep_one_file_of_a_child_and_collect(number),
                    lambda number=number, tag=tag: machine.take_what_was_there_once(number, tag),
                    lambda number=number, steps=steps: machine.crash_while_writing_incrementally(
                        number % 60, steps, number % 60
                    ),
                    lambda number=number: machine.checkpoints and machine.remove(number),
                    machine.collect,
                    machine.repair,
                    machine.verify,
                    lambda drawn=drawn, number=number: machine.crash_while_writing(drawn, number % 60),
                    lambda number=number: machine.crash_while_collecting(number % 60),
                    lambda number=number: machine.crash_while_repairing(number % 60),
                    machine.everything_comes_back,
                ]
            )
            action()
            machine.the_lists_agree()
        machine.verify()
        machine.everything_comes_back()
        machine.everything_comes_back_by_a_reader_that_knows_only_the_format()
    finally:
        machine.teardown()
