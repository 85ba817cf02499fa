"""Directories of images: taking one into the store. (Giving one back is Checkpoint.export.)"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from gpuimg.errors import ImagesDirectoryError
from gpuimg.store import files
from gpuimg.store.catalogue import check_tag
from gpuimg.store.checkpoint import Checkpoint
from gpuimg.store.choice import Profile
from gpuimg.store.ingest import Session
from gpuimg.store.model import Source, SourceKind
from gpuimg.store.store import Store


def image_paths(directory: Path) -> list[Path]:
    """The regular files of a flat images directory, sorted by name; sockets are passed over.

    Raises
    ------
    ImagesDirectoryError
        It is no directory, is empty, or holds folders, links or devices.
    """
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        raise ImagesDirectoryError(
            f"{directory} is no directory", remedy="name the directory that criu wrote its images to"
        ) from None
    except OSError as error:
        raise files.describe_os_error(error, f"reading {directory}") from error
    found = []
    for entry in entries:
        kind = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISREG(kind):
            found.append(Path(entry.path))
        elif entry.name == "parent" and stat.S_ISLNK(kind):
            raise ImagesDirectoryError(
                f"{directory} is an incremental dump that goes on in another directory (the link 'parent')",
                remedy="dump without --prev-images-dir, or straight into the store with `gpuimg dump`",
            )
        elif not stat.S_ISSOCK(kind):
            raise ImagesDirectoryError(
                f"{entry.path} is not a regular file", remedy="remove it; images lie flat in one directory"
            )
    if not found:
        raise ImagesDirectoryError(f"{directory} holds no files", remedy="name a directory of images")
    return found


def import_directory(
    store: Store,
    directory: Path,
    *,
    tag: str | None = None,
    parent: Checkpoint | None = None,
    profile: Profile = Profile.BALANCED,
    watch: Callable[[Session], None] | None = None,
) -> Checkpoint:
    """Take every file of a directory into a new checkpoint, byte for byte.

    It is compared with `parent`, if there is one: what has not changed costs next to nothing. `watch` is
    called with the session when reading has begun, for progress.
    """
    if tag is not None:
        check_tag(tag)
    paths = image_paths(directory)
    with store.ingest(parent=parent, profile=profile) as session:
        if watch:
            watch(session)
        for path in paths:
            session.add_path(path.name, path)
        return session.commit(tag=tag, source=Source(kind=SourceKind.IMPORT))
