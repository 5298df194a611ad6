"""Greedy rollouts, the baseline of ReMax: their time, their scores, and their effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitppo.batch import Batch
from splitppo.config import Schedule
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_GREEDY, Slot
from tests.support.fake_run import FakeRun, make_run
from tests.support.fake_services import FakeActor, make_prompts

SCHEDULES: list[Schedule] = ["serial", "gather", "overlap"]
REMAX: dict[str, Any] = {"algorithm__adv_estimator": "remax"}
GREEDY_LENGTH = 3

pytestmark = pytest.mark.usefixtures("no_task_is_left")


class Actor(FakeActor):
    """Answers greedily with three tokens; remembers the advantages that it is sent."""

    def __init__(self, log: Any) -> None:
        super().__init__(log)
        self.advantages: list[list[float]] = []

    def _answers(self, asked: Batch, step: int, sampling: SamplingParams, max_step_tokens: int) -> Batch:
        if sampling.temperature == 0.0:
            responses = [np.arange(GREEDY_LENGTH)] * asked.num_rows
            return asked.merge(Batch.from_rows(responses=responses)).select(["prompts", "responses"])
        return super()._answers(asked, step, sampling, max_step_tokens)

    async def put_batch(self, slot: Slot, batch: Batch) -> None:
        if "advantages" in batch:
            self.advantages.append([float(row[0]) for row in batch["advantages"].rows()])
        await super().put_batch(slot, batch)


def run_of(run_dir: Path, **changes: Any) -> tuple[FakeRun, Actor]:
    run = make_run(run_dir, actor=Actor, **{**REMAX, **changes})
    assert isinstance(run.actor, Actor)
    return run, run.actor


def sampled_scores(run: FakeRun, step: int) -> tuple[list[int], list[int]]:
    """Returns the scores of samples and of greedy responses; a score is the length for prompts of source "a"."""
    prompts = make_prompts(run.config).batch_at(step)
    seeds = prompts.to_batch(run.config.run.seed, step, run.config.rollout.n)["seeds"].rows()
    is_judged = [row.data_source == "a" for row in prompts.rows]
    lengths = [1 + of_prompt % run.config.data.max_response_length for of_prompt in seeds]
    sampled = [int(one) * judged for of_prompt, judged in zip(lengths, is_judged, strict=True) for one in of_prompt]
    return sampled, [GREEDY_LENGTH * judged for judged in is_judged]


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_what_is_learned_is_the_score_less_that_of_the_prompts_greedy_response(
    tmp_path: Path, schedule: Schedule
) -> None:
    buffer = {"reward__overlong_buffer": {"enable": True, "len": 2, "penalty_factor": 1.0, "log": False}}
    run, actor = run_of(tmp_path, run__schedule=schedule, **buffer)
    await run.trainer.fit()
    for step, (advantages, row) in enumerate(zip(actor.advantages, run.metrics, strict=True), start=1):
        sampled, greedy = sampled_scores(run, step)
        prompts = make_prompts(run.config).batch_at(step)
        seeds = prompts.to_batch(run.config.run.seed, step, 2)["seeds"].values
        penalty = np.maximum(1 + seeds % 4 - 2, 0) / 2  # of the samples alone
        assert advantages == pytest.approx((sampled - penalty - np.repeat(greedy, 2)).tolist())
        assert row["critic/greedy_score/mean"] == np.mean(greedy)
        assert row["timing_s/gen_max"] > 0


@pytest.mark.parametrize("schedule", ["gather", "overlap"])
async def test_greedy_rollouts_are_made_before_the_actors_log_probs_and_scored_meanwhile(
    tmp_path: Path, schedule: Schedule
) -> None:
    run, actor = run_of(tmp_path, run__schedule=schedule, run__total_steps=1, actor__ppo_epochs=2)
    scored: list[int] = []

    async def meet(call: int) -> None:
        scored.append(call)
        if call == 2:
            await run.log.until("begin", "actor.old_log_probs", 1)

    run.log.hooks["scorer.score"] = meet
    await run.trainer.fit()
    assert [slot.kind == SLOT_KIND_GREEDY for slot, _ in actor.sampling] == [False, True]
    assert run.log.names(1)[0] == "actor.generate"
    assert run.log.names().index("actor.old_log_probs") > run.log.names().index("actor.generate", 1)
    assert sorted(scored) == [1, 2]


async def test_serial_makes_one_call_at_a_time(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, run__schedule="serial", checkpoint__save_last=False, actor__ppo_epochs=2)
    await run.trainer.fit()
    assert run.log.most_at_once() == 1
    of_a_step = ["generate", "generate", "score", "old_log_probs", "score", "update"]
    assert [name.partition(".")[2] for name in run.log.names()] == of_a_step * 3


async def test_dynamic_sampling_asks_for_greedy_rollouts_of_what_it_has_kept(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, run__total_steps=2, algorithm__filter_groups__enable=True)
    await run.trainer.fit()
    greedy = [slot.step for slot, _ in actor.sampling if slot.kind == SLOT_KIND_GREEDY]
    assert greedy == [1, 2]
    assert [row["critic/greedy_score/mean"] for row in run.metrics] == [GREEDY_LENGTH] * 2  # all kept are of source "a"


async def test_other_estimators_ask_for_none(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, algorithm__adv_estimator="grpo")
    await run.trainer.fit()
    assert all(slot.kind != SLOT_KIND_GREEDY for slot, _ in actor.sampling)
    assert not any("greedy" in name or "gen_max" in name for name in run.metrics[0])
