from splitppo.v1 import batch_pb2 as _batch_pb2
from splitppo.v1 import conversation_pb2 as _conversation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_ACTOR: _ClassVar[Role]
    ROLE_CRITIC: _ClassVar[Role]
    ROLE_REWARD: _ClassVar[Role]
    ROLE_ROLLOUT: _ClassVar[Role]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_IDLE: _ClassVar[WorkerState]
    WORKER_STATE_BUSY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_DIRTY: _ClassVar[WorkerState]
    WORKER_STATE_FAILED: _ClassVar[WorkerState]
ROLE_UNSPECIFIED: Role
ROLE_ACTOR: Role
ROLE_CRITIC: Role
ROLE_REWARD: Role
ROLE_ROLLOUT: Role
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_IDLE: WorkerState
WORKER_STATE_BUSY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_DIRTY: WorkerState
WORKER_STATE_FAILED: WorkerState

class CommandHeader(_message.Message):
    __slots__ = ("run_id", "epoch", "base_step", "request_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_STEP_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    base_step: int
    request_id: str
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., base_step: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("done", "total", "phase")
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    done: int
    total: int
    phase: str
    def __init__(self, done: _Optional[int] = ..., total: _Optional[int] = ..., phase: _Optional[str] = ...) -> None: ...

class EngineTime(_message.Message):
    __slots__ = ("started_unix_ns", "finished_unix_ns")
    STARTED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    started_unix_ns: int
    finished_unix_ns: int
    def __init__(self, started_unix_ns: _Optional[int] = ..., finished_unix_ns: _Optional[int] = ...) -> None: ...

class PartReady(_message.Message):
    __slots__ = ("part", "num_parts", "policy_version")
    PART_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    part: int
    num_parts: int
    policy_version: int
    def __init__(self, part: _Optional[int] = ..., num_parts: _Optional[int] = ..., policy_version: _Optional[int] = ...) -> None: ...

class CommandResult(_message.Message):
    __slots__ = ("engine_time", "metrics", "committed_step", "replayed", "weights_sha256", "policy_version", "manifest_sha256")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ENGINE_TIME_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    engine_time: EngineTime
    metrics: _containers.ScalarMap[str, float]
    committed_step: int
    replayed: bool
    weights_sha256: str
    policy_version: int
    manifest_sha256: str
    def __init__(self, engine_time: _Optional[_Union[EngineTime, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., committed_step: _Optional[int] = ..., replayed: _Optional[bool] = ..., weights_sha256: _Optional[str] = ..., policy_version: _Optional[int] = ..., manifest_sha256: _Optional[str] = ...) -> None: ...

class CommandEvent(_message.Message):
    __slots__ = ("progress", "result", "part", "turns")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    result: CommandResult
    part: PartReady
    turns: _conversation_pb2.TurnsEnded
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., result: _Optional[_Union[CommandResult, _Mapping]] = ..., part: _Optional[_Union[PartReady, _Mapping]] = ..., turns: _Optional[_Union[_conversation_pb2.TurnsEnded, _Mapping]] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("protocol_version", "software_version", "run_id", "epoch", "config_digest", "nonce")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    software_version: str
    run_id: str
    epoch: int
    config_digest: str
    nonce: str
    def __init__(self, protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., config_digest: _Optional[str] = ..., nonce: _Optional[str] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("rank", "pid", "host")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    host: str
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("protocol_version", "software_version", "role", "world_size", "instance_id", "committed_step", "config_digest", "processes", "unix_ns", "num_parameters", "num_trainable_parameters")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINABLE_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    software_version: str
    role: Role
    world_size: int
    instance_id: str
    committed_step: int
    config_digest: str
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    unix_ns: int
    num_parameters: int
    num_trainable_parameters: int
    def __init__(self, protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., world_size: _Optional[int] = ..., instance_id: _Optional[str] = ..., committed_step: _Optional[int] = ..., config_digest: _Optional[str] = ..., processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ..., unix_ns: _Optional[int] = ..., num_parameters: _Optional[int] = ..., num_trainable_parameters: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("role", "state", "instance_id", "committed_step", "epoch", "running_method", "progress", "queued_commands", "slots", "protocol_version", "software_version", "config_digest", "unix_ns")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUNNING_METHOD_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_COMMANDS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    state: WorkerState
    instance_id: str
    committed_step: int
    epoch: int
    running_method: str
    progress: Progress
    queued_commands: int
    slots: _containers.RepeatedCompositeFieldContainer[_batch_pb2.Slot]
    protocol_version: int
    software_version: str
    config_digest: str
    unix_ns: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., instance_id: _Optional[str] = ..., committed_step: _Optional[int] = ..., epoch: _Optional[int] = ..., running_method: _Optional[str] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., queued_commands: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[_batch_pb2.Slot, _Mapping]]] = ..., protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., config_digest: _Optional[str] = ..., unix_ns: _Optional[int] = ...) -> None: ...

class DiagnoseRequest(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: str
    def __init__(self, nonce: _Optional[str] = ...) -> None: ...

class RankDiagnosis(_message.Message):
    __slots__ = ("process", "device", "free_bytes", "total_bytes", "silent_s")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    process: Process
    device: str
    free_bytes: int
    total_bytes: int
    silent_s: float
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., device: _Optional[str] = ..., free_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., silent_s: _Optional[float] = ...) -> None: ...

class DiagnoseResponse(_message.Message):
    __slots__ = ("ranks", "run_dir", "sees_nonce", "is_writable", "disk_free_bytes", "certificate_ends_unix_s", "image_decoder")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    SEES_NONCE_FIELD_NUMBER: _ClassVar[int]
    IS_WRITABLE_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ENDS_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    IMAGE_DECODER_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankDiagnosis]
    run_dir: str
    sees_nonce: bool
    is_writable: bool
    disk_free_bytes: int
    certificate_ends_unix_s: int
    image_decoder: str
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankDiagnosis, _Mapping]]] = ..., run_dir: _Optional[str] = ..., sees_nonce: _Optional[bool] = ..., is_writable: _Optional[bool] = ..., disk_free_bytes: _Optional[int] = ..., certificate_ends_unix_s: _Optional[int] = ..., image_decoder: _Optional[str] = ...) -> None: ...

