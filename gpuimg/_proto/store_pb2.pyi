from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Layout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FIXED: _ClassVar[Layout]
    PAGES: _ClassVar[Layout]
FIXED: Layout
PAGES: Layout

class Manifest(_message.Message):
    __slots__ = ("store_id", "created_unix_ns", "nonce", "root", "contents", "parent", "source", "statistics", "figures")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    store_id: bytes
    created_unix_ns: int
    nonce: bytes
    root: bytes
    contents: bytes
    parent: bytes
    source: Source
    statistics: Statistics
    figures: _containers.RepeatedCompositeFieldContainer[FileFigures]
    def __init__(self, store_id: _Optional[bytes] = ..., created_unix_ns: _Optional[int] = ..., nonce: _Optional[bytes] = ..., root: _Optional[bytes] = ..., contents: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., statistics: _Optional[_Union[Statistics, _Mapping]] = ..., figures: _Optional[_Iterable[_Union[FileFigures, _Mapping]]] = ...) -> None: ...

class FileFigures(_message.Message):
    __slots__ = ("name", "statistics", "element_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    statistics: Statistics
    element_size: int
    def __init__(self, name: _Optional[str] = ..., statistics: _Optional[_Union[Statistics, _Mapping]] = ..., element_size: _Optional[int] = ...) -> None: ...

class Contents(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[File]
    def __init__(self, files: _Optional[_Iterable[_Union[File, _Mapping]]] = ...) -> None: ...

class File(_message.Message):
    __slots__ = ("name", "size", "layout", "data", "segments", "bo")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    BO_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    layout: Layout
    data: bytes
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    bo: BufferObject
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., layout: _Optional[_Union[Layout, str]] = ..., data: _Optional[bytes] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., bo: _Optional[_Union[BufferObject, _Mapping]] = ...) -> None: ...

class BufferObject(_message.Message):
    __slots__ = ("gpu_id", "handle", "address", "size", "flags")
    GPU_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    gpu_id: int
    handle: int
    address: int
    size: int
    flags: int
    def __init__(self, gpu_id: _Optional[int] = ..., handle: _Optional[int] = ..., address: _Optional[int] = ..., size: _Optional[int] = ..., flags: _Optional[int] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("id", "size")
    ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    size: int
    def __init__(self, id: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("kind", "hostname", "kernel", "criu_version", "processes")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Source.Kind]
        DUMP: _ClassVar[Source.Kind]
        CAPTURE: _ClassVar[Source.Kind]
        IMPORT: _ClassVar[Source.Kind]
        EXTRACT: _ClassVar[Source.Kind]
    UNKNOWN: Source.Kind
    DUMP: Source.Kind
    CAPTURE: Source.Kind
    IMPORT: Source.Kind
    EXTRACT: Source.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    CRIU_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    kind: Source.Kind
    hostname: str
    kernel: str
    criu_version: str
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    def __init__(self, kind: _Optional[_Union[Source.Kind, str]] = ..., hostname: _Optional[str] = ..., kernel: _Optional[str] = ..., criu_version: _Optional[str] = ..., processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("pid", "ppid", "threads", "comm")
    PID_FIELD_NUMBER: _ClassVar[int]
    PPID_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    COMM_FIELD_NUMBER: _ClassVar[int]
    pid: int
    ppid: int
    threads: int
    comm: str
    def __init__(self, pid: _Optional[int] = ..., ppid: _Optional[int] = ..., threads: _Optional[int] = ..., comm: _Optional[str] = ...) -> None: ...

class Statistics(_message.Message):
    __slots__ = ("raw_bytes", "new_bytes", "zero_bytes", "inline_bytes", "deduplicated_bytes", "coded_bytes", "raw_stored_bytes", "chunks", "new_chunks", "seconds", "unchanged_bytes", "delta_bytes", "stored_bytes")
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEW_BYTES_FIELD_NUMBER: _ClassVar[int]
    ZERO_BYTES_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEDUPLICATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RAW_STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NEW_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DELTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    raw_bytes: int
    new_bytes: int
    zero_bytes: int
    inline_bytes: int
    deduplicated_bytes: int
    coded_bytes: int
    raw_stored_bytes: int
    chunks: int
    new_chunks: int
    seconds: float
    unchanged_bytes: int
    delta_bytes: int
    stored_bytes: int
    def __init__(self, raw_bytes: _Optional[int] = ..., new_bytes: _Optional[int] = ..., zero_bytes: _Optional[int] = ..., inline_bytes: _Optional[int] = ..., deduplicated_bytes: _Optional[int] = ..., coded_bytes: _Optional[int] = ..., raw_stored_bytes: _Optional[int] = ..., chunks: _Optional[int] = ..., new_chunks: _Optional[int] = ..., seconds: _Optional[float] = ..., unchanged_bytes: _Optional[int] = ..., delta_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ...) -> None: ...
