from splitppo.v1 import batch_pb2 as _batch_pb2
from splitppo.v1 import worker_pb2 as _worker_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ComputeValuesRequest(_message.Message):
    __slots__ = ("header", "slot")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    header: _worker_pb2.CommandHeader
    slot: _batch_pb2.Slot
    def __init__(self, header: _Optional[_Union[_worker_pb2.CommandHeader, _Mapping]] = ..., slot: _Optional[_Union[_batch_pb2.Slot, _Mapping]] = ...) -> None: ...

class CriticUpdateRequest(_message.Message):
    __slots__ = ("header", "slot", "total_steps", "num_epochs")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    header: _worker_pb2.CommandHeader
    slot: _batch_pb2.Slot
    total_steps: int
    num_epochs: int
    def __init__(self, header: _Optional[_Union[_worker_pb2.CommandHeader, _Mapping]] = ..., slot: _Optional[_Union[_batch_pb2.Slot, _Mapping]] = ..., total_steps: _Optional[int] = ..., num_epochs: _Optional[int] = ...) -> None: ...
