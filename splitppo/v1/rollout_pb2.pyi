from splitppo.v1 import actor_pb2 as _actor_pb2
from splitppo.v1 import conversation_pb2 as _conversation_pb2
from splitppo.v1 import worker_pb2 as _worker_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SyncWeightsRequest(_message.Message):
    __slots__ = ("header", "version", "manifest_sha256")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    header: _worker_pb2.CommandHeader
    version: int
    manifest_sha256: str
    def __init__(self, header: _Optional[_Union[_worker_pb2.CommandHeader, _Mapping]] = ..., version: _Optional[int] = ..., manifest_sha256: _Optional[str] = ...) -> None: ...
