"""Dynamic sampling: a step is full of groups that differ, and a replay draws the same ones.

The scorer of the fakes gives the length of a response to prompts of source "a", and 0 to all others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.data.prompts import Answered, PromptDataset
from controller.sampling.keep import TooFewSampleGroups
from controller.step.rollouts import StepRollouts
from splitppo.batch import Batch
from splitppo.config import Schedule
from splitppo.v1.batch_pb2 import SLOT_KIND_CANDIDATES, SLOT_KIND_EXPERIENCE, Slot
from tests.support.fake_run import FakeRun, make_run
from tests.support.fake_services import FakeActor, make_prompts, make_table

SCHEDULES: list[Schedule] = ["serial", "gather", "overlap"]
DYNAMIC: dict[str, Any] = {"algorithm__filter_groups__enable": True}
MODEL: dict[str, Any] = {"reward_model__model": "models/reward"}
NUM_SAMPLES = 2

pytestmark = pytest.mark.usefixtures("no_task_is_left")


class Actor(FakeActor):
    """Remembers what was put to it, by slot."""

    def __init__(self, log: Any) -> None:
        super().__init__(log)
        self.batches: list[tuple[Slot, Batch]] = []

    async def put_batch(self, slot: Slot, batch: Batch) -> None:
        self.batches.append((slot, batch))
        await super().put_batch(slot, batch)

    def asked(self, step: int) -> list[Batch]:
        """Returns the prompts of each round of a step."""
        return [batch for slot, batch in self.batches if (slot.kind, slot.step) == (SLOT_KIND_CANDIDATES, step)]

    def kept(self, step: int) -> Batch:
        """The rollouts that the step trains on."""
        slot = Slot(kind=SLOT_KIND_EXPERIENCE, step=step)
        (kept,) = [batch for at, batch in self.batches if at == slot and "responses" in batch]
        return kept


def run_of(run_dir: Path, **changes: Any) -> tuple[FakeRun, Actor]:
    run = make_run(run_dir, actor=Actor, **{**DYNAMIC, **changes})
    assert isinstance(run.actor, Actor)
    return run, run.actor


def seeds(asked: Sequence[Batch]) -> list[int]:
    return [seed for batch in asked for seed in batch["seeds"].values.tolist()]


def learning(run: FakeRun) -> list[dict[str, Any]]:
    timed = ("timing", "perf/", "overlap/", "rpc/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in run.metrics]


async def test_every_step_is_full_of_groups_that_differ_in_the_order_in_which_they_were_drawn(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, run__total_steps=4)
    await run.trainer.fit()
    table, num_draws = make_table(), 0
    for step in range(1, 5):
        lengths = actor.kept(step)["responses"].lengths.reshape(-1, NUM_SAMPLES)
        assert len(lengths) == run.config.data.train_batch_size
        assert (lengths[:, 0] != lengths[:, 1]).all()
        # What the fake answers and scores, worked out from what it was asked.
        due: list[tuple[list[int], list[int]]] = []
        for asked in actor.asked(step):
            num_draws += 1
            drawn = make_prompts(run.config).batch_at(num_draws)
            for row, of_prompt in zip(drawn.row_indices, asked["seeds"].rows(), strict=True):
                answers = [1 + seed % run.config.data.max_response_length for seed in of_prompt]
                if table.rows[row].data_source == "a" and len(set(answers)) > 1:
                    due.append((table.prompts.rows()[row].tolist(), answers))
        prompts = [row.tolist() for row in actor.kept(step)["prompts"].rows()[::NUM_SAMPLES]]
        assert list(zip(prompts, lengths.tolist(), strict=True)) == due[: len(lengths)]
        assert len(due) >= len(lengths) > len(due) - run.config.data.draw_size
    assert num_draws > 4
    assert run.trainer.state.draw == num_draws


async def test_what_was_drawn_and_dropped_is_counted(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, run__total_steps=3, data__gen_batch_size=4)
    await run.trainer.fit()
    for row in run.metrics:
        num_drawn = sum(asked.num_rows for asked in actor.asked(row["step"]))
        of_groups = {name.rpartition("/")[2]: n for name, n in row.items() if "/filter_groups/" in name}
        num_dropped = of_groups["evicted_samples"]
        assert num_drawn == 4 * row["train/num_gen_batches"]
        assert num_drawn - num_dropped == 2 + of_groups["discarded_surplus_samples"]
        assert of_groups["share_kept"] == pytest.approx(1 - num_dropped / num_drawn)
        assert of_groups["evicted_right"] + of_groups["evicted_wrong"] == num_dropped  # no response is without a token
        assert of_groups["evicted_wrong"] >= num_drawn // 2 - 1
        assert row["timing_s/dynamic_sampling"] > 0


async def test_a_prompt_that_comes_again_in_a_step_gets_further_seeds(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, run__total_steps=2, data__gen_batch_size=6, data__train_batch_size=4)
    await run.trainer.fit()
    assert any(len(actor.asked(step)) > 1 for step in (1, 2))
    drawn = seeds([*actor.asked(1), *actor.asked(2)])
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("stopped_after", [1, 2])
async def test_a_resumed_run_goes_on_with_the_same_prompts_and_seeds(tmp_path: Path, stopped_after: int) -> None:
    whole, of_whole = run_of(tmp_path / "whole", run__total_steps=4)
    await whole.trainer.fit()

    first, _ = run_of(tmp_path / "stopped", run__total_steps=4, run__stop_after_step=stopped_after)
    await first.trainer.fit()
    state = first.store.load(stopped_after).state
    assert state.refills == sum(len(of_whole.asked(step)) - 1 for step in range(1, stopped_after + 1))

    second, of_second = run_of(tmp_path / "stopped", run__total_steps=4, at_step=stopped_after)
    second.trainer = replace(second.trainer, state=state)
    await second.trainer.fit()
    for step in range(stopped_after + 1, 5):
        assert seeds(of_second.asked(step)) == seeds(of_whole.asked(step))
    assert learning(second)[stopped_after:] == learning(whole)[stopped_after:]


async def test_all_schedules_learn_from_the_same_numbers(tmp_path: Path) -> None:
    lines = []
    for schedule in SCHEDULES:
        run, _ = run_of(tmp_path / schedule, run__schedule=schedule, algorithm__use_kl_in_reward=True, **MODEL)
        await run.trainer.fit()
        lines.append(learning(run))
    assert len(lines[0]) == 3
    assert lines[0] == lines[1] == lines[2]


async def test_serial_makes_one_call_at_a_time(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, run__schedule="serial", checkpoint__save_last=False)
    await run.trainer.fit()
    assert run.log.most_at_once() == 1


async def test_overlap_generates_candidates_while_the_critic_still_updates(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, run__schedule="overlap", run__total_steps=2)
    finish_update = run.log.hold("critic.update", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.generate", 2)
    assert not run.log.happened("end", "critic.update", 1)
    finish_update.set()
    await fitting
    assert run.log.order(("end", "critic.update", 1), ("begin", "critic.values", 2))


async def test_what_is_kept_is_put_where_the_actor_would_have_left_it(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, run__total_steps=1)
    await run.trainer.fit()
    num_rounds = len(actor.asked(1))
    assert run.actor.puts == [
        *[(1, {"prompts", "seeds"})] * num_rounds,
        (1, {"prompts", "responses", "rollout_log_probs", "seeds"}),
        (1, {"advantages"}),
    ]
    assert run.critic.puts == [(1, {"prompts", "responses"}), (1, {"returns"})]
    assert run.log.names().count("actor.generate") == run.log.names().count("scorer.score") == num_rounds


async def test_the_reward_model_scores_candidates_once_where_they_are_compared_by_score(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, run__total_steps=1, tracking__dump_rollouts=True, **MODEL)
    await run.trainer.fit()
    assert run.log.names().count("critic.reward_scores") == len(actor.asked(1))
    (dumped,) = (tmp_path / "rollouts").rglob("*.jsonl")
    kept = [json.loads(line) for line in dumped.read_text().splitlines()]
    lengths = actor.kept(1)["responses"].lengths
    of_model = 0.1 * np.minimum(lengths + actor.kept(1)["prompts"].lengths, 4)
    assert [row["model_score"] for row in kept] == pytest.approx(of_model.tolist())
    of_rules = [length if row["data_source"] == "a" else 0 for row, length in zip(kept, lengths, strict=True)]
    assert [row["score"] for row in kept] == pytest.approx((of_rules + of_model).tolist())


async def test_the_reward_model_scores_what_is_kept_alone_where_a_field_is_compared(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, run__total_steps=1, algorithm__filter_groups__metric="acc", **MODEL)
    await run.trainer.fit()
    assert len(actor.asked(1)) > 1
    assert run.log.names().count("critic.reward_scores") == 1
    lengths = actor.kept(1)["responses"].lengths
    read = np.minimum(lengths + actor.kept(1)["prompts"].lengths, 4)
    (row,) = run.metrics
    assert row["critic/score/mean"] == pytest.approx(float(np.mean(lengths + np.float32(0.1) * read)))


async def test_groups_are_compared_before_long_responses_lose_some_of_their_score(tmp_path: Path) -> None:
    buffer = {"reward__overlong_buffer": {"enable": True, "len": 3, "penalty_factor": 1.0, "log": False}}
    run, actor = run_of(tmp_path, run__total_steps=1, **buffer)
    await run.trainer.fit()
    lengths = actor.kept(1)["responses"].lengths
    penalty = np.maximum(lengths - 1, 0) / 3
    # Those of source "b" have score 0, whatever they lose.
    (row,) = run.metrics
    assert row["critic/score/mean"] == pytest.approx(float(np.mean(lengths - penalty)), abs=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_a_step_that_cannot_be_filled_in_time_ends_the_run_and_says_why(
    tmp_path: Path, schedule: Schedule
) -> None:
    limited = {"algorithm__filter_groups__max_num_gen_batches": 2, "checkpoint__save_freq": 1}
    run, actor = run_of(tmp_path, run__total_steps=9, run__schedule=schedule, **limited)
    with pytest.raises(TooFewSampleGroups) as raised:
        await run.trainer.fit()
    step = run.trainer.state.step
    assert len(actor.asked(step)) == 2
    sentence = str(raised.value)
    assert sentence.startswith(
        f"step {step} cannot be filled: after 2 rounds (algorithm.filter_groups.max_num_gen_batches) it has "
    )
    assert " of 2 prompts (data.train_batch_size); " in sentence
    assert "were dropped because their samples are alike in 'score' (all at 0: " in sentence
    assert "raise algorithm.filter_groups.max_num_gen_batches or data.gen_batch_size, or raise rollout.n" in sentence
    assert actor.committed_step == step - 1
    # What was due before is complete, also where it was still going on.
    await run.trainer.join()
    assert run.store.latest_step() == run.metrics[-1]["step"] == step - 1 > 0


async def test_a_data_epoch_without_any_group_that_differs_ends_the_run(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, data__max_response_length=1)
    with pytest.raises(
        TooFewSampleGroups, match=r"after a whole data epoch .* it has 0 of 2 .* \(all at 1: 3, all at 0: 3\)"
    ):
        await run.trainer.fit()
    assert len(actor.asked(1)) == 3
    await run.trainer.abandon()


async def test_the_run_ends_with_the_step_that_draws_the_last_prompts_of_its_epochs(tmp_path: Path) -> None:
    last = {"run__total_steps": 50, "run__total_epochs": 3, "evaluation__test_freq": -1, "data__val_files": "v"}
    run, actor = run_of(tmp_path, validates=True, **last)
    await run.trainer.fit()
    done = run.trainer.state.step
    drawn = [len(actor.asked(step)) for step in range(1, done + 1)]
    assert sum(drawn) >= 9 > sum(drawn[:-1])  # three rounds are an epoch
    assert run.store.steps() == [done]
    assert run.trainer.state.validated_step == done

    again, _ = run_of(tmp_path, at_step=done, **last)
    again.trainer = replace(again.trainer, state=run.store.load(done).state)
    await again.trainer.fit()
    assert again.log.events == []


class Counting(PromptDataset):
    """Counts how often it was asked for the length of its epochs, which a user's sampler has to work out."""

    num_asked = [0]  # noqa: RUF012 - of the test's only instance

    def num_steps(self, num_epochs: int) -> int:
        self.num_asked[0] += 1
        return super().num_steps(num_epochs)


