"""The streamer's operations on a store, for criu that somebody else runs; one call for each command."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpuimg.errors import BadStreamError, GpuimgError, IncompleteDumpError
from gpuimg.store.choice import Profile
from gpuimg.store.model import Source, SourceKind
from gpuimg.stream import pipes
from gpuimg.stream.capture import INVENTORY, Capture
from gpuimg.stream.progress import Progress
from gpuimg.stream.remap import FILES_IMAGE, RemappedSource
from gpuimg.stream.seams import ImageSource
from gpuimg.stream.serve import Serve
from gpuimg.stream.shards import ShardReader, ShardWriter
from gpuimg.stream.store_sink import StoreConsumer, StoreSink
from gpuimg.stream.store_source import StoreSource

if TYPE_CHECKING:
    from gpuimg.store.checkpoint import Checkpoint
    from gpuimg.store.store import Store


def _source(kind: SourceKind) -> Source:
    system = os.uname()
    return Source(kind=kind, hostname=system.nodename, kernel=system.release)


def capture(
    store: Store,
    images_dir: Path,
    *,
    tag: str | None = None,
    parent: Checkpoint | None = None,
    profile: Profile = Profile.BALANCED,
    ext_files: Sequence[tuple[str, int]] = (),
    progress_fd: int | None = None,
) -> Checkpoint:
    """Take one `criu dump --stream` into a new checkpoint, durable on return.

    It is compared with `parent`, if there is one.

    Progress lines are those of criu-image-streamer. IncompleteDumpError if criu went away before the image
    was complete, BadStreamError, SocketPathError, and what the store raises.
    """
    progress = Progress(progress_fd)
    _require_pipes(ext_files)
    started = time.monotonic()

    def on_start() -> None:
        nonlocal started
        started = time.monotonic()
        progress.line("checkpoint-start")

    with store.ingest(parent=parent, profile=profile) as session:
        streamer = Capture(images_dir, StoreSink(session), ext_files=ext_files, on_start=on_start)
        progress.line("socket-init")
        streamer.run()
        streamer.require_inventory()
        checkpoint = session.commit(tag=tag, source=_source(SourceKind.CAPTURE))
    progress.shards([streamer.bytes_moved], [time.monotonic() - started])
    return checkpoint


def serve(
    checkpoint: Checkpoint,
    images_dir: Path,
    *,
    ext_files: Sequence[tuple[str, int]] = (),
    tcp_listen_remap: Sequence[tuple[int, int]] = (),
    progress_fd: int | None = None,
) -> None:
    """Give a checkpoint to one `criu restore --stream`.

    Files named in `ext_files` go to those pipes, which are closed at their end, and are hidden from criu.
    The error of the first file that could not be delivered whole is raised.
    """
    _require_pipes(ext_files)
    source: ImageSource = StoreSource(checkpoint, hidden={name for name, _ in ext_files})
    if tcp_listen_remap:
        image = checkpoint.read(FILES_IMAGE) if FILES_IMAGE in checkpoint.files else None
        source = RemappedSource(source, image, tcp_listen_remap)
    streamer = Serve(images_dir, source)
    senders = [_ExtSender(checkpoint, name, fd) for name, fd in ext_files]
    Progress(progress_fd).line("socket-init")
    streamer.run()
    for sender in senders:
        sender.finish()


def extract(
    store: Store,
    shard_fds: Sequence[int],
    *,
    tag: str | None = None,
    parent: Checkpoint | None = None,
    profile: Profile = Profile.BALANCED,
    progress_fd: int | None = None,
) -> Checkpoint:
    """Take a shard stream into a new checkpoint, durable on return.

    It is compared with `parent`, if there is one.

    BadStreamError if the stream is malformed or cut short, IncompleteDumpError if the dump that it holds
    failed.
    """
    with store.ingest(parent=parent, profile=profile) as session:
        consumer = StoreConsumer(session)
        reader = ShardReader(shard_fds, consumer)
        reader.run()
        if INVENTORY not in consumer.names:
            raise IncompleteDumpError(
                f"the stream has no {INVENTORY}, the dump in it failed",
                remedy="see criu's log for why the dump failed",
            )
        checkpoint = session.commit(tag=tag, source=_source(SourceKind.EXTRACT))
    Progress(progress_fd).shards(reader.sizes, reader.durations)
    return checkpoint


def export_shards(checkpoint: Checkpoint, shard_fds: Sequence[int]) -> None:
    """Write a checkpoint as a stream that criu-image-streamer can serve and extract; every byte is
    verified.
    """
    writer = ShardWriter(shard_fds)
    for name in checkpoint.files:
        file = writer.open(name)
        for buffer in checkpoint.stream(name):
            file.write(buffer)
        file.close()
    writer.finish()


def _require_pipes(ext_files: Sequence[tuple[str, int]]) -> None:
    for name, fd in ext_files:
        if not pipes.is_pipe(fd):
            raise BadStreamError(f"external file {name} must be a pipe: fd {fd} is not a pipe")


class _ExtSender:
    """Sends one file of a checkpoint to a pipe that was given for it, in a thread."""

    def __init__(self, checkpoint: Checkpoint, name: str, fd: int) -> None:
        self._source = StoreSource(checkpoint)
        self._name = name
        self._fd = fd
        self._error: GpuimgError | None = None
        self._thread = threading.Thread(target=self._run, name=f"send {name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            file = self._source.lookup(self._name)
            if file is not None:
                file.send(self._fd, lambda _: None)
        except BrokenPipeError:
            pass  # like tar, a reader may know where its data end
        except GpuimgError as error:
            self._error = error
        finally:
            os.close(self._fd)

    def finish(self) -> None:
        """Wait for the end, and raise what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error
