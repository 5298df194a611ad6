"""The inputs that an estimator of advantages asks for, and the columns that workers get then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from splitppo.batch import Batch
from splitppo.config import ConfigError, Schedule
from splitppo.v1.batch_pb2 import Slot
from tests.support.fake_run import make_run
from tests.support.fake_services import FakeCritic

SCHEDULES: list[Schedule] = ["serial", "gather", "overlap"]

pytestmark = pytest.mark.usefixtures("no_task_is_left")


async def test_in_its_warm_up_the_critic_may_learn_monte_carlo_returns(tmp_path: Path) -> None:
    learned: list[list[float]] = []

    class Critic(FakeCritic):
        async def put_batch(self, slot: Slot, batch: Batch) -> None:
            await super().put_batch(slot, batch)
            if "returns" in batch:
                learned.append([float(np.ptp(row)) for row in batch["returns"].rows() if len(row)])

    changes = {"algorithm__lam": 0.5, "algorithm__lam_critic_warmup": 1.0, "critic__warmup_steps": 2}
    await make_run(tmp_path, critic=Critic, **changes).trainer.fit()
    # Of one score at the end, not discounted: the same return for every token of a response.
    assert [max(of_step) < 1e-6 for of_step in learned] == [True, True, False]


async def test_gdpo_learns_from_the_named_parts_of_the_scores(tmp_path: Path) -> None:
    gdpo = {"algorithm__adv_estimator": "gdpo", "run__total_steps": 1}
    run = make_run(tmp_path, algorithm__gdpo_reward_keys=["score"], **gdpo)
    await run.trainer.fit()
    assert run.actor.updates == [(1, False)]
    with pytest.raises(ConfigError, match=r"no response has the field 'colour'; known: score"):
        await make_run(tmp_path / "other", algorithm__gdpo_reward_keys=["colour"], **gdpo).trainer.fit()


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_grpo_calls_no_critic(tmp_path: Path, schedule: Schedule, num_groups: int) -> None:
    run = make_run(
        tmp_path,
        run__schedule=schedule,
        rollout__stream_groups=num_groups,
        algorithm__adv_estimator="grpo",
        checkpoint__save_freq=1,
        critic__warmup_steps=2,
    )
    await run.trainer.fit()
    assert not [name for name in run.log.names() if name.startswith("critic")]
    assert run.actor.updates == [(1, False), (2, False), (3, False)]
    assert run.store.steps() == [1, 2, 3]
