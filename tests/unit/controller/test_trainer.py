"""The dataflow of a step in every schedule: who waits for whom, what is sent, what a failure leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller.checkpointing import CheckpointWriter
from controller.checkpoints import CheckpointStore
from controller.evaluation import Evaluator
from controller.recorder import Recorder
from controller.report import PHASE_COLOURS, PHASES
from controller.run_state import RunState
from controller.trace import Span, read_trace
from controller.trackers import read_metrics
from controller.trainer import Observers, Services, Trainer
from splitppo.config import Config
from splitppo.config.schema import Schedule
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, Slot
from tests.fake_services import (
    CallLog,
    FakeActor,
    FakeCritic,
    FakeScorer,
    make_config,
    make_prompts,
    make_table,
    plain_display,
)

SCHEDULES: list[Schedule] = ["serial", "gather", "overlap"]
FIRST_EXPERIENCE = Slot(kind=SLOT_KIND_EXPERIENCE, step=1)


@dataclass
class Run:
    """A trainer over fake services, and what it leaves."""

    config: Config
    log: CallLog
    actor: FakeActor
    critic: FakeCritic
    trainer: Trainer
    store: CheckpointStore
    recorder: Recorder
    scorer: FakeScorer

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.config.run.dir / "metrics.jsonl")


def make_run(run_dir: Path, *, at_step: int = 0, validates: bool = False, **changes: Any) -> Run:
    config = make_config(run_dir, **changes)
    log = CallLog()
    actor, critic, scorer = FakeActor(log), FakeCritic(log), FakeScorer(log)
    actor.committed_step = critic.committed_step = at_step
    prompts = make_prompts(config)
    clients = [actor, critic] if config.uses_critic else [actor]
    recorder = Recorder(config, run_dir, plain_display(), prompts.epoch_of)
    recorder.restart_at(at_step, clients, None)
    store = CheckpointStore(run_dir / "checkpoints")
    observers = Observers(
        Evaluator(config, actor, make_table(2) if validates else None, scorer),
        CheckpointWriter(
            store,
            clients,
            config.checkpoint,
            config.run.schedule,
            on_saved=recorder.add_spans,
            on_commit=recorder.release,
        ),
        recorder,
    )
    services = Services(actor, critic if config.uses_critic else None)
    state = RunState.initial(config).at_step(at_step)
    trainer = Trainer(config, services, prompts, scorer, observers, state)
    return Run(config, log, actor, critic, trainer, store, recorder, scorer)


@pytest.fixture
async def no_task_is_left() -> AsyncIterator[None]:
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}


pytestmark = pytest.mark.usefixtures("no_task_is_left")


# The order of the dataflow.


async def test_serial_makes_one_call_at_a_time_in_the_order_of_the_dataflow(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        run__schedule="serial",
        run__total_steps=2,
        algorithm__use_kl_in_reward=True,
        checkpoint__save_last=False,
    )
    await run.trainer.fit()
    assert run.log.most_at_once() == 1
    of_a_step = ["generate", "old_log_probs", "ref_log_probs", "values", "score", "update", "update"]
    assert [name.partition(".")[2] for name in run.log.names()] == of_a_step * 2


@pytest.mark.parametrize("schedule", ["gather", "overlap"])
async def test_log_probs_values_and_scores_run_at_the_same_time(tmp_path: Path, schedule: Schedule) -> None:
    run = make_run(tmp_path, run__schedule=schedule, run__total_steps=1, algorithm__use_kl_in_reward=True)
    run.log.meet("actor.old_log_probs", "critic.values", "scorer.score")
    await run.trainer.fit()
    assert run.log.order(("end", "actor.generate", 1), ("begin", "critic.values", 1), ("begin", "actor.update", 1))


@pytest.mark.parametrize("schedule", ["gather", "overlap"])
async def test_both_updates_run_at_the_same_time(tmp_path: Path, schedule: Schedule) -> None:
    run = make_run(tmp_path, run__schedule=schedule, run__total_steps=2)
    run.log.meet("actor.update", "critic.update")
    await run.trainer.fit()
    assert (run.actor.committed_step, run.critic.committed_step) == (2, 2)


async def test_gather_joins_both_updates_before_the_next_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="gather", run__total_steps=2)
    await run.trainer.fit()
    for update in ("actor.update", "critic.update"):
        assert run.log.order(("end", update, 1), ("begin", "actor.generate", 2))


async def test_overlap_generates_while_the_critic_still_updates_and_joins_it_before_the_values(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="overlap", run__total_steps=2)
    finish_update = run.log.hold("critic.update", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.generate", 2)
    await run.log.until("end", "scorer.score", 2)
    assert not run.log.happened("begin", "critic.values", 2)
    assert not run.metrics
    finish_update.set()
    await fitting
    assert run.log.order(("end", "critic.update", 1), ("begin", "critic.values", 2))
    assert [row["step"] for row in run.metrics] == [1, 2]


async def test_overlap_joins_the_last_steps_critic_before_it_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="overlap", run__total_steps=1)
    finish_update = run.log.hold("critic.update", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.update", 1)
    assert not fitting.done()
    finish_update.set()
    await fitting
    assert run.critic.committed_step == 1


async def test_all_schedules_learn_from_the_same_numbers(tmp_path: Path) -> None:
    lines = []
    for schedule in SCHEDULES:
        run = make_run(tmp_path / schedule, run__schedule=schedule, algorithm__use_kl_in_reward=True)
        await run.trainer.fit()
        timed = ("timing", "perf/", "overlap/", "rpc/")
        lines.append([{k: v for k, v in row.items() if not k.startswith(timed)} for row in run.metrics])
    assert len(lines[0]) == 3
    assert lines[0] == lines[1] == lines[2]


# What is sent and what is left out.


@pytest.mark.parametrize(
    ("changes", "is_computed"),
    [
        ({}, False),
        ({"actor__ppo_epochs": 2}, True),
        ({"actor__ppo_mini_batch_size": 1}, True),
        ({"algorithm__use_kl_in_reward": True}, True),
        ({"actor__use_kl_loss": True}, False),
    ],
)
async def test_old_log_probs_are_computed_only_where_the_update_cannot_have_them_itself(
    tmp_path: Path, changes: dict[str, Any], is_computed: bool
) -> None:
    run = make_run(tmp_path, run__total_steps=1, **changes)
    await run.trainer.fit()
    assert ("actor.old_log_probs" in run.log.names()) is is_computed
    assert ("actor.ref_log_probs" in run.log.names()) is run.config.uses_reference


async def test_each_service_gets_only_what_it_lacks(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__total_steps=1)
    await run.trainer.fit()
    assert run.actor.puts == [(1, {"prompts", "seeds"}), (1, {"advantages"})]
    assert run.critic.puts == [(1, {"prompts", "responses"}), (1, {"returns"})]


async def test_the_critics_warm_up_only_advances_the_actor(tmp_path: Path) -> None:
    run = make_run(tmp_path, critic__warmup_steps=2)
    await run.trainer.fit()
    assert run.actor.updates == [(1, True), (2, True), (3, False)]
    assert [step for step, columns in run.actor.puts if "advantages" in columns] == [3]
    assert run.critic.committed_step == 3


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


async def test_a_step_samples_with_the_rollouts_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__total_steps=1, rollout__temperature=0.5, rollout__top_k=7, rollout__top_p=0.75)
    await run.trainer.fit()
    (slot, sampling) = run.actor.sampling[0]
    assert slot == FIRST_EXPERIENCE
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_response_length) == (0.5, 7, 0.75, 4)


async def test_a_restored_run_goes_on_with_the_next_steps_prompts(tmp_path: Path) -> None:
    straight, resumed = make_run(tmp_path / "straight"), make_run(tmp_path / "resumed", at_step=2)
    await straight.trainer.fit()
    await resumed.trainer.fit()
    third, only = straight.metrics[2], resumed.metrics[0]
    assert resumed.actor.updates == [(3, False)]
    assert [only[key] for key in ("step", "critic/score/mean")] == [third[key] for key in ("step", "critic/score/mean")]


# Streamed generation.


@pytest.mark.parametrize("schedule", ["gather", "overlap"])
async def test_values_and_scores_of_a_group_come_while_the_next_one_is_generated(
    tmp_path: Path, schedule: Schedule
) -> None:
    run = make_run(tmp_path, run__schedule=schedule, run__total_steps=1, rollout__stream_groups=2)
    end_part = run.log.hold("actor.part", at_step=2)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "critic.values", 1)
    await run.log.until("end", "scorer.score", 1)
    assert not run.log.happened("end", "actor.generate", 1)
    end_part.set()
    await fitting
    assert run.log.names().count("critic.values") == run.log.names().count("scorer.score") == 2
    assert run.log.order(("end", "actor.generate", 1), ("begin", "actor.update", 1))


async def test_serial_generates_completely_before_it_computes_anything_of_any_group(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        run__schedule="serial",
        run__total_steps=1,
        rollout__stream_groups=2,
        algorithm__use_kl_in_reward=True,
        checkpoint__save_last=False,
    )
    await run.trainer.fit()
    assert run.log.most_at_once() == 1
    assert [name.partition(".")[2] for name in run.log.names()] == [
        *("generate", "old_log_probs", "ref_log_probs"),
        *("values", "values", "score", "score", "update", "update"),
    ]


async def test_what_is_learned_does_not_depend_on_groups_or_schedule(tmp_path: Path) -> None:
    lines = []
    for schedule in SCHEDULES:
        for num_groups in (1, 2):
            run = make_run(
                tmp_path / f"{schedule}_{num_groups}",
                run__schedule=schedule,
                rollout__stream_groups=num_groups,
                algorithm__use_kl_in_reward=True,
            )
            await run.trainer.fit()
            timed = ("timing", "perf/", "overlap/", "rpc/")
            lines.append([{k: v for k, v in row.items() if not k.startswith(timed)} for row in run.metrics])
    assert len(lines[0]) == 3
    assert all(line == lines[0] for line in lines)


async def test_the_critic_is_sent_each_group_once_and_the_returns_of_all_together(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__total_steps=1, rollout__stream_groups=2)
    await run.trainer.fit()
    assert run.critic.puts == [(1, {"prompts", "responses"}), (1, {"prompts", "responses"}), (1, {"returns"})]
    assert run.actor.puts == [(1, {"prompts", "seeds"}), (1, {"advantages"})]


async def test_the_critics_update_is_joined_before_the_values_of_the_first_group(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="overlap", run__total_steps=2, rollout__stream_groups=2)
    finish_update = run.log.hold("critic.update", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.generate", 2)
    assert not run.log.happened("begin", "critic.values", 2)
    finish_update.set()
    await fitting
    assert [row["step"] for row in run.metrics] == [1, 2]


async def test_examples_are_shown_once_per_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__total_steps=2, rollout__stream_groups=2, reward__num_examine=3)
    await run.trainer.fit()
    assert run.scorer.examined == [3, 0, 3, 0]


@pytest.mark.parametrize("culprit", ["actor.part", "critic.values", "scorer.score"])
async def test_a_failure_while_groups_are_generated_ends_the_step(tmp_path: Path, culprit: str) -> None:
    run = make_run(tmp_path, run__schedule="gather", rollout__stream_groups=2)
    run.log.hold("actor.part", at_step=2)
    run.log.fail(culprit, ConnectionError("the cause"), at_step=2 if culprit == "actor.part" else 1)
    with pytest.raises(ConnectionError, match="the cause"):
        await run.trainer.fit()
    assert not run.log.happened("end", "actor.generate", 1)
    assert "actor.update" not in run.log.names()
    await run.trainer.abandon()


# Validation and checkpoints.


async def test_validation_comes_before_the_run_every_few_steps_and_after_the_last(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        validates=True,
        run__total_steps=5,
        run__stop_after_step=3,
        evaluation__val_before_train=True,
        evaluation__test_freq=2,
    )
    await run.trainer.fit()
    validated = [step for what, name, step in run.log.events if (what, name) == ("end", "actor.validate")]
    assert validated == [0, 2, 3]
    assert run.log.order(("end", "critic.update", 2), ("begin", "actor.validate", 2), ("begin", "actor.generate", 3))
    assert [row["step"] for row in run.metrics if "val/accuracy" in row] == [0, 2, 3]
    assert run.trainer.state.validated_step == 3
    assert run.trainer.state.validation_before is not None


async def test_the_time_of_a_weight_sync_is_on_the_line_of_the_step_that_waited_for_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, validates=True, evaluation__val_before_train=True, evaluation__test_freq=2)
    run.actor.sync_s = {0: 0.5, 1: 0.25, 2: 0.125, 3: 0.0625}
    await run.trainer.fit()
    # The validations before the run, of step 2 and of step 3 come first; so the second line holds two.
    times = {row["step"]: row.get("timing_s/update_weights") for row in run.metrics}
    assert times == {0: 0.5, 1: None, 2: 0.25 + 0.125, 3: 0.0625}


async def test_without_validation_prompts_nothing_is_validated(tmp_path: Path) -> None:
    run = make_run(tmp_path, evaluation__val_before_train=True)
    await run.trainer.fit()
    assert "actor.validate" not in run.log.names()


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_pairs_are_saved_every_few_steps_and_after_the_last(tmp_path: Path, schedule: Schedule) -> None:
    run = make_run(tmp_path, run__schedule=schedule, run__total_steps=5, checkpoint__save_freq=2)
    await run.trainer.fit()
    assert run.store.steps() == [2, 4, 5]
    assert [run.store.read_state(step)["step"] for step in (2, 4, 5)] == [2, 4, 5]


@pytest.mark.parametrize("run", [{"total_steps": 2}, {"total_steps": 5, "stop_after_step": 2}])
@pytest.mark.parametrize(
    ("checkpoint", "saved"), [({}, [2]), ({"save_last": False}, []), ({"save_last": False, "save_freq": 1}, [1, 2])]
)
async def test_a_completed_run_leaves_the_pair_of_its_last_step_unless_told_not_to(
    tmp_path: Path, run: dict[str, int], checkpoint: dict[str, Any], saved: list[int]
) -> None:
    changes = {f"run__{key}": value for key, value in run.items()}
    done = make_run(tmp_path, **changes, checkpoint=checkpoint)
    await done.trainer.fit()
    assert done.store.steps() == saved


async def test_a_checkpoint_of_an_overlapped_step_waits_for_the_critic(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="overlap", run__total_steps=2, checkpoint__save_freq=1)
    finish_update = run.log.hold("critic.update", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.generate", 2)
    assert not run.log.happened("begin", "actor.save_checkpoint", 1)
    finish_update.set()
    await fitting
    assert run.store.steps() == [1, 2]


async def test_serial_saves_before_the_next_step_begins(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="serial", run__total_steps=2, checkpoint__save_freq=1)
    await run.trainer.fit()
    for role in ("actor", "critic"):
        assert run.log.order(("end", f"{role}.save_checkpoint", 1), ("begin", "actor.generate", 2))
    assert run.log.most_at_once() == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_all_work_of_a_run_is_in_the_trace_and_what_it_is_called_in_the_report_is_known(
    tmp_path: Path, schedule: Schedule
) -> None:
    run = make_run(
        tmp_path,
        validates=True,
        run__schedule=schedule,
        run__total_steps=2,
        algorithm__use_kl_in_reward=True,
        evaluation__val_before_train=True,
        checkpoint__save_freq=1,
    )
    restored = [Span(role, "load_checkpoint", 0, 0.0, 1.0) for role in ("actor", "critic")]
    run.recorder.restart_at(0, [run.actor, run.critic], None, restored)
    await run.trainer.fit()
    spans = read_trace(tmp_path / "trace.json")
    assert {span.name for span in spans} == PHASES.keys()
    assert set(PHASES.values()) == PHASE_COLOURS.keys()
    beside = sorted((span.name, span.step, span.pool) for span in spans if not span.is_call)
    assert beside == [
        *[("load_checkpoint", 0, pool) for pool in ("actor", "critic")],
        *[("save_checkpoint", step, pool) for step in (1, 2) for pool in ("actor", "critic")],
        *[("testing", step, pool) for step in (0, 2) for pool in ("actor", "reward")],
    ]


# Stopping and failing.


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_a_stopped_run_finishes_its_step_and_saves_it(tmp_path: Path, schedule: Schedule) -> None:
    run = make_run(tmp_path, run__schedule=schedule, run__total_steps=5)
    go_on = run.log.hold("actor.generate", at_step=2)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("begin", "actor.generate", 2)
    run.trainer.stop()
    go_on.set()
    await fitting
    assert run.trainer.step == 2
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
    await run.trainer.join()
    assert run.critic.committed_step == 1


async def test_what_could_not_be_saved_ends_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint__save_freq=1)
    run.log.fail("critic.save_checkpoint", OSError("no space left"), at_step=1)
    with pytest.raises(OSError, match="no space left"):
        await run.trainer.fit()
    assert run.store.steps() == []
    await run.trainer.abandon()


async def test_the_kl_coefficient_and_the_totals_of_a_step_are_saved_with_it(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        run__total_steps=2,
        checkpoint__save_freq=1,
        algorithm__use_kl_in_reward=True,
        algorithm__kl_ctrl="adaptive",
        algorithm__kl_target=0.01,
        algorithm__kl_horizon=10,
    )
    await run.trainer.fit()
    first, second = (run.store.read_state(step) for step in (1, 2))
    used = [row["actor/reward_kl_penalty_coeff"] for row in run.metrics]
    assert used == [run.config.algorithm.kl_coef, first["kl_coef"]]
    assert second["kl_coef"] > first["kl_coef"] > run.config.algorithm.kl_coef
    assert second["tokens"] == sum(row["perf/total_num_tokens"] for row in run.metrics)


async def test_the_line_of_a_saved_step_is_written_when_its_checkpoint_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__total_steps=3, checkpoint__save_freq=2)
    make_durable = run.log.hold("critic.save_checkpoint", at_step=2)
    fit = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.generate", 3)
    assert [row["step"] for row in run.metrics] == [1]
    make_durable.set()
    await fit
    assert [row["step"] for row in run.metrics] == [1, 2, 3]


async def test_a_run_killed_between_checkpoint_and_line_has_no_gap(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__total_steps=2, checkpoint__save_freq=2)
    await run.trainer.fit()
    saved = run.store.read_metrics(2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:-1]))
    run.recorder.restart_at(2, [], saved)
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert run.metrics[-1]["training/global_step"] == 2.0
