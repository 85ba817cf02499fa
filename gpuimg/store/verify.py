"""Checking a store down to the bytes, and naming what every fault hurts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuimg.errors import DamagedError, GpuimgError, NewerFormatError, StoredDataError
from gpuimg.store import codec, files
from gpuimg.store.context import Context
from gpuimg.store.hashing import checksum, identify
from gpuimg.store.index import Place
from gpuimg.store.layout import parse_id
from gpuimg.store.model import Manifest, Progress
from gpuimg.store.pack import (
    HAS_BASE,
    MAX_CHAIN,
    MAX_RAW,
    OBJECT_HEADER_SIZE,
    ObjectHeader,
    PackInfo,
    TocEntry,
    decode_header,
)
from gpuimg.store.packset import load_pack
from gpuimg.store.reports import Fault, FaultKind, VerifyReport
from gpuimg.store.workers import cores, run_on_all_cores

_REPAIR = "run `gpuimg repair`"
_REPLACE = "run `gpuimg repair`, then take the checkpoint again or bring the lost pack back from a backup"
_BEGINNING = 8
Location = tuple[int, int]


@dataclass(slots=True)
class PackCheck:
    """What a look at every object of one pack found: damaged ordinals with reasons, bytes decoded."""

    raw_bytes: int = 0
    damaged: dict[int, str] = field(default_factory=dict)


def check_payload(context: Context, header: ObjectHeader, payload: bytes, target: memoryview) -> None:
    """Decode and hash an object's payload, into `target` of at least its raw length.

    Of an object whose base cannot be had the checksum alone is looked at: it is as it was written, and nobody
    need miss the base.

    Raises
    ------
    GpuimgError
        It is damaged.
    """
    base = None
    if header.flags & HAS_BASE:
        if checksum(payload) != header.checksum:
            raise DamagedError("its payload does not match its checksum")
        for _ in _bases(context, header.base):
            # Raises if there is no end of them.
            continue
        try:
            base = memoryview(context.reader.chunk(header.base))
        except StoredDataError:
            return
    out = target[: header.raw]
    codec.decode(header.codec, memoryview(payload), out, header.element_size, base)
    if identify(out) != header.id:
        raise DamagedError("its bytes do not match its hash")


def _bases(context: Context, base: bytes) -> Iterator[tuple[bytes, Place | None]]:
    """All that rests one on the other from a base on, with places; the last is lost or stands alone."""
    for _ in range(MAX_CHAIN):
        place = context.index.lookup([base])[0]
        yield base, place
        if place is None or not place.base:
            return
        base = place.base
    raise DamagedError("its chain of bases does not end")


def check_objects(context: Context, info: PackInfo) -> PackCheck:
    """Read, decode and hash every object of a pack (see `check_payload`)."""
    check = PackCheck()
    target = memoryview(bytearray(MAX_RAW))
    with context.folder.pack(info.id).open("rb", buffering=0) as stream:
        for ordinal, (offset, header) in enumerate(info.toc):
            data = files.pread_exactly(stream.fileno(), OBJECT_HEADER_SIZE + header.stored, offset)
            try:
                if decode_header(data[:OBJECT_HEADER_SIZE]) != header:
                    raise DamagedError("its header contradicts the table of contents")
                check_payload(context, header, data[OBJECT_HEADER_SIZE:], target)
            except GpuimgError as error:
                check.damaged[ordinal] = error.what
            check.raw_bytes += header.raw
    return check


class _Verification:
    """One run over the whole store."""

    def __init__(self, context: Context, *, quick: bool, progress: Progress) -> None:
        self.context = context
        self.progress = progress
        self.quick = quick
        self.faults: list[Fault] = []
        self.objects = 0
        self.raw_bytes = 0
        self.packs = 0
        self.checkpoints = 0
        # Locations whose object is damaged or whose pack is lost, with the reason.
        self.bad: dict[Location, str] = {}
        self.bad_packs: dict[int, str] = {}
        # The first 8 bytes of the id of every object, by pack: is there what the index says?
        self.beginnings: dict[int, bytes] = {}
        # Chunks that lie in packs and are not in the index.
        self.unindexed: set[bytes] = set()
        self._lock = threading.Lock()

    def run(self) -> VerifyReport:
        self._check_foreign_files()
        self._check_packs()
        # Checkpoints are read after the packs: a fault in a pack is then named with what it hurts.
        hurt: set[Location] = set()
        for checkpoint_id in self.context.catalogue.ids():
            hurt |= self._check_checkpoint(checkpoint_id)
        for location in sorted(self.bad.keys() - hurt):
            what = f"{self.bad[location]}; no checkpoint needs it"
            self.faults.append(Fault(FaultKind.DAMAGED_CHUNK, what, _REPAIR))
        self._check_tags()
        return self.report()

    def report(self) -> VerifyReport:
        return VerifyReport(self.checkpoints, self.packs, self.objects, self.raw_bytes, tuple(self.faults))

    def check_one(self, checkpoint_id: bytes) -> VerifyReport:
        """Verify one checkpoint with the packs it lies in."""
        manifest = self.context.catalogue.load(checkpoint_id)
        self._check_packs(self._packs_of(manifest))
        self._check_checkpoint(checkpoint_id)
        return self.report()

    def _packs_of(self, manifest: Manifest) -> set[int]:
        numbers = set()
        for entry in manifest.files:
            for ref in entry.segments:
                try:
                    ids = [ref.id, *self.context.reader.segment(ref).chunk_ids()]
                except (StoredDataError, NewerFormatError):
                    ids = [ref.id]
                for _ in range(MAX_CHAIN + 1):
                    places = [place for place in self.context.index.lookup(ids) if place]
                    numbers |= {place.pack for place in places}
                    ids = [place.base for place in places if place.base]
        return numbers

    def _check_foreign_files(self) -> None:
        folder = self.context.folder
        for path in folder.packs.rglob("*"):
            pack_id = parse_id(path.name, ".pack")
            if not (pack_id and path == folder.pack(pack_id)) and path.exists() and not path.is_dir():
                self._foreign(path.relative_to(folder.root).as_posix())
        for path in folder.manifests.iterdir():
            if parse_id(path.name) is None:
                self._foreign(path.relative_to(folder.root).as_posix())

    def _foreign(self, name: str) -> None:
        self.faults.append(
            Fault(FaultKind.FOREIGN_FILE, f"{name} does not belong here", "see what it is and remove it")
        )

    def _check_packs(self, only: set[int] | None = None) -> None:
        packs = {n: e for n, e in self.context.index.packs().items() if only is None or n in only}
        self.progress.total = sum(entry.size for entry in packs.values())
        work = iter(packs.items())

        def step() -> bool:
            with self._lock:
                item = next(work, None)
            if item is None:
                return False
            self._check_pack(item[0], item[1].id)
            with self._lock:
                self.progress.done += item[1].size
            return True

        run_on_all_cores(step, cores())
        if only is None:
            indexed = {entry.id for entry in packs.values()}
            for pack_id in self.context.folder.list_packs():
                if pack_id not in indexed:
                    self._check_unindexed_pack(pack_id)

    def _check_unindexed_pack(self, pack_id: bytes) -> None:
        """A pack that a writer has just sealed is fine; one that could not be indexed is damaged."""
        try:
            load_pack(self.context.folder.pack(pack_id), self.context.config, pack_id)
        except FileNotFoundError:
            return
        except (DamagedError, NewerFormatError) as error:
            what = f"pack {pack_id.hex()[:16]}: {error.what}"
            self.faults.append(Fault(FaultKind.DAMAGED_PACK, what, _REPAIR))

    def _check_pack(self, number: int, pack_id: bytes) -> None:
        name = f"pack {pack_id.hex()[:16]}"
        try:
            info = load_pack(self.context.folder.pack(pack_id), self.context.config, pack_id)
            check = PackCheck() if self.quick else check_objects(self.context, info)
        except FileNotFoundError:
            # A collector may have condemned it since the index was read.
            if self.context.index.pack(number) is not None:
                self._bad_pack(number, f"{name} is lost")
            return
        except (DamagedError, NewerFormatError) as error:
            self._bad_pack(number, f"{name}: {error.what}")
            return
        stale = self._stale_entries(number, info)
        with self._lock:
            self.beginnings[number] = b"".join(chunk_id[:_BEGINNING] for chunk_id in info.toc.ids())
            self.packs += 1
            self.objects += len(info.toc)
            self.raw_bytes += check.raw_bytes
            for ordinal, why in check.damaged.items():
                offset = info.toc[ordinal].offset
                self.bad[number, ordinal] = f"the chunk in {name} at offset {offset} is damaged: {why}"
            if stale:
                what = f"the index does not match {name} in {stale} entries"
                self.faults.append(Fault(FaultKind.STALE_INDEX, what, _REPAIR))

    def _bad_pack(self, number: int, what: str) -> None:
        with self._lock:
            self.bad_packs[number] = what
            self.faults.append(
                Fault(FaultKind.DAMAGED_PACK, what, f"{_REPAIR}, which saves what is readable")
            )

    def _stale_entries(self, number: int, info: PackInfo) -> int:
        """Entries that place a chunk of this pack wrongly.

        That the index lacks a chunk is a fault only if a checkpoint needs it: a collector that deletes
        one of two copies forgets the chunk.
        """
        ids = info.toc.ids()
        wrong = 0
        for chunk_id, place in zip(ids, self.context.index.lookup(ids), strict=True):
            if place is None:
                with self._lock:
                    self.unindexed.add(chunk_id)
            elif place.pack != number and self.context.index.pack(place.pack) is None:
                wrong += 1
            elif place.pack == number:
                wrong += place.ordinal >= len(ids) or place[2:] != _place_of(
                    info.toc[place.ordinal], chunk_id
                )
        return wrong if self.context.index.pack(number) is not None else 0

    def _misplaced(self, chunk_id: bytes, place: Place) -> bool:
        """Whether the index names a place where this chunk is not."""
        beginnings = self.beginnings.get(place.pack)
        if beginnings is None:
            return place.pack not in self.bad_packs and self.context.index.pack(place.pack) is None
        start = place.ordinal * _BEGINNING
        return beginnings[start : start + _BEGINNING] != chunk_id[:_BEGINNING]

    def _check_checkpoint(self, checkpoint_id: bytes) -> set[Location]:
        """Check that all of a checkpoint can be had; returns the bad locations it needs."""
        name = checkpoint_id.hex()
        try:
            manifest = self.context.catalogue.load(checkpoint_id)
        except (DamagedError, NewerFormatError) as error:
            self.faults.append(
                Fault(FaultKind.DAMAGED_MANIFEST, error.what, f"{_REPAIR} to set it aside", checkpoint=name)
            )
            return set()
        except GpuimgError:
            # Removed since the checkpoints were listed.
            return set()
        self.checkpoints += 1
        before = len(self.faults)
        hurt = self._check_files(name, manifest)
        if len(self.faults) > before and not self.context.folder.manifest(checkpoint_id).exists():
            # Removed meanwhile, and collected.
            del self.faults[before:]
            self.checkpoints -= 1
        return hurt

    def _check_files(self, name: str, manifest: Manifest) -> set[Location]:
        hurt: set[Location] = set()
        for entry in manifest.files:
            offset = 0
            for ref in entry.segments:
                place = self.context.index.lookup([ref.id])[0]
                bad = self.bad.get((place.pack, place.ordinal)) if place else None
                if place and bad is not None:
                    hurt.add((place.pack, place.ordinal))
                try:
                    segment = self.context.reader.segment(ref)
                except (StoredDataError, NewerFormatError) as error:
                    lost = place is not None or ref.id not in self.unindexed
                    kind = FaultKind.DAMAGED_RECIPE if lost else FaultKind.STALE_INDEX
                    remedy = _REPLACE if lost else _REPAIR
                    self.faults.append(Fault(kind, error.what, remedy, name, entry.name, offset))
                    offset += ref.size
                    continue
                if bad is not None:
                    # Its header only; a reader does without.
                    self.faults.append(
                        Fault(FaultKind.DAMAGED_RECIPE, bad, _REPAIR, name, entry.name, offset)
                    )
                pieces = zip(segment.lengths, segment.zero, strict=True)
                hurt |= self._check_chunks(name, entry.name, offset, list(pieces), segment.chunk_ids())
                offset += ref.size
        return hurt

    def _check_chunks(
        self, checkpoint: str, file: str, offset: int, pieces: list[tuple[int, bool]], ids: list[bytes]
    ) -> set[Location]:
        places = iter(zip(ids, self.context.index.lookup(ids), strict=True))
        hurt: set[Location] = set()
        for length, zero in pieces:
            if not zero:
                chunk_id, place = next(places)
                if place is None and chunk_id in self.unindexed:
                    what = f"the index lacks the chunk {chunk_id.hex()[:16]}"
                    self.faults.append(Fault(FaultKind.STALE_INDEX, what, _REPAIR, checkpoint, file, offset))
                elif place is None:
                    what = f"the chunk {chunk_id.hex()[:16]} is not in the store"
                    self.faults.append(
                        Fault(FaultKind.MISSING_CHUNK, what, _REPLACE, checkpoint, file, offset)
                    )
                elif self._misplaced(chunk_id, place):
                    what = f"the index places the chunk {chunk_id.hex()[:16]} where it is not"
                    self.faults.append(Fault(FaultKind.STALE_INDEX, what, _REPAIR, checkpoint, file, offset))
                elif place.raw != length:
                    what = f"the recipe contradicts the chunk {chunk_id.hex()[:16]}"
                    self.faults.append(
                        Fault(FaultKind.DAMAGED_RECIPE, what, _REPLACE, checkpoint, file, offset)
                    )
                elif (why := self.bad.get((place.pack, place.ordinal))) is not None:
                    hurt.add((place.pack, place.ordinal))
                    self.faults.append(
                        Fault(FaultKind.DAMAGED_CHUNK, why, _REPLACE, checkpoint, file, offset)
                    )
                elif (why := self.bad_packs.get(place.pack)) is not None:
                    self.faults.append(
                        Fault(FaultKind.MISSING_CHUNK, why, _REPLACE, checkpoint, file, offset)
                    )
                elif place.base and (found := self._fault_of_bases(chunk_id, place, hurt)) is not None:
                    self.faults.append(Fault(*found, _REPLACE, checkpoint, file, offset))
            offset += length
        return hurt

    def _fault_of_bases(
        self, chunk_id: bytes, place: Place, hurt: set[Location]
    ) -> tuple[FaultKind, str] | None:
        """Why a chunk that is coded against others cannot be decoded, and what fault that is; None if it can.

        Locations of damaged bases are added to `hurt`.
        """
        try:
            for base, found in _bases(self.context, place.base):
                rests = f"the chunk {chunk_id.hex()[:16]} rests on the chunk {base.hex()[:16]}"
                if found is None:
                    return FaultKind.MISSING_CHUNK, f"{rests}, which is not in the store"
                location = (found.pack, found.ordinal)
                if location in self.bad:
                    hurt.add(location)
                    return FaultKind.DAMAGED_CHUNK, f"{rests}: {self.bad[location]}"
                if found.pack in self.bad_packs:
                    return FaultKind.MISSING_CHUNK, f"{rests}: {self.bad_packs[found.pack]}"
                if self._misplaced(base, found):
                    return FaultKind.STALE_INDEX, f"{rests}, which the index places where it is not"
        except DamagedError as error:
            return FaultKind.DAMAGED_CHUNK, f"the chunk {chunk_id.hex()[:16]} is damaged: {error.what}"
        return None

    def _check_tags(self) -> None:
        ids = set(self.context.catalogue.ids())
        tags = self.context.catalogue.tags()
        for path in self.context.folder.tags.iterdir():
            target = tags.get(path.name)
            if target in ids:
                continue
            # It may have come, moved or gone since it was listed.
            lost = target is not None and not self.context.folder.manifest(target).exists()
            now = self.context.catalogue.tags().get(path.name)
            if now is None and path.exists():
                what = f"the tag file {path.name} names no checkpoint"
            elif target is not None and now == target and lost:
                what = f"the tag {path.name} points at checkpoint {target.hex()[:12]}, which is not there"
            else:
                continue
            remedy = f"remove it with `gpuimg tag --delete {path.name}`"
            self.faults.append(Fault(FaultKind.DANGLING_TAG, what, remedy))


def _place_of(entry: TocEntry, chunk_id: bytes) -> tuple[int | bytes, ...] | None:
    """What the index must say behind pack and ordinal of the object of this entry, if it is that chunk."""
    header = entry.header
    if header.id != chunk_id:
        return None
    offset = entry.offset + OBJECT_HEADER_SIZE
    base = header.base if header.flags & HAS_BASE else b""
    return (offset, header.stored, header.raw, header.codec, header.element_size, header.flags, base)


def verify(
    context: Context,
    checkpoint_id: bytes | None = None,
    *,
    quick: bool = False,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check everything, or one checkpoint; `quick` leaves the chunks' bytes out."""
    with files.os_errors("verifying the store"):
        verification = _Verification(context, quick=quick, progress=progress or Progress())
        if checkpoint_id is not None:
            return verification.check_one(checkpoint_id)
        return verification.run()
