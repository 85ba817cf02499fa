"""The process tree of a checkpoint, for people: a checkpoint is not worse for one that cannot be read."""

from __future__ import annotations

from gpuimg.criu import images
from gpuimg.errors import BadNameError, ImagesDirectoryError, StoredDataError
from gpuimg.store.checkpoint import Checkpoint
from gpuimg.store.model import Process


def tree_of_images(read: images.ReadFile) -> tuple[Process, ...]:
    """The processes that CRIU's images tell of; none if there are no such images, or damaged ones."""
    try:
        found = images.process_tree(read)
    except ImagesDirectoryError:
        return ()
    return tuple(Process(item.pid, item.ppid, len(item.threads), item.comm) for item in found)


def tree_of_checkpoint(checkpoint: Checkpoint) -> tuple[Process, ...]:
    """What was noted when the checkpoint was taken, else what its images tell."""

    def read(name: str) -> bytes:
        try:
            return checkpoint.read(name)
        except (BadNameError, StoredDataError) as error:
            raise KeyError(name) from error

    return checkpoint.source.processes or tree_of_images(read)
