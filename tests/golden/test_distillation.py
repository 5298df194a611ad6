"""The signals of a teacher against float64 references and numbers worked by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from controller.ppo.distillation import NO_TEACHER, add_signal, distillation_metrics, teacher_signal
from controller.ppo.experience import Experience, assemble_experience
from controller.ppo.normalization import NO_NORMALIZATION, Normalization
from controller.ppo.scores import objects
from services.actor.losses.actor_loss import actor_loss
from services.actor.losses.distillation import distillation_loss
from services.engine.model.forward import policy_forward
from splitppo.batch import Batch, Column
from splitppo.config import ActorConfig
from splitppo.config.section import KlEstimator
from splitppo.config.sections.teacher import TeacherConfig
from splitppo.config.subsections.reward_shaping import RewardShapingConfig
from tests.golden.test_policy_loss import reference_kl
from tests.support.engines import make_batch, make_engine, response_tokens, silent
from tests.support.fake_services import make_config
from tests.support.models import VOCABULARY, save_policy
from tests.support.scores import make_scores
from tests.support.seeds import shifted

Array = NDArray[np.float64]
NUM_TOKENS = 9
MAX_K3 = 10.0
# Their gradient does not depend on the teacher, and the configuration refuses them.
ESTIMATORS = [name for name in get_args(KlEstimator) if name not in ("kl", "k1")]


def config(**values: Any) -> TeacherConfig:
    return TeacherConfig.model_validate({"model": "unused", **values})


def draw(*shape: int, seed: int = 0, scale: float = 2.0) -> Array:
    """Log-probs of `shape`; those of the last axis of several are of different tokens, so that some mass is left."""
    logits = np.random.default_rng(shifted(seed)).normal(0.0, scale, (*shape[:-1], shape[-1] + 5))
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[..., : shape[-1]]


def value_and_gradient(teacher: TeacherConfig, output: Array, name: str, columns: dict[str, Array]) -> Any:
    """Returns the loss of each token, the gradient of their sum with respect to one output, and the metrics."""
    leaf = torch.tensor(output, dtype=torch.float32, requires_grad=True)
    given = {column: torch.tensor(values, dtype=torch.float32) for column, values in columns.items()}
    loss_N, metrics = distillation_loss({name: leaf}, given, teacher)
    loss_N.sum().backward()
    assert leaf.grad is not None
    return loss_N.detach().numpy(), leaf.grad.numpy(), metrics


def differences(function: Any, at: Array, step: float = 1e-6) -> Array:
    """Central differences of a sum over tokens, one argument at a time."""
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up).sum() - function(down).sum()) / (2 * step)
    return gradient


# Signal loss.


@pytest.mark.parametrize("loss_type", ESTIMATORS)
@pytest.mark.parametrize(("low", "most"), [(None, None), (-1.5, None), (None, 0.1), (-1.5, 0.1)])
def test_the_loss_on_sampled_tokens_is_the_estimate_of_its_name_in_bounds(
    loss_type: str, low: float | None, most: float | None
) -> None:
    log_p, log_q = draw(NUM_TOKENS, seed=1, scale=1.0) + 1e-3, draw(NUM_TOKENS, seed=2, scale=1.0)
    teacher = config(signal="loss", loss_type=loss_type, log_prob_min=low, max_abs=most)
    loss, gradient, metrics = value_and_gradient(teacher, log_p, "log_probs", {"teacher_log_probs": log_q})

    floor, bound = -math.inf if low is None else low, math.inf if most is None else most
    p, q = np.maximum(log_p, floor), np.maximum(log_q, floor)
    value = np.array([reference_kl(a, b, loss_type.removesuffix("+")) for a, b in zip(p, q, strict=True)])
    has_own_bound = loss_type in ("k3", "low_var_kl")  # beyond which its gradient is 0
    inside = (log_p > floor) & (np.abs(value) < (min(bound, MAX_K3) if has_own_bound else bound))
    # With a + at the end the gradient is that of d^2 / 2, which is d.
    d = p - q
    slope = d if loss_type.endswith("+") else {"abs": np.sign(d), "mse": d, "k2": d}.get(loss_type, 1.0 - np.exp(-d))
    np.testing.assert_allclose(loss, np.clip(value, -bound, bound), atol=1e-5)
    np.testing.assert_allclose(gradient, np.where(inside, slope, 0.0), atol=1e-5)
    assert metrics == {}
    if low is not None or most is not None:
        assert not inside.all()


# Signal top_k.


def top_k_reference(log_p: Array, log_q: Array, kl: str, low: float | None, most: float | None) -> Array:
    """The formulas of the docstring in float64, token by token."""
    floor, losses = -math.inf if low is None else low, []
    for row_p, row_q in zip(log_p, log_q, strict=True):
        p, q = [max(x, floor) for x in row_p], [max(x, floor) for x in row_q]
        if kl == "forward":
            loss = max(0.0, sum(math.exp(b) * (b - a) for a, b in zip(p, q, strict=True)))
        else:
            rest_p, rest_q = (max(math.log(1.0 - np.exp(row).sum()), floor) for row in (row_p, row_q))
            pairs = [*zip(p, q, strict=True), (rest_p, rest_q)]
            loss = sum(math.exp(a) * (a - b) for a, b in pairs)
        losses.append(loss if most is None else min(max(loss, -most), most))
    return np.array(losses)


@pytest.mark.parametrize("kl", ["forward", "reverse"])
@pytest.mark.parametrize("num_likely", [1, 4])
@pytest.mark.parametrize(("low", "most"), [(None, None), (-2.5, None), (None, 0.3), (-2.5, 0.3)])
def test_the_loss_on_likely_tokens_is_the_kl_over_them(
    kl: str, num_likely: int, low: float | None, most: float | None
) -> None:
    log_p, log_q = draw(NUM_TOKENS, num_likely, seed=3), draw(NUM_TOKENS, num_likely, seed=4)
    teacher = config(signal="top_k", top_k_kl=kl, top_k=num_likely, log_prob_min=low, max_abs=most)
    columns = {"teacher_top_log_probs": log_q}
    loss, gradient, metrics = value_and_gradient(teacher, log_p, "top_log_probs", columns)

    def reference(log_p: Array) -> Array:
        return top_k_reference(log_p, log_q, kl, low, most)

    np.testing.assert_allclose(loss, reference(log_p), atol=1e-5)
    np.testing.assert_allclose(gradient, differences(reference, log_p), atol=1e-5)
    np.testing.assert_allclose(metrics["distillation/student_mass"], np.exp(log_p).sum(-1), atol=1e-5)
    np.testing.assert_allclose(metrics["distillation/teacher_mass"], np.exp(log_q).sum(-1), atol=1e-5)


def test_the_reverse_kl_does_not_fall_if_all_likely_tokens_lose_probability() -> None:
    log_q = np.log([[0.5, 0.3]])
    reverse = config(signal="top_k", top_k_kl="reverse")
    losses = [
        value_and_gradient(reverse, log_q - less, "top_log_probs", {"teacher_top_log_probs": log_q})[0][0]
        for less in (0.0, 0.5, 1.0)
    ]
    assert losses[0] == pytest.approx(0.0, abs=1e-6)
    assert losses == sorted(losses)


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_tokens_that_have_all_probability_give_a_finite_loss_and_gradient(kl: str) -> None:
    certain = np.array([[0.0, -60.0]])
    teacher = config(signal="top_k", top_k_kl=kl)
    for log_p, log_q in ((certain, certain), (certain, np.log([[0.5, 0.3]])), (np.log([[0.5, 0.3]]), certain)):
        loss, gradient, _ = value_and_gradient(teacher, log_p, "top_log_probs", {"teacher_top_log_probs": log_q})
        assert np.isfinite(loss).all()
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_all_tokens_of_the_vocabulary_give_the_full_kl_in_value_and_gradient(tmp_path: Path, kl: str) -> None:
    size = len(VOCABULARY)
    policy = make_engine(save_policy(tmp_path / "policy"), ppo_max_token_len_per_gpu=64)
    other = make_engine(save_policy(tmp_path / "teacher", seed=7), ppo_max_token_len_per_gpu=64)
    batch = make_batch(6)
    forward = policy_forward(0.7, top_k=size, num_ids=size)
    computed = other.compute(batch, forward, outputs=["log_probs", "top_ids", "top_log_probs"], progress=silent)
    columns = {f"teacher_{name}": column for name, column in computed.items()}
    batch = batch.merge(Batch(batch.num_rows, columns))
    teacher = config(signal="top_k", top_k=size, top_k_kl=kl, coef=0.5, max_abs=None)
    loss = actor_loss(ActorConfig.model_validate({"model": "unused"}), teacher)
    mini_batch = policy.plan_update(batch)[0]
    policy.accumulate_gradients(batch, mini_batch, policy_forward(0.7), loss)
    found = {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}
    policy.model.zero_grad()

    expected, value = 0.0, 0.0
    num_tokens = int(batch["response_mask"].values.sum())
    for prompt, response, mask, advantages in zip(
        *(batch[name].rows() for name in ("prompts", "responses", "response_mask", "advantages")), strict=True
    ):
        tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        log_p, log_q = (
            torch.log_softmax(engine.model(input_ids=tokens[None]).logits[0].double() / 0.7, -1)[len(prompt) - 1 : -1]
            for engine in (policy, other)
        )
        one, two = (log_q.detach(), log_p) if kl == "forward" else (log_p, log_q.detach())
        counts = torch.from_numpy(mask.astype(bool))
        kl_T = (one.exp() * (one - two)).sum(-1)[counts]
        sampled_T = log_p.gather(-1, tokens[len(prompt) :, None])[:, 0]
        ratio_T = (sampled_T - sampled_T.detach()).exp()
        pg_T = -(torch.from_numpy(advantages).double() * ratio_T)[counts]
        ((0.5 * kl_T + pg_T).sum() / num_tokens).backward()
        value += float(kl_T.detach().sum()) / num_tokens
    expected = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    assert value > 0.1
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()) + 1e-6, name
    metrics = policy.update(batch, policy_forward(0.7), loss, progress=silent).metrics
    assert metrics["distillation/loss"] == pytest.approx(value, rel=1e-4)
    assert metrics["distillation/student_mass"] == pytest.approx(1.0, abs=1e-5)


# The sum of the actor's loss.


def test_the_weight_multiplies_the_term_and_the_mask_leaves_tokens_out() -> None:
    log_p, log_q = draw(NUM_TOKENS, seed=5, scale=1.0), draw(NUM_TOKENS, seed=6, scale=1.0)
    weights = np.where(np.arange(NUM_TOKENS) % 3 == 1, 0.0, np.random.default_rng(shifted(0)).random(NUM_TOKENS))
    mask = torch.tensor(weights > 0)

    def gradient_of(teacher: TeacherConfig | None) -> tuple[Array, Any]:
        leaf = torch.tensor(log_p, dtype=torch.float32, requires_grad=True)
        columns = {"advantages": torch.ones(NUM_TOKENS), "teacher_log_probs": torch.tensor(log_q).float()}
        tokens = response_tokens(mask, torch.tensor(weights).float(), columns)
        actor = ActorConfig.model_validate({"model": "unused"})
        output = actor_loss(actor, teacher)({"log_probs": leaf, "entropy": torch.zeros(NUM_TOKENS)}, tokens)
        output.loss.backward()
        assert leaf.grad is not None
        return leaf.grad.numpy().astype(np.float64), output

    teacher = config(signal="loss", loss_type="mse", coef=0.25)
    with_teacher, output = gradient_of(teacher)
    alone, plain = gradient_of(None)
    np.testing.assert_allclose(with_teacher - alone, 0.25 * weights * (log_p - log_q), atol=1e-5)
    kl = float((weights * (log_p - log_q) ** 2 / 2).sum())
    assert float(output.loss - plain.loss) == pytest.approx(0.25 * kl, abs=1e-5)
    assert float(output.sums["distillation/loss"]) == pytest.approx(kl, abs=1e-5)


# Signals of the controller.

RESPONSES = [[5, 6, 7], [5], [], [5, 6]]
OF_POLICY = [[-1.0, -2.0, -12.0], [-0.5], [], [-3.0, -1.0]]
OF_TEACHER = [[-1.5, -0.5, -0.25], [-0.5], [], [-16.0, -1.25]]
MASK = [[1, 1, 1], [1], [], [1, 0]]
D = [[-0.5, 1.5, 11.75], [0.0], [], [-13.0, -0.25]]


def assemble(
    teacher: TeacherConfig,
    *,
    masks: list[list[int]] | None = None,
    scores: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0),
    columns: dict[str, Any] | None = None,
    normalization: Normalization = NO_NORMALIZATION,
    **changes: Any,
) -> Experience:
    of_policy = dict.fromkeys(("old_log_probs", "rollout_log_probs"), OF_POLICY)
    given = {"responses": RESPONSES, **of_policy, "teacher_log_probs": OF_TEACHER, **(columns or {})}
    if masks is not None:
        given["response_mask"] = masks
    rollouts = Batch.from_rows(prompts=[[1], [1], [2, 3], [2, 3]], **given)
    return assemble_experience(
        make_config(Path("unused"), **changes).algorithm,
        rollouts,
        make_scores(np.array(scores, np.float32), data_sources=objects(["a", "b", "b", "a"])),
        num_samples=2,
        normalization=normalization,
        teacher=teacher,
    )


@pytest.mark.parametrize(("low", "most"), [(None, None), (-2.0, None), (None, 10.0), (-2.0, 1.0)])
def test_the_signal_is_the_clamped_log_ratio_times_its_weight(low: float | None, most: float | None) -> None:
    rollouts = Batch.from_rows(responses=RESPONSES, old_log_probs=OF_POLICY, teacher_log_probs=OF_TEACHER)
    mask = Column.from_rows(MASK, np.dtype(bool))
    found = teacher_signal(config(coef=0.5, log_prob_min=low, max_abs=most), rollouts, mask)
    floor, bound = -math.inf if low is None else low, math.inf if most is None else most
    expected = [
        0.5 * min(max(max(q, floor) - max(p, floor), -bound), bound) * counts
        for row in zip(OF_TEACHER, OF_POLICY, MASK, strict=True)
        for q, p, counts in zip(*row, strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-7)
    added = add_signal(Column(np.ones(6, np.float32), mask.lengths), found, mask)
    np.testing.assert_allclose(added.values, 1.0 + np.array(expected), rtol=1e-6)
    assert added.values.dtype == np.float32


def test_metrics_are_the_mean_log_ratio_and_the_share_that_the_teacher_would_accept() -> None:
    rollouts = Batch.from_rows(responses=RESPONSES, old_log_probs=OF_POLICY, teacher_log_probs=OF_TEACHER)
    mask = Column.from_rows(MASK, np.dtype(bool))
    # Neither bounds nor the weight change what is measured.
    found = distillation_metrics(config(coef=0.5, max_abs=1.0), rollouts, mask, objects(["a", "b", "c", "a"]))
    assert found == {
        "distillation/coef": 0.5,
        "distillation/kl": pytest.approx((0.5 - 1.5 - 11.75 - 0.0 + 13.0) / 5),
        "distillation/agreement": pytest.approx((math.exp(-0.5) + 1 + 1 + 1 + math.exp(-13.0)) / 5),
        "distillation/a/kl": pytest.approx((0.5 - 1.5 - 11.75 + 13.0) / 4),
        "distillation/a/agreement": pytest.approx((math.exp(-0.5) + 1 + 1 + math.exp(-13.0)) / 4),
        "distillation/b/kl": 0.0,
        "distillation/b/agreement": 1.0,
    }


def test_agreement_and_kl_of_many_samples_are_the_overlap_and_the_kl_of_the_distributions() -> None:
    """The agreement is 1 - TV = sum of min(p, q), and the KL is that of the policy from the teacher."""
    rng = np.random.default_rng(shifted(8))
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    tokens = rng.choice(6, 200_000, p=p)
    rollouts = Batch.from_rows(
        responses=[tokens], old_log_probs=[np.log(p[tokens])], teacher_log_probs=[np.log(q[tokens])]
    )
    mask = Column.from_rows([np.ones(len(tokens))], np.dtype(bool))
    found = distillation_metrics(config(), rollouts, mask, objects(["a"]))
    assert found["distillation/agreement"] == pytest.approx(1 - np.abs(p - q).sum() / 2, abs=0.005)
    assert found["distillation/kl"] == pytest.approx((p * np.log(p / q)).sum(), abs=0.01)


@pytest.mark.parametrize("signal", ["advantage", "reward", "loss", "top_k"])
def test_a_signal_goes_only_where_it_belongs(signal: str) -> None:
    estimator = {"algorithm__adv_estimator": "reinforce_plus_plus", "algorithm__gamma": 0.0}
    scores = (1.0, 2.0, 0.0, 4.0)
    alone = assemble(NO_TEACHER, scores=scores, **estimator)
    taught = assemble(config(signal=signal, coef=0.5, max_abs=None), scores=scores, **estimator)
    by_coef = 0.5 * np.array([d for row in D for d in row])
    for name, before, after in (
        ("reward", alone.rewards.values, taught.rewards.values),
        ("advantage", alone.batch["advantages"].values, taught.batch["advantages"].values),
    ):
        if name == signal:
            np.testing.assert_allclose(after - before, by_coef, atol=1e-5)
        elif (signal, name) != ("reward", "advantage"):  # which follows from the rewards
            assert after.tobytes() == before.tobytes()
    assert taught.metrics["distillation/kl"] == pytest.approx(-np.mean([d for row in D for d in row]))


def test_the_signal_in_advantages_is_neither_whitened_nor_discounted() -> None:
    changes = {"algorithm__gamma": 0.5, "algorithm__lam": 0.9, "columns": {"values": OF_POLICY}}
    scores = (1.0, 2.0, 0.0, 4.0)
    alone, taught = (
        assemble(teacher, scores=scores, **changes) for teacher in (NO_TEACHER, config(coef=2.0, max_abs=None))
    )
    difference = taught.batch["advantages"].values - alone.batch["advantages"].values
    np.testing.assert_allclose(difference, 2.0 * np.array([d for row in D for d in row]), atol=1e-5)
    assert taught.batch["returns"].values.tobytes() == alone.batch["returns"].values.tobytes()


@pytest.mark.parametrize("signal", ["advantage", "reward"])
def test_tokens_of_an_environment_carry_no_signal(signal: str) -> None:
    """Their log-probs are those of tokens that nobody sampled."""
    masks = [[1, 0, 1], [1], [], [0, 1]]
    experience = assemble(
        config(signal=signal), masks=masks, algorithm__adv_estimator="reinforce_plus_plus", algorithm__gamma=0.0
    )
    # The first signal is cut off at 10.
    column = experience.rewards if signal == "reward" else experience.batch["advantages"]
    if signal == "advantage":
        assert [row.tolist() for row in column.rows()] == [[-0.5, 0.0, 10.0], [0.0], [], [0.0, -0.25]]
    else:
        assert [row.tolist() for row in column.rows()] == [[-0.5, 0.0, 10.0], [0.0], [], [0.0, -0.25]]
        assert not experience.batch["advantages"].values[[1, 4]].any()
    assert experience.metrics["distillation/kl"] == pytest.approx((0.5 - 11.75 + 0.0 + 0.25) / 4)


def test_an_advantage_without_rewards_is_reinforce_on_minus_the_kl() -> None:
    """The gradient in the log-prob of token t is -w c d_t, as of REINFORCE with the reward c d_t; worked by hand."""
    coef, counted = 0.25, [d for row in D for d in row]
    experience = assemble(config(coef=coef, max_abs=None), algorithm__adv_estimator="reinforce_plus_plus")
    assert not experience.scores.any()
    num_tokens = len(counted)
    log_probs = torch.tensor([p for row in OF_POLICY for p in row], requires_grad=True)
    columns = {name: torch.from_numpy(experience.batch[name].values) for name in ("advantages", "old_log_probs")}
    mask = torch.ones(num_tokens, dtype=torch.bool)
    tokens = response_tokens(mask, torch.full((num_tokens,), 1.0 / num_tokens), columns)
    outputs: dict[str, Tensor] = {"log_probs": log_probs, "entropy": torch.zeros(num_tokens)}
    actor_loss(ActorConfig.model_validate({"model": "unused"}))(outputs, tokens).loss.backward()
    assert log_probs.grad is not None
    np.testing.assert_allclose(log_probs.grad, -coef * np.array(counted) / num_tokens, atol=1e-5)


# The start of the policy as its own teacher is the reference.


@pytest.mark.parametrize("masks", [None, [[1, 0, 1], [1], [], [0, 1]]])
@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
@pytest.mark.parametrize("whiten", [False, True])
def test_a_teacher_that_is_the_reference_gives_the_bits_of_its_kl_in_the_reward(
    masks: list[list[int]] | None, estimator: str, whiten: bool
) -> None:
    rng = np.random.default_rng(shifted(9))
    rows = {
        name: [rng.normal(-2.0, 1.0, len(row)).astype(np.float32) for row in RESPONSES]
        for name in ("old_log_probs", "teacher_log_probs", "values")
    }
    rows["ref_log_probs"] = rows["teacher_log_probs"]
    changes: dict[str, Any] = {
        "masks": masks,
        "columns": rows,
        "algorithm__adv_estimator": estimator,
        "algorithm__gamma": 0.97,
        "algorithm__kl_coef": 0.3,
        "normalization": Normalization(RewardShapingConfig(whiten_rewards=whiten)),
    }
    by_kl = assemble(NO_TEACHER, algorithm__use_kl_in_reward=True, **changes)
    taught = assemble(config(signal="reward", coef=0.3), **changes)
    assert taught.rewards.values.tobytes() == by_kl.rewards.values.tobytes()
    for name in ("advantages", "returns"):
        assert taught.batch[name].values.tobytes() == by_kl.batch[name].values.tobytes()
    assert np.abs(taught.rewards.values).max() > 0.1
