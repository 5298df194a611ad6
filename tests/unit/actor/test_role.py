"""The actor's commands on one rank: log-probs, updates, checkpoints, and refused input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from services.engine import flops
from services.rollout.backends import BACKENDS, Backend
from services.rollout.protocol import DecodingStep, Sampling, begin_responses
from splitppo.batch import Batch, Column
from splitppo.config.subsections.policy_loss import COVARIANCE_LOSSES, LOSS_MODES
from splitppo.rpc.errors import WrongState
from splitppo.run_folder.metrics import check_declared
from splitppo.v1 import actor_pb2
from tests.support.models import EOS, VOCABULARY
from tests.support.roles import (
    RecordedProgress,
    build_actor,
    call,
    experience,
    generate_request,
    log_probs_request,
    prompts,
    ref_log_probs,
    update_request,
)


class SleepyRollout:
    """A rollout backend that knows whether it is awake; every response is one token."""

    ranks_per_engine = 1

    def __init__(self) -> None:
        self.is_awake = True
        self.policy_version: int | None = None

    def sync_weights(self, version: int) -> None:
        self.is_awake, self.policy_version = True, version

    def sleep(self) -> None:
        self.is_awake = False

    def check_request(self, sampling: Sampling, num_tokens: int) -> None:
        pass

    def generate(
        self, rows: Batch, sampling: Sampling, is_cancelled: Callable[[], bool], conversations: None = None
    ) -> Iterator[DecodingStep]:
        self.is_awake = True
        responses = begin_responses(rows)
        for response in responses:
            response.extend([EOS], [0.0])
        yield DecodingStep(len(responses), len(responses), responses)


@pytest.mark.parametrize(
    "work",
    [
        lambda role, batch, report, _: call(role, "ComputeLogProbs", log_probs_request(), batch, report),
        lambda role, batch, report, _: ref_log_probs(role, batch, report),
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
    monkeypatch.setitem(
        cast(Any, BACKENDS),
        "hf",
        Backend(lambda _: None, lambda *_: rollout, samples_with_policy=True),
    )
    role = build_actor(model, use_kl_loss=True)
    batch = experience(role)
    batch = batch.merge(Batch(batch.num_rows, {"ref_log_probs": batch["rollout_log_probs"]}))
    assert rollout.is_awake

    class AsleepReport(RecordedProgress):
        def __call__(self, done: int, total: int, phase: str) -> None:
            assert not rollout.is_awake

    work(role, batch, AsleepReport(), tmp_path)

    assert not rollout.is_awake
    call(role, "Generate", generate_request(), prompts())
    assert rollout.is_awake


def test_log_probs_report_the_share_of_a_peak_that_is_known(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_cpu = call(build_actor(model), "ComputeLogProbs", log_probs_request(), experience(build_actor(model)))
    monkeypatch.setattr(flops, "peak_flops", lambda *_: 1e15)
    role = build_actor(model)
    metrics = call(role, "ComputeLogProbs", log_probs_request(), experience(role)).metrics

    assert dict(of_cpu.metrics) == {}
    assert list(metrics) == ["perf/mfu/actor_infer"]
    assert 0.0 < metrics["perf/mfu/actor_infer"] < 1.0
    check_declared(metrics)


def test_rollout_log_probs_equal_the_training_forwards(model: Path) -> None:
    role = build_actor(model)
    rollout = call(role, "Generate", generate_request(), prompts()).columns
    assert rollout is not None

    outcome = call(role, "ComputeLogProbs", log_probs_request(), rollout)

    assert outcome.columns is not None
    np.testing.assert_allclose(outcome.columns["old_log_probs"].values, rollout["rollout_log_probs"].values, atol=1e-5)


def test_the_reference_starts_equal_to_the_policy_and_stays(model: Path) -> None:
    role = build_actor(model, use_kl_loss=True)
    batch = experience(role)
    first = ref_log_probs(role, batch)
    old = call(role, "ComputeLogProbs", log_probs_request(), batch).columns
    assert old is not None

    call(role, "Update", update_request(), batch.merge(first))

    again = ref_log_probs(role, batch)
    moved = call(role, "ComputeLogProbs", log_probs_request(), batch).columns
    assert moved is not None
    np.testing.assert_array_equal(first["ref_log_probs"].values, old["old_log_probs"].values)
    np.testing.assert_array_equal(first["ref_log_probs"].values, again["ref_log_probs"].values)
    assert np.abs(moved["old_log_probs"].values - old["old_log_probs"].values).max() > 1e-4


def test_update_reports_the_actors_metrics_and_moves_the_weights(model: Path) -> None:
    role = build_actor(model, use_kl_loss=True)
    batch = experience(role)
    reference = ref_log_probs(role, batch)
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
    role = build_actor(model, ppo_mini_batch_size=4)
    batch = experience(role)
    old = call(role, "ComputeLogProbs", log_probs_request(), batch).columns
    assert old is not None

    metrics = call(role, "Update", update_request(), batch.merge(old)).metrics

    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_without_old_log_probs_one_mini_batch_gives_the_same_weights(model: Path) -> None:
    digests = []
    for with_old in (True, False):
        role = build_actor(model, ppo_mini_batch_size=4)
        batch = experience(role)
        if with_old:
            old = call(role, "ComputeLogProbs", log_probs_request(), batch).columns
            assert old is not None
            batch = batch.merge(old)
        call(role, "Update", update_request(), batch)
        digests.append(role.compute_weights_digest())

    assert digests[0] == digests[1]


def test_advance_only_leaves_the_weights_and_needs_no_advantages(model: Path) -> None:
    role = build_actor(model)
    batch = experience(role).select(["prompts", "responses"])
    before = role.compute_weights_digest()

    outcome = call(role, "Update", update_request(advance_only=True), batch)

    assert role.compute_weights_digest() == before
    assert outcome.metrics == {}


def test_steps_of_the_critics_warm_up_do_not_count_in_the_actors_learning_rate(model: Path) -> None:
    role = build_actor(model, lr=1.0, lr_warmup_steps=2)
    for _ in range(3):
        call(role, "Update", update_request(advance_only=True), experience(role).select(["prompts", "responses"]))
    rates = [call(role, "Update", update_request(), experience(role)).metrics["actor/lr"] for _ in range(3)]
    assert rates == [0.5, 1.0, 1.0]


def test_two_runs_give_the_same_weights_bit_for_bit_and_the_initial_model_can_be_restored(model: Path) -> None:
    role = build_actor(model, ppo_epochs=2, shuffle=True)
    initial, digests = role.compute_weights_digest(), []
    for _ in range(2):
        call(role, "Update", update_request(), experience(role))
        digests.append(role.compute_weights_digest())
        assert role.load_checkpoint(None) == b""

    assert digests[0] == digests[1] != initial
    assert role.compute_weights_digest() == initial


def test_a_checkpoint_brings_back_weights_and_state(model: Path, tmp_path: Path) -> None:
    role = build_actor(model)
    call(role, "Update", update_request(), experience(role))
    saved = role.compute_weights_digest()
    role.save_checkpoint(tmp_path / "actor", b"ledger", with_hf_model=False).result(timeout=60)
    call(role, "Update", update_request(2), experience(role))

    assert role.load_checkpoint(tmp_path / "actor") == b"ledger"
    assert role.compute_weights_digest() == saved


def with_seeds(batch: Batch) -> Batch:
    """The batch as an update of a loss that draws tokens wants it; the policy before the update is the old one."""
    seeds = Column(np.arange(batch.num_rows) + 7, np.ones(batch.num_rows, np.int32))
    return batch.merge(Batch(batch.num_rows, {"seeds": seeds, "old_log_probs": batch["rollout_log_probs"]}))


@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_every_loss_moves_the_weights_and_its_metrics_are_declared(model: Path, loss_mode: str) -> None:
    shares = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "kl_cov_ratio": 0.2}
    role = build_actor(model, policy_loss={"loss_mode": loss_mode, **shares})
    before = role.compute_weights_digest()

    metrics = call(role, "Update", update_request(), with_seeds(experience(role))).metrics

    assert role.compute_weights_digest() != before
    assert {"actor/pg_loss", "actor/ppo_kl", "actor/entropy"} <= metrics.keys()
    check_declared(metrics)
    if loss_mode in COVARIANCE_LOSSES:
        assert metrics["actor/pg_clipfrac" if loss_mode == "clip_cov" else "actor/pg_klfrac"] > 0.1


@pytest.mark.parametrize("loss_mode", COVARIANCE_LOSSES)
def test_a_loss_that_draws_tokens_says_what_it_lacks(model: Path, loss_mode: str) -> None:
    role = build_actor(model, policy_loss={"loss_mode": loss_mode})
    batch = with_seeds(experience(role))
    twice = Batch.from_rows(seeds=[[1, 2]] * batch.num_rows)

    with pytest.raises(WrongState, match="Update needs old_log_probs, seeds, which the slot lacks"):
        call(role, "Update", update_request(), batch.select(["prompts", "responses", "advantages"]))
    with pytest.raises(ValueError, match=f"loss_mode {loss_mode} needs one seed per response in column 'seeds'"):
        call(role, "Update", update_request(), batch.merge(twice))


def test_an_update_ends_before_the_mini_batch_whose_kl_is_over_the_target(model: Path) -> None:
    """Four mini-batches, each an optimizer step of a rate that moves the policy far."""
    settings = {"lr": 0.05, "ppo_mini_batch_size": 1}
    whole = build_actor(model, **settings)
    batch = with_seeds(experience(whole))
    parts = [batch.take(np.arange(start, start + 3)) for start in range(0, 12, 3)]

    role = build_actor(model, target_kl=0.05, **settings)
    metrics = call(role, "Update", update_request(), batch).metrics

    stopped = int(metrics["actor/num_stopped_steps"])
    assert 1 <= stopped <= 3
    assert metrics["actor/num_skipped_steps"] == 0
    assert metrics["actor/ppo_kl"] <= 0.05
    # The steps before it are those of an update that knows nothing of the others; and the next one would be over it.
    first = build_actor(model, **settings)
    made = [call(first, "Update", update_request(step), part) for step, part in enumerate(parts[: 4 - stopped], 1)]
    assert made[-1].metrics["actor/ppo_kl"] <= 0.05
    assert first.compute_weights_digest() == role.compute_weights_digest()
    assert call(first, "Update", update_request(9), parts[4 - stopped]).metrics["actor/ppo_kl"] > 0.05


def test_an_update_that_ends_before_its_first_step_changes_nothing_and_goes_on_next_time(model: Path) -> None:
    role = build_actor(model, target_kl=1e-3)
    batch = with_seeds(experience(role))
    old = Column(batch["old_log_probs"].values + np.float32(0.5), batch["old_log_probs"].lengths)
    stale = batch.merge(Batch(batch.num_rows, {"old_log_probs": old}))
    before = role.compute_weights_digest()

    metrics = call(role, "Update", update_request(), stale).metrics

    assert role.compute_weights_digest() == before
    assert (metrics["actor/num_stopped_steps"], metrics["actor/num_skipped_steps"]) == (2, 0)
    assert "actor/grad_norm" not in metrics
    check_declared(metrics)
    metrics = call(role, "Update", update_request(2), batch).metrics
    assert metrics["actor/num_stopped_steps"] < 2
    assert role.compute_weights_digest() != before


def test_without_a_target_nothing_is_counted(model: Path) -> None:
    role = build_actor(model)
    assert "actor/num_stopped_steps" not in call(role, "Update", update_request(), experience(role)).metrics


def test_update_refuses_what_it_cannot_train_on(model: Path) -> None:
    role = build_actor(model, use_kl_loss=True)
    whole = experience(role)
    bad = np.array([np.nan, *whole["advantages"].values[1:]], np.float32)
    poisoned = Batch(whole.num_rows, {"advantages": Column(bad, whole["advantages"].lengths)})
    reference = ref_log_probs(role, whole)

    with pytest.raises(WrongState, match="Update needs advantages, ref_log_probs, which the slot lacks"):
        call(role, "Update", update_request(), whole.select(["prompts", "responses"]))
    with pytest.raises(WrongState, match="Update needs ref_log_probs, which the slot lacks"):
        call(role, "Update", update_request(), whole)
    with pytest.raises(ValueError, match="column 'advantages', row 0: expected a finite number, got nan"):
        call(role, "Update", update_request(), whole.merge(reference).merge(poisoned))
    with pytest.raises(ValueError, match="9 rows do not divide into mini-batches of 6"):
        call(role, "Update", update_request(), whole.merge(reference).take(np.arange(9)))


def test_the_rate_of_a_step_follows_the_steps_of_the_run_that_the_request_says(model: Path) -> None:
    role = build_actor(model, lr=1.0, lr_warmup_steps_ratio=0.5)
    update = lambda **said: call(role, "Update", update_request(**said), experience(role))  # noqa: E731
    assert update(total_steps=8).metrics["actor/lr"] == 0.25
    with pytest.raises(ValueError, match="total_steps: expected the number of steps of the run, 1 or more, got 0"):
        update()


# The terms of the loss that an update is asked for.

TERMS = {"loss_mode": "vanilla", "entropy_coeff": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.001}


def asked_for(**terms: Any) -> actor_pb2.ActorUpdateRequest:
    return update_request(loss_terms=actor_pb2.LossTerms(**{**TERMS, **terms}))


def test_an_update_has_the_terms_that_it_is_asked_for_as_if_they_were_configured(model: Path) -> None:
    configured = build_actor(model, use_kl_loss=True, kl_loss_coef=0.5, entropy_coeff=0.25)
    rows = experience(configured)
    rows = rows.merge(ref_log_probs(configured, rows))
    expected = call(configured, "Update", update_request(), rows)

    asked = build_actor(model, entropy_coeff=9.0)
    request = asked_for(entropy_coeff=0.25, use_kl_loss=True, kl_loss_coef=0.5, phase="cool")
    outcome = call(asked, "Update", request, rows)

    assert asked.compute_weights_digest() == configured.compute_weights_digest()
    names = ("actor/loss", "actor/entropy_coeff", "actor/kl_coef", "actor/kl_loss")
    assert [outcome.metrics[name] for name in names] == [expected.metrics[name] for name in names]
    assert outcome.metrics["actor/entropy_coeff"] == 0.25


def test_what_it_was_asked_for_holds_for_this_update_alone(model: Path) -> None:
    role = build_actor(model, entropy_coeff=0.25)
    rows = experience(role)
    coefficients = [
        call(role, "Update", request, rows).metrics["actor/entropy_coeff"]
        for request in (asked_for(entropy_coeff=0.5), update_request())
    ]
    assert coefficients == [0.5, 0.25]


def test_an_update_without_kl_in_its_loss_needs_no_reference(model: Path) -> None:
    role = build_actor(model, use_kl_loss=True)
    assert "actor/kl_loss" not in call(role, "Update", asked_for(), experience(role)).metrics
    with pytest.raises(WrongState, match="Update needs ref_log_probs, which the slot lacks"):
        call(role, "Update", asked_for(use_kl_loss=True), experience(role))


@pytest.mark.parametrize(
    ("terms", "sentence"),
    [
        ({"loss_mode": "vanila"}, "loss_mode: expected one of .*, got 'vanila' .did you mean vanilla"),
        ({"loss_mode": ""}, "loss_mode: expected one of .*, got ''"),
        ({"entropy_coeff": math.nan}, r"loss_terms\.entropy_coeff: .*, got nan$"),
        ({"entropy_coeff": math.inf}, r"loss_terms\.entropy_coeff: .*, got inf$"),
        ({"phase": "p" * 101}, r"loss_terms\.phase: expected at most 100 characters, got 101"),
        ({"kl_loss_coef": math.nan}, r"loss_terms\.kl_loss_coef: .*, got nan$"),
        ({"kl_loss_coef": -0.5}, r"loss_terms\.kl_loss_coef: .*, got -0\.5$"),
    ],
)
def test_terms_that_make_no_sense_are_refused_and_nothing_changes(
    model: Path, terms: dict[str, Any], sentence: str
) -> None:
    role = build_actor(model)
    rows, before = experience(role), role.compute_weights_digest()
    with pytest.raises(ValueError, match=sentence):
        call(role, "Update", asked_for(**terms), rows)
    assert role.compute_weights_digest() == before
