"""Rows with several contexts: each segment is computed as if it were alone, and learned from as a part of its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.actor.losses.actor_loss import actor_loss
from services.engine.batching.mini_batches import plan_mini_batches
from services.engine.batching.packing import MicroBatchLimits, collate
from services.engine.forward_proof import FORWARDS, Row, attention_of, own_outputs
from services.engine.inference import compute_columns
from services.engine.model.adapters import trained_parameters
from services.engine.model.weights import Kind
from services.engine.train_engine import TrainEngine
from splitppo.batch import Batch, Column
from splitppo.config import ActorConfig
from splitppo.config.subsections.policy_loss import LOSS_MODES
from tests.support.architectures import ARCHITECTURES, save_architecture
from tests.support.engines import (
    CPU,
    MAX_RESPONSE,
    forward_of,
    gradients,
    make_engine,
    prepared,
    relative_error,
    silent,
)
from tests.support.episodes import (
    Episodes,
    each_alone,
    make_episodes,
    sampled_tokens,
    with_privileged_tokens,
    without_segments,
)
from tests.support.models import save_policy

EPISODES = make_episodes()
PRIVILEGED = with_privileged_tokens(EPISODES)
KINDS: tuple[Kind, ...] = ("policy", "value")
TEMPERATURE = 0.7  # of `forward_of`

# olmo2 has no classifier of tokens in transformers.
MODELS = [(name, kind) for name in ARCHITECTURES for kind in KINDS if (name, kind) != ("olmo2", "value")]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


# What is computed.


def computed(engine: TrainEngine, batch: Batch, *, packed: bool) -> Column:
    """The log-probs at temperature 1, or the values, of all response tokens."""
    forward, output, _ = FORWARDS[engine.kind]
    limits = replace(engine.limits, packed=packed, max_tokens=64)
    facts: Any = {"outputs": [output], "limits": limits, "device": engine.device, "progress": silent}
    return compute_columns(engine.model, engine.strategy, batch, forward, **facts)[output]


@pytest.mark.parametrize(("architecture", "kind"), MODELS)
def test_each_segment_has_the_numbers_of_its_context_and_what_follows_alone(
    tmp_path: Path, architecture: str, kind: Kind
) -> None:
    engine = make_engine(save_architecture(architecture, tmp_path), kind)
    check_numbers_of_segments(engine, EPISODES)
    if kind == "value":  # the context that a value model sees begins with the privileged tokens of the row
        check_numbers_of_segments(engine, PRIVILEGED)


def check_numbers_of_segments(engine: TrainEngine, episodes: Episodes) -> None:
    rows = [Row(segment.context, segment.sampled) for segment in episodes.segments]
    with attention_of(engine.model, "sdpa"):
        alone, _ = own_outputs(engine.model, engine.kind, rows, CPU)
    expected = np.zeros(len(episodes.batch["responses"].values), np.float32)
    expected[np.concatenate(list(sampled_tokens(episodes)))] = alone.numpy()

    for packed in (True, False):
        found = computed(engine, episodes.batch, packed=packed)
        assert found.lengths.tolist() == episodes.batch["responses"].lengths.tolist()
        np.testing.assert_allclose(found.values, expected, rtol=0.0, atol=1e-6)
        assert (found.values[expected == 0.0] == 0.0).all()


# What is learned, in float64: a plain forward of each segment alone, and the loss of whole rows, are the reference.


def reference_outputs(model: Any) -> dict[str, Tensor]:
    """Log-probs and entropies of all response tokens of whole rows, 0 on contexts, with a gradient."""
    num_tokens = len(EPISODES.batch["responses"].values)
    log_probs_N = torch.zeros(num_tokens, dtype=torch.float64)
    entropy_N = torch.zeros(num_tokens, dtype=torch.float64)
    for segment, places in zip(EPISODES.segments, sampled_tokens(EPISODES), strict=True):
        ids = torch.from_numpy(np.concatenate([segment.context, segment.sampled]))
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / TEMPERATURE
        of_sampled = logits[len(segment.context) - 1 : -1].log_softmax(-1)
        where = (torch.from_numpy(places),)
        log_probs_N = log_probs_N.index_put(where, of_sampled.gather(-1, ids[len(segment.context) :, None])[:, 0])
        entropy_N = entropy_N.index_put(where, -(of_sampled.exp() * of_sampled).sum(-1))
    return {"log_probs": log_probs_N, "entropy": entropy_N}


def reference_gradients(engine: TrainEngine, batch: Batch) -> dict[str, Tensor]:
    config = engine.config
    assert isinstance(config, ActorConfig)
    whole = without_segments(batch)
    limits = MicroBatchLimits(packed=True, max_tokens=10_000)
    [mini_batch] = plan_mini_batches(whole, config, limits, MAX_RESPONSE, CPU)
    tokens = collate(whole, mini_batch.weights, limits, device=CPU).tokens
    exact = {name: column.double() for name, column in tokens.columns.items()}
    with attention_of(engine.model, "sdpa"):
        output = actor_loss(config)(reference_outputs(engine.model), replace(tokens, columns=exact))
        weights = trained_parameters(engine.model)
        gradients_of_weights = torch.autograd.grad(output.loss, list(weights.values()))
    return dict(zip(weights, gradients_of_weights, strict=True))


def every_other_row_near(engine: TrainEngine) -> Batch:
    """Old log-probs by which half of the rows are rejected: those of the policy, or lower by 1."""
    found = engine.compute(EPISODES.batch, forward_of("policy"), outputs=["log_probs"], progress=silent)["log_probs"]
    is_far = np.repeat(np.arange(found.num_rows) % 2, found.lengths)
    old = Column((found.values - is_far).astype(np.float32), found.lengths)
    return Batch(found.num_rows, {"old_log_probs": old})


USERS_LOSS = """
def mine(tokens, config):
    return -tokens.advantages * tokens.row_max(tokens.log_ratio.abs()) * tokens.row_sum(tokens.log_probs)
