"""A power cut after any call: what was reported is durable, and everything it refers to before it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

import gpuimg
from gpuimg.store import pack
from gpuimg.store.index import Index
from gpuimg.store.ingest import Session
from gpuimg.store.store import Store

from . import lab
from .power import Disk

Expected = dict[str, lab.Files]


class Cuts:
    """Cuts the power after every call, in both extremes, with and without the index of that moment."""

    def __init__(self, store: Store, ram: Path, expected: Expected, patch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.ram = ram
        self.expected = expected
        self.count = 0
        self.index = store._context.index
        (ram / "attic").mkdir()
        self.disk = Disk(store.path, ram / "attic", patch, self.event)
        self._patch = patch
        real = Index._write

        def write(index: Index, action: Callable[[object], object]) -> object:
            result = real(index, action)
            if index.folder == store.path / "index":
                self.index = index
                self.event("index", store.path)
            return result

        patch.setattr(Index, "_write", write)

    def event(self, name: str, path: Path) -> None:
        if name == "mkdir" or (name == "fsync" and path.parent.name == "leases"):
            return
        with self.disk._lock:
            for kept_only in (True, False):
                self.cut(f"{name} {path.relative_to(self.store.path)}", kept_only=kept_only)

    def cut(self, after: str, *, kept_only: bool) -> None:
        found = self.disk.after_power_cut(self.ram / "found", kept_only=kept_only)
        # While nobody has the store open, the next boot may as well find no index.
        with contextlib.suppress(lmdb.Error):
            self.index._env.copy(str(found / "index"))
        try:
            self.count += 1
            if self.count % 3 == 0:
                shutil.rmtree(found / "index")
                (found / "index").mkdir()
            lab.check(found, self.expected, self.ram)
        except Exception as error:
            raise AssertionError(f"after {after}, kept_only={kept_only}: {error}") from error
        finally:
            shutil.rmtree(found)


@pytest.fixture
def cut_after_each_call(ram: Path) -> Iterator[Callable[[Store, Expected], Cuts]]:
    with contextlib.ExitStack() as stack:

        def start(store: Store, expected: Expected) -> Cuts:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            return Cuts(store, ram, expected, patch)

        yield start


Start = Callable[[Store, Expected], Cuts]


@pytest.fixture
def store(ram: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(pack, "TARGET_SIZE", lab.SMALL_PACK)
    with gpuimg.init_store(ram / "store") as store:
        yield store


@pytest.mark.slow
@pytest.mark.parametrize("incremental", [False, True])
def test_a_power_cut_during_an_import_loses_nothing(
    store: Store, cut_after_each_call: Start, incremental: bool
) -> None:
    expected = {lab.take(store, lab.contents(1), tag="t"): lab.contents(1)}
    cuts = cut_after_each_call(store, expected)
    files = lab.following(lab.contents(1)) if incremental else lab.contents(2)
    made = lab.take(store, files, tag="t", parent="t" if incremental else None)
    expected[made] = files
    assert bool(store.checkpoint("t").statistics.delta_bytes) == incremental
    cuts.event("commit", store.path)
    assert cuts.count > 20
    assert_order(cuts.disk.log, f"manifests/{made}")


@pytest.mark.parametrize("forgotten", ["gpuimg.store.files.sync_folder", "os.fsync"])
def test_a_forgotten_sync_would_be_noticed(store: Store, cut_after_each_call: Start, forgotten: str) -> None:
    """This holds the model, not the store, to its promise."""
    expected: Expected = {}
    cuts = cut_after_each_call(store, expected)

    def work() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forgotten, lambda _: None)
            made = lab.take(store, lab.contents(1))
        expected[made] = lab.contents(1)
        cuts.event("commit", store.path)

    with pytest.raises(AssertionError, match="kept_only"):
        work()


def assert_order(log: list[tuple[str, str]], manifest: str) -> None:
    """The steps of a writer, as documented."""
    at = log.index(("rename", manifest))
    packs = [i for i, (name, path) in enumerate(log) if name == "rename" and path.startswith("packs/")]
    assert packs
    for i in packs:
        folder = log[i][1].rpartition("/")[0]
        assert i < log.index(("fsync", folder), i) < at
        assert i < log.index(("fsync", "packs"), i) < at
    tag = log.index(("rename", "tags/t"))
    assert at < log.index(("fsync", "manifests"), at) < tag < log.index(("fsync", "tags"), tag)


@pytest.mark.slow
def test_a_power_cut_during_rm_and_gc_loses_nothing(store: Store, cut_after_each_call: Start) -> None:
    expected: Expected = {}
    for number in (1, 2, 3):
        expected[lab.take(store, lab.contents(number))] = lab.contents(number)
    doomed = next(iter(expected))
    del expected[doomed]
    cuts = cut_after_each_call(store, expected)
    store.remove(doomed)
    store.gc()
    assert any(name == "unlink" and path.endswith(".pack") for name, path in cuts.disk.log)
    assert cuts.count > 20


@pytest.mark.slow
def test_a_power_cut_while_a_parent_is_collected_loses_nothing(
    store: Store, cut_after_each_call: Start
) -> None:
    """Most of it goes; what others are coded against moves to another pack."""
    first = lab.contents(1)
    parent = lab.take(store, first)
    files = {"buffer.bin": lab.following(first)["buffer.bin"]}
    expected: Expected = {lab.take(store, files, parent=parent): files}
    cuts = cut_after_each_call(store, expected)
    store.remove(parent)
    before = lab.pack_bytes(store.path)
    assert store.gc().deleted_packs
    assert lab.pack_bytes(store.path) < before
    assert cuts.count > 10


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["alone", "with its base"])
def test_a_power_cut_after_a_rescue_loses_nothing(
    store: Store, cut_after_each_call: Start, shared: str
) -> None:
    expected: Expected = {}
    files = lab.contents(1)
    doomed = [lab.take(store, files)]
    if shared == "with its base":
        files = lab.following(files)
        doomed.append(lab.take(store, files, parent=doomed[0]))
    cuts = cut_after_each_call(store, expected)
    with store.ingest(parent=store.checkpoint(doomed[-1])) as session:
        put(session, files)
        for each in doomed:
            store.remove(each)
        assert store.gc().condemned_packs
        expected[session.commit(tag="t").id] = files
    assert not store.checkpoint("t").statistics.new_chunks
    cuts.event("commit", store.path)


@pytest.mark.slow
def test_a_pack_of_a_writer_killed_before_its_name_was_durable_may_be_counted_on(
    store: Store, cut_after_each_call: Start
) -> None:
    """Another writer finds it in the index, and is reported committed."""
    expected: Expected = {}
    cuts = cut_after_each_call(store, expected)

    with pytest.MonkeyPatch.context() as patch:

        def killed(*_: object) -> None:
            raise KilledError

        patch.setattr("gpuimg.store.files.sync_folder", killed)
        with pytest.raises(KilledError):
            lab.take(store, lab.contents(1))
    store.close()
    assert lab.pack_bytes(store.path)
    with gpuimg.open_store(store.path) as again:
        cuts.index = again._context.index
        expected[lab.take(again, lab.contents(1), tag="t")] = lab.contents(1)
        cuts.event("commit", again.path)


def test_a_checkpoint_whose_removal_was_not_durable_does_not_come_back_without_its_packs(
    store: Store, cut_after_each_call: Start
) -> None:
    expected: Expected = {}
    cuts = cut_after_each_call(store, expected)
    doomed = lab.take(store, lab.contents(1))
    with pytest.MonkeyPatch.context() as patch:

        def killed(*_: object) -> None:
            raise KilledError

        patch.setattr("gpuimg.store.files.sync_folder", killed)
        with pytest.raises(KilledError):
            store.remove(doomed)
    assert store.gc().deleted_packs
    cuts.event("gc", store.path)


class KilledError(BaseException):
    pass


def put(session: Session, files: lab.Files) -> None:
    for name, data in files.items():
        file = session.file(name)
        file.write(data)
        file.close()
    session.workers.drain()


def test_the_index_syncs_its_transactions(store: Store) -> None:
    flags = store._context.index._env.flags()
    assert flags["sync"] and flags["metasync"] and not flags["writemap"] and not flags["map_async"]
