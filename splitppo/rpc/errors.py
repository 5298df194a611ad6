"""Errors on the wire: one table between our exceptions and gRPC status, in both directions.

A worker raises one of these errors; `abort` ends the call with its status; the client gets the same exception back from
`error_from_rpc`. The reason, and the place (role, rank, step, method, phase), travel as a google.rpc.ErrorInfo in the
rich status.
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

ERROR_DOMAIN = "splitppo"

# gRPC refuses metadata of more than 8 KiB, and the message travels three times.
_MAX_MESSAGE_BYTES = 1000
_INNER_CAPITAL = re.compile(r"(?<!^)([A-Z])")


@dataclass(frozen=True)
class Place:
    """The place of a failure, as far as it is known."""

    role: str = ""
    rank: int | None = None
    step: int | None = None
    method: str = ""
    phase: str = ""

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}"
        step = "" if self.step is None else f"step {self.step}"
        phase = self.phase and f"({self.phase})"
        parts = (f"{self.role} {rank}", step, f"{self.method} {phase}")
        return ", ".join(part.strip() for part in parts if part.strip())

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that are not empty, by name."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None)}

    def or_else(self, other: "Place") -> "Place":
        """Returns this place; what it lacks is taken from `other`."""
        return replace(other, **self.fields)


class WireError(Exception):
    """An error that crosses the wire.

    `str()` is one sentence that begins with the place; `message` is the sentence without the place.
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
        self.message = message.encode()[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
        self.place = place

    def __str__(self) -> str:
        place = str(self.place)
        return f"{place}: {self.message}" if place else self.message

    def at(self, place: Place) -> Self:
        """Returns this error; what its place lacks is taken from `place`."""
        self.place = self.place.or_else(place)
        return self


class InvalidArgument(WireError, ValueError, code=StatusCode.INVALID_ARGUMENT):
    """The caller's mistake; nothing was changed."""


class InvalidBatch(InvalidArgument):
    """A batch stream that breaks its own header or the closed schema."""


class WrongState(WireError, code=StatusCode.FAILED_PRECONDITION):
    """The worker is not in the state that the call needs."""


class StaleEpoch(WrongState):
    """Another controller has taken over the worker in the meantime."""


class NotIntroduced(WrongState):
    """The worker knows no controller: it has started anew, and holds nothing of the run."""


class WrongStep(WrongState):
    """The committed step is not the one that the command expects to find."""


class WrongPolicy(WrongState):
    """The responses were sampled with the weights of another step than the one they are meant for."""


class Dirty(WrongState):
    """An update failed half-way: only GetStatus and LoadCheckpoint are answered."""


class StorageFailed(WireError, code=StatusCode.FAILED_PRECONDITION):
    """The run folder cannot be written: the disk is full, a quota is used up, a permission is lost."""


class NotFound(WireError, code=StatusCode.NOT_FOUND):
    """A slot, a column or a checkpoint that the worker does not have."""


class Busy(WireError, code=StatusCode.RESOURCE_EXHAUSTED):
    """There is no room at the moment, and nothing was changed: the same call may be answered later."""


class LimitExceeded(WireError, code=StatusCode.RESOURCE_EXHAUSTED):
    """A message, a batch, or the time to send it is over what the worker ever accepts."""


class OutOfMemory(WireError, code=StatusCode.RESOURCE_EXHAUSTED):
    """Memory ran out, and the group can go on."""


class Unavailable(WireError, code=StatusCode.UNAVAILABLE):
    """The worker cannot be reached, is draining or is starting."""


class PeerDied(WireError, code=StatusCode.ABORTED):
    """A rank of the group has died; the group ends."""


class DataLoss(WireError, code=StatusCode.DATA_LOSS):
    """The bytes do not have their digest."""


class CorruptBatch(DataLoss):
    """The payload of a chunk does not have its checksum."""


class DeadlineExceeded(WireError, code=StatusCode.DEADLINE_EXCEEDED):
    """There was no answer, or no progress, in time."""


class Cancelled(WireError, code=StatusCode.CANCELLED):
    """The caller has given up the call."""


class AccessDenied(WireError, code=StatusCode.PERMISSION_DENIED):
    """The caller may not do this."""


class Unauthenticated(AccessDenied, code=StatusCode.UNAUTHENTICATED):
    """The caller, or the worker, has not proved who it is: no token, a wrong one, no trusted certificate."""


class Unsupported(WireError, code=StatusCode.UNIMPLEMENTED):
    """The worker has no such method."""


class Internal(WireError, code=StatusCode.INTERNAL):
    """A bug of ours."""


# Exceptions of Python that have a meaning of their own on the wire; any other exception is a bug.
_BUILTIN: Mapping[type[Exception], type[WireError]] = {
    ValueError: InvalidArgument,
    MemoryError: OutOfMemory,
    TimeoutError: DeadlineExceeded,
}


def wire_error(error: BaseException, place: Place = Place()) -> WireError:
    """Returns the error that goes over the wire for `error`.

    Our own errors stay as they are, a ValueError is the caller's mistake, any other error is our bug.
    """
    if isinstance(error, WireError):
        return error.at(place)
    for builtin, ours in _BUILTIN.items():
        if isinstance(error, builtin):
            return ours(str(error) or ours.__doc__ or ours.reason, place)
    return Internal(f"{type(error).__name__}: {error}", place)


def status_of(error: WireError) -> grpc.Status:
    """Returns the rich status of an error."""
    metadata = {"message": error.message, **{name: str(value) for name, value in error.place.fields.items()}}
    status = status_pb2.Status(code=error.code.value[0], message=str(error))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata))
    return rpc_status.to_status(status)


async def abort(context: Any, error: WireError) -> NoReturn:
    """Ends a call of an aio servicer with the status of an error."""
    status = status_of(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("unreachable")


def error_from_rpc(error: Any, place: Place = Place()) -> WireError:
    """Returns the exception behind a failed call (grpc or grpc.aio); `place` is what the caller itself knows of it."""
    code, details = error.code(), error.details() or ""
    by_code = WireError.by_code.get(code, Internal)
    if (info := _error_info(error)) is not None:
        ours = WireError.by_reason.get(info.reason, by_code)
        return ours(info.metadata.get("message", details), _place_from(info.metadata).or_else(place))
    if code is StatusCode.CANCELLED:  # a server drops calls over gRPC's limit; our own cancellations raise no RpcError
        by_code = Busy
    silent = "the worker failed without saying why" if code is StatusCode.UNKNOWN else code.name
    return by_code(details or silent, place)


def _error_info(error: Any) -> error_details_pb2.ErrorInfo | None:
    """Returns our ErrorInfo in the rich status; None if the status comes from gRPC itself or from another program."""
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
    fields: dict[str, Any] = {name: metadata.get(name, "") for name in ("role", "method", "phase")}
    for name in ("rank", "step"):
        if (text := metadata.get(name, "")).removeprefix("-").isdecimal():
            fields[name] = int(text)
    return Place(**fields)
