"""Errors on the wire: one table between our exceptions and gRPC status, both ways.

A worker raises one of these; the servicer ends the call with `status_of(error)`; the client gets the same exception
back from `error_from_rpc`. What the status code does not say (reason, role, rank, step, method, phase) travels as a
google.rpc.ErrorInfo in the rich status.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

ERROR_DOMAIN = "splitppo"

# gRPC refuses metadata of more than 8 KiB, and the message travels three times.
_MAX_MESSAGE_BYTES = 1000


@dataclass(frozen=True)
class Place:
    """Where something went wrong. Unknown parts are empty (rank and step: None)."""

    role: str = ""
    rank: int | None = None
    step: int | None = None
    method: str = ""
    phase: str = ""

    def __str__(self) -> str:
        rank = None if self.rank is None else f"rank {self.rank}"
        step = None if self.step is None else f"step {self.step}"
        who = " ".join(part for part in (self.role, rank) if part)
        what = " ".join(part for part in (self.method, f"({self.phase})" if self.phase else "") if part)
        return ", ".join(part for part in (who, step, what) if part)

    def or_else(self, other: Place) -> Place:
        """This place, with what it does not know taken from `other`."""
        unknown = {f.name for f in fields(self) if getattr(self, f.name) in ("", None)}
        return replace(self, **{name: getattr(other, name) for name in unknown})


class WireError(Exception):
    """An error that crosses the wire. `str()` is one sentence, led by the place.

    Attributes:
        message: what happened, without the place; cut to what fits into gRPC's metadata.
        place: where it happened.
    """

    code: ClassVar[grpc.StatusCode]
    reason: ClassVar[str]

    def __init__(self, message: str, place: Place = Place()) -> None:
        super().__init__(message)
        self.message = message.encode()[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
        self.place = place

    def __str__(self) -> str:
        place = str(self.place)
        return f"{place}: {self.message}" if place else self.message

    def at(self, place: Place) -> Self:
        """The same error; what its place does not know is filled in from `place`."""
        self.place = self.place.or_else(place)
        return self


class InvalidArgument(WireError, ValueError):
    """The caller's mistake; nothing was changed."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"


class InvalidBatch(InvalidArgument):
    """A batch stream that breaks its own header or the closed schema."""

    reason = "INVALID_BATCH"


class WrongState(WireError):
    """The worker is not in the state that the call needs."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE"


class StaleEpoch(WrongState):
    """Another controller has taken the worker over since."""

    reason = "STALE_EPOCH"


class NotIntroduced(WrongState):
    """The worker knows no controller: it has started since, and holds nothing of the run."""

    reason = "NOT_INTRODUCED"


class WrongStep(WrongState):
    """The committed step is not the one that the command expects to find."""

    reason = "WRONG_STEP"


class WrongPolicy(WrongState):
    """Responses were sampled with other weights than those of the step that they are meant for."""

    reason = "WRONG_POLICY"


class Dirty(WrongState):
    """An update failed half-way: only GetStatus and LoadCheckpoint are answered."""

    reason = "DIRTY"


class StorageFailed(WireError):
    """The run folder cannot be written: the disk is full, a quota is used up, a permission is lost."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "STORAGE_FAILED"


class NotFound(WireError):
    """A slot, a column or a checkpoint that the worker does not have."""

    code, reason = grpc.StatusCode.NOT_FOUND, "NOT_FOUND"


class LimitExceeded(WireError):
    """More than the worker takes: a message, a batch, or all of them together."""

    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED"


class QueueFull(WireError):
    """The mailbox holds as many commands as it may."""

    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"


class OutOfMemory(WireError):
    """Memory ran out, and the group can go on."""

    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY"


