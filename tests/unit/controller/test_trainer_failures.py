"""The state that a stopped or failing run leaves, in every schedule."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controller.scoring.scorer import ScoringFailed
from rewards.samples import Failure
from splitppo.config import Schedule
from tests.support.fake_run import make_run

SCHEDULES: list[Schedule] = ["serial", "gather", "overlap"]

pytestmark = pytest.mark.usefixtures("no_task_is_left")


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_a_stopped_run_finishes_its_step_and_saves_it(tmp_path: Path, schedule: Schedule) -> None:
    run = make_run(tmp_path, run__schedule=schedule, run__total_steps=5)
    go_on = run.log.hold("actor.generate", at_step=2)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("begin", "actor.generate", 2)
    run.trainer.stop()
    go_on.set()
    await fitting
    assert run.trainer.state.step == 2
    assert run.critic.committed_step == 2
    assert run.store.steps() == [2]
    assert [row["step"] for row in run.metrics] == [1, 2]


async def test_a_run_that_is_stopped_after_its_updates_have_begun_joins_the_critic(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="overlap", run__total_steps=5, validates=True, evaluation__test_freq=1)
    finish_update = run.log.hold("critic.update", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("begin", "actor.validate", 1)
    run.trainer.stop()
    finish_update.set()
    await fitting
    assert run.store.steps() == [1]
    assert [row["step"] for row in run.metrics] == [1]


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_scorers_that_fail_too_often_end_the_run_before_anything_is_learned_and_checkpoints_stay(
    tmp_path: Path, schedule: Schedule
) -> None:
    run = make_run(tmp_path, run__schedule=schedule, reward__max_error_rate=0.5, checkpoint__save_freq=1)
    go_on = run.log.hold("actor.generate", at_step=3)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("begin", "actor.generate", 3)
    run.scorer.failure = Failure.ERROR
    go_on.set()
    with pytest.raises(ScoringFailed, match=r"^4 of 4 responses of step 3 have no score .*\(0\.5\) .*; first row \d, "):
        await fitting
    await run.trainer.abandon()
    assert run.actor.committed_step == 2
    assert run.store.steps()[:1] == [1]


async def test_a_validation_without_scores_ends_the_run_too(tmp_path: Path) -> None:
    run = make_run(tmp_path, validates=True, evaluation__val_before_train=True)
    run.scorer.failure = Failure.TIMEOUT
    with pytest.raises(ScoringFailed, match=r"^2 of 2 responses of the validation of step 0 have no score"):
        await run.trainer.fit()
    assert run.actor.committed_step == 0


@pytest.mark.parametrize("schedule", ["gather", "overlap"])
@pytest.mark.parametrize("culprit", ["actor.ref_log_probs", "critic.values", "scorer.score"])
async def test_one_failing_call_cancels_the_others_and_its_error_comes_out(
    tmp_path: Path, schedule: Schedule, culprit: str
) -> None:
    run = make_run(tmp_path, run__schedule=schedule, actor__use_kl_loss=True)
    calls = ["actor.ref_log_probs", "critic.values", "scorer.score"]
    for name in calls:
        run.log.hold(name)
    run.log.fail(culprit, ConnectionError("the cause"))
    with pytest.raises(ConnectionError, match="the cause"):
        await run.trainer.fit()
    assert not [name for name in calls if run.log.happened("end", name, 1)]
    assert "actor.update" not in run.log.names()
    await run.trainer.abandon()


async def test_an_error_of_the_overlapped_update_comes_out_where_it_is_joined(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="overlap")
    run.log.fail("critic.update", ConnectionError("the critic is gone"))
    with pytest.raises(ConnectionError, match="the critic is gone"):
        await run.trainer.fit()
    assert run.log.happened("end", "actor.update", 1)
    assert "critic.values" not in run.log.names(2)
    assert not run.metrics
    await run.trainer.abandon()


async def test_abandoning_gives_up_the_critics_update_and_the_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="overlap", checkpoint__save_freq=1)
    run.log.hold("critic.update", at_step=1)
    run.log.fail("actor.generate", ConnectionError("the actor is gone"), at_step=2)
    with pytest.raises(ConnectionError, match="the actor is gone"):
        await run.trainer.fit()
    await run.trainer.abandon()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not run.log.happened("end", "critic.update", 1)
    assert run.store.steps() == []


async def test_a_cancelled_wait_leaves_the_critics_update_running(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="overlap", run__total_steps=1)
    finish_update = run.log.hold("critic.update", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.update", 1)
    fitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fitting
    finish_update.set()
    await run.trainer.critic_update.join()
    await run.trainer.checkpoints.join()
    assert run.critic.committed_step == 1


async def test_what_could_not_be_saved_ends_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint__save_freq=1)
    run.log.fail("critic.save_checkpoint", OSError("no space left"), at_step=1)
    with pytest.raises(OSError, match="no space left"):
        await run.trainer.fit()
    assert run.store.steps() == []
    await run.trainer.abandon()
