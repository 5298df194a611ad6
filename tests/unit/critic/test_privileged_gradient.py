"""What a critic with privileged tokens does to the policy's gradient: nothing at lambda 1, whatever its values are.

All episodes of a small task are enumerated, each with its probability, so that an expectation is a sum. The environment
draws a number, of which the prompt says nothing. The policy gives two answers of one token each; between them the
environment says by chance something about the number, as text or as a context that begins anew. Values, advantages
before whitening and policy loss are those of a run. The policy computes in float64, and the reference is the derivative
of the expected score itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from controller.ppo.advantages.gae import gae
from services.actor.losses.actor_loss import actor_loss
from services.engine.batching.packing import MicroBatchLimits, ResponseTokens, collate
from services.engine.batching.segments import SegmentRows
from services.engine.model.forward import policy_forward
from services.engine.train_engine import TrainEngine
from splitppo.batch import Batch
from splitppo.config import ActorConfig
from tests.support.engines import CPU, forward_of, make_engine, silent
from tests.support.models import SIZES, save_random

NUM_TOKENS = 6  # of the vocabulary, and answers
NUMBERS = {1: 0.5, 2: 0.3, 3: 0.2}  # which the environment draws, with these probabilities
LAMBDA = 0.5  # of the tests of bootstrapped values


@dataclass(frozen=True, eq=False)
class Episodes:
    """All episodes of the task; arrays of [num_episodes].

    Attributes:
        batch: their rows, with `response_mask`.
        numbers, first, said, second: the drawn number, the first answer, what the environment says, the second answer.
        drawn: the probability of what the environment draws.
        scores: of the whole episode, given at its end.
    """

    batch: Batch
    numbers: NDArray[np.int64]
    first: NDArray[np.int64]
    said: NDArray[np.int64]
    second: NDArray[np.int64]
    drawn: NDArray[np.float64]
    scores: NDArray[np.float64]


def all_episodes(*, begins_context: bool) -> Episodes:
    """An episode scores 1 if the second answer is the number. To a first answer of 0 the environment says most."""
    found = []
    for number, first, said, second in itertools.product(NUMBERS, range(NUM_TOKENS), (4, 5), range(NUM_TOKENS)):
        says_high = (0.9 if number > 1 else 0.1) if first == 0 else (0.6 if first > number else 0.4)
        drawn = NUMBERS[number] * (says_high if said == 5 else 1.0 - says_high)
        found.append((number, first, said, second, drawn, float(second == number)))
    batch = Batch.from_rows(
        prompts=[[4, 5]] * len(found),
        responses=[[first, said, first, second] for _, first, said, second, *_ in found],
        response_mask=[[1, 0, 0, 1]] * len(found),
        segments=[[1, 2] if begins_context else []] * len(found),
    )
    return Episodes(batch, *(np.array(column) for column in zip(*found, strict=True)))


class Task:
    """The task, a policy in float64, and the probability of each episode with it, [num_episodes]."""

    def __init__(self, policy: TrainEngine, episodes: Episodes) -> None:
        self.model = policy.model
        self.episodes = episodes
        _, _, self._log_probs_B = self._forward(episodes.batch)
        self.probabilities = episodes.drawn * self._log_probs_B.detach().exp().numpy()
        assert self.probabilities.sum() == pytest.approx(1.0, abs=1e-12)

    def mean_given(self, values: NDArray[Any], *known: NDArray[Any]) -> NDArray[np.float64]:
        """The mean of values over the episodes that are alike in what is known, for each episode."""
        _, group = np.unique(np.stack([np.zeros(len(values)), *known]), axis=1, return_inverse=True)
        means: NDArray[np.float64] = np.bincount(group, self.probabilities * values) / np.bincount(
            group, self.probabilities
        )
        return means[group]

    def gradient_of_expected_score(self) -> Tensor:
        """The derivative of the sum over all episodes of probability times score."""
        weights_B = torch.from_numpy(self.episodes.drawn * self.episodes.scores)
        return self._gradient((weights_B * self._log_probs_B.exp()).sum())

    def expected_gradient(self, values: NDArray[Any], *, lam: float = 1.0) -> Tensor:
        """The expectation of the gradient by which PPO raises the score, with values of [num_episodes, 2 answers]."""
        outputs, tokens, _ = self._forward(self._with_advantages(values, lam))
        exactly = replace(
            tokens,
            weights=torch.from_numpy(self.probabilities)[tokens.row_index] * tokens.mask,
            columns={name: column.double() for name, column in tokens.columns.items()},
        )
        return -self._gradient(actor_loss(ActorConfig(model="unused"))(outputs, exactly).loss)

    def _forward(self, batch: Batch) -> tuple[dict[str, Tensor], ResponseTokens, Tensor]:
        """Runs the policy; returns its outputs, their tokens, and the log-prob of both answers of each episode, [B]."""
        limits = MicroBatchLimits(packed=False, max_tokens=1)
        micro_batch = collate(SegmentRows.of(batch).batch, None, limits, device=CPU)
        outputs = policy_forward(1.0)(self.model, micro_batch)
        tokens = micro_batch.tokens
        log_probs_B = torch.zeros(batch.num_rows, dtype=torch.float64)
        return outputs, tokens, log_probs_B.index_add(0, tokens.row_index, outputs["log_probs"] * tokens.mask)

    def _with_advantages(self, values: NDArray[Any], lam: float) -> Batch:
        batch = self.episodes.batch
        mask_BT = batch["response_mask"].pad() != 0
        rewards_BT = np.zeros(mask_BT.shape, np.float32)
        values_BT = np.zeros(mask_BT.shape, np.float32)
        rewards_BT[:, -1] = self.episodes.scores
        values_BT[mask_BT] = values.reshape(-1)
        advantages_BT, _ = gae(rewards_BT, values_BT, mask_BT, gamma=1.0, lam=lam)
        return batch.merge(Batch(batch.num_rows, {"advantages": batch["responses"].unpad(advantages_BT)}))

    def _gradient(self, objective: Tensor) -> Tensor:
        gradients = torch.autograd.grad(objective, list(self.model.parameters()), retain_graph=True)
        return torch.cat([gradient.reshape(-1) for gradient in gradients])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An architecture that computes in float64 throughout; norms of most others are float32."""
    sizes = {**SIZES, "vocab_size": NUM_TOKENS, "hidden_size": 16, "num_hidden_layers": 1, "initializer_range": 0.1}
    config = AutoConfig.for_model("starcoder2", **sizes)
    return save_random(AutoModelForCausalLM.from_config, config, tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def policy(folder: Path) -> TrainEngine:
    engine = make_engine(folder, use_remove_padding=False)
    engine.model.double()
    return engine


@pytest.fixture(scope="module")
def critic(folder: Path) -> TrainEngine:
    """A critic that has learned nothing, and errs by more than any score."""
    engine = make_engine(folder, "value", use_remove_padding=False)
    engine.model.double()
    engine.model.score.weight.data.normal_(generator=torch.Generator().manual_seed(2))
    return engine


@pytest.fixture(scope="module", params=[False, True], ids=["one context", "two contexts"])
def task(request: pytest.FixtureRequest, policy: TrainEngine) -> Task:
    return Task(policy, all_episodes(begins_context=request.param))


def values_of(critic: TrainEngine, episodes: Episodes, text: Sequence[Sequence[int]] | None) -> NDArray[np.float32]:
    """The critic's values before both answers, [num_episodes, 2]; multiples of 1/64, so that float32 adds exactly."""
    batch = episodes.batch
    if text is not None:
        batch = batch.merge(Batch.from_rows(privileged_tokens=text))
    values = critic.compute(batch, forward_of("value"), outputs=["values"], progress=silent)["values"].values
    of_answers = values[batch["response_mask"].values != 0].reshape(-1, 2)
    assert np.abs(of_answers).max() > 1.0
    return np.round(of_answers * 64.0) / np.float32(64.0)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_at_lambda_1_any_critic_leaves_the_expected_gradient_as_it_is(task: Task, critic: TrainEngine) -> None:
    plain = values_of(critic, task.episodes, None)
    privileged = values_of(critic, task.episodes, [[0, number] for number in task.episodes.numbers])

    assert np.abs(privileged - plain).max() > 0.5  # the text matters to the critic
    for values in (plain, privileged):
        assert relative(task.expected_gradient(values), task.gradient_of_expected_score()) <= 1e-6


@pytest.mark.parametrize("answer", ["first", "second"])
def test_a_text_that_depends_on_the_response_changes_the_expected_gradient(
    task: Task, critic: TrainEngine, answer: str
) -> None:
    """All else is as in the test before: the text tells an answer that is still to come."""
    values = values_of(critic, task.episodes, [[0, token] for token in getattr(task.episodes, answer)])

    assert relative(task.expected_gradient(values), task.gradient_of_expected_score()) > 0.2


# At a smaller lambda, values are also targets of the tokens before them.


def values_given(task: Task, scores: NDArray[Any], *text: NDArray[Any]) -> NDArray[np.float64]:
    """The means of scores given what stands before each answer, and the text; [num_episodes, 2]."""
    episodes = task.episodes
    first = task.mean_given(scores, *text)
    second = task.mean_given(scores, *text, episodes.first, episodes.said)
    return np.stack([first, second], axis=1)


def test_at_a_smaller_lambda_exact_values_leave_it_with_the_text_and_without(task: Task) -> None:
    expected = task.gradient_of_expected_score()
    for text in ((), (task.episodes.numbers,)):
        exact = values_given(task, task.episodes.scores, *text)
        assert relative(task.expected_gradient(exact, lam=LAMBDA), expected) <= 1e-5


def test_at_a_smaller_lambda_only_the_error_that_is_left_in_the_mean_over_texts_counts(task: Task) -> None:
    episodes = task.episodes
    expected = task.gradient_of_expected_score()
    exact = values_given(task, episodes.scores, episodes.numbers)
    any_errors = np.random.default_rng(5).normal(size=len(episodes.scores))
    errors = values_given(task, any_errors, episodes.numbers)
    means = values_given(task, errors[:, 1])

    assert np.abs(errors - means).max() > 0.2
    assert relative(task.expected_gradient(exact + errors - means, lam=LAMBDA), expected) <= 1e-5
    assert relative(task.expected_gradient(exact + errors, lam=LAMBDA), expected) > 0.2


def test_at_a_smaller_lambda_a_critic_that_reads_the_text_alone_changes_it(task: Task) -> None:
    """It gives a first answer no credit for what the environment says to it."""
    of_text = task.mean_given(task.episodes.scores, task.episodes.numbers)
    values = np.stack([of_text, of_text], axis=1)

    assert relative(task.expected_gradient(values, lam=LAMBDA), task.gradient_of_expected_score()) > 1e-3
    assert relative(task.expected_gradient(values), task.gradient_of_expected_score()) <= 1e-5
