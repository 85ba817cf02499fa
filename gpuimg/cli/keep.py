"""`gc`, `verify`, `repair`: keep a store small and whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpuimg.cli import output
from gpuimg.cli.context import STORE_ERRORS, State, command
from gpuimg.cli.progress import Reporter
from gpuimg.errors import (
    AmbiguousReferenceError,
    BusyError,
    DamagedError,
    InputOutputError,
    NewerFormatError,
    NoSpaceError,
    NotAStoreError,
    PermissionDeniedError,
    UnknownReferenceError,
    VerifyFailedError,
)

if TYPE_CHECKING:
    from gpuimg.store.reports import Fault

_FAULTS_SHOWN = 100
"""A lost pack hurts thousands of chunks; people need the first of them, programs take --json."""


@command(
    "gc", example="gpuimg rm old\ngpuimg gc", errors=(*STORE_ERRORS, DamagedError, NoSpaceError, BusyError)
)
def gc_command(state: State) -> None:
    """Free the space of what no checkpoint needs.

    Never takes what a running dump, capture or import counts on; such packs wait for a later gc.
    """
    with state.open_store() as store, Reporter(state, "gc"):
        report = store.gc()
    if state.as_json:
        output.write_json(report)
        return
    output.write(f"freed {output.size(report.freed_bytes)}: deleted {report.deleted_packs} packs")
    output.write(
        f"condemned {report.condemned_packs} packs, rewrote {report.rewritten_packs}, "
        f"removed {report.removed_leftovers} leftovers"
    )
    if report.waiting_packs:
        output.write(
            f"{report.waiting_packs} packs wait for running writers; run gc again when these have ended"
        )


@command(
    "verify",
    example="gpuimg verify\ngpuimg verify before-update\ngpuimg verify --quick",
    errors=(*STORE_ERRORS, UnknownReferenceError, AmbiguousReferenceError, VerifyFailedError),
)
@click.argument("ref", required=False)
@click.option("--quick", is_flag=True, help="Check structure, checksums and references only; decode nothing.")
def verify_command(state: State, ref: str | None, quick: bool) -> None:
    """Check the store, or one checkpoint, down to the bytes.

    Names every fault, the checkpoint, file and offset it hurts, and what to do.
    """
    from gpuimg.store.model import Progress

    progress = Progress()
    with state.open_store() as store, Reporter(state, "verify") as reporter:
        reporter.watch(lambda: progress.done, lambda: progress.total)
        report = store.verify(ref, quick=quick, progress=progress)
    if report.faults and not state.as_json:
        for fault in report.faults[:_FAULTS_SHOWN]:
            output.write(_fault_line(fault))
        if len(report.faults) > _FAULTS_SHOWN:
            output.write(f"and {len(report.faults) - _FAULTS_SHOWN} more; --json lists them all")
    if state.as_json:
        output.write_json({"clean": not report.faults, **output.plain(report)})
    elif not report.faults:
        output.write(
            f"clean: {report.checkpoints} checkpoints, {report.packs} packs, {report.objects} objects, "
            f"{output.size(report.raw_bytes)}"
        )
    if not report.faults:
        return
    number = len(report.faults)
    raise VerifyFailedError(
        f"verify found {number} fault{'s' if number > 1 else ''} in {state.store_path()}",
        remedy="do what is said beside each fault",
    )


def _fault_line(fault: Fault) -> str:
    place = [f"checkpoint {fault.checkpoint[:12]}"] if fault.checkpoint else []
    place += [f"file {fault.file}"] if fault.file else []
    place += [f"offset {fault.offset}"] if fault.offset is not None else []
    where = f" ({', '.join(place)})" if place else ""
    return output.printable(f"{fault.kind.value}: {fault.what}{where}; {fault.remedy}")


@command(
    "repair",
    example="gpuimg verify || gpuimg repair",
    errors=(
        NotAStoreError,
        NewerFormatError,
        PermissionDeniedError,
        NoSpaceError,
        BusyError,
        InputOutputError,
    ),
)
def repair_command(state: State) -> None:
    """Rebuild the index and save what is good of damaged packs.

    Deletes nothing: what cannot be used is set aside in the store's folder `damaged`.
    """
    import gpuimg

    with Reporter(state, "repair"):
        report = gpuimg.repair_store(state.store_path())
    if state.as_json:
        output.write_json(report)
        return
    output.write(f"indexed {report.packs} packs; rebuilt {report.rebuilt_packs} damaged ones")
    output.write(f"salvaged {report.salvaged_objects} objects, lost {report.lost_objects}")
    for path in report.set_aside:
        output.write(f"set aside {output.printable(path)}")
    for checkpoint in report.hurt:
        output.write(f"checkpoint {checkpoint[:12]} still lacks data; see `gpuimg verify {checkpoint[:12]}`")
