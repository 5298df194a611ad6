from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_UINT8: _ClassVar[DType]

class SlotKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLOT_KIND_UNSPECIFIED: _ClassVar[SlotKind]
    SLOT_KIND_EXPERIENCE: _ClassVar[SlotKind]
    SLOT_KIND_EVALUATION: _ClassVar[SlotKind]
    SLOT_KIND_CANDIDATES: _ClassVar[SlotKind]
    SLOT_KIND_GREEDY: _ClassVar[SlotKind]
    SLOT_KIND_SHARE: _ClassVar[SlotKind]
DTYPE_UNSPECIFIED: DType
DTYPE_INT32: DType
DTYPE_INT64: DType
DTYPE_FLOAT32: DType
DTYPE_UINT8: DType
SLOT_KIND_UNSPECIFIED: SlotKind
SLOT_KIND_EXPERIENCE: SlotKind
SLOT_KIND_EVALUATION: SlotKind
SLOT_KIND_CANDIDATES: SlotKind
SLOT_KIND_GREEDY: SlotKind
SLOT_KIND_SHARE: SlotKind

class Slot(_message.Message):
    __slots__ = ("kind", "step", "part")
    KIND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    kind: SlotKind
    step: int
    part: int
    def __init__(self, kind: _Optional[_Union[SlotKind, str]] = ..., step: _Optional[int] = ..., part: _Optional[int] = ...) -> None: ...

class ColumnSpec(_message.Message):
    __slots__ = ("name", "dtype", "lengths", "stored_rows")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    STORED_ROWS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    lengths: _containers.RepeatedScalarFieldContainer[int]
    stored_rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., lengths: _Optional[_Iterable[int]] = ..., stored_rows: _Optional[_Iterable[int]] = ...) -> None: ...

class BatchHeader(_message.Message):
    __slots__ = ("slot", "num_rows", "columns", "total_bytes")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    slot: Slot
    num_rows: int
    columns: _containers.RepeatedCompositeFieldContainer[ColumnSpec]
    total_bytes: int
    def __init__(self, slot: _Optional[_Union[Slot, _Mapping]] = ..., num_rows: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[ColumnSpec, _Mapping]]] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class BatchChunk(_message.Message):
    __slots__ = ("offset", "payload", "checksum")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    offset: int
    payload: bytes
    checksum: int
    def __init__(self, offset: _Optional[int] = ..., payload: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...
