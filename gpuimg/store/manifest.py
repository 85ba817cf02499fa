"""Manifest files (docs/store-format.md, "Manifest"): a checkpoint as bytes and back."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from dataclasses import asdict

from google.protobuf.message import DecodeError

from gpuimg._proto import store_pb2
from gpuimg.errors import BadNameError, DamagedError, NewerFormatError
from gpuimg.store.hashing import ID_SIZE, identify
from gpuimg.store.model import (
    BufferObject,
    FileEntry,
    FileFigures,
    Layout,
    Manifest,
    Process,
    SegmentRef,
    Source,
    SourceKind,
    Statistics,
)
from gpuimg.store.names import check_name

MAGIC = b"GPIMANI\n"
VERSION = 1
MAX_BODY = 1 << 30
_HEAD = struct.Struct("<8sHHI")
_STATISTICS = tuple(Statistics.__dataclass_fields__)


def encode(
    *,
    store_id: bytes,
    created: int,
    nonce: bytes,
    source: Source,
    statistics: Statistics,
    files: list[FileEntry],
    parent: bytes = b"",
    figures: Mapping[str, FileFigures] | None = None,
) -> tuple[bytes, bytes]:
    """The manifest file's bytes, and the checkpoint id."""
    contents = store_pb2.Contents(files=[_file_message(entry) for entry in sorted(files, key=_by_name)])
    contents_bytes = contents.SerializeToString(deterministic=True)
    message = store_pb2.Manifest(
        store_id=store_id,
        created_unix_ns=created,
        nonce=nonce,
        root=identify(contents_bytes),
        contents=contents_bytes,
        source=_source_message(source),
        parent=parent,
        statistics=_statistics_message(statistics),
        figures=[
            store_pb2.FileFigures(
                name=name, statistics=_statistics_message(item.statistics), element_size=item.element_size
            )
            for name, item in sorted((figures or {}).items())
        ],
    )
    body = message.SerializeToString(deterministic=True)
    data = _HEAD.pack(MAGIC, VERSION, 0, len(body)) + body
    checkpoint_id = identify(data)
    return data + checkpoint_id, checkpoint_id


def decode(data: bytes, *, store_id: bytes, checkpoint_id: bytes) -> Manifest:
    """Parse and check a manifest file.

    Raises
    ------
    DamagedError, NewerFormatError
        The message speaks of "the manifest"; the caller names it.
    """
    if len(data) < _HEAD.size + ID_SIZE:
        raise DamagedError("the manifest is cut short")
    magic, version, flags, size = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise DamagedError("the manifest does not begin like one")
    if version > VERSION or flags:
        raise NewerFormatError(f"the manifest has format {version}.{flags}", remedy="use a newer gpuimg")
    if len(data) != _HEAD.size + size + ID_SIZE:
        raise DamagedError("the manifest is cut short or has bytes behind its end")
    if identify(memoryview(data)[:-ID_SIZE]) != data[-ID_SIZE:] or data[-ID_SIZE:] != checkpoint_id:
        raise DamagedError("the manifest does not match its hash")
    try:
        message = store_pb2.Manifest.FromString(data[_HEAD.size : -ID_SIZE])
        contents = store_pb2.Contents.FromString(message.contents)
    except DecodeError:
        raise DamagedError("the manifest cannot be parsed") from None
    if message.store_id != store_id:
        raise DamagedError("the manifest belongs to another store")
    if identify(message.contents) != message.root:
        raise DamagedError("the manifest's root does not match its contents")
    return Manifest(
        store_id=message.store_id,
        created=message.created_unix_ns,
        nonce=message.nonce,
        root=message.root,
        parent=message.parent,
        source=_source(message.source),
        statistics=_statistics(message.statistics),
        files=_files(contents),
        figures={
            item.name: FileFigures(_statistics(item.statistics), item.element_size)
            for item in message.figures
        },
    )


def _statistics_message(statistics: Statistics) -> store_pb2.Statistics:
    return store_pb2.Statistics(**{name: getattr(statistics, name) for name in _STATISTICS})


def _statistics(message: store_pb2.Statistics) -> Statistics:
    return Statistics(**{name: getattr(message, name) for name in _STATISTICS})


def _by_name(entry: FileEntry) -> bytes:
    return entry.name.encode()


def _file_message(entry: FileEntry) -> store_pb2.File:
    segments = [store_pb2.Segment(id=segment.id, size=segment.size) for segment in entry.segments]
    return store_pb2.File(
        name=entry.name,
        size=entry.size,
        layout=store_pb2.Layout.Name(entry.layout),
        data=entry.data,
        segments=segments,
        bo=store_pb2.BufferObject(**asdict(entry.bo)) if entry.bo is not None else None,
    )


def _files(contents: store_pb2.Contents) -> tuple[FileEntry, ...]:
    entries = []
    for message in contents.files:
        try:
            check_name(message.name)
        except BadNameError as error:
            raise DamagedError(f"the manifest holds a bad name: {error.what}") from None
        segments = tuple(SegmentRef(segment.id, segment.size) for segment in message.segments)
        whole = message.size == sum(segment.size for segment in segments) if segments else True
        if (
            not whole
            or any(len(segment.id) != ID_SIZE for segment in segments)
            or (not segments and len(message.data) != message.size)
            or (segments and message.data)
        ):
            raise DamagedError(f"the manifest contradicts itself about the file {message.name}")
        # Layouts of later versions matter to writers only.
        layout = Layout(message.layout) if int(message.layout) in set(Layout) else Layout.FIXED
        bo = message.bo if message.HasField("bo") else None
        entries.append(
            FileEntry(
                message.name,
                message.size,
                layout,
                message.data,
                segments,
                BufferObject(bo.gpu_id, bo.handle, bo.address, bo.size, bo.flags) if bo is not None else None,
            )
        )
    names = [_by_name(entry) for entry in entries]
    if any(first >= second for first, second in itertools.pairwise(names)):
        raise DamagedError("the manifest's names are not sorted")
    return tuple(entries)


def _source_message(source: Source) -> store_pb2.Source:
    processes = [
        store_pb2.Process(pid=process.pid, ppid=process.ppid, threads=process.threads, comm=process.comm)
        for process in source.processes
    ]
    return store_pb2.Source(
        kind=store_pb2.Source.Kind.Name(source.kind),
        hostname=source.hostname,
        kernel=source.kernel,
        criu_version=source.criu_version,
        processes=processes,
    )


def _source(message: store_pb2.Source) -> Source:
    known = int(message.kind) in set(SourceKind)
    return Source(
        kind=SourceKind(message.kind) if known else SourceKind.UNKNOWN,
        hostname=message.hostname,
        kernel=message.kernel,
        criu_version=message.criu_version,
        processes=tuple(Process(item.pid, item.ppid, item.threads, item.comm) for item in message.processes),
    )
