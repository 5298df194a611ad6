"""The controller catches the error that a worker raises."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from splitppo.rpc import errors
from splitppo.rpc.errors import Place, WireError, error_from_rpc, status_of, wire_error

PLACE = Place(role="actor", rank=1, step=5, method="Update", phase="backward")


class FailedCall(grpc.RpcError):
    """A failed call as the client sees it."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...] = ()) -> None:
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._metadata


def over_the_wire(error: WireError, place: Place | None = None) -> WireError:
    status = status_of(error)
    return error_from_rpc(FailedCall(status.code, status.details, status.trailing_metadata), place or Place())


ALL = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, WireError)),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind is not WireError])
def test_every_error_crosses_the_wire_with_its_place(kind: type[WireError]) -> None:
    arrived = over_the_wire(kind("it broke: ä", PLACE))

    assert type(arrived) is kind
    assert (arrived.message, arrived.place) == ("it broke: ä", PLACE)
    assert str(arrived) == "actor rank 1, step 5, Update (backward): it broke: ä"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.InvalidBatch, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.WrongState, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.StaleEpoch, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.StorageFailed, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.Dirty, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.NotFound, grpc.StatusCode.NOT_FOUND),
        (errors.Busy, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.OutOfMemory, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
        (errors.PeerDied, grpc.StatusCode.ABORTED),
        (errors.CorruptBatch, grpc.StatusCode.DATA_LOSS),
        (errors.Internal, grpc.StatusCode.INTERNAL),
    ],
)
def test_status_codes_are_those_of_the_protocol(kind: type[WireError], code: grpc.StatusCode) -> None:
    assert status_of(kind("x")).code is code


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("it is invalid:\n- `a`: is 1\n\nFix it."), "actor: it is invalid: - `a`: is 1 Fix it."),
        (RuntimeError("\n two \n lines"), "actor: RuntimeError: two lines"),
        (RuntimeError(), "actor: RuntimeError"),
        (ValueError(" \n"), f"actor: {errors.InvalidArgument.__doc__}"),
    ],
)
def test_any_exception_arrives_as_one_line_that_says_something(error: Exception, sentence: str) -> None:
    assert str(over_the_wire(wire_error(error, Place(role="actor")))) == sentence


def test_an_error_without_a_message_says_what_its_kind_stands_for() -> None:
    assert errors.StorageFailed("").message == " ".join((errors.StorageFailed.__doc__ or "").split())


def test_a_strangers_client_reads_reason_and_place_from_the_error_info() -> None:
    ((key, value),) = status_of(errors.OutOfMemory("no memory", PLACE)).trailing_metadata
    status = status_pb2.Status.FromString(value)
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)

    assert key == "grpc-status-details-bin"
    assert (info.reason, info.domain) == ("OUT_OF_MEMORY", "splitppo")
    assert (info.metadata["role"], info.metadata["rank"], info.metadata["step"]) == ("actor", "1", "5")


def test_the_client_adds_what_the_worker_did_not_say() -> None:
    arrived = over_the_wire(errors.NotFound("no such slot", Place(role="critic", step=7)), Place("x", 0, 1, "GetBatch"))

    assert arrived.place == Place(role="critic", rank=0, step=7, method="GetBatch")


def test_rank_and_step_zero_are_known_parts_of_a_place() -> None:
    arrived = over_the_wire(errors.Internal("x", Place(role="actor", rank=0, step=0)), Place(rank=3, step=3))

    assert str(arrived) == "actor rank 0, step 0: x"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, errors.Busy),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Unsupported),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Busy),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.WrongState),
        (grpc.StatusCode.UNKNOWN, errors.Internal),
        (grpc.StatusCode.OUT_OF_RANGE, errors.Internal),
    ],
)
def test_a_status_without_our_details_is_read_by_its_code(code: grpc.StatusCode, kind: type[WireError]) -> None:
    arrived = error_from_rpc(FailedCall(code, "connection refused"), Place(role="actor"))

    assert type(arrived) is kind
    assert str(arrived) == "actor: connection refused"


def test_a_status_that_the_client_has_lost_is_no_bug_of_the_worker() -> None:
    arrived = error_from_rpc(FailedCall(grpc.StatusCode.INTERNAL, "Internal error from Core"), Place(role="actor"))

    assert type(arrived) is errors.Unavailable
    assert str(arrived) == "actor: the call ended while it was still being sent; its status is lost"


def test_a_newer_workers_unknown_reason_falls_back_to_its_code() -> None:
    info = error_details_pb2.ErrorInfo(reason="FROM_THE_FUTURE", domain="splitppo", metadata={"message": "new"})
    status = status_pb2.Status(code=grpc.StatusCode.NOT_FOUND.value[0], message="new")
    status.details.add().Pack(info)
    call = FailedCall(grpc.StatusCode.NOT_FOUND, "new", (("grpc-status-details-bin", status.SerializeToString()),))

    assert type(error_from_rpc(call)) is errors.NotFound


@pytest.mark.parametrize("value", [b"\xff\xff not a status", b""])
def test_details_that_cannot_be_read_are_ignored(value: bytes) -> None:
    call = FailedCall(grpc.StatusCode.NOT_FOUND, "gone", (("grpc-status-details-bin", value),))

    assert str(error_from_rpc(call)) == "gone"


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (ValueError("temperature must be >= 0"), errors.InvalidArgument, "actor: temperature must be >= 0"),
        (MemoryError(), errors.OutOfMemory, "actor: Memory ran out, and the group can go on."),
        (KeyError("x"), errors.Internal, "actor: KeyError: 'x'"),
        (errors.Dirty("load first"), errors.Dirty, "actor: load first"),
    ],
)
def test_a_workers_exception_becomes_one_of_the_table(error: Exception, kind: type[WireError], sentence: str) -> None:
    ours = wire_error(error, Place(role="actor"))

    assert type(ours) is kind
    assert str(ours) == sentence


def test_a_callers_mistake_is_a_value_error_on_both_sides() -> None:
    with pytest.raises(ValueError, match="bad"):
        raise over_the_wire(errors.InvalidArgument("bad"))


def test_a_message_longer_than_metadata_may_be_is_cut() -> None:
    status = status_of(errors.Internal("ä" * 100_000))

    assert sum(len(value) for _, value in status.trailing_metadata) < 4096
    assert over_the_wire(errors.Internal("ä" * 100_000)).message == "ä" * 500