class MeasureUploadRequest(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class MeasureUploadResponse(_message.Message):
    __slots__ = ("received_bytes",)
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    def __init__(self, received_bytes: _Optional[int] = ...) -> None: ...

class MeasureDownloadRequest(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class MeasureDownloadResponse(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class PutBatchRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PutBatchHeader
    chunk: _batch_pb2.BatchChunk
    def __init__(self, header: _Optional[_Union[PutBatchHeader, _Mapping]] = ..., chunk: _Optional[_Union[_batch_pb2.BatchChunk, _Mapping]] = ...) -> None: ...

class PutBatchHeader(_message.Message):
    __slots__ = ("run_id", "epoch", "batch")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    batch: _batch_pb2.BatchHeader
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., batch: _Optional[_Union[_batch_pb2.BatchHeader, _Mapping]] = ...) -> None: ...

class PutBatchResponse(_message.Message):
    __slots__ = ("received_bytes",)
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    def __init__(self, received_bytes: _Optional[int] = ...) -> None: ...

class GetBatchRequest(_message.Message):
    __slots__ = ("run_id", "epoch", "slot", "columns")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    slot: _batch_pb2.Slot
    columns: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., slot: _Optional[_Union[_batch_pb2.Slot, _Mapping]] = ..., columns: _Optional[_Iterable[str]] = ...) -> None: ...

class GetBatchResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: _batch_pb2.BatchHeader
    chunk: _batch_pb2.BatchChunk
    def __init__(self, header: _Optional[_Union[_batch_pb2.BatchHeader, _Mapping]] = ..., chunk: _Optional[_Union[_batch_pb2.BatchChunk, _Mapping]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("header", "with_hf_model")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    WITH_HF_MODEL_FIELD_NUMBER: _ClassVar[int]
    header: CommandHeader
    with_hf_model: bool
    def __init__(self, header: _Optional[_Union[CommandHeader, _Mapping]] = ..., with_hf_model: _Optional[bool] = ...) -> None: ...

class LoadCheckpointRequest(_message.Message):
    __slots__ = ("header", "step")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    header: CommandHeader
    step: int
    def __init__(self, header: _Optional[_Union[CommandHeader, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class ComputeWeightsDigestRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: CommandHeader
    def __init__(self, header: _Optional[_Union[CommandHeader, _Mapping]] = ...) -> None: ...
