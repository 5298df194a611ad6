"""Bounds of a service: a call over a bound changes nothing, and its memory is free again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitppo.batch import Batch
from splitppo.rpc.channel_options import MAX_MESSAGE_BYTES
from splitppo.rpc.errors import Busy, LimitExceeded, WireError, error_from_rpc
from splitppo.v1 import worker_pb2
from tests.integration.runtime.client import Client, experience
from tests.integration.runtime.conftest import StartToy
from tests.support.batch_streams import encode
from tests.support.groups import wait_until

MAX_CALLS = 3
MAX_HELD_BYTES = 1 << 20


@pytest.fixture(scope="module")
def client(start_module_toy: StartToy) -> Client:
    bounds = {"max_calls": MAX_CALLS, "max_batch_bytes": 1 << 19, "max_held_bytes": MAX_HELD_BYTES}
    return start_module_toy(**bounds).client


@pytest.fixture(autouse=True)
def _nothing_is_changed(client: Client) -> Iterator[None]:
    before = client.status()
    yield
    assert client.status().committed_step == before.committed_step
    wait_until(lambda: can_put(client), what="room as before")


def can_put(client: Client) -> bool:
    try:
        client.put(experience(1), prompts=[[1]])
    except Busy:
        return False
    return True


def failure(call: object) -> WireError:
    with pytest.raises(grpc.RpcError) as failed:
        call()  # type: ignore[operator]
    return error_from_rpc(failed.value)


def opening(client: Client, num_values: int, step: int = 1) -> worker_pb2.PutBatchRequest:
    """A header alone."""
    header, _ = encode(Batch.from_rows(prompts=[[1] * num_values]), experience(step))
    return worker_pb2.PutBatchRequest(
        header=worker_pb2.PutBatchHeader(run_id=client.run_id, epoch=client.epoch, batch=header)
    )


class Unfinished:
    """A stream that sends its header and then nothing, until the test lets it end."""

    def __init__(self, client: Client, first: worker_pb2.PutBatchRequest) -> None:
        self._end = threading.Event()
        self._first = first
        self.call = client.worker.PutBatch.future(self._parts(), timeout=120)

    def _parts(self) -> Iterator[worker_pb2.PutBatchRequest]:
        yield self._first
        self._end.wait(120)

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.call.cancel()


def test_more_calls_than_may_be_are_refused_while_health_is_answered(client: Client) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_CALLS):
            stack.enter_context(Unfinished(client, opening(client, 10)))
        refused = wait_until(lambda: refusal_of_status(client), what="a refusal")
        assert "services.max_calls" in refused
        check = health_pb2_grpc.HealthStub(client.channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert check.status == health_pb2.HealthCheckResponse.SERVING
    wait_until(lambda: not refusal_of_status(client), what="room again")


def refusal_of_status(client: Client) -> str:
    try:
        client.status()
    except Busy as error:
        return str(error)
    return ""


def test_batches_on_their_way_count_until_they_are_given_up(client: Client) -> None:
    half = MAX_HELD_BYTES // 2 // 4 - 100
    with Unfinished(client, opening(client, half)), Unfinished(client, opening(client, half)):
        refused = wait_until(lambda: refusal_of_put(client, half), what="a refusal")
        assert "services.max_held_bytes" in refused


def refusal_of_put(client: Client, num_values: int) -> str:
    try:
        client.put(experience(2), prompts=[[1] * num_values])
    except Busy as error:
        return str(error)
    return ""


def test_a_request_over_its_bound_is_refused(client: Client) -> None:
    request = worker_pb2.HandshakeRequest(run_id="r" * (1 << 20))
    assert isinstance(failure(lambda: client.worker.Handshake(request, timeout=20)), LimitExceeded)


def test_a_message_over_the_largest_is_refused(client: Client) -> None:
    method = client.channel.stream_unary("/splitppo.v1.WorkerService/PutBatch")
    error = failure(lambda: method(iter([b"\x0a" * (MAX_MESSAGE_BYTES - 1000), b""]), timeout=20))
    assert isinstance(error, WireError)
    raw = grpc.insecure_channel(client_address(client))  # without the client's own bound
    with raw:
        call = raw.stream_unary("/splitppo.v1.WorkerService/PutBatch")
        assert isinstance(
            failure(lambda: call(iter([bytes(MAX_MESSAGE_BYTES + 1)]), timeout=20)), Busy
        )  # of gRPC itself


def client_address(client: Client) -> str:
    return (client.config.run.dir / "services" / "critic.json").read_text().split('"address": "')[1].split('"')[0]
