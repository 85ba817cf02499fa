from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TreeEntry(_message.Message):
    __slots__ = ("pid", "ppid", "pgid", "sid", "threads")
    PID_FIELD_NUMBER: _ClassVar[int]
    PPID_FIELD_NUMBER: _ClassVar[int]
    PGID_FIELD_NUMBER: _ClassVar[int]
    SID_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    ppid: int
    pgid: int
    sid: int
    threads: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pid: _Optional[int] = ..., ppid: _Optional[int] = ..., pgid: _Optional[int] = ..., sid: _Optional[int] = ..., threads: _Optional[_Iterable[int]] = ...) -> None: ...

class CoreEntry(_message.Message):
    __slots__ = ("task",)
    TASK_FIELD_NUMBER: _ClassVar[int]
    task: TaskCore
    def __init__(self, task: _Optional[_Union[TaskCore, _Mapping]] = ...) -> None: ...

class TaskCore(_message.Message):
    __slots__ = ("state", "comm")
    STATE_FIELD_NUMBER: _ClassVar[int]
    COMM_FIELD_NUMBER: _ClassVar[int]
    state: int
    comm: bytes
    def __init__(self, state: _Optional[int] = ..., comm: _Optional[bytes] = ...) -> None: ...

class StatisticsEntry(_message.Message):
    __slots__ = ("dump", "restore")
    DUMP_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    dump: DumpStatistics
    restore: RestoreStatistics
    def __init__(self, dump: _Optional[_Union[DumpStatistics, _Mapping]] = ..., restore: _Optional[_Union[RestoreStatistics, _Mapping]] = ...) -> None: ...

class DumpStatistics(_message.Message):
    __slots__ = ("freezing_time", "frozen_time", "memory_dump_time", "memory_write_time", "pages_scanned", "pages_written", "shared_pages_scanned", "shared_pages_written")
    FREEZING_TIME_FIELD_NUMBER: _ClassVar[int]
    FROZEN_TIME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_DUMP_TIME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_WRITE_TIME_FIELD_NUMBER: _ClassVar[int]
    PAGES_SCANNED_FIELD_NUMBER: _ClassVar[int]
    PAGES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    SHARED_PAGES_SCANNED_FIELD_NUMBER: _ClassVar[int]
    SHARED_PAGES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    freezing_time: int
    frozen_time: int
    memory_dump_time: int
    memory_write_time: int
    pages_scanned: int
    pages_written: int
    shared_pages_scanned: int
    shared_pages_written: int
    def __init__(self, freezing_time: _Optional[int] = ..., frozen_time: _Optional[int] = ..., memory_dump_time: _Optional[int] = ..., memory_write_time: _Optional[int] = ..., pages_scanned: _Optional[int] = ..., pages_written: _Optional[int] = ..., shared_pages_scanned: _Optional[int] = ..., shared_pages_written: _Optional[int] = ...) -> None: ...

class RestoreStatistics(_message.Message):
    __slots__ = ("forking_time", "restore_time", "pages_restored")
    FORKING_TIME_FIELD_NUMBER: _ClassVar[int]
    RESTORE_TIME_FIELD_NUMBER: _ClassVar[int]
    PAGES_RESTORED_FIELD_NUMBER: _ClassVar[int]
    forking_time: int
    restore_time: int
    pages_restored: int
    def __init__(self, forking_time: _Optional[int] = ..., restore_time: _Optional[int] = ..., pages_restored: _Optional[int] = ...) -> None: ...
