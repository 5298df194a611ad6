"""A real rollout group beside a real actor: the same responses as the actor's own, and what each of them survives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from services.rollout.begun_responses import BEGUN_COLUMNS
from splitppo.batch import Batch, join_parts
from splitppo.rpc.errors import DataLoss, NotFound, PeerDied, StorageFailed, Unavailable, WireError, WrongState
from splitppo.v1 import batch_pb2, worker_pb2
from tests.integration.runtime.client import Client, error_of, experience, progress, result
from tests.support.checkpoints import flip
from tests.support.disks import fill, mounted
from tests.support.groups import ONE_THREAD, Group, is_alive, wait_until
from tests.support.models import VOCABULARY, save_policy
from tests.support.seeds import shifted

pytestmark = pytest.mark.timeout(300)

MAX_RESPONSE = 16
NUM_PROMPTS, NUM_SAMPLES, NUM_PARTS = 6, 3, 3
# A sync to this version kills the last rank of the rollout group, once.
FATAL_VERSION = 2
_SLOTS = itertools.count(1)


def rows() -> dict[str, Any]:
    """Prompts and seeds, the same for every version."""
    rng = np.random.default_rng(shifted(0))
    prompts = [rng.integers(3, len(VOCABULARY), rng.integers(2, 12)) for _ in range(NUM_PROMPTS)]
    return {"prompts": prompts, "seeds": rng.integers(-(2**62), 2**62, (NUM_PROMPTS, NUM_SAMPLES))}


def sample(client: Client, version: int) -> Batch:
    """Responses of the weights of a version, in an evaluation slot of its own."""
    slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=version, part=next(_SLOTS))
    client.put(slot, **rows())
    reply = result(client.generate(slot, base_step=version, max_response_length=MAX_RESPONSE))
    assert reply.policy_version == version
    return client.get(slot, "responses", "rollout_log_probs")


def step_of(client: Client) -> int:
    return client.status().committed_step


@dataclass
class Groups:
    """An actor, which samples as well, and a rollout group, which is started again after it has ended.

    Attributes:
        published: the digest of the manifest, by version.
        sampled: the actor's own responses, by version.
    """

    folder: Path
    num_ranks: tuple[int, int]
    published: dict[int, str] = field(default_factory=dict)
    sampled: dict[int, Batch] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)
    _rollout: tuple[Group, Client] | None = None

    def __post_init__(self) -> None:
        """Starts both groups at the same time."""
        self.weights = self.folder / "weights"
        model = str(save_policy(self.folder / "policy"))
        actor_ranks, rollout_ranks = self.num_ranks
        fatal = {"rank": rollout_ranks - 1, "step": FATAL_VERSION, "action": "kill"}
        tree = {
            "run": {"dir": str(self.folder), "total_steps": 10},
            "data": {"train_files": "unused", "train_batch_size": 3, "max_response_length": MAX_RESPONSE},
            "actor": {"model": model, "lr": 0.05, "ppo_mini_batch_size": 3},
            "services": {"actor": {"num_processes": actor_ranks}},
            "debug": {"failpoints": {"rollout.sync_weights.begin": fatal}},
        }
        self._config_files = {"actor": self.folder / "actor.yaml", "rollout": self.folder / "rollout.yaml"}
        self._config_files["actor"].write_text(yaml.safe_dump(tree))
        tree["services"]["rollout"] = {"num_processes": rollout_ranks, "threads": 1}
        self._config_files["rollout"].write_text(yaml.safe_dump(tree))
        actor, rollout = self._start("actor", actor_ranks), self._start("rollout", rollout_ranks)
        self.actor = self._introduced(actor)
        self._rollout = rollout, self._introduced(rollout)

    @property
    def rollout(self) -> Client:
        """A client of the rollout group, which runs."""
        assert self._rollout is not None
        group, client = self._rollout
        if group.process.poll() is not None:
            group = self._start("rollout", self.num_ranks[1])
            client = self._introduced(group)
            self._rollout = group, client
        return client

    @property
    def rollout_group(self) -> Group:
        assert self._rollout is not None
        return self._rollout[0]

    def _start(self, role: Any, num_processes: int) -> Group:
        options = {"num_processes": num_processes, "overrides": ONE_THREAD}
        group = Group(f"services.{role}", self._config_files[role], self.folder, role, **options)
        self._open.callback(group.stop)
        return group

    def _introduced(self, group: Group) -> Client:
        client = Client(group.wait_ready().address, self._config_files[group.role], role=group.role)
        self._open.callback(client.close)
        client.handshake()
        return client

    def close(self) -> None:
        self._open.close()

    def update(self) -> None:
        """Trains one step on made-up advantages."""
        step = step_of(self.actor) + 1
        rng = np.random.default_rng(shifted(step))
        made = {name: rng.integers(3, len(VOCABULARY), (3, 4)) for name in ("prompts", "responses")}
        self.actor.put(experience(step), **made, advantages=rng.normal(size=(3, 4)))
        result(self.actor.update(step))

    def publish(self) -> int:
        """Publishes the actor's weights, and notes what the actor samples with them; returns the version."""
        version = step_of(self.actor)
        self.published[version] = result(self.actor.publish(version)).manifest_sha256
        self.sampled[version] = sample(self.actor, version)
        return version

    def sync(self, version: int) -> worker_pb2.CommandResult:
        rollout = self.rollout
        return result(rollout.sync(version, self.published[version], base_step=step_of(rollout)))

    def at(self, version: int) -> None:
        """Brings actor and rollout group to a version, or beyond it."""
        while not self.published or max(self.published) < version:
            if self.published:
                self.update()
            self.publish()
        self.sync(version)

    def check_samples(self, version: int) -> None:
        """The rollout group samples as the actor: bit for bit if both have the same number of ranks."""
        found, expected = sample(self.rollout, version), self.sampled[version]
        np.testing.assert_array_equal(found["responses"].values, expected["responses"].values)
        same_ranks = self.num_ranks[0] == self.num_ranks[1]
        log_probs = found["rollout_log_probs"].values, expected["rollout_log_probs"].values
        np.testing.assert_allclose(*log_probs, rtol=0, atol=0 if same_ranks else 1e-5)


