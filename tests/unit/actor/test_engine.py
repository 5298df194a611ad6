"""The actor's commands on one rank: what they make of a slot, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from services.actor.engine import ActorRole, deal_prompts
from services.actor.rollout.backends import BACKENDS, Backend
from services.actor.rollout.protocol import Listener, PromptRows, Rollout, Sampling
from services.shell.commands import Command, CommandCancelled, Outcome
from services.shell.context import RankContext
from splitppo.batch import Batch, Column, concatenate
from splitppo.config import Config
from splitppo.rpc.errors import WrongState
from splitppo.v1 import actor_pb2, batch_pb2, worker_pb2
from tests.models import EOS, VOCABULARY, save_policy

N_SAMPLES = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


def build(model: Path, **actor: Any) -> ActorRole:
    config = Config.model_validate(
        {
            "run": {"dir": "unused", "total_steps": 10},
            "data": {"train_files": "unused", "train_batch_size": 4, "max_response_length": 6},
            "rollout": {"n": N_SAMPLES},
            "actor": {"model": str(model), "lr": 1e-3, "ppo_mini_batch_size": 2, **actor},
        }
    )
    context = RankContext(
        role_name="actor",
        rank=0,
        world_size=1,
        local_rank=0,
        device=torch.device("cpu"),
        control_group=cast(Any, None),
        config=config,
    )
    return ActorRole(context)


def command(role: ActorRole, method: str) -> Command:
    return next(entry for entry in role.commands() if entry.method == method)


class Parts:
    """The report of a command that is cancelled at its `cancelled_at`-th question."""

    def __init__(self, cancelled_at: int | None = None) -> None:
        self.parts: dict[int, Batch] = {}
        self.versions: set[int] = set()
        self._questions_left = cancelled_at

    def __call__(self, done: int, total: int, phase: str) -> None:
        assert 0 <= done <= total

    def part_ready(self, part: int, columns: Batch, *, policy_version: int) -> None:
        assert part not in self.parts
        self.parts[part] = columns
        self.versions.add(policy_version)

    @property
    def is_cancelled(self) -> bool:
        if self._questions_left is None:
            return False
        self._questions_left -= 1
        return self._questions_left <= 0


def call(role: ActorRole, method: str, request: Any, batch: Batch, report: Parts | None = None) -> Outcome:
    """What the shell does on one rank."""
    entry = command(role, method)
    wanted = [*entry.columns, *(name for name in entry.optional_columns if name in batch)]
    assert entry.prepare is not None
    return entry.run(request, entry.prepare(request, batch.select(wanted)), report or Parts())


def generate_request(*, num_parts: int = 0, base_step: int = 0, **changes: Any) -> actor_pb2.GenerateRequest:
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_response_length": 6, **changes}
    header = worker_pb2.CommandHeader(base_step=base_step)
    return actor_pb2.GenerateRequest(header=header, sampling=actor_pb2.SamplingParams(**params), num_parts=num_parts)


def update_request(step: int = 1, **changes: Any) -> actor_pb2.ActorUpdateRequest:
    slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=step)
    return actor_pb2.ActorUpdateRequest(slot=slot, **changes)


def log_probs_request(model: actor_pb2.PolicyModel = actor_pb2.POLICY_MODEL_POLICY) -> actor_pb2.ComputeLogProbsRequest:
    return actor_pb2.ComputeLogProbsRequest(model=model)


def prompts(num_prompts: int = 4) -> Batch:
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, len(VOCABULARY), rng.integers(2, 9)) for _ in range(num_prompts)]
    seeds = [[10 * row + sample for sample in range(N_SAMPLES)] for row in range(num_prompts)]
    return Batch.from_rows(prompts=rows, seeds=seeds)


def experience(role: ActorRole) -> Batch:
    """A generated batch with advantages, in which every step is the role's own work."""
    made = call(role, "Generate", generate_request(), prompts()).columns
    assert made is not None
    rng = np.random.default_rng(1)
    return made.merge(Batch.from_rows(advantages=[rng.normal(size=length) for length in made["responses"].lengths]))