class Unavailable(WireError):
    """The worker cannot be reached, is draining or is starting."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"


class PeerDied(WireError):
    """A rank of the group has died; the group ends."""

    code, reason = grpc.StatusCode.ABORTED, "PEER_DIED"


class DataLoss(WireError):
    """Bytes are not what their digest says."""

    code, reason = grpc.StatusCode.DATA_LOSS, "DATA_LOSS"


class CorruptBatch(DataLoss):
    """A chunk whose checksum does not fit its payload."""

    reason = "CORRUPT_BATCH"


class DeadlineExceeded(WireError):
    """No answer, or no progress, in time."""

    code, reason = grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"


class Cancelled(WireError):
    """The call was given up by its caller."""

    code, reason = grpc.StatusCode.CANCELLED, "CANCELLED"


class AccessDenied(WireError):
    """The caller may not do this."""

    code, reason = grpc.StatusCode.PERMISSION_DENIED, "ACCESS_DENIED"


class Unauthenticated(AccessDenied):
    """The caller has not proved who it is, or the worker has not: no token, a wrong one, no trusted certificate."""

    code, reason = grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"


class Unsupported(WireError):
    """The worker has no such method."""

    code, reason = grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED"


class Internal(WireError):
    """A bug of ours."""

    code, reason = grpc.StatusCode.INTERNAL, "INTERNAL"


_ERRORS: tuple[type[WireError], ...] = (
    InvalidArgument,
    InvalidBatch,
    WrongState,
    StaleEpoch,
    NotIntroduced,
    WrongStep,
    WrongPolicy,
    Dirty,
    StorageFailed,
    NotFound,
    LimitExceeded,
    OutOfMemory,
    QueueFull,
    Unavailable,
    PeerDied,
    DataLoss,
    CorruptBatch,
    DeadlineExceeded,
    Cancelled,
    AccessDenied,
    Unauthenticated,
    Unsupported,
    Internal,
)
_BY_REASON = {error.reason: error for error in _ERRORS}
# The first error of a code stands for a status without a reason that we know.
_BY_CODE = {error.code: error for error in reversed(_ERRORS)}
# Exceptions of Python that have a meaning of their own on the wire; any other one is a bug.
_BUILTIN: tuple[tuple[type[Exception], type[WireError]], ...] = (
    (ValueError, InvalidArgument),
    (MemoryError, OutOfMemory),
    (TimeoutError, DeadlineExceeded),
)


def wire_error(error: BaseException, place: Place = Place()) -> WireError:
    """The error as it goes over the wire: ours as it is, ValueError as the caller's mistake, others as our bug."""
    if isinstance(error, WireError):
        return error.at(place)
    for builtin, ours in _BUILTIN:
        if isinstance(error, builtin):
            return ours(str(error) or ours.__doc__ or ours.reason, place)
    return Internal(f"{type(error).__name__}: {error}", place)


def status_of(error: WireError) -> grpc.Status:
    """The rich status; an aio servicer ends its call with `context.abort(s.code, s.details, s.trailing_metadata)`."""
    metadata = {"message": error.message}
    for name, value in vars(error.place).items():
        if value not in ("", None):
            metadata[name] = str(value)
    status = status_pb2.Status(code=error.code.value[0], message=str(error))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata))
    return rpc_status.to_status(status)


def error_from_rpc(error: grpc.RpcError, place: Place = Place()) -> WireError:
    """The exception behind a failed call (grpc or grpc.aio); `place` is what the caller knows of it itself."""
    code, details = _code_and_details(error)
    info = _error_info(error)
    if info is None:
        if code is grpc.StatusCode.UNKNOWN:
            return Internal(details or "the worker failed without saying why", place)
        return _BY_CODE.get(code, Internal)(details or code.name, place)
    ours = _BY_REASON.get(info.reason, _BY_CODE.get(code, Internal))
    return ours(info.metadata.get("message", details), _place_from(info.metadata).or_else(place))


def _code_and_details(error: Any) -> tuple[grpc.StatusCode, str]:
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    return code or grpc.StatusCode.UNKNOWN, (error.details() if hasattr(error, "details") else str(error)) or ""


def _error_info(error: Any) -> error_details_pb2.ErrorInfo | None:
    """Our ErrorInfo in the trailing metadata, or None: the status comes from gRPC itself or from a stranger."""
    for key, value in (error.trailing_metadata() if hasattr(error, "trailing_metadata") else None) or ():
        if key != "grpc-status-details-bin":
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            return None
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN and status.code != code_pb2.OK:
                return info
    return None


def _place_from(metadata: Any) -> Place:
    def number(name: str) -> int | None:
        text = metadata.get(name, "")
        return int(text) if text.removeprefix("-").isdigit() else None

    return Place(
        role=metadata.get("role", ""),
        rank=number("rank"),
        step=number("step"),
        method=metadata.get("method", ""),
        phase=metadata.get("phase", ""),
    )
