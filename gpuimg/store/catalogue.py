"""Manifests and tags as files: listing, loading, resolving references, tagging, removing."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from gpuimg.errors import (
    AmbiguousReferenceError,
    BadNameError,
    DamagedError,
    NewerFormatError,
    UnknownReferenceError,
)
from gpuimg.store import files, manifest
from gpuimg.store.layout import Config, StoreFolder, parse_id
from gpuimg.store.model import Manifest

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_PREFIX = re.compile(r"[0-9a-f]{4,64}")
_MAX_TAG_FILE = 1024


def check_tag(name: str) -> None:
    """Refuse a tag that could not be a file name, or would be read as something else.

    Raises
    ------
    BadNameError
    """
    if not _TAG.fullmatch(name):
        raise BadNameError(
            f"{name!r} is no tag",
            remedy="use 1 to 128 letters, digits, '.', '_' and '-', not starting with '.' or '-'",
        )


class Catalogue:
    """The checkpoints and tags of one store."""

    def __init__(self, folder: StoreFolder, config: Config) -> None:
        self._folder = folder
        self._config = config

    def ids(self) -> list[bytes]:
        """Ids of all checkpoints, unsorted."""
        with files.os_errors("listing the checkpoints"):
            return self._folder.list_manifests()

    def load(self, checkpoint_id: bytes) -> Manifest:
        """Read a manifest.

        Raises
        ------
        UnknownReferenceError, DamagedError, NewerFormatError
        """
        name = checkpoint_id.hex()[:12]
        path = self._folder.manifest(checkpoint_id)
        with files.os_errors(f"reading the manifest {path}"):
            try:
                with path.open("rb") as stream:
                    data = stream.read(manifest.MAX_BODY + 64)
            except FileNotFoundError:
                raise UnknownReferenceError(
                    f"there is no checkpoint {name}", remedy="see `gpuimg ls` for what there is"
                ) from None
        try:
            return manifest.decode(data, store_id=self._config.id, checkpoint_id=checkpoint_id)
        except DamagedError as error:
            raise DamagedError(
                f"checkpoint {name} cannot be read: {error.what}",
                remedy="bring its manifest back from a backup, or run `gpuimg repair` to set it aside",
            ) from None
        except NewerFormatError as error:
            raise NewerFormatError(
                f"checkpoint {name} cannot be read: {error.what}", remedy=error.remedy
            ) from None

    def tags(self) -> dict[str, bytes]:
        """Checkpoint ids by tag; tag files that hold no id are left out."""
        found = {}
        with files.os_errors("listing the tags"):
            for path in sorted(self._folder.tags.iterdir()):
                target = self._read_tag(path)
                if target is not None and _TAG.fullmatch(path.name):
                    found[path.name] = target
        return found

    def tags_of(self, checkpoint_id: bytes) -> tuple[str, ...]:
        return tuple(tag for tag, target in self.tags().items() if target == checkpoint_id)

    def _read_tag(self, path: Path) -> bytes | None:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
            text = stream.read(_MAX_TAG_FILE).decode("ascii", "replace")
            return parse_id(text.strip())
        return None

    def resolve(self, reference: str) -> bytes:
        """The checkpoint id that a tag, id or unique id prefix (at least 4 digits) means.

        Raises
        ------
        UnknownReferenceError, AmbiguousReferenceError
        """
        if _TAG.fullmatch(reference):
            with files.os_errors(f"reading the tag {reference}"):
                target = self._read_tag(self._folder.tags / reference)
            if target is not None:
                return target
        matches: list[bytes] = []
        if _PREFIX.fullmatch(reference):
            matches = [found for found in self.ids() if found.hex().startswith(reference)]
        if len(matches) > 1:
            raise AmbiguousReferenceError(
                f"{reference!r} fits {len(matches)} checkpoints: "
                + ", ".join(sorted(found.hex()[:12] for found in matches)[:8]),
                remedy="give more digits",
            )
        if not matches:
            raise UnknownReferenceError(
                f"there is no checkpoint or tag {reference!r}", remedy="see `gpuimg ls` for what there is"
            )
        return matches[0]

    def set_tag(self, name: str, checkpoint_id: bytes) -> None:
        """Point a tag at a checkpoint, durably."""
        check_tag(name)
        with files.os_errors(f"writing the tag {name}"):
            files.write_durably(
                self._folder.tags / name,
                checkpoint_id.hex().encode() + b"\n",
                self._folder.temporary("tag"),
            )

    def remove_tag(self, name: str) -> None:
        """Remove a tag.

        Raises
        ------
        UnknownReferenceError
        """
        check_tag(name)
        with files.os_errors(f"removing the tag {name}"):
            try:
                (self._folder.tags / name).unlink()
            except FileNotFoundError:
                raise UnknownReferenceError(
                    f"there is no tag {name!r}", remedy="see `gpuimg tag` for the tags"
                ) from None
            files.sync_folder(self._folder.tags)

    def remove(self, checkpoint_id: bytes) -> None:
        """Remove a checkpoint and its tags; its chunks stay until gc."""
        for tag in self.tags_of(checkpoint_id):
            # It may have been removed a moment ago.
            with contextlib.suppress(UnknownReferenceError):
                self.remove_tag(tag)
        with files.os_errors(f"removing checkpoint {checkpoint_id.hex()[:12]}"):
            try:
                self._folder.manifest(checkpoint_id).unlink()
            except FileNotFoundError:
                raise UnknownReferenceError(
                    f"there is no checkpoint {checkpoint_id.hex()[:12]}",
                    remedy="see `gpuimg ls` for what there is",
                ) from None
            files.sync_folder(self._folder.manifests)
