from splitppo.v1 import batch_pb2 as _batch_pb2
from splitppo.v1 import conversation_pb2 as _conversation_pb2
from splitppo.v1 import worker_pb2 as _worker_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_response_length")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_RESPONSE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_response_length: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_response_length: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("header", "slot", "sampling", "num_parts", "sleep_after", "conversation", "max_step_tokens")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    SLEEP_AFTER_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    header: _worker_pb2.CommandHeader
    slot: _batch_pb2.Slot
    sampling: SamplingParams
    num_parts: int
    sleep_after: bool
    conversation: _conversation_pb2.Conversation
    max_step_tokens: int
    def __init__(self, header: _Optional[_Union[_worker_pb2.CommandHeader, _Mapping]] = ..., slot: _Optional[_Union[_batch_pb2.Slot, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., num_parts: _Optional[int] = ..., sleep_after: _Optional[bool] = ..., conversation: _Optional[_Union[_conversation_pb2.Conversation, _Mapping]] = ..., max_step_tokens: _Optional[int] = ...) -> None: ...

class ComputeLogProbsRequest(_message.Message):
    __slots__ = ("header", "slot")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    header: _worker_pb2.CommandHeader
    slot: _batch_pb2.Slot
    def __init__(self, header: _Optional[_Union[_worker_pb2.CommandHeader, _Mapping]] = ..., slot: _Optional[_Union[_batch_pb2.Slot, _Mapping]] = ...) -> None: ...

class ActorUpdateRequest(_message.Message):
    __slots__ = ("header", "slot", "advance_only", "loss_terms", "total_steps")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_ONLY_FIELD_NUMBER: _ClassVar[int]
    LOSS_TERMS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    header: _worker_pb2.CommandHeader
    slot: _batch_pb2.Slot
    advance_only: bool
    loss_terms: LossTerms
    total_steps: int
    def __init__(self, header: _Optional[_Union[_worker_pb2.CommandHeader, _Mapping]] = ..., slot: _Optional[_Union[_batch_pb2.Slot, _Mapping]] = ..., advance_only: _Optional[bool] = ..., loss_terms: _Optional[_Union[LossTerms, _Mapping]] = ..., total_steps: _Optional[int] = ...) -> None: ...

class LossTerms(_message.Message):
    __slots__ = ("loss_mode", "entropy_coeff", "use_kl_loss", "kl_loss_coef", "phase", "teacher_coef")
    LOSS_MODE_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_COEFF_FIELD_NUMBER: _ClassVar[int]
    USE_KL_LOSS_FIELD_NUMBER: _ClassVar[int]
    KL_LOSS_COEF_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TEACHER_COEF_FIELD_NUMBER: _ClassVar[int]
    loss_mode: str
    entropy_coeff: float
    use_kl_loss: bool
    kl_loss_coef: float
    phase: str
    teacher_coef: float
    def __init__(self, loss_mode: _Optional[str] = ..., entropy_coeff: _Optional[float] = ..., use_kl_loss: _Optional[bool] = ..., kl_loss_coef: _Optional[float] = ..., phase: _Optional[str] = ..., teacher_coef: _Optional[float] = ...) -> None: ...

class PublishWeightsRequest(_message.Message):
    __slots__ = ("header", "keep_from", "save_hf_model")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KEEP_FROM_FIELD_NUMBER: _ClassVar[int]
    SAVE_HF_MODEL_FIELD_NUMBER: _ClassVar[int]
    header: _worker_pb2.CommandHeader
    keep_from: int
    save_hf_model: bool
    def __init__(self, header: _Optional[_Union[_worker_pb2.CommandHeader, _Mapping]] = ..., keep_from: _Optional[int] = ..., save_hf_model: _Optional[bool] = ...) -> None: ...