async def test_the_length_of_the_epochs_is_asked_for_once_and_not_in_every_step(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, run__total_steps=3, run__total_epochs=50)
    source = Counting(make_table(), batch_size=2, seed=run.config.run.seed, shuffle=True)
    run.trainer = replace(run.trainer, rollouts=StepRollouts(source))
    source.num_asked[0] = 0
    await run.trainer.fit()
    assert source.num_asked == [0]


class Heard(PromptDataset):
    """Notes what it hears after each step."""

    answers: list[Sequence[Answered]] = []  # noqa: RUF012 - of the test's only instance

    def state_after(self, answered: Sequence[Answered]) -> None:
        self.answers.append(answered)


async def test_a_sampler_hears_the_scores_of_everything_that_was_drawn(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, run__total_steps=2)
    source = Heard(make_table(), batch_size=2, seed=run.config.run.seed, shuffle=True)
    run.trainer = replace(run.trainer, rollouts=StepRollouts(source))
    await run.trainer.fit()
    assert [len(answered) for answered in source.answers] == [len(actor.asked(step)) for step in (1, 2)]
    for number, (prompts, scores_B) in enumerate((answer for step in source.answers for answer in step), start=1):
        assert prompts.row_indices.tolist() == source.batch_at(number).row_indices.tolist()
        of_b = np.repeat([row.data_source == "b" for row in prompts.rows], NUM_SAMPLES)
        assert (scores_B[of_b] == 0).all()
        assert (scores_B[~of_b] > 0).all()
