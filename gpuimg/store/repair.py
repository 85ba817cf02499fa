"""Saving what can be saved: damaged packs and manifests are set aside, good objects move to new packs,
the index is made anew from the packs. Nothing is deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gpuimg.errors import DamagedError, GpuimgError, IndexBrokenError, NewerFormatError
from gpuimg.store import files
from gpuimg.store.catalogue import Catalogue
from gpuimg.store.context import Context
from gpuimg.store.index import Index
from gpuimg.store.layout import Config, StoreFolder
from gpuimg.store.lease import Lease, exclusive_lock
from gpuimg.store.pack import OBJECT_HEADER_SIZE, ObjectHeader, PackInfo, scan_objects
from gpuimg.store.packfiles import PackFiles
from gpuimg.store.packset import load_pack
from gpuimg.store.packwriter import PackWriter
from gpuimg.store.reader import ChunkReader
from gpuimg.store.reports import RepairReport
from gpuimg.store.verify import check_objects, check_payload, verify


@dataclass(slots=True)
class _Findings:
    rebuilt: int = 0
    salvaged: int = 0
    lost: int = 0
    set_aside: list[str] = field(default_factory=list)


def repair(folder: StoreFolder, config: Config, index: Index) -> RepairReport:
    """Bring a store into a state in which everything that is still whole can be used.

    The caller holds off other collectors (`gc.only_collector`), from before it opened the index.
    """
    catalogue = Catalogue(folder, config)
    packs = PackFiles(folder, index)
    context = Context(folder, config, index, packs, ChunkReader(index, packs), catalogue)
    with files.os_errors("repairing the store"), exclusive_lock(folder):
        for name in ("packs", "manifests", "tags", "leases", "trash", "damaged", "tmp", "index"):
            files.make_folder(folder.root / name)
        findings = _Findings()
        try:
            infos = _repair_packs(context, findings)
            _rebuild_index(index, infos)
        except IndexBrokenError:
            # Damage that shows only when it is touched.
            index.remake()
            infos = _repair_packs(context, findings)
            _rebuild_index(index, infos)
        _set_manifests_aside(folder, catalogue, findings)
        report = verify(context, quick=True)
    packs.close()
    hurt = {fault.checkpoint for fault in report.faults if fault.checkpoint}
    return RepairReport(
        packs=len(infos),
        rebuilt_packs=findings.rebuilt,
        salvaged_objects=findings.salvaged,
        lost_objects=findings.lost,
        set_aside=tuple(findings.set_aside),
        hurt=tuple(sorted(hurt)),
    )


def _repair_packs(context: Context, findings: _Findings) -> list[PackInfo]:
    """Check every pack; returns the structure of all that are whole or were rebuilt."""
    folder = context.folder
    whole: list[PackInfo] = []
    damaged: list[Path] = []
    for pack_id in folder.list_packs():
        path = folder.pack(pack_id)
        try:
            whole.append(load_pack(path, context.config, pack_id))
        except NewerFormatError:
            continue
        except DamagedError:
            damaged.append(path)
    # What chunks are coded against must be found, whatever state the index was in.
    _rebuild_index(context.index, whole)
    infos = []
    lease = Lease(folder)
    try:
        for path in damaged:
            infos += _rebuild(context, path, lease, findings, None)
        for info in whole:
            if check_objects(context, info).damaged:
                infos += _rebuild(context, folder.pack(info.id), lease, findings, info)
            else:
                infos.append(info)
    finally:
        lease.release()
    return infos


def _rebuild_index(index: Index, infos: list[PackInfo]) -> None:
    """Fill the index from the packs; in new files if it does not find all of it again in these."""
    index.rebuild(infos)
    if not all(all(index.contains(info.toc.ids())) for info in infos):
        index.remake()
        index.rebuild(infos)


def _rebuild(
    context: Context, path: Path, lease: Lease, findings: _Findings, info: PackInfo | None
) -> list[PackInfo]:
    """Copy the good objects of a damaged pack into a new one, then set the pack aside."""
    writer = PackWriter(context.folder, context.config.id, lease.id)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for header, payload in _objects(fd, info):
            if _is_good(context, header, payload):
                writer.add_object(header, payload)
        saved = len(writer.chunk_ids)
        infos = []
        # Durable before the damaged one moves.
        if saved:
            infos.append(writer.seal(context.index, moves=True))
        else:
            writer.abandon()
    except BaseException:
        writer.abandon()
        raise
    finally:
        os.close(fd)
    findings.rebuilt += 1
    findings.salvaged += saved
    # Without its table of contents nobody knows how many objects the pack had.
    findings.lost += len(info.toc) - saved if info is not None else 0
    _set_aside(context.folder, path, findings)
    return infos


def _objects(fd: int, info: PackInfo | None) -> Iterator[tuple[ObjectHeader, bytes]]:
    """The objects that a pack's table names, damaged ones too; without a table, those that a scan finds."""
    if info is None:
        for _, header, payload in scan_objects(fd):
            yield header, payload
        return
    for offset, header in info.toc:
        yield header, files.pread_exactly(fd, header.stored, offset + OBJECT_HEADER_SIZE)


def _is_good(context: Context, header: ObjectHeader, payload: bytes) -> bool:
    try:
        check_payload(context, header, payload, memoryview(bytearray(header.raw)))
    except GpuimgError:
        return False
    return True


def _set_manifests_aside(folder: StoreFolder, catalogue: Catalogue, findings: _Findings) -> None:
    for checkpoint_id in catalogue.ids():
        try:
            catalogue.load(checkpoint_id)
        except NewerFormatError:
            continue
        except DamagedError:
            _set_aside(folder, folder.manifest(checkpoint_id), findings)
    present = set(catalogue.ids())
    tags = catalogue.tags()
    for path in list(folder.tags.iterdir()):
        if tags.get(path.name) not in present:
            _set_aside(folder, path, findings)


def _set_aside(folder: StoreFolder, path: Path, findings: _Findings) -> None:
    target = folder.damaged / path.name
    number = 1
    while target.exists():
        number += 1
        target = folder.damaged / f"{path.name}.{number}"
    shutil.move(path, target)
    files.sync_folder(folder.damaged)
    files.sync_folder(path.parent)
    findings.set_aside.append(str(target.relative_to(folder.root)))
