from splitppo.v1 import batch_pb2 as _batch_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Conversation(_message.Message):
    __slots__ = ("max_turn_length", "reply_steps", "max_context_length", "first_turns", "with_log_probs")
    MAX_TURN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    REPLY_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FIRST_TURNS_FIELD_NUMBER: _ClassVar[int]
    WITH_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    max_turn_length: int
    reply_steps: int
    max_context_length: int
    first_turns: _containers.RepeatedCompositeFieldContainer[FirstTurn]
    with_log_probs: bool
    def __init__(self, max_turn_length: _Optional[int] = ..., reply_steps: _Optional[int] = ..., max_context_length: _Optional[int] = ..., first_turns: _Optional[_Iterable[_Union[FirstTurn, _Mapping]]] = ..., with_log_probs: _Optional[bool] = ...) -> None: ...

class TurnLimits(_message.Message):
    __slots__ = ("max_tokens", "stop")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ...) -> None: ...

class FirstTurn(_message.Message):
    __slots__ = ("place", "limits")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    place: int
    limits: TurnLimits
    def __init__(self, place: _Optional[int] = ..., limits: _Optional[_Union[TurnLimits, _Mapping]] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("place", "turn", "tokens", "is_last", "log_probs")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    place: int
    turn: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    is_last: bool
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, place: _Optional[int] = ..., turn: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., is_last: _Optional[bool] = ..., log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class TurnsEnded(_message.Message):
    __slots__ = ("turns",)
    TURNS_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    def __init__(self, turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ...) -> None: ...

class TurnReply(_message.Message):
    __slots__ = ("place", "turn", "tokens", "is_last", "begins_context", "limits")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    BEGINS_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    place: int
    turn: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    is_last: bool
    begins_context: bool
    limits: TurnLimits
    def __init__(self, place: _Optional[int] = ..., turn: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., is_last: _Optional[bool] = ..., begins_context: _Optional[bool] = ..., limits: _Optional[_Union[TurnLimits, _Mapping]] = ...) -> None: ...

class ReplyRequest(_message.Message):
    __slots__ = ("run_id", "epoch", "slot", "replies")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    slot: _batch_pb2.Slot
    replies: _containers.RepeatedCompositeFieldContainer[TurnReply]
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., slot: _Optional[_Union[_batch_pb2.Slot, _Mapping]] = ..., replies: _Optional[_Iterable[_Union[TurnReply, _Mapping]]] = ...) -> None: ...

class ReplyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