@pytest.fixture(
    scope="module",
    params=[(2, 2), *(pytest.param(ranks, marks=pytest.mark.extended) for ranks in ((1, 1), (3, 3), (1, 3), (3, 1)))],
    ids=lambda ranks: "{}-to-{}-ranks".format(*ranks),
)
def groups(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    groups = Groups(tmp_path_factory.mktemp("run"), request.param)
    try:
        yield groups
    finally:
        groups.close()


def test_a_group_that_has_just_started_has_no_weights_and_samples_nothing(groups: Groups) -> None:
    rollout = groups.rollout
    assert rollout.handshake().role == worker_pb2.ROLE_ROLLOUT
    assert step_of(rollout) == -1
    rollout.put(experience(1), **rows())
    refused = error_of(rollout.generate(experience(1), base_step=-1, max_response_length=MAX_RESPONSE))
    assert isinstance(refused, WrongState)
    assert refused.message == "the group has no weights yet: SyncWeights comes first"


@pytest.mark.promise("a rollout group")
def test_every_version_is_sampled_as_by_the_actor_also_an_older_one(groups: Groups) -> None:
    groups.at(1)
    groups.check_samples(1)
    for version in (0, 1, 1):
        assert groups.sync(version).committed_step == version
        groups.check_samples(version)
    log_probs = [groups.sampled[version]["rollout_log_probs"].values for version in (0, 1)]
    assert log_probs[0].tobytes() != log_probs[1].tobytes()


def continued(client: Client, version: int, num_tokens: int) -> tuple[Batch, int]:
    """The same responses as by `sample`, at most so many tokens of each at a time, in the order of the prompts."""
    made, begun, pending = rows(), dict[str, Any](), np.arange(NUM_PROMPTS * NUM_SAMPLES)
    prompts = [prompt for prompt in made["prompts"] for _ in range(NUM_SAMPLES)]
    whole: dict[str, list[Any]] = {name: [None] * len(prompts) for name in ("responses", "rollout_log_probs")}
    for number in itertools.count(1):
        slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=version, part=next(_SLOTS))
        seeds = made["seeds"].reshape(-1, 1)[pending]
        client.put(slot, prompts=[prompts[row] for row in pending], seeds=seeds, **begun)
        options = {"max_step_tokens": num_tokens, "max_response_length": MAX_RESPONSE}
        result(client.generate(slot, base_step=version, **options))
        cut = client.get(slot, *whole, "unfinished")
        for name, so_far in whole.items():
            for row, values in zip(pending, cut[name].rows(), strict=True):
                so_far[row] = values
        pending = pending[cut["unfinished"].values == 1]
        if not len(pending):
            return Batch.from_rows(**whole), number
        so_far_of = zip(BEGUN_COLUMNS, whole.values(), strict=True)
        begun = {name: [so_far[row] for row in pending] for name, so_far in so_far_of}
    raise AssertionError("unreachable")


