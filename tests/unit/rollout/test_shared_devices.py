"""Rollout and critic group on the same devices: who gives memory back, when, and what is loaded again afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from services.actor import rank as actor_rank
from services.critic import rank as critic_rank
from services.rollout.backends import BACKENDS, Backend
from services.rollout.protocol import DecodingStep, PolicyWeights, Sampling, begin_responses
from services.rollout.role import RolloutRole
from services.runtime.command import Command, CommandCancelled, Effect, Outcome
from splitppo.batch import Batch
from splitppo.v1 import batch_pb2, critic_pb2, worker_pb2
from tests.support.command_calls import result_of
from tests.support.models import EOS
from tests.support.roles import (
    RecordedProgress,
    build_actor,
    build_rollout,
    call,
    context_of,
    experience,
    generate_request,
    prompts,
    publish,
    sync,
    update_request,
)
from tests.unit.runtime.ranks.service import Service

SHARED = {"critic": {"cpus": [0]}, "rollout": {"cpus": [0]}}
APART = {"critic": {"cpus": [0]}, "rollout": {"cpus": [1]}}


class RecordedRollout:
    """A rollout backend with weights of its own, which it drops when it sleeps at level 2; it records what it does."""

    ranks_per_engine = 1

    def __init__(self, policy: PolicyWeights, level: int) -> None:
        self._policy, self._level = policy, level
        self.policy_version: int | None = None
        self.is_awake = True
        self.events: list[str] = []
        self.loaded: list[str] = []  # digests of the weights
        self.failure: Exception | None = None

    def _wake(self) -> None:
        if not self.is_awake:
            self.is_awake = True
            self.events.append("wake")

    def sync_weights(self, version: int) -> None:
        self._wake()
        content = [weight.numpy().tobytes() for _, weight in self._policy.whole_weights(torch.float32)]
        self.loaded.append(hashlib.sha256(b"".join(content)).hexdigest())
        self.policy_version = version
        self.events.append(f"load {version}")

    def sleep(self) -> None:
        if self.is_awake:
            self.is_awake = False
            self.policy_version = None if self._level == 2 else self.policy_version
            self.events.append("sleep")

    def check_request(self, sampling: Sampling, num_tokens: int) -> None:
        pass

    def generate(
        self, rows: Batch, sampling: Sampling, is_cancelled: Callable[[], bool], conversations: None = None
    ) -> Iterator[DecodingStep]:
        self._wake()
        self.events.append("generate")
        if self.failure is not None:
            raise self.failure
        responses = begin_responses(rows)
        for response in responses:
            response.extend([EOS], [0.0])
        yield DecodingStep(len(responses), len(responses), responses)


class Awake(RecordedProgress):
    """The progress of a Generate whose backend must be awake at every report."""

    def __init__(self, backend: RecordedRollout) -> None:
        super().__init__()
        self._backend = backend

    def __call__(self, done: int, total: int, phase: str) -> None:
        assert self._backend.is_awake
        super().__call__(done, total, phase)

    def part_ready(self, part: int, columns: Batch, *, policy_version: int) -> None:
        assert self._backend.is_awake
        super().part_ready(part, columns, policy_version=policy_version)


Build = Callable[[int], tuple[RolloutRole, RecordedRollout]]


@pytest.fixture
def build(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns a function that makes a rollout role and its recorded backend, which sleeps at a level."""

    def make(level: int = 1, services: Any = APART) -> tuple[RolloutRole, RecordedRollout]:
        backends: list[RecordedRollout] = []

        def build_backend(_: object, policy: PolicyWeights, __: object) -> Any:
            backends.append(RecordedRollout(policy, level))
            return backends[-1]

        entry = Backend(lambda _: None, build_backend, samples_with_policy=False)
        monkeypatch.setitem(cast(Any, BACKENDS), "hf", entry)
        sections = {"rollout": {"n": 3, "sync_dir": str(tmp_path)}, "actor": {"model": str(model)}}
        role = RolloutRole(context_of("rollout", services=services, **sections))
        return role, backends[0]

    return make


def new_events(backend: RecordedRollout) -> list[str]:
    events, backend.events = backend.events, []
    return events


