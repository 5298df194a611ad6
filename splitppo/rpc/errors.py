"""Errors between services and controller: one table of exceptions and gRPC status codes, in both directions.

A worker raises one of these errors; `abort` ends the call with the status of the error; the client gets the same
exception back from `error_from_rpc`. The reason, and the location (role, rank, step, method, phase), are sent as a
google.rpc.ErrorInfo in the rich status.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, NoReturn, Self

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from grpc_status import rpc_status

from splitppo.manifest import DamagedCheckpoint
from splitppo.user_file import describe

ERROR_DOMAIN = "splitppo"

# gRPC refuses metadata of more than 8 KiB, and the message travels three times.
_MAX_MESSAGE_BYTES = 1000
_INNER_CAPITAL = re.compile(r"(?<!^)([A-Z])")
# What grpc.aio puts in the place of the server's status if a call ends while the client is still sending: no worker
# says this (https://github.com/grpc/grpc/issues/36066).
_ENDED_WHILE_SENDING = "Internal error from Core"


@dataclass(frozen=True)
class Place:
    """The location of a failure (role, rank, step, method, phase), as far as it is known."""

    role: str = ""
    rank: int | None = None
    step: int | None = None
    method: str = ""
    phase: str = ""

    def __str__(self) -> str:
        """Writes for people what is known, e.g. "actor rank 1, step 3, Update (backward)"."""
        rank = "" if self.rank is None else f"rank {self.rank}"
        step = "" if self.step is None else f"step {self.step}"
        phase = self.phase and f"({self.phase})"
        parts = (f"{self.role} {rank}", step, f"{self.method} {phase}")
        return ", ".join(part.strip() for part in parts if part.strip())

    @property
    def fields(self) -> dict[str, Any]:
        """The known fields of the failure's location, by name; unknown ones are left out."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None)}

    def or_else(self, other: "Place") -> "Place":
        """Returns this location with the fields that are unknown here taken from `other`."""
        return replace(other, **self.fields)


