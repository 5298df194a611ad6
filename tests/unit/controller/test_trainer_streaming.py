"""Generation in parts: the calls that begin before all responses have ended, in every schedule."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from splitppo.config import Schedule
from tests.support.fake_run import make_run

SCHEDULES: list[Schedule] = ["serial", "gather", "overlap"]

pytestmark = pytest.mark.usefixtures("no_task_is_left")


@pytest.mark.parametrize("schedule", ["gather", "overlap"])
async def test_values_and_scores_of_a_part_come_while_the_next_one_is_generated(
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


async def test_serial_generates_completely_before_it_computes_anything_of_any_part(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        run__schedule="serial",
        run__total_steps=1,
        rollout__stream_groups=2,
        algorithm__use_kl_in_reward=True,
        placement__reference="actor",
        checkpoint__save_last=False,
    )
    await run.trainer.fit()
    assert run.log.most_at_once() == 1
    assert [name.partition(".")[2] for name in run.log.names()] == [
        *("generate", "old_log_probs", "ref_log_probs"),
        *("values", "values", "score", "score", "update", "update"),
    ]


async def test_what_is_learned_does_not_depend_on_parts_or_schedule(tmp_path: Path) -> None:
    lines = []
    for schedule in SCHEDULES:
        for num_parts, host in ((1, "actor"), (2, "actor"), (2, "critic")):
            run = make_run(
                tmp_path / f"{schedule}_{num_parts}_{host}",
                run__schedule=schedule,
                rollout__stream_groups=num_parts,
                placement__reference=host,
                algorithm__use_kl_in_reward=True,
            )
            await run.trainer.fit()
            timed = ("timing", "perf/", "overlap/", "rpc/")
            lines.append([{k: v for k, v in row.items() if not k.startswith(timed)} for row in run.metrics])
    assert len(lines[0]) == 3
    assert all(line == lines[0] for line in lines)


async def test_the_critic_is_sent_each_part_once_and_the_returns_of_all_together(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__total_steps=1, rollout__stream_groups=2)
    await run.trainer.fit()
    assert run.critic.puts == [
        (1, {"prompts", "responses", "places"}),
        (1, {"prompts", "responses", "places"}),
        (1, {"returns"}),
    ]
    assert run.actor.puts == [(1, {"prompts", "seeds"}), (1, {"advantages"})]


async def test_the_critics_reference_works_on_each_part_and_shares_its_rows_with_the_values(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        run__total_steps=1,
        rollout__stream_groups=2,
        placement__reference="critic",
        algorithm__use_kl_in_reward=True,
    )
    end_part = run.log.hold("actor.part", at_step=2)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "critic.ref_log_probs", 1)
    assert not run.log.happened("end", "actor.generate", 1)
    end_part.set()
    await fitting
    assert run.log.names().count("critic.ref_log_probs") == 2
    assert run.critic.puts == [
        (1, {"prompts", "responses", "places"}),
        (1, {"prompts", "responses", "places"}),
        (1, {"returns"}),
    ]


async def test_the_critics_update_is_joined_before_the_values_of_the_first_part(tmp_path: Path) -> None:
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
async def test_a_failure_while_parts_are_generated_ends_the_step(tmp_path: Path, culprit: str) -> None:
    run = make_run(tmp_path, run__schedule="gather", rollout__stream_groups=2)
    run.log.hold("actor.part", at_step=2)
    run.log.fail(culprit, ConnectionError("the cause"), at_step=2 if culprit == "actor.part" else 1)
    with pytest.raises(ConnectionError, match="the cause"):
        await run.trainer.fit()
    assert not run.log.happened("end", "actor.generate", 1)
    assert "actor.update" not in run.log.names()
    await run.trainer.abandon()
