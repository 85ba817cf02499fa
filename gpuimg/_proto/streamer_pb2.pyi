from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class FileRequest(_message.Message):
    __slots__ = ("filename",)
    FILENAME_FIELD_NUMBER: _ClassVar[int]
    filename: str
    def __init__(self, filename: _Optional[str] = ...) -> None: ...

class FileReply(_message.Message):
    __slots__ = ("exists",)
    EXISTS_FIELD_NUMBER: _ClassVar[int]
    exists: bool
    def __init__(self, exists: bool = ...) -> None: ...

class Marker(_message.Message):
    __slots__ = ("seq", "filename", "file_data", "file_eof", "image_eof")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    FILENAME_FIELD_NUMBER: _ClassVar[int]
    FILE_DATA_FIELD_NUMBER: _ClassVar[int]
    FILE_EOF_FIELD_NUMBER: _ClassVar[int]
    IMAGE_EOF_FIELD_NUMBER: _ClassVar[int]
    seq: int
    filename: str
    file_data: int
    file_eof: bool
    image_eof: bool
    def __init__(self, seq: _Optional[int] = ..., filename: _Optional[str] = ..., file_data: _Optional[int] = ..., file_eof: bool = ..., image_eof: bool = ...) -> None: ...