def generate(role: RolloutRole, version: int, report: RecordedProgress | None = None, *, num_parts: int = 0) -> None:
    request = generate_request(base_step=version, sleep_after=True, num_parts=num_parts)
    assert call(role, "Generate", request, prompts(), report).policy_version == version


@pytest.mark.parametrize("level", [1, 2])
def test_it_wakes_samples_and_sleeps_and_loads_once_the_weights_that_it_has_dropped(
    model: Path, tmp_path: Path, build: Build, level: int
) -> None:
    actor = build_actor(model, weights=tmp_path)
    rollout, backend = build(level)

    first = publish(actor, 0)
    sync(rollout, 0, first)
    assert new_events(backend) == ["sleep", "wake", "load 0"]
    generate(rollout, 0)
    assert new_events(backend) == ["generate", "sleep"]
    for _ in range(2):
        generate(rollout, 0)
        assert new_events(backend) == ["wake", *(["load 0"] if level == 2 else []), "generate", "sleep"]

    call(actor, "Update", update_request(1), experience(build_actor(model)))
    sync(rollout, 1, publish(actor, 1))
    assert new_events(backend) == ["wake", "load 1"]
    generate(rollout, 1)
    assert new_events(backend) == ["generate", "sleep"]
    sync(rollout, 0, first)
    assert new_events(backend) == ["wake", "load 0"]
    sync(rollout, 0, first)
    assert new_events(backend) == ["sleep", "wake", "load 0"]


def test_weights_that_were_dropped_are_those_of_the_held_version_also_when_its_files_are_removed(
    model: Path, tmp_path: Path, build: Build
) -> None:
    actor = build_actor(model, weights=tmp_path)
    rollout, backend = build(2)
    sync(rollout, 0, publish(actor, 0))
    generate(rollout, 0)
    call(actor, "Update", update_request(1), experience(build_actor(model)))
    publish(actor, 1, keep_from=1)
    assert [entry.name for entry in (tmp_path / "splitppo-run").iterdir()] == ["version_1"]

    generate(rollout, 0)

    assert backend.loaded[0] == backend.loaded[1]
    assert len(backend.loaded) == 2


def test_all_parts_are_reported_before_it_sleeps(model: Path, tmp_path: Path, build: Build) -> None:
    rollout, backend = build(1)
    sync(rollout, 0, publish(build_actor(model, weights=tmp_path), 0))
    report = Awake(backend)
    generate(rollout, 0, report, num_parts=3)
    assert list(report.parts) == [1, 2, 3]
    assert not backend.is_awake


def test_unless_it_is_asked_to_sleep_it_stays_awake(model: Path, tmp_path: Path, build: Build) -> None:
    rollout, backend = build(1)
    sync(rollout, 0, publish(build_actor(model, weights=tmp_path), 0))
    call(rollout, "Generate", generate_request(), prompts())
    assert backend.is_awake


@pytest.mark.parametrize("failure", [CommandCancelled(), FloatingPointError("NaN")])
def test_a_generation_that_is_cancelled_or_fails_gives_memory_back_too(
    model: Path, tmp_path: Path, build: Build, failure: Exception
) -> None:
    rollout, backend = build(2)
    sync(rollout, 0, publish(build_actor(model, weights=tmp_path), 0))
    backend.failure = failure
    with pytest.raises(type(failure)):
        generate(rollout, 0)
    assert not backend.is_awake
    backend.failure = None
    new_events(backend)
    generate(rollout, 0)
    assert new_events(backend) == ["wake", "load 0", "generate", "sleep"]


def test_a_group_on_the_critics_devices_leaves_them_free_from_the_beginning(build: Callable[..., Any]) -> None:
    assert build(services=SHARED)[1].events == ["sleep"]
    assert build(services=APART)[1].events == []


