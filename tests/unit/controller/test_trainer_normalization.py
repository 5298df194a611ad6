"""The state that the trainer passes from step to step if scores and values are normalised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from controller.conversations.conversation import Conversation
from controller.data.prompts import PromptBatch
from controller.ppo.scores import Scores
from rewards.source import FailureLimit
from splitppo.batch import Batch, Column
from splitppo.config import Schedule
from splitppo.v1.batch_pb2 import Slot
from tests.support.fake_run import make_run
from tests.support.fake_services import FakeActor, FakeCritic, FakeScorer

pytestmark = pytest.mark.usefixtures("no_task_is_left")


class Listening(FakeCritic):
    """Remembers what it said, and what it was sent to learn from, by step."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.said: dict[int, Batch] = {}
        self.learned: dict[int, Batch] = {}

    async def put_batch(self, slot: Slot, batch: Batch) -> None:
        if "returns" in batch:
            self.said[slot.step] = self._slot(slot)
            self.learned[slot.step] = batch
        await super().put_batch(slot, batch)


@pytest.mark.parametrize("schedule", ["serial", "overlap"])
async def test_values_come_on_the_scale_of_the_last_update_and_are_learned_on_the_next(
    tmp_path: Path, schedule: Schedule
) -> None:
    run = make_run(tmp_path, critic=Listening, run__schedule=schedule, critic__normalize_values=True)
    await run.trainer.fit()
    assert isinstance(run.critic, Listening)
    mean, std = 0.0, 1.0
    for row in run.metrics:
        learned, said = run.critic.learned[row["step"]]["values"], run.critic.said[row["step"]]["values"]
        values = said.values * std + mean
        assert row["critic/values/mean"] == pytest.approx(values.mean(), rel=1e-6)
        mean, std = row["critic/value_norm/mean"], row["critic/value_norm/std"]
        np.testing.assert_allclose(learned.values, (values - mean) / std, rtol=1e-5, atol=1e-6)
        returns = run.critic.learned[row["step"]]["returns"].values * std + mean
        assert row["critic/returns/mean"] == pytest.approx(returns.mean(), rel=1e-5)
    moments = run.trainer.state.running.returns
    assert (moments.mean, moments.count) == (mean, sum(len(b["returns"].values) for b in run.critic.learned.values()))


class Placing(FakeScorer):
    """Half of every score is on the first token."""

    async def score(
        self,
        prompts: PromptBatch,
        rollouts: Batch,
        conversations: Sequence[Conversation] = (),
        *,
        num_examine: int,
        asks_functions: bool = True,
        limit: FailureLimit | None = None,
    ) -> Scores:
        scores = await super().score(
            prompts, rollouts, conversations, num_examine=num_examine, asks_functions=asks_functions, limit=limit
        )
        pairs = zip(rollouts["responses"].lengths, scores.scores, strict=True)
        firsts = [np.eye(1, length, dtype=np.float32)[0] * np.float32(0.5) * score for length, score in pairs]
        return replace(scores, token_scores=Column.from_rows(firsts, np.dtype(np.float32)))


class Taught(FakeActor):
    """Remembers the advantages that it was sent."""

    advantages: Column

    async def put_batch(self, slot: Slot, batch: Batch) -> None:
        if "advantages" in batch:
            self.advantages = batch["advantages"]
        await super().put_batch(slot, batch)


@pytest.mark.parametrize("num_parts", [1, 2])
async def test_scores_on_tokens_stay_with_their_responses_also_where_these_come_in_parts(
    tmp_path: Path, num_parts: int
) -> None:
    changes = {"run__total_steps": 1, "algorithm__adv_estimator": "reinforce_plus_plus"}
    run = make_run(tmp_path, actor=Taught, rollout__stream_groups=num_parts, **changes)
    run.trainer.scorer = Placing(run.log)
    await run.trainer.fit()
    assert isinstance(run.actor, Taught)
    # Rewards to go of a response: its whole score on the first token, half of it on all others, before whitening.
    lengths, prompts = run.actor.advantages.lengths, run.trainer.rollouts.prompts.batch_at(1).repeated(2)
    scores = [length * (row.data_source == "a") for length, row in zip(lengths, prompts.rows, strict=True)]
    togo = np.concatenate([[score, *[score / 2] * (n - 1)] for score, n in zip(scores, lengths, strict=True)])
    assert len(set(lengths)) > 1
    expected = (togo - togo.mean()) / togo.std(ddof=1)
    np.testing.assert_allclose(run.actor.advantages.values, expected, rtol=1e-5)