"""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"policy_loss": {"loss_mode": name}} for name in LOSS_MODES},
    "clip_cov": {"policy_loss": {"loss_mode": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": 0.0}},
    "kl_cov": {"policy_loss": {"loss_mode": "kl_cov", "kl_cov_ratio": 0.2}},
    "reinforce of sequences": {"policy_loss": {"loss_mode": "reinforce", "reinforce_is": "sequence"}},
    "rejected rows": {"policy_loss": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.7_1.5"}},
    "entropy and KL": {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.5},
    "mean of rows": {"loss_agg_mode": "seq-mean-token-mean"},
    "sum of rows": {"loss_agg_mode": "seq-mean-token-sum"},
    "a user's": {"policy_loss": {"loss_mode": "mine"}},
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_gradient_of_a_row_is_that_of_its_segments_with_the_weights_and_sums_of_the_row(
    policy: Path, tmp_path: Path, name: str, packed: bool
) -> None:
    settings = {**SETTINGS[name], "use_remove_padding": packed, "ppo_max_token_len_per_gpu": 40}
    if name == "a user's":
        (tmp_path / "mine.py").write_text(USERS_LOSS)
        settings["policy_loss"] = {**settings["policy_loss"], "custom_path": str(tmp_path / "mine.py")}
    engine = make_engine(policy, **settings)
    assert isinstance(engine.config, ActorConfig)
    engine.model.double()  # rounding is no reason for a difference
    batch = prepared(engine.config, EPISODES.batch)
    if name == "rejected rows":
        batch = batch.merge(every_other_row_near(engine))
    if name in ("clip_cov", "kl_cov"):
        assert batch["selected_tokens"].values.any()

    found = gradients(engine, batch, actor_loss(engine.config), keeps_rows=engine.config.policy_loss.looks_at_rows)

    assert relative_error(found, reference_gradients(engine, batch)) <= 1e-6


@pytest.mark.parametrize("batching", [{}, {"use_remove_padding": False}, {"ppo_micro_batch_size_per_gpu": 1}])
@pytest.mark.parametrize("has_contexts", [True, False])
def test_a_value_model_learns_from_rows_with_privileged_tokens_as_if_they_began_their_contexts(
    policy: Path, has_contexts: bool, batching: Mapping[str, Any]
) -> None:
    episodes = PRIVILEGED if has_contexts else with_privileged_tokens(make_episodes((1, 1, 1, 1)))
    engine = make_engine(policy, "value", ppo_max_token_len_per_gpu=40, **batching)
    engine.model.double()  # rounding is no reason for a difference
    engine.model.score.weight.data.normal_(generator=torch.Generator().manual_seed(1))

    found = gradients(engine, episodes.batch)
    expected = gradients(engine, each_alone(episodes))
    unprivileged = gradients(engine, episodes.batch.select(set(episodes.batch.columns) - {"privileged_tokens"}))

    assert relative_error(found, expected) <= 1e-6
    assert relative_error(unprivileged, expected) > 0.1


def test_an_update_returns_the_outputs_of_recorded_rows_with_0_on_contexts(policy: Path) -> None:
    is_recorded = np.array([True, True, False, False, True, False])
    batch = EPISODES.batch.merge(Batch.from_rows(recorded=is_recorded[:, None]))
    expected = make_engine(policy).compute(batch, forward_of("policy"), outputs=["log_probs"], progress=silent)

    engine = make_engine(policy, ppo_max_token_len_per_gpu=20)
    loss = actor_loss(ActorConfig(model=str(policy)))
    updated = engine.update(batch, forward_of("policy"), loss, progress=silent, outputs=["log_probs"])

    found = updated.columns["log_probs"]
    assert found.lengths.tolist() == (batch["responses"].lengths * is_recorded).tolist()
    assert found.values == pytest.approx(expected["log_probs"].take(np.flatnonzero(is_recorded)).values, abs=1e-6)


def test_an_update_counts_each_token_once_whatever_row_it_is_in(policy: Path) -> None:
    """A return to an earlier context makes tokens of the response, which are counted as such."""
    engine = make_engine(policy)
    loss = actor_loss(ActorConfig(model=str(policy)))
    metrics = engine.update(EPISODES.batch, forward_of("policy"), loss, progress=silent).metrics

    num_tokens = len(EPISODES.batch["prompts"].values) + len(EPISODES.batch["responses"].values)
    assert metrics["tokens_rank_mean"] == num_tokens


def test_the_flops_of_a_row_are_those_of_its_segments(policy: Path) -> None:
    meter = make_engine(policy).flops_meter

    assert meter.forward_flops(EPISODES.batch) == meter.forward_flops(each_alone(EPISODES))
    assert meter.forward_flops(EPISODES.batch) < meter.forward_flops(without_segments(EPISODES.batch))
    assert meter.forward_flops(PRIVILEGED.batch) == meter.forward_flops(each_alone(PRIVILEGED))
    assert meter.forward_flops(PRIVILEGED.batch) > meter.forward_flops(EPISODES.batch)


def test_a_context_after_which_nothing_was_sampled_is_not_computed(policy: Path) -> None:
    """It may end a response, or fill all of it."""
    engine = make_engine(policy)
    batch = Batch.from_rows(
        prompts=[[3, 4], [5], [6]], responses=[[7, 8, 9, 9], [5, 5], [7, 8]], segments=[[2, 2], [0, 2], []]
    )
    computed_of = engine.compute(batch, forward_of("policy"), outputs=["log_probs"], progress=silent)["log_probs"]
    plain = Batch.from_rows(prompts=[[3, 4], [6]], responses=[[7, 8], [7, 8]])
    first, last = engine.compute(plain, forward_of("policy"), outputs=["log_probs"], progress=silent)[
        "log_probs"
    ].rows()

    assert computed_of.lengths.tolist() == [4, 2, 2]
    assert computed_of.values == pytest.approx([*first, 0.0, 0.0, 0.0, 0.0, *last], abs=1e-6)