@pytest.mark.promise("a rollout group")
@pytest.mark.parametrize("num_tokens", [5, MAX_RESPONSE])
def test_actor_and_rollout_group_go_on_with_responses_that_they_have_cut(groups: Groups, num_tokens: int) -> None:
    """Ranks get other rows in each call, since fewer and fewer go on."""
    groups.at(1)
    for client in (groups.actor, groups.rollout):
        expected = sample(client, step_of(client))
        made, num_calls = continued(client, step_of(client), num_tokens)
        assert num_calls == -(-MAX_RESPONSE // num_tokens)
        np.testing.assert_array_equal(made["responses"].values, expected["responses"].values)
        log_probs = (batch["rollout_log_probs"].values for batch in (made, expected))
        np.testing.assert_allclose(*log_probs, rtol=0, atol=1e-5)


@pytest.mark.promise("a rollout group")
@pytest.mark.parametrize("kind", [batch_pb2.SLOT_KIND_EXPERIENCE, batch_pb2.SLOT_KIND_SHARE])
def test_parts_of_a_generation_two_steps_ahead_are_handed_on(groups: Groups, kind: batch_pb2.SlotKind) -> None:
    """Also those of a share, after which the group sleeps."""
    groups.at(1)
    rollout, slot = groups.rollout, batch_pb2.Slot(kind=kind, step=3)
    rollout.put(slot, **rows())
    is_share = kind == batch_pb2.SLOT_KIND_SHARE
    options = {"num_parts": NUM_PARTS, "sleep_after": is_share, "max_response_length": MAX_RESPONSE}
    events = [*rollout.generate(slot, base_step=1, **options)]
    parts = [event.part.part for event in events if event.HasField("part")]
    assert parts == list(range(1, NUM_PARTS + 1))
    assert events[-1].result.policy_version == 1
    whole = rollout.get(slot, "responses")["responses"]
    np.testing.assert_array_equal(whole.values, groups.sampled[1]["responses"].values)
    parted = [rollout.get(batch_pb2.Slot(kind=kind, step=3, part=part), "responses", "places") for part in parts]
    np.testing.assert_array_equal(join_parts(parted)["responses"].values, whole.values)
    slot.step = 4
    with pytest.raises(WrongState, match=r"no room for (experience|share) slot of step 4: steps 2 and 3 are taken"):
        rollout.put(slot, **rows())
    groups.check_samples(1)


def test_a_damaged_version_is_refused_and_the_group_goes_on_with_the_one_it_has(groups: Groups) -> None:
    groups.at(1)
    groups.sync(0)
    rollout = groups.rollout
    flip(max((groups.weights / "version_1").glob("*.safetensors")))

    refused = error_of(rollout.sync(1, groups.published[1], base_step=0))

    assert isinstance(refused, DataLoss)
    assert f"{groups.weights}/version_1/weights-" in refused.message
    missing = error_of(rollout.sync(7, groups.published[1], base_step=0))
    assert isinstance(missing, NotFound)
    assert (step_of(rollout), rollout.status().state) == (0, worker_pb2.WORKER_STATE_IDLE)
    groups.check_samples(0)
    digest = groups.published[1]
    if step_of(groups.actor) == 1:
        assert groups.publish() == 1
        assert groups.published[1] == digest
        groups.sync(1)
        groups.check_samples(1)


def test_a_sync_ends_a_generation_that_nobody_needs_any_more(groups: Groups) -> None:
    groups.at(1)
    rollout, slot = groups.rollout, experience(2)
    endless = rows()
    endless["seeds"] = np.arange(NUM_PROMPTS * 3000).reshape(NUM_PROMPTS, 3000)
    rollout.put(slot, **endless)
    generation = rollout.generate(slot, base_step=1, max_response_length=400)
    assert progress(generation).phase == "generate"

    groups.sync(1)

    cancelled = error_of(generation)
    assert isinstance(cancelled, Unavailable)
    assert cancelled.message == "the command was cancelled: other weights are being loaded"
    assert list(rollout.status().slots) == []
    groups.check_samples(1)


def test_a_full_disk_costs_a_version_and_the_actor_goes_on(groups: Groups) -> None:
    groups.at(1)
    version, digest = step_of(groups.actor), groups.actor.digest(step_of(groups.actor))
    elsewhere = groups.weights.rename(groups.weights.with_name("elsewhere"))
    try:
        with mounted(groups.weights, "size=1m") as disk:
            filler = fill(disk)
            failed = error_of(groups.actor.publish(version))
            assert isinstance(failed, StorageFailed)
            assert "No space left on device" in failed.message or "its log says why" in failed.message
            assert [entry.name for entry in disk.iterdir()] == [filler.name]
            assert groups.actor.status().state == worker_pb2.WORKER_STATE_IDLE
            assert groups.actor.digest(version) == digest
            filler.unlink()
            assert groups.publish() == version
            groups.sync(version)
            groups.check_samples(version)
    finally:
        groups.weights.rmdir()
        elsewhere.rename(groups.weights)


@pytest.mark.extended
def test_a_rank_that_dies_in_a_sync_is_named_and_a_new_group_goes_on_where_it_was(groups: Groups) -> None:
    groups.at(FATAL_VERSION - 1)
    rollout, group = groups.rollout, groups.rollout_group
    victim = groups.num_ranks[1] - 1
    groups.update()
    assert groups.publish() == FATAL_VERSION

    lost = error_of(rollout.sync(FATAL_VERSION, groups.published[FATAL_VERSION], base_step=FATAL_VERSION - 1))

    assert isinstance(lost, WireError)
    if victim:
        assert isinstance(lost, PeerDied)
        assert (lost.place.rank, lost.place.method, lost.place.step) == (victim, "SyncWeights", FATAL_VERSION)
    assert group.wait_ended() != 0
    wait_until(lambda: not any(map(is_alive, group.pids)), what="the end of the group")
    assert step_of(groups.rollout) == -1
    groups.sync(FATAL_VERSION)
    groups.check_samples(FATAL_VERSION)