def test_generate_expands_prompts_to_samples_in_order(model: Path) -> None:
    outcome = call(build(model), "Generate", generate_request(), prompts())

    assert outcome.columns is not None
    assert set(outcome.columns.columns) == {"prompts", "responses", "rollout_log_probs"}
    assert outcome.columns.num_rows == 4 * N_SAMPLES
    for index, row in enumerate(outcome.columns["prompts"].rows()):
        np.testing.assert_array_equal(row, prompts()["prompts"].rows()[index // N_SAMPLES])
    for row in outcome.columns["responses"].rows():
        assert len(row) == 6 or row[-1] == EOS


def test_streamed_groups_are_slices_of_the_whole_and_of_what_is_not_streamed(model: Path) -> None:
    report = Parts()
    outcome = call(build(model), "Generate", generate_request(num_parts=3, base_step=2), prompts(), report)
    plain = call(build(model), "Generate", generate_request(), prompts())

    assert outcome.columns is not None
    assert plain.columns is not None
    assert (outcome.policy_version, report.versions, plain.policy_version) == (2, {2}, 0)
    assert sorted(report.parts) == [1, 2, 3]
    streamed = concatenate([report.parts[part].select(outcome.columns.columns) for part in (1, 2, 3)])
    assert report.parts[1].num_rows == 2 * N_SAMPLES
    for name in ("prompts", "responses"):
        assert streamed[name].values.tolist() == outcome.columns[name].values.tolist()
        assert streamed[name].values.tolist() == plain.columns[name].values.tolist()
    np.testing.assert_array_equal(streamed["rollout_log_probs"].values, outcome.columns["rollout_log_probs"].values)
    np.testing.assert_allclose(
        streamed["rollout_log_probs"].values, plain.columns["rollout_log_probs"].values, atol=1e-5
    )


class SleepyRollout:
    """A rollout engine that knows whether it is awake; every response is one token."""

    def __init__(self) -> None:
        self.is_awake = True
        self.policy_version: int | None = None

    def sync_weights(self, version: int) -> None:
        self.is_awake, self.policy_version = True, version

    def sleep(self) -> None:
        self.is_awake = False

    def check_request(self, sampling: Sampling, num_tokens: int) -> None:
        pass

    def generate(self, rows: PromptRows, sampling: Sampling, listener: Listener) -> Rollout:
        self.is_awake = True
        responses = [[EOS] for seeds in rows.seeds for _ in seeds]
        return Rollout(
            Column.from_rows(responses, np.dtype(np.int32)),
            Column.from_rows([[0.0]] * len(responses), np.dtype(np.float32)),
        )


@pytest.mark.parametrize(
    "work",
    [
        lambda role, batch, report, _: call(role, "ComputeLogProbs", log_probs_request(), batch, report),
        lambda role, batch, report, _: call(
            role, "ComputeLogProbs", log_probs_request(actor_pb2.POLICY_MODEL_REFERENCE), batch, report
        ),
        lambda role, batch, report, _: call(role, "Update", update_request(), batch, report),
        lambda role, _, __, folder: role.save_checkpoint(folder, b"", with_hf_model=True).result(timeout=60),
        lambda role, _, __, ___: role.load_checkpoint(None),
        lambda role, _, __, ___: role.compute_weights_digest(),
    ],
    ids=["log-probs of the policy", "of the reference", "update", "save", "load", "digest"],
)
def test_the_rollout_engine_sleeps_before_anything_else_computes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[..., object]
) -> None:
    rollout = SleepyRollout()
    monkeypatch.setitem(cast(Any, BACKENDS), "hf", Backend(lambda _: None, lambda *_: rollout, lambda _: 1))
    role = build(model, use_kl_loss=True)
    batch = experience(role)
    batch = batch.merge(Batch(batch.num_rows, {"ref_log_probs": batch["rollout_log_probs"]}))
    assert rollout.is_awake

    class AsleepReport(Parts):
        def __call__(self, done: int, total: int, phase: str) -> None:
            assert not rollout.is_awake

    work(role, batch, AsleepReport(), tmp_path)

    assert not rollout.is_awake
    call(role, "Generate", generate_request(), prompts())
    assert rollout.is_awake


@pytest.mark.parametrize("num_parts", [-1, 5])
def test_more_groups_than_prompts_are_refused(model: Path, num_parts: int) -> None:
    with pytest.raises(ValueError, match=f"num_parts must be 0 .* to 4 prompts, got {num_parts}"):
        call(build(model), "Generate", generate_request(num_parts=num_parts), prompts())


def test_a_cancelled_generation_leaves_an_actor_that_generates_the_same_afterwards(model: Path) -> None:
    role = build(model)
    with pytest.raises(CommandCancelled):
        call(role, "Generate", generate_request(), prompts(), Parts(cancelled_at=2))
    again = call(role, "Generate", generate_request(), prompts()).columns
    fresh = call(build(model), "Generate", generate_request(), prompts()).columns

    assert again is not None
    assert fresh is not None
    assert again["responses"].values.tolist() == fresh["responses"].values.tolist()


def test_rollout_log_probs_equal_the_training_forwards(model: Path) -> None:
    role = build(model)
    rollout = call(role, "Generate", generate_request(), prompts()).columns
    assert rollout is not None

    outcome = call(role, "ComputeLogProbs", log_probs_request(), rollout)

    assert outcome.columns is not None
    np.testing.assert_allclose(outcome.columns["old_log_probs"].values, rollout["rollout_log_probs"].values, atol=1e-5)


def test_the_reference_starts_equal_to_the_policy_and_stays(model: Path) -> None:
    role = build(model, use_kl_loss=True)
    batch = experience(role)
    first = call(role, "ComputeLogProbs", log_probs_request(actor_pb2.POLICY_MODEL_REFERENCE), batch).columns
    old = call(role, "ComputeLogProbs", log_probs_request(), batch).columns
    assert first is not None
    assert old is not None

    call(role, "Update", update_request(), batch.merge(first))

    again = call(role, "ComputeLogProbs", log_probs_request(actor_pb2.POLICY_MODEL_REFERENCE), batch).columns
    moved = call(role, "ComputeLogProbs", log_probs_request(), batch).columns
    assert again is not None
    assert moved is not None
    np.testing.assert_array_equal(first["ref_log_probs"].values, old["old_log_probs"].values)
    np.testing.assert_array_equal(first["ref_log_probs"].values, again["ref_log_probs"].values)
    assert np.abs(moved["old_log_probs"].values - old["old_log_probs"].values).max() > 1e-4


def test_update_reports_the_actors_metrics_and_moves_the_weights(model: Path) -> None:
    role = build(model, use_kl_loss=True)
    batch = experience(role)
    reference = call(role, "ComputeLogProbs", log_probs_request(actor_pb2.POLICY_MODEL_REFERENCE), batch).columns
    assert reference is not None
    before = role.compute_weights_digest()

    metrics = call(role, "Update", update_request(), batch.merge(reference)).metrics

    assert role.compute_weights_digest() != before
    names = (
        "pg_loss",
        "pg_clipfrac",
        "pg_clipfrac_lower",
        "ppo_kl",
        "entropy",
        "kl_loss",
        "kl_coef",
        "grad_norm",
        "lr",
    )
    assert {f"actor/{name}" for name in names} <= set(metrics)
    assert metrics["actor/lr"] == 1e-3
    assert 0 < metrics["actor/entropy"] < np.log(len(VOCABULARY))
    assert not any("sum/" in name or "num_tokens" in name for name in metrics)
    assert not any("mfu" in name for name in metrics)  # on a CPU


def test_in_the_first_mini_batch_the_ratio_is_exactly_one(model: Path) -> None:
    role = build(model, ppo_mini_batch_size=4)
    batch = experience(role)
    old = call(role, "ComputeLogProbs", log_probs_request(), batch).columns
    assert old is not None

    metrics = call(role, "Update", update_request(), batch.merge(old)).metrics

    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_without_old_log_probs_one_mini_batch_gives_the_same_weights(model: Path) -> None:
    digests = []
    for with_old in (True, False):
        role = build(model, ppo_mini_batch_size=4)
        batch = experience(role)
        if with_old:
            old = call(role, "ComputeLogProbs", log_probs_request(), batch).columns
            assert old is not None
            batch = batch.merge(old)
        call(role, "Update", update_request(), batch)
        digests.append(role.compute_weights_digest())

    assert digests[0] == digests[1]


def test_generation_after_an_update_uses_the_new_weights(model: Path) -> None:
    role = build(model, lr=0.1)
    batch = experience(role)

    call(role, "Update", update_request(), batch)

    rollout = call(role, "Generate", generate_request(), prompts()).columns
    assert rollout is not None
    assert not np.array_equal(rollout["rollout_log_probs"].values, batch["rollout_log_probs"].values)
    recomputed = call(role, "ComputeLogProbs", log_probs_request(), rollout).columns
    assert recomputed is not None
    np.testing.assert_allclose(recomputed["old_log_probs"].values, rollout["rollout_log_probs"].values, atol=1e-5)


def test_generation_reports_the_time_of_a_weight_sync_where_there_was_one(model: Path) -> None:
    role = build(model)

    def reported(step: int) -> set[str]:
        return set(call(role, "Generate", generate_request(base_step=step), prompts()).metrics)

    assert [reported(0), reported(0)] == [{"timing_s/update_weights"}, set()]
    call(role, "Update", update_request(1), experience(role))
    assert [reported(1), reported(1)] == [{"timing_s/update_weights"}, set()]
    role.load_checkpoint(None)
    assert reported(0) == {"timing_s/update_weights"}


def test_advance_only_leaves_the_weights_and_needs_no_advantages(model: Path) -> None:
    role = build(model)
    batch = experience(role).select(["prompts", "responses"])
    before = role.compute_weights_digest()

    outcome = call(role, "Update", update_request(advance_only=True), batch)

    assert role.compute_weights_digest() == before
    assert outcome.metrics == {}


def test_two_runs_give_the_same_weights_bit_for_bit_and_the_initial_model_can_be_restored(model: Path) -> None:
    role = build(model, ppo_epochs=2, shuffle=True)
    initial, digests = role.compute_weights_digest(), []
    for _ in range(2):
        call(role, "Update", update_request(), experience(role))
        digests.append(role.compute_weights_digest())
        assert role.load_checkpoint(None) == b""

    assert digests[0] == digests[1] != initial
    assert role.compute_weights_digest() == initial


def test_a_checkpoint_brings_back_weights_and_state(model: Path, tmp_path: Path) -> None:
    role = build(model)
    call(role, "Update", update_request(), experience(role))
    saved = role.compute_weights_digest()
    role.save_checkpoint(tmp_path / "actor", b"ledger", with_hf_model=False).result(timeout=60)
    call(role, "Update", update_request(2), experience(role))

    assert role.load_checkpoint(tmp_path / "actor") == b"ledger"
    assert role.compute_weights_digest() == saved


def test_prompts_are_dealt_evenly() -> None:
    batch = Batch.from_rows(prompts=[[1] * length for length in (3, 9, 4, 8, 5)])

    shards = deal_prompts(batch, 2)

    assert [shard.tolist() for shard in shards] == [[0, 1, 4], [2, 3]]  # lengths 3, 9, 5 and 4, 8


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_k": -1}, "top_k must be"),
        ({"max_response_length": 0}, "max_response_length must be at least 1"),
        ({"max_response_length": 511}, "the model takes 512"),
    ],
)
def test_generate_refuses_sampling_out_of_range(model: Path, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(build(model), "Generate", generate_request(**change), prompts())


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"prompts": [[5], []], "seeds": [[1], [2]]}, "the prompt of row 1 is empty"),
        ({"prompts": [[5], [999]], "seeds": [[1], [2]]}, r"column 'prompts', row 1: expected a token id in \[0, \d+\)"),
        ({"prompts": [[5], [-1]], "seeds": [[1], [2]]}, "column 'prompts', row 1: expected a token id"),
        ({"prompts": [[5], [6]], "seeds": [[1], [2, 3]]}, r"every prompt needs the same number of seeds.*\[1, 2\]"),
        ({"prompts": [[5]], "seeds": [[]]}, "every prompt needs the same number of seeds"),
        ({"prompts": [], "seeds": []}, "the batch has no rows"),
    ],
)
def test_generate_refuses_rows_that_it_cannot_sample_for(model: Path, columns: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(build(model), "Generate", generate_request(), Batch.from_rows(**columns))


def test_compute_log_probs_refuses_a_model_that_is_not_there(model: Path) -> None:
    role = build(model)
    batch = Batch.from_rows(prompts=[[5]], responses=[[6, 7]])

    with pytest.raises(ValueError, match="this actor holds no reference"):
        call(role, "ComputeLogProbs", log_probs_request(actor_pb2.POLICY_MODEL_REFERENCE), batch)
    with pytest.raises(ValueError, match="model must be POLICY or REFERENCE"):
        call(role, "ComputeLogProbs", log_probs_request(actor_pb2.POLICY_MODEL_UNSPECIFIED), batch)


def test_update_refuses_what_it_cannot_train_on(model: Path) -> None:
    role = build(model, use_kl_loss=True)
    whole = experience(role)
    bad = np.array([np.nan, *whole["advantages"].values[1:]], np.float32)
    poisoned = Batch(whole.num_rows, {"advantages": Column(bad, whole["advantages"].lengths)})
    reference = call(role, "ComputeLogProbs", log_probs_request(actor_pb2.POLICY_MODEL_REFERENCE), whole).columns
    assert reference is not None

    with pytest.raises(WrongState, match="Update needs advantages, ref_log_probs, which the slot lacks"):
        call(role, "Update", update_request(), whole.select(["prompts", "responses"]))
    with pytest.raises(WrongState, match="Update needs ref_log_probs, which the slot lacks"):
        call(role, "Update", update_request(), whole)
    with pytest.raises(ValueError, match="column 'advantages', row 0: expected a finite number, got nan"):
        call(role, "Update", update_request(), whole.merge(reference).merge(poisoned))
    with pytest.raises(ValueError, match="9 rows do not divide into mini-batches of 6"):
        call(role, "Update", update_request(), whole.merge(reference).take(np.arange(9)))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_rank_has_a_share_of_every_streamed_group(num_ranks: int) -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1, 2], [5, 4, 3])
    batch = Batch.from_rows(
        prompts=[np.ones(length) for length in rng.integers(1, 30, 12)], groups=groups[:, None].tolist()
    )
    shards = deal_prompts(batch, num_ranks)
    assert np.sort(np.concatenate(shards)).tolist() == list(range(12))
    for shard in shards:
        assert np.unique(groups[shard]).tolist() == [0, 1, 2]
        assert np.diff(shard).min() > 0
