"""Properties of the losses: neither the split into micro-batches nor masked tokens matter."""

from __future__ import annotations

import functools
import itertools
import operator
from typing import get_args

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.actor.losses.actor_loss import actor_loss
from services.actor.losses.kl import kl_estimate
from services.critic.losses import critic_loss
from services.engine.token_metrics import LossOutput, MetricSums, reduce_metrics
from splitppo.config import ActorConfig
from splitppo.config.section import KlEstimator
from splitppo.config.sections.models import CriticConfig
from tests.support.engines import response_tokens

Tokens = dict[str, Tensor]
COLUMNS = ("old_log_probs", "ref_log_probs", "advantages", "values", "returns")


def random_tokens(seed: int, num_tokens: int) -> Tokens:
    rng = np.random.default_rng(seed)
    tokens = {name: torch.tensor(rng.normal(0, 1, num_tokens)) for name in (*COLUMNS, "log_probs", "new_values")}
    tokens["entropy"] = torch.tensor(rng.exponential(1.0, num_tokens))
    tokens["mask"] = torch.tensor(rng.random(num_tokens) > 0.3)
    tokens["weights"] = torch.where(tokens["mask"], torch.tensor(rng.random(num_tokens)), 0.0)
    return tokens


def actor(tokens: Tokens) -> LossOutput:
    config = ActorConfig.model_validate({"model": "unused", "entropy_coeff": 0.01, "use_kl_loss": True})
    return actor_loss(config)(tokens, response_tokens(tokens["mask"], tokens["weights"], tokens))


def critic(tokens: Tokens) -> LossOutput:
    config = CriticConfig.model_validate({"model": "unused"})
    return critic_loss(config)(
        {"values": tokens["new_values"]}, response_tokens(tokens["mask"], tokens["weights"], tokens)
    )


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    loss=st.sampled_from([actor, critic]),
)
def test_losses_and_metrics_over_any_split_add_up_to_the_whole(seed, num_tokens, cuts, loss) -> None:
    tokens = random_tokens(seed, num_tokens)
    bounds = [0, *sorted(min(cut, num_tokens) for cut in cuts), num_tokens]

    whole = loss(tokens)
    slices = [{name: value[start:end] for name, value in tokens.items()} for start, end in itertools.pairwise(bounds)]
    parts = [loss(part) for part in slices]

    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss, rtol=1e-9, atol=1e-9)
    sums = [MetricSums.of(output, part["mask"]) for output, part in zip(parts, slices, strict=True)]
    added = reduce_metrics([functools.reduce(operator.add, sums)])
    expected = reduce_metrics([MetricSums.of(whole, tokens["mask"])])
    assert added.keys() == expected.keys() != set()
    for name, value in added.items():
        assert abs(value - expected[name]) <= 1e-5 * max(1.0, abs(expected[name])), name


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), num_tokens=st.integers(1, 40), loss=st.sampled_from([actor, critic]))
def test_what_stands_outside_the_mask_changes_nothing(seed, num_tokens, loss) -> None:
    tokens = random_tokens(seed, num_tokens)
    other = random_tokens(seed + 1, num_tokens)
    changed = {
        name: value if name in ("mask", "weights") else torch.where(tokens["mask"], value, other[name])
        for name, value in tokens.items()
    }

    first, second = loss(tokens), loss(changed)

    torch.testing.assert_close(first.loss, second.loss)
    metrics = [reduce_metrics([MetricSums.of(output, tokens["mask"])]) for output in (first, second)]
    assert metrics[0]
    assert metrics[0] == metrics[1]


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted({*get_args(KlEstimator)} - {"kl", "k1", "kl+", "k1+"})),
    log_probs=st.lists(st.floats(-50, 0), min_size=1, max_size=20),
    gap=st.floats(-60, 60),
)
def test_every_kl_estimate_but_k1_is_nonnegative_finite_and_zero_for_equal_policies(name, log_probs, gap) -> None:
    log_probs_N = torch.tensor(log_probs)

    estimate = kl_estimate(log_probs_N, log_probs_N + gap, name)

    assert torch.isfinite(estimate).all()
    assert (estimate >= -1e-6).all()
    assert (kl_estimate(log_probs_N, log_probs_N, name) == 0).all()
