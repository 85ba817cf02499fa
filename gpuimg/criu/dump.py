"""A process tree into the store, through criu; durable before the tasks end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from gpuimg.criu.folder import work_folder
from gpuimg.criu.locate import Criu, find_criu
from gpuimg.criu.runner import STALL_SECONDS, Watch, check_extra_args, check_process, run_dump
from gpuimg.criu.tree import tree_of_images
from gpuimg.errors import GpuimgError
from gpuimg.store.catalogue import check_tag
from gpuimg.store.checkpoint import Checkpoint
from gpuimg.store.choice import Profile
from gpuimg.store.ingest import Session
from gpuimg.store.model import Source, SourceKind
from gpuimg.store.store import Store
from gpuimg.stream.capture import Capture
from gpuimg.stream.store_sink import StoreSink


def dump(
    store: Store,
    pid: int,
    *,
    tag: str,
    parent: Checkpoint | None = None,
    profile: Profile = Profile.BALANCED,
    leave_running: bool = False,
    criu: str | None = None,
    extra_args: Sequence[str] = (),
    watch: Callable[[Session], None] | None = None,
) -> Checkpoint:
    """Checkpoint the tree of `pid`; its tasks end only when the checkpoint is durable.

    It is compared with `parent`, if there is one, so that only what has changed is stored. `watch` is
    called with the ingest session before criu starts, for progress.

    Raises
    ------
    GpuimgError
        Whatever failed. There is no new checkpoint then and the tasks run on, unless criu failed after
        the commit: that error says so.
    """
    check_tag(tag)
    check_extra_args(extra_args)
    check_process(pid)
    found = find_criu(criu)
    committed: list[Checkpoint] = []
    with work_folder() as folder, store.ingest(parent=parent, profile=profile) as session:
        if watch:
            watch(session)
        capture = Capture(folder, StoreSink(session))
        capture.start()

        def commit() -> None:
            capture.wait_complete(STALL_SECONDS)
            committed.append(session.commit(tag=tag, source=_source(session, found)))

        try:
            run_dump(
                found,
                pid,
                folder,
                on_post_dump=commit,
                leave_running=leave_running,
                extra_args=extra_args,
                watch=Watch(
                    progress=lambda: session.raw_bytes, abort=capture.abort, fault=lambda: capture.error
                ),
            )
        except GpuimgError as error:
            if committed:
                raise _after_commit(error, committed[0]) from error
            raise
        finally:
            capture.close()
    return committed[0]


def _after_commit(error: GpuimgError, checkpoint: Checkpoint) -> GpuimgError:
    return type(error)(
        f"checkpoint {checkpoint.name} is complete and durable, but then: {error.what}",
        remedy=error.remedy or "see whether the processes still run",
    )


def _source(session: Session, criu: Criu) -> Source:
    system = os.uname()
    return Source(
        kind=SourceKind.DUMP,
        hostname=system.nodename,
        kernel=system.release,
        criu_version=criu.version_text,
        processes=tree_of_images(session.small_file),
    )