class WireError(Exception):
    """The base class of errors that are sent from a service to its caller as a gRPC status.

    `str()` is one sentence that begins with the location (role, rank, step, method); `message` is the sentence without
    the location, in one line. An error without a message says what its class stands for.
    """

    code: ClassVar[StatusCode]
    reason: ClassVar[str]  # in the ErrorInfo: the name of the class, in capitals
    by_reason: ClassVar[dict[str, "type[WireError]"]] = {}
    by_code: ClassVar[dict[StatusCode, "type[WireError]"]] = {}  # the first class of a code, for unknown reasons

    def __init_subclass__(cls, code: StatusCode | None = None) -> None:
        cls.code = code or cls.code
        cls.reason = _INNER_CAPITAL.sub(r"_\1", cls.__name__).upper()
        WireError.by_reason[cls.reason] = cls
        WireError.by_code.setdefault(cls.code, cls)

    def __init__(self, message: str, place: Place = Place()) -> None:
        super().__init__(message)
        one_line = " ".join(message.split()) or self.__doc__ or self.reason
        self.message = one_line.encode()[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
        self.place = place

    def __str__(self) -> str:
        place = str(self.place)
        return f"{place}: {self.message}" if place else self.message

    def at(self, place: Place) -> Self:
        """Adds to this error what is missing in its location, taken from `place`; returns this error."""
        self.place = self.place.or_else(place)
        return self


class InvalidArgument(WireError, ValueError, code=StatusCode.INVALID_ARGUMENT):
    """The caller's mistake; nothing was changed."""


class InvalidBatch(InvalidArgument):
    """A batch stream contradicts its own header, or has columns or types outside of the fixed schema."""


class WrongState(WireError, code=StatusCode.FAILED_PRECONDITION):
    """The worker is not in the state that the call needs; base class of more exact errors."""


class StaleEpoch(WrongState):
    """A newer controller has taken over the worker, so the worker refuses the calls of this controller."""


class NotIntroduced(WrongState):
    """The worker knows no controller: the worker was restarted, and has nothing of the run in memory."""


class WrongStep(WrongState):
    """The worker's last committed step is not the one that the command expects."""


class WrongPolicy(WrongState):
    """The responses were sampled with the weights of another step than the call expects."""


class Dirty(WrongState):
    """An update failed half-way, so the worker answers only GetStatus and LoadCheckpoint."""


class StorageFailed(WireError, code=StatusCode.FAILED_PRECONDITION):
    """The run folder cannot be written: the disk is full, a quota is used up, or a permission is missing."""


class NotFound(WireError, code=StatusCode.NOT_FOUND):
    """The call names a slot, a column or a checkpoint that the worker does not have."""


class Busy(WireError, code=StatusCode.RESOURCE_EXHAUSTED):
    """The worker has no room for the call at the moment, and nothing was changed: the same call may succeed later."""


class LimitExceeded(WireError, code=StatusCode.RESOURCE_EXHAUSTED):
    """A message or a batch is larger, or takes longer to send, than the worker ever accepts."""


class OutOfMemory(WireError, code=StatusCode.RESOURCE_EXHAUSTED):
    """Memory ran out, and the group can go on."""


class Unavailable(WireError, code=StatusCode.UNAVAILABLE):
    """The worker cannot be reached, is starting, or is ending and takes no new calls."""


class PeerDied(WireError, code=StatusCode.ABORTED):
    """A rank of the worker group has died; the whole group ends."""


class DataLoss(WireError, code=StatusCode.DATA_LOSS):
    """Data are damaged, e.g. a checkpoint: the bytes are not those that were written or sent."""


class CorruptBatch(DataLoss):
    """The payload of a chunk of a batch does not have the checksum that was sent with it."""


class DeadlineExceeded(WireError, code=StatusCode.DEADLINE_EXCEEDED):
    """There was no answer, or no progress, in time."""


class Cancelled(WireError, code=StatusCode.CANCELLED):
    """The caller has cancelled the call."""


class AccessDenied(WireError, code=StatusCode.PERMISSION_DENIED):
    """The caller is not permitted to make this call."""


class Unauthenticated(AccessDenied, code=StatusCode.UNAUTHENTICATED):
    """The caller, or the worker, has not proved who it is: no token, a wrong token, or no trusted certificate."""


class Unsupported(WireError, code=StatusCode.UNIMPLEMENTED):
    """The worker has no RPC method of this name."""


class Internal(WireError, code=StatusCode.INTERNAL):
    """The worker failed by a bug: an exception that no other error of this table stands for."""


# Exceptions that have a meaning of their own on the wire; any other exception is a bug.
_MEANINGS: Mapping[type[Exception], type[WireError]] = {
    DamagedCheckpoint: DataLoss,
    ValueError: InvalidArgument,
    MemoryError: OutOfMemory,
    TimeoutError: DeadlineExceeded,
}


def wire_error(error: BaseException, place: Place = Place()) -> WireError:
    """Converts any exception to the `WireError` that is sent to the caller.

    A WireError stays as it is; a DamagedCheckpoint is data loss, any other ValueError is the caller's mistake;
    MemoryError and TimeoutError have errors of their own; any other exception is a bug.
    """
    if isinstance(error, WireError):
        return error.at(place)
    for meant, ours in _MEANINGS.items():
        if isinstance(error, meant):
            return ours(str(error), place)
    return Internal(describe(error), place)


def status_of(error: WireError) -> grpc.Status:
    """Converts an error to a gRPC rich status with reason, message and location."""
    metadata = {"message": error.message, **{name: str(value) for name, value in error.place.fields.items()}}
    status = status_pb2.Status(code=error.code.value[0], message=str(error))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata))
    return rpc_status.to_status(status)


async def abort(context: Any, error: WireError) -> NoReturn:
    """Ends a call of a grpc.aio servicer with the status of an error; never returns."""
    status = status_of(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("unreachable")


def error_from_rpc(error: Any, place: Place = Place()) -> WireError:
    """Converts a failed gRPC call (grpc or grpc.aio) back to a `WireError`, on the caller's side.

    `place` is what the caller itself knows of the failure's location.
    """
    code = error.code()
    details = error.details() or ""
    by_code = WireError.by_code.get(code, Internal)
    if (info := _error_info(error)) is not None:
        ours = WireError.by_reason.get(info.reason, by_code)
        return ours(info.metadata.get("message", details), _place_from(info.metadata).or_else(place))
    if details == _ENDED_WHILE_SENDING:
        return Unavailable("the call ended while it was still being sent; its status is lost", place)
    if code is StatusCode.CANCELLED:  # a server drops calls over gRPC's limit; our own cancellations raise no RpcError
        by_code = Busy
    silent = "the worker failed without saying why" if code is StatusCode.UNKNOWN else code.name
    return by_code(details or silent, place)


def _error_info(error: Any) -> error_details_pb2.ErrorInfo | None:
    """Finds the ErrorInfo of this project in a rich status; None if gRPC itself or another program made the status."""
    try:
        status = rpc_status.from_call(error)
    except (DecodeError, ValueError):
        return None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            return info
    return None


def _place_from(metadata: Mapping[str, str]) -> Place:
    """Reads a place from a call's metadata, which may lack parts or hold nonsense: such parts are left open."""
    fields: dict[str, Any] = {name: metadata.get(name, "") for name in ("role", "method", "phase")}
    for name in ("rank", "step"):
        if (text := metadata.get(name, "")).removeprefix("-").isdecimal():
            fields[name] = int(text)
    return Place(**fields)
