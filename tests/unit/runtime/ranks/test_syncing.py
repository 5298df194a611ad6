"""The command SyncWeights in a group of one rank: its version is the committed step, and what becomes of the slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.runtime.command import Command, CommandCancelled, Effect, Outcome, Rows
from splitppo.batch import Batch
from splitppo.rpc.errors import (
    DataLoss,
    Dirty,
    Internal,
    InvalidArgument,
    NotFound,
    StorageFailed,
    Unavailable,
    WireError,
    WrongState,
    WrongStep,
)
from splitppo.v1 import actor_pb2, batch_pb2, rollout_pb2, worker_pb2
from tests.support.command_calls import result_of
from tests.unit.runtime.ranks.service import Service, experience, raises

PUBLISHED = range(10)
PROMPTS = Batch.from_rows(prompts=[[1], [2, 3]])


class Sampler:
    """A role whose weights are the number of their version, which is every token that it samples."""

    role = worker_pb2.ROLE_ROLLOUT
    num_parameters = 1

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.while_loading: Callable[[], None] = lambda: None
        self.while_sampling: Callable[[], None] = lambda: None
        self.metrics: dict[str, Any] = {}

    def commands(self) -> Sequence[Command]:
        service = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"]
        return (
            Command("SyncWeights", rollout_pb2.SyncWeightsRequest, Effect.LOADS, self.sync, check=self.check),
            Command(
                "Generate",
                actor_pb2.GenerateRequest,
                Effect.WRITES_SLOT,
                self.generate,
                Rows(columns=("prompts",)),
                service=service,
            ),
        )

    def check(self, request: Any) -> None:
        if request.version not in PUBLISHED:
            raise NotFound(f"there is no version {request.version}")

    def sync(self, request: Any, _: bytes, progress: Any) -> Outcome:
        self.while_loading()
        self.loaded.append(request.version)
        return Outcome(metrics=self.metrics)

    def generate(self, request: Any, batch: Batch, progress: Any) -> Outcome:
        self.while_sampling()
        if progress.is_cancelled():
            raise CommandCancelled
        responses = Batch.from_rows(responses=[[self.loaded[-1]]] * batch.num_rows)
        return Outcome(responses, policy_version=request.header.base_step)


@pytest.fixture
def sampler() -> Sampler:
    return Sampler()


@pytest.fixture
def service(tmp_path: Path, sampler: Sampler) -> Service:
    """A service that has no weights yet."""
    return Service(tmp_path, sampler=sampler)


def sync(service: Service, version: int, **fields: Any) -> worker_pb2.CommandResult:
    """Syncs to a version by a request id of its own."""
    base_step = service.worker.committed_step
    fields = {"base_step": base_step, "request_id": f"sync-{base_step}-{version}", **fields}
    return service.do("SyncWeights", version=version, **fields)


def put(service: Service, slot: batch_pb2.Slot) -> None:
    service.worker.slots.put(slot, PROMPTS, service.worker.committed_step)


def evaluation(step: int) -> batch_pb2.Slot:
    return batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=step)


@pytest.mark.parametrize(
    ("expected", "error", "sentence"),
    [
        (-1, WrongState, "the group has no weights yet: SyncWeights comes first"),
        (0, WrongStep, "the caller expects committed step 0, it is -1"),
    ],
)
def test_without_weights_nothing_is_sampled_whichever_step_the_caller_expects(
    service: Service, expected: int, error: type[WireError], sentence: str
) -> None:
    put(service, experience(1))
    with pytest.raises(error, match=sentence):
        service.do("Generate", base_step=expected, slot=experience(1))
    assert service.worker.is_serving


@pytest.mark.parametrize("versions", [[0], [4], [0, 1, 2], [4, 2], [4, 4]])
def test_any_version_may_follow_any_other_and_is_the_committed_step(
    service: Service, sampler: Sampler, versions: list[int]
) -> None:
    for number, version in enumerate(versions):
        assert sync(service, version, request_id=f"sync-{number}").committed_step == version
    last = versions[-1]
    assert (sampler.loaded, service.worker.committed_step) == (versions, last)
    put(service, experience(last + 1))
    assert service.do("Generate", base_step=last, slot=experience(last + 1)).policy_version == last
    assert set(service.worker.slots.get(experience(last + 1))["responses"].values) == {last}


@pytest.mark.parametrize("expected", [-1, 2, 4])
def test_a_command_for_another_version_is_refused(service: Service, sampler: Sampler, expected: int) -> None:
    sync(service, 3)
    put(service, experience(4))
    for method, fields in (("Generate", {"slot": experience(4)}), ("SyncWeights", {"version": 4})):
        with pytest.raises(WrongStep, match=f"the caller expects committed step {expected}, it is 3"):
            service.do(method, base_step=expected, **fields)
    assert sampler.loaded == [3]


@pytest.mark.parametrize(
    ("version", "left"),
    [
        (4, [experience(5), evaluation(4)]),
        (5, []),
        (3, []),
        (2, []),
    ],
    ids=["the next version", "the one after it", "the same version", "an older version"],
)
def test_a_later_version_drops_the_slots_up_to_its_step_and_any_other_version_all(
    service: Service, version: int, left: list[batch_pb2.Slot]
) -> None:
    sync(service, 3)
    for slot in (experience(4), experience(5), evaluation(3), evaluation(4)):
        put(service, slot)
    sync(service, version)
    assert service.worker.slots.slots() == left


def test_rows_may_come_before_the_first_version(service: Service) -> None:
    put(service, experience(1))
    with pytest.raises(WrongState, match="no room for experience slot of step 2: steps 0 and 1"):
        put(service, experience(2))
    sync(service, 0)
    assert service.worker.slots.slots() == [experience(1)]


def test_a_repeated_request_is_answered_from_the_ledger_and_changes_nothing(service: Service, sampler: Sampler) -> None:
    first = sync(service, 3, base_step=-1, request_id="one")
    put(service, experience(4))
    again = sync(service, 3, base_step=-1, request_id="one")
    assert (first.replayed, again.replayed) == (False, True)
    assert (again.committed_step, again.engine_time) == (3, first.engine_time)
    assert sampler.loaded == [3]
    assert service.worker.slots.slots() == [experience(4)]


def test_a_request_id_belongs_to_one_version(service: Service, sampler: Sampler) -> None:
    sync(service, 3, base_step=-1, request_id="one")
    with pytest.raises(InvalidArgument, match="'one' belongs to another request than this SyncWeights"):
        sync(service, 4, base_step=-1, request_id="one")
    assert sampler.loaded == [3]


def test_a_version_that_the_check_refuses_changes_nothing(service: Service, sampler: Sampler) -> None:
    sync(service, 3)
    put(service, experience(4))
    with pytest.raises(NotFound, match="there is no version 77"):
        sync(service, 77)
    assert (sampler.loaded, service.worker.committed_step) == ([3], 3)
    assert service.worker.state == worker_pb2.WORKER_STATE_IDLE
    assert service.worker.slots.slots() == [experience(4)]
    assert service.do("Generate", base_step=3, slot=experience(4)).policy_version == 3


@pytest.mark.parametrize(
    ("error", "answer"),
    [(DataLoss("torn"), DataLoss), (OSError("no disk"), Internal), (StorageFailed("full"), StorageFailed)],
)
def test_weights_that_are_loaded_half_way_belong_to_no_version_until_the_next_one(
    service: Service, sampler: Sampler, error: Exception, answer: type[WireError]
) -> None:
    sync(service, 3)
    sampler.while_loading = lambda: raises(error=error)
    with pytest.raises(answer):
        sync(service, 4)
    assert service.worker.state == worker_pb2.WORKER_STATE_DIRTY
    with pytest.raises(Dirty, match=r"SyncWeights failed half-way .*only GetStatus and SyncWeights are answered"):
        service.do("Generate", base_step=3, slot=experience(4))

    sampler.while_loading = lambda: None
    assert sync(service, 4).committed_step == 4
    assert service.worker.is_serving
    assert sampler.loaded == [3, 4]


def test_a_stored_answer_says_nothing_of_weights_that_were_lost_since(service: Service, sampler: Sampler) -> None:
    sync(service, 3, base_step=-1, request_id="one")
    sampler.while_loading = lambda: raises(error=DataLoss("torn"))
    with pytest.raises(DataLoss):
        sync(service, 4)
    sampler.while_loading = lambda: None

    assert not sync(service, 3, base_step=3, request_id="one").replayed
    assert (sampler.loaded, service.worker.is_serving) == ([3, 3], True)


def test_a_version_that_cannot_be_entered_into_the_ledger_leaves_the_service_dirty(
    service: Service, sampler: Sampler
) -> None:
    sampler.metrics = {"a name that no message can hold: \ud800": 1.0}
    with pytest.raises(Internal):
        sync(service, 3)
    assert service.worker.state == worker_pb2.WORKER_STATE_DIRTY


def test_a_version_waits_for_no_generation(service: Service, sampler: Sampler) -> None:
    sync(service, 3)
    put(service, experience(4))
    put(service, experience(5))
    syncs = []

    def ask_for_another_version() -> None:
        syncs.append(service.submit("SyncWeights", base_step=3, version=4))

    sampler.while_sampling = ask_for_another_version
    running = service.submit("Generate", base_step=3, slot=experience(4), request_id="runs")
    waiting = service.submit("Generate", base_step=3, slot=experience(5), request_id="waits")
    service.work()

    for call, sentence in (
        (running, "cancelled: other weights are being loaded"),
        (waiting, "other weights are being"),
    ):
        with pytest.raises(Unavailable, match=sentence):
            result_of(call)
    assert result_of(syncs[0]).committed_step == 4
    assert sampler.loaded == [3, 4]
    assert "responses" not in service.worker.slots.get(experience(5))


@pytest.mark.parametrize("method", ["SaveCheckpoint", "LoadCheckpoint", "ComputeWeightsDigest"])
def test_a_group_that_only_samples_has_no_checkpoints(service: Service, method: str) -> None:
    sync(service, 3)
    with pytest.raises(InvalidArgument, match="the rollout group trains nothing: it has no checkpoints and no digest"):
        service.do(method, base_step=3)
    assert service.worker.is_serving
