"""Work between steps: validation, checkpoints, and the lines and the state that belong to them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splitppo.config import ConfigError, Schedule
from splitppo.run_folder.spans import Span
from splitppo.run_folder.step_spans import PHASES
from splitppo.run_folder.trace import read_trace
from tests.support.fake_run import FakeRun, make_run

SCHEDULES: list[Schedule] = ["serial", "gather", "overlap"]

pytestmark = pytest.mark.usefixtures("no_task_is_left")


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
    spans = [span for span in read_trace(tmp_path / "trace.json") if span.name == "update_weights"]
    assert sorted((span.pool, span.step) for span in spans) == [("actor", step) for step in (0, 2, 2, 3)]


async def test_without_validation_prompts_nothing_is_validated(tmp_path: Path) -> None:
    run = make_run(tmp_path, evaluation__val_before_train=True)
    await run.trainer.fit()
    assert "actor.validate" not in run.log.names()


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_pairs_are_saved_every_few_steps_and_after_the_last(tmp_path: Path, schedule: Schedule) -> None:
    run = make_run(tmp_path, run__schedule=schedule, run__total_steps=5, checkpoint__save_freq=2)
    await run.trainer.fit()
    assert run.store.steps() == [2, 4, 5]
    assert [run.store.load(step).state.step for step in (2, 4, 5)] == [2, 4, 5]


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


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_both_updates_are_told_the_steps_of_the_run_not_of_this_start(tmp_path: Path, schedule: Schedule) -> None:
    run = make_run(tmp_path, run__schedule=schedule, run__total_steps=5, run__stop_after_step=2)
    await run.trainer.fit()
    assert run.actor.total_steps == run.critic.total_steps == [5, 5]


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
        reward_model__model="rm",
        teacher__model="teacher",
        algorithm__use_kl_in_reward=True,
        evaluation__val_before_train=True,
        checkpoint__save_freq=1,
        rollout__staleness=1,
        algorithm__rollout_correction__rollout_is="token",
        services__rollout={},
    )
    restored = [Span(role, "load_checkpoint", 0, 0.0, 1.0) for role in ("actor", "critic")]
    run.recorder.restart_at(0, [run.actor, run.critic], None, restored)
    await run.trainer.fit()
    spans = read_trace(tmp_path / "trace.json")
    assert {span.name for span in spans} == PHASES.keys() - {
        "environment",
        "update_weights",
    }  # of conversations, and without a group
    beside = sorted((span.name, span.step, span.pool) for span in spans if not span.is_call)
    assert beside == [
        *[("load_checkpoint", 0, pool) for pool in ("actor", "critic")],
        *[("save_checkpoint", step, pool) for step in (1, 2) for pool in ("actor", "critic")],
        *[("testing", step, pool) for step in (0, 2) for pool in ("rollout", "scoring")],
    ]


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
    first, second = (run.store.load(step).state for step in (1, 2))
    used = [row["actor/reward_kl_penalty_coeff"] for row in run.metrics]
    assert used == [run.config.algorithm.kl_coef, first.kl_coef]
    assert second.kl_coef > first.kl_coef > run.config.algorithm.kl_coef
    assert second.tokens == sum(row["perf/total_num_tokens"] for row in run.metrics)


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
    saved = run.store.load(2).metrics
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:-1]))
    run.recorder.restart_at(2, [], saved)
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert run.metrics[-1]["training/global_step"] == 2.0


# The best checkpoint, and an early end. The score of a response is its length.


def accuracies(run: FakeRun) -> dict[int, float]:
    return {row["step"]: row["val/accuracy"] for row in run.metrics if "val/accuracy" in row}


VALIDATED = {"validates": True, "data__val_files": "val.jsonl", "evaluation__test_freq": 1}


async def test_a_step_that_is_the_best_so_far_is_saved_and_kept(tmp_path: Path) -> None:
    best = {"checkpoint__best_metric": "val/accuracy", "checkpoint__keep": 1}
    run = make_run(tmp_path, **VALIDATED, **best, run__total_steps=6)
    await run.trainer.fit()
    found = accuracies(run)
    step = max(found, key=lambda step: (found[step], -step))
    assert step < 6, "the last step is saved in any case"
    assert run.store.steps() == [step, 6]
    assert (run.store.path / "best").resolve() == run.store.folder(step)
    for saved in (step, 6):
        state = run.store.load(saved).state
        assert state.best is not None
        assert (state.best.step, state.best.value) == (step, found[step])


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_a_run_that_gets_no_better_ends_with_a_checkpoint_and_does_not_go_on(
    tmp_path: Path, schedule: Schedule
) -> None:
    stop = {"evaluation__early_stop": {"metric": "val/accuracy", "patience": 2}, "checkpoint__save_last": False}
    run = make_run(tmp_path, **VALIDATED, **stop, run__schedule=schedule, run__total_steps=20)
    await run.trainer.fit()
    found = list(accuracies(run).values())
    assert 3 <= len(found) < 20
    assert max(found[-2:]) <= max(found[:-2])
    assert run.store.steps() == [len(found)]
    state = run.store.load(len(found)).state
    assert state.has_stagnated(run.config)

    again = make_run(tmp_path, **VALIDATED, **stop, run__total_steps=20, at_step=len(found))
    again.trainer = replace(again.trainer, state=state)
    await again.trainer.fit()
    assert again.log.events == []


async def test_an_unknown_metric_ends_the_run_at_the_first_validation(tmp_path: Path) -> None:
    unknown = {"evaluation__early_stop": {"metric": "val-aux/a/no_such_field/mean@1"}}
    run = make_run(tmp_path, **VALIDATED, **unknown, evaluation__val_before_train=True)
    with pytest.raises(ConfigError, match="validation gives no 'val-aux/a/no_such_field/mean@1'; it gives val-core/a"):
        await run.trainer.fit()
    assert "actor.generate" not in run.log.names()


@pytest.mark.parametrize("at_step", [0, 2])
async def test_val_only_validates_the_step_that_the_run_is_at_and_does_nothing_else(
    tmp_path: Path, at_step: int
) -> None:
    run = make_run(tmp_path, validates=True, data__val_files="v", evaluation__val_only=True, at_step=at_step)
    await run.trainer.fit()
    assert set(run.log.names()) == {"actor.validate", "scorer.score"}
    assert [row["step"] for row in run.metrics if "val/accuracy" in row] == [at_step]
    assert run.trainer.state.validated_step == at_step
    assert run.store.steps() == []


async def test_a_validation_alone_that_draws_responses_differently_leaves_the_runs_own_file_and_is_not_compared(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, validates=True, data__val_files="v", evaluation__val_before_train=True)
    await run.trainer.fit()
    last, own = run.trainer.state, (tmp_path / "rollouts" / "val" / "3.jsonl").read_text()
    for changes, folder, num_rows in (({}, "val", 2), ({"evaluation__n": 4}, "val_only", 8)):
        alone = make_run(tmp_path, validates=True, data__val_files="v", evaluation__val_only=True, at_step=3, **changes)
        alone.trainer = replace(alone.trainer, state=last)
        await alone.trainer.fit()
        assert len((tmp_path / "rollouts" / folder / "3.jsonl").read_text().splitlines()) == num_rows
        assert (tmp_path / "rollouts" / "val" / "3.jsonl").read_text() == own
        state = alone.trainer.state
        assert (state.validation_before is None) == (folder == "val_only")
