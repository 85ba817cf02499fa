"""A checkpoint of the store into running processes, through criu."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpuimg.criu.folder import work_folder
from gpuimg.criu.locate import find_criu
from gpuimg.criu.runner import STALL_SECONDS, RestoreResult, Watch, check_extra_args, run_restore
from gpuimg.errors import ImagesDirectoryError
from gpuimg.store.store import Store
from gpuimg.stream.capture import INVENTORY
from gpuimg.stream.serve import Serve
from gpuimg.stream.store_source import StoreSource


def restore(
    store: Store,
    reference: str,
    *,
    detach: bool = False,
    pidfile: Path | None = None,
    criu: str | None = None,
    extra_args: Sequence[str] = (),
) -> RestoreResult:
    """Restore the processes of a checkpoint.

    The tasks run only if every file that criu asked for was delivered whole and verified; otherwise none
    is left behind.

    Raises
    ------
    GpuimgError
        Whatever failed, stored data that is damaged or missing above all.
    """
    check_extra_args(extra_args)
    checkpoint = store.checkpoint(reference)
    if INVENTORY not in checkpoint.files:
        raise ImagesDirectoryError(
            f"checkpoint {checkpoint.name} has no {INVENTORY}, so it is no complete dump of criu",
            remedy="see `gpuimg show --files` for what it holds, and get its files with `gpuimg export`",
        )
    found = find_criu(criu)
    with work_folder() as folder:
        serve = Serve(folder, StoreSource(checkpoint))
        serve.start()
        try:
            return run_restore(
                found,
                folder,
                on_post_restore=lambda: serve.wait_delivered(STALL_SECONDS),
                detach=detach,
                pidfile=pidfile,
                extra_args=extra_args,
                watch=Watch(progress=lambda: serve.bytes_moved, abort=serve.abort, fault=lambda: serve.error),
            )
        finally:
            serve.close()
