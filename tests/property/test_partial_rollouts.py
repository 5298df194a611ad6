"""Partial rollouts keep their bounds for any lengths of responses: age, waiting prompts, and each response once."""

from __future__ import annotations

import asyncio
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.data.prompts import PromptDataset
from controller.sampling.stream import SamplingGroups
from controller.step.context import StepContext
from controller.step.log_prob_check import LogProbCheck
from controller.step.partial import PartialRollouts
from controller.step.pool import UnlearnedPrompts
from controller.tracking.step_record import StepRecord
from controller.workers.command import CommandReply
from controller.workers.worker_groups import Workers
from splitppo.batch import Batch
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import Slot
from splitppo.v1.worker_pb2 import CommandResult
from tests.support.call_log import CallLog
from tests.support.fake_services import FakeActor, FakeCritic, FakeScorer, make_config, make_table

MAX_LENGTH = 12
NUM_STEPS = 8


class Sampler(FakeActor):
    """Samples responses whose lengths are those of a list, chosen by seed; token t is t, and its log-prob -version."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(CallLog())
        self.whole = lengths
        self.num_rows = 0  # of the last round

    def length_of(self, seed: int) -> int:
        return self.whole[seed % len(self.whole)]

    async def generate(
        self, slot: Slot, sampling: SamplingParams, *, base_step: int, max_step_tokens: int = 0, **others: Any
    ) -> CommandReply:
        asked = self._slot(slot)
        seeds = asked["seeds"].values.tolist()
        self.num_rows = len(seeds)
        have_begun = asked["begun_log_probs"].rows() if "begun_log_probs" in asked else [np.empty(0)] * len(seeds)
        rows: dict[str, list[Any]] = {"seeds": [[seed] for seed in seeds]}
        rows |= {"responses": [], "rollout_log_probs": [], "unfinished": []}
        for seed, begun in zip(seeds, have_begun, strict=True):
            whole = self.length_of(seed)
            length = min(whole, len(begun) + max_step_tokens)
            rows["responses"].append(np.arange(length))
            rows["rollout_log_probs"].append(np.concatenate([begun, np.full(length - len(begun), -float(base_step))]))
            rows["unfinished"].append([length < whole])
        self._slots[slot.SerializeToString()] = Batch.from_rows(**rows)
        return CommandReply(CommandResult(policy_version=base_step), 0.0, 0.0)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=20),
    max_step_tokens=st.integers(1, MAX_LENGTH + 1),
    overcommit=st.sampled_from([1.0, 1.5, 2.5]),
    num_samples=st.integers(1, 3),
    batch_size=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_bounds_hold_and_every_response_is_learned_from_once(
    lengths: list[int], max_step_tokens: int, overcommit: float, num_samples: int, batch_size: int, seed: int
) -> None:
    config = make_config(
        Path("unused"),
        run={"dir": "unused", "total_steps": NUM_STEPS, "seed": seed},
        data__train_batch_size=batch_size,
        data__max_response_length=MAX_LENGTH,
        rollout={"n": num_samples, "max_step_tokens": max_step_tokens, "overcommit": overcommit},
        algorithm__rollout_correction__rollout_is="token",
    )
    sampler = Sampler(lengths)
    workers = Workers.of(config, sampler, FakeCritic(CallLog()), None, None)
    table = make_table(9)
    prompts = PromptDataset(table, batch_size=batch_size, seed=seed, shuffle=True)
    rollouts = PartialRollouts(prompts, UnlearnedPrompts.none(table, num_samples))
    seeds_seen: list[int] = []
    learned_rows: list[int] = []

    async def train() -> None:
        for number in range(1, NUM_STEPS + 1):
            step = StepContext(
                config,
                workers,
                SamplingGroups.of(config, workers),
                FakeScorer(CallLog()),
                LogProbCheck(config.rollout, 1),
                StepRecord(number, 0.0),
                asyncio.Event().wait,
            )
            drawn = await rollouts.draw(step, number)
            learned = await drawn.generate()
            metrics = step.record.metrics
            batch = await sampler.get_batch(drawn.slot, ["seeds", "rollout_log_probs"])
            seeds = batch["seeds"].values.tolist()
            assert learned["responses"].lengths.tolist() == [sampler.length_of(seed) for seed in seeds]
            ages = number - 1 + batch["rollout_log_probs"].values  # a log-prob says minus the version
            assert ages.min() >= 0
            assert ages.max() == metrics["partial/max_age"] <= ceil(MAX_LENGTH / max_step_tokens)
            assert metrics["partial/num_waiting"] <= batch_size
            assert sampler.num_rows < overcommit * batch_size * num_samples + num_samples
            seeds_seen.extend(seeds)
            learned_rows.extend(drawn.prompts.row_indices.tolist())
            sampler.committed_step = number

    asyncio.run(train())
    assert len({*seeds_seen}) == NUM_STEPS * batch_size * num_samples
    assert rollouts.file_of_next is None
    in_order = np.concatenate([prompts.batch_at(number).row_indices for number in range(1, NUM_STEPS + 1)])
    assert sorted(learned_rows) == sorted(in_order.tolist())