def test_a_group_that_sleeps_keeps_its_step_its_ledger_and_its_version(
    model: Path, tmp_path: Path, build: Build
) -> None:
    """A repeated SyncWeights is answered from the ledger, and the weights come with the next Generate."""
    manifest = publish(build_actor(model, weights=tmp_path), 0)
    rollout, backend = build(2)
    service = Service(tmp_path, sampler=rollout)

    def synced() -> worker_pb2.CommandResult:
        call = service.submit("SyncWeights", base_step=-1, version=0, manifest_sha256=manifest)
        service.work()
        return result_of(call)

    def generated(request_id: str) -> worker_pb2.CommandResult:
        slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_SHARE, step=1)
        service.worker.slots.put(slot, prompts(), 0)
        sampling = generate_request().sampling
        return service.do(
            "Generate", slot=slot, sampling=sampling, num_parts=2, sleep_after=True, request_id=request_id
        )

    first, again = synced(), synced()
    assert (first.committed_step, first.replayed, again.replayed) == (0, False, True)
    for request_id, metrics in (("first", set[str]()), ("again", {"timing_s/update_weights"})):
        reply = generated(request_id)
        assert (reply.committed_step, reply.policy_version, set(reply.metrics)) == (0, 0, metrics)
        service.worker.slots.clear()
        assert synced().replayed
    assert new_events(backend) == [
        "sleep",
        "wake",
        "load 0",
        "generate",
        "sleep",
        "wake",
        "load 0",
        "generate",
        "sleep",
    ]


class Moved:
    """A model that records to which devices it is moved."""

    def __init__(self, places: list[str]) -> None:
        self.places = places

    def to(self, device: Any) -> Moved:
        self.places.append(str(device))
        return self


def test_a_whole_copy_waits_in_main_memory_on_a_gpu_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = build_rollout(model, tmp_path)._weights
    places: list[str] = []
    weights.model = Moved(places)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: places.append("cache emptied"))
    weights.rest()
    assert places == []
    weights._device = torch.device("cuda", 1)
    weights.rest()
    assert places == ["cpu", "cache emptied"]
    with weights.gathered():
        assert places[2:] == ["cuda:1"]


def test_tokens_are_the_same_after_a_rest(model: Path, tmp_path: Path) -> None:
    rollout = build_rollout(model, tmp_path)
    sync(rollout, 0, publish(build_actor(model, weights=tmp_path), 0))
    made = [call(rollout, "Generate", generate_request(sleep_after=True), prompts()).columns for _ in range(2)]
    assert made[0] is not None
    assert made[1] is not None
    assert made[0]["rollout_log_probs"].values.tobytes() == made[1]["rollout_log_probs"].values.tobytes()


GPUS = {"allow_shared_devices": True, "actor": {"devices": [0]}, "critic": {"devices": [1]}}
ON_SHARED_GPU = {**GPUS, "rollout": {"devices": [1]}}
ON_OWN_GPU = {**GPUS, "rollout": {"devices": [2]}}


@pytest.mark.parametrize(
    ("role", "device", "services", "share", "freed"),
    [
        pytest.param("critic", "cuda", ON_SHARED_GPU, 0.5, True, id="the critic, on a shared GPU"),
        pytest.param("critic", "cuda", ON_SHARED_GPU, 1.0, True, id="beside a group that samples alone"),
        pytest.param("critic", "cuda", ON_SHARED_GPU, 0.0, False, id="beside a group that samples nothing"),
        pytest.param("critic", "cuda", ON_OWN_GPU, 0.5, False, id="beside a group on another GPU"),
        pytest.param("critic", "cuda", GPUS, 1.0, False, id="without a rollout group"),
        pytest.param("critic", "cpu", SHARED, 0.5, False, id="on shared cores"),
        pytest.param("actor", "cuda", ON_SHARED_GPU, 0.5, False, id="the actor"),
    ],
)
def test_commands_of_the_critic_free_cached_memory_before_their_result_on_gpus_that_it_shares(
    monkeypatch: pytest.MonkeyPatch, role: Any, device: str, services: Any, share: float, freed: bool
) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("cache emptied"))

    def run(request: object, batch: object, progress: object) -> Outcome:
        assert (request, batch, progress) == (1, 2, 3)
        events.append("run")
        return Outcome(metrics={"a": 1.0})

    context = context_of(role, services=services, rollout={"share": share}, actor={"model": "some/model"})
    context = replace(context, device=torch.device(device))
    commands = [Command(name, critic_pb2.ComputeValuesRequest, Effect.WRITES_SLOT, run) for name in ("One", "Two")]

    program = {"critic": critic_rank, "actor": actor_rank}[role].PROGRAM
    for command in commands:
        assert program.adapt(command, context).run(1, 2, 3).metrics == {"a": 1.0}

    assert events == (["run", "cache emptied"] if freed else ["run"]) * 2
