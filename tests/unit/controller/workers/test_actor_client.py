"""Generation by the actor's client: its parts, and the weights that sampled them."""

from typing import Any

import grpc
import grpc.aio
import pytest

from splitppo.rpc.errors import WrongPolicy
from splitppo.v1 import worker_pb2
from tests.support.fake_worker import Connect, Events, FakeWorker, generate, part, progress, result


async def test_a_streamed_generation_tells_of_every_part_again_after_a_lost_connection(connect: Connect) -> None:
    async def break_off(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield progress(1)
        yield part(2)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")

    async def go_on(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield part(2)
        yield progress(2)
        yield part(1)
        yield result()

    worker, ready, seen = FakeWorker([break_off, go_on]), [], []
    client = await connect(worker, on_progress=lambda role, method, event: seen.append(event.done))

    reply = await generate(client, num_parts=2, on_part=ready.append)

    assert ready == [2, 2, 1]
    assert seen == [1, 2]
    assert reply.result.policy_version == 4
    assert [request.num_parts for request in worker.requests] == [2, 2]


async def test_a_generation_that_is_not_streamed_asks_for_no_parts(connect: Connect) -> None:
    worker = FakeWorker()
    await generate(await connect(worker))
    assert worker.requests[0].num_parts == 0


async def test_a_generation_asks_for_as_many_tokens_of_a_step_as_it_is_told(connect: Connect) -> None:
    worker = FakeWorker()
    client = await connect(worker)
    await generate(client, max_step_tokens=7)
    assert worker.requests[0].max_step_tokens == 7


@pytest.mark.parametrize("first", [part(1, policy_version=3), result(policy_version=3)], ids=["part", "result"])
async def test_responses_of_other_weights_are_refused_with_both_numbers(
    connect: Connect, first: worker_pb2.CommandEvent
) -> None:
    async def script(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield first
        yield result()

    ready: list[int] = []
    with pytest.raises(WrongPolicy, match=r"^actor, step 5, Generate: .*weights of step 3, expected those of step 4$"):
        await generate(await connect(FakeWorker([script])), num_parts=2, on_part=ready.append)
    assert not ready
