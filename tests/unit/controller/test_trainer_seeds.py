"""The calls that get the sampling seeds of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.data.prompts import response_seeds
from splitppo.batch import Batch
from splitppo.v1.batch_pb2 import Slot
from tests.support.fake_run import make_run
from tests.support.fake_services import FakeActor

pytestmark = pytest.mark.usefixtures("no_task_is_left")


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("loss_mode", ["clip_cov", "vanilla"])
async def test_seeds_are_sent_with_the_prompts_alone_and_the_actor_keeps_each_responses_own(
    tmp_path: Path, loss_mode: str, num_groups: int
) -> None:
    updated: list[Batch] = []

    class Recording(FakeActor):
        async def put_batch(self, slot: Slot, batch: Batch) -> None:
            await super().put_batch(slot, batch)
            if "advantages" in batch:
                updated.append(await self.get_batch(slot, ["seeds", "advantages"]))

    run = make_run(
        tmp_path,
        actor=Recording,
        run__total_steps=1,
        rollout={"n": 2, "stream_groups": num_groups},
        actor__policy_loss={"loss_mode": loss_mode},
    )
    await run.trainer.fit()

    [rows] = updated
    prompts = run.trainer.rollouts.prompts.batch_at(1).row_indices
    wanted = response_seeds(run.config.run.seed, 1, prompts[:, None], [0, 1])
    assert [row.tolist() for row in rows["seeds"].rows()] == [[seed] for seed in wanted.reshape(-1).tolist()]
    assert [columns for _, columns in run.actor.puts if "seeds" in columns] == [{"prompts", "seeds"}]
