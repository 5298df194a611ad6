"""Predicted steps of other values of `rollout.share`, from runs of a machine whose step times are worked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.commands.planner.measured import Measurement, measurement_of
from controller.commands.planner.plans import Plans, make_plans
from controller.commands.planner.report import explain
from controller.commands.planner.scaling import phase_times
from splitppo.run_folder.spans import Span
from tests.support.fake_services import make_config
from tests.support.models import save_policy

pytestmark = pytest.mark.slow

ONE_CORE_EACH: dict[str, Any] = {
    "services__actor": {"threads": 1, "cpus": [0]},
    "services__critic": {"threads": 1, "cpus": [1]},
}
GROUP: dict[str, Any] = {"services__rollout": {"threads": 1, "cpus": [1]}}
# Seconds. The other phases of a step: 2 s of old log-probs, 1 s of values, 0.5 s in which nobody works.
GEN, SYNC, PUBLISH, UPDATE, IDLE = 6.0, 0.4, 0.2, 5.0, 0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_policy(tmp_path_factory.mktemp("policy")))


def gen_s(rows: float, fixed: float) -> float:
    return GEN * (fixed + (1 - fixed) * rows)


def step_s(share: float, *, late: float = 0.0, fixed: float = 0.2) -> float:
    """The step on this machine: generation, then log-probs beside values, advantages, and the actor's update."""
    by_group = late + SYNC + gen_s(share, fixed) if share else 0.0
    by_actor = gen_s(1 - share, fixed) if share < 1 else 0.0
    return max(by_actor, by_group) + 2 + IDLE + UPDATE + (PUBLISH if share else 0.0)


def run(
    run_dir: Path, model: str, share: float, *, late: float = 0.0, fixed: float = 0.2, **changes: Any
) -> Measurement:
    """A measured run of 20 prompts a step under `overlap`, whose critic updates `late` s longer than the actor."""
    settings = {"run__schedule": "overlap", "actor__model": model, "data__train_batch_size": 20}
    group = GROUP | {"rollout__share": share} if share else {}
    config = make_config(run_dir, **(settings | ONE_CORE_EACH | group | changes))
    phases = {"old_log_prob": 2.0, "update_actor": UPDATE}
    if config.uses_critic:
        phases |= {"values": 1.0, "update_critic": UPDATE + (PUBLISH if share else 0.0) + late}
    if share < 1:
        phases["gen"] = gen_s(1 - share, fixed)
    if share:
        phases |= {"sync": SYNC, "gen_rollout": gen_s(share, fixed), "publish": PUBLISH}
    seconds, devices = step_s(share, late=late, fixed=fixed), dict.fromkeys(config.roles, 1)
    return Measurement(config, phases, dict.fromkeys(phases, 0.0), IDLE, seconds, 5, devices)


def predicted(plans: Plans, *shares: float) -> list[float]:
    return [next(plan.step_s for plan in plans.shares if plan.share == share) for share in shares]


FIVE = (0.0, 0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize("late", [0.0, 1.5])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_one_run_with_a_share_predicts_every_other_share(tmp_path: Path, model: str, share: float, late: float) -> None:
    plans = make_plans([run(tmp_path, model, share, late=late)], None)
    assert plans.fitted_s == pytest.approx(step_s(share, late=late))
    assert predicted(plans, *FIVE) == pytest.approx([step_s(share, late=late) for share in FIVE])


def test_a_run_in_which_the_actor_samples_alone_predicts_shares_on_the_critics_devices(
    tmp_path: Path, model: str
) -> None:
    plans = make_plans([run(tmp_path, model, 0.0)], None)
    # nobody knows publish and sync
    by_longer = {0.0: GEN, 0.25: gen_s(0.75, 0.2), 0.5: gen_s(0.5, 0.2), 0.75: gen_s(0.75, 0.2), 1.0: GEN}
    assert predicted(plans, *FIVE) == pytest.approx([by_longer[share] + 2 + IDLE + UPDATE for share in FIVE])
    assert [*explain(plans)][-1] == (
        "rollout.share: 0 in this run, best 0.5 in a new one with services.rollout on the critic's devices: 11.1 s"
        " instead of 13.5 s a step (schedule overlap; half of the responses take 0.60 of the time of all, which is"
        " assumed: a run with another share shows it, name its folder too; publish and sync, which no run has measured,"
        " are left out)."
    )


def test_two_runs_show_what_half_of_the_responses_cost(tmp_path: Path, model: str) -> None:
    runs = [run(tmp_path / str(share), model, share, fixed=0.4) for share in (0.0, 0.5)]
    times, _ = phase_times(runs)
    assert times["gen"].factor(0.5) == pytest.approx(0.7)  # 6 s and 4.2 s: 2.4 s + 3.6 s x rows
    for own in (runs, runs[::-1]):
        plans = make_plans(own, None)
        assert plans.fitted_s == pytest.approx(own[0].step_s)
        assert predicted(plans, *FIVE) == pytest.approx([step_s(share, fixed=0.4) for share in FIVE])
    assert "half of the responses take 0.70 of the time of all)" in [*explain(make_plans(runs, None))][-1]


def test_shares_that_are_almost_alike_do_not_show_it(tmp_path: Path, model: str) -> None:
    assert phase_times([run(tmp_path, model, 0.4, fixed=0.5)])[0]["gen"].fixed is None
    assert phase_times([run(tmp_path, model, 0.25, fixed=0.5)])[0]["gen"].fixed == pytest.approx(0.5)


def test_each_group_keeps_the_speed_that_was_measured(tmp_path: Path, model: str) -> None:
    measured = run(tmp_path, model, 0.5)
    plans = make_plans([replace(measured, phase_s=measured.phase_s | {"gen_rollout": 2 * 3.6})], None)
    assert plans.fitted_s == pytest.approx(SYNC + 2 * 3.6 + 2 + IDLE + UPDATE + PUBLISH)
    assert predicted(plans, 0.25) == pytest.approx([SYNC + 2 * 2.4 + 2 + IDLE + UPDATE + PUBLISH])


def test_the_best_share_is_lower_than_half_if_loading_and_a_late_critic_cost_the_group_time(
    tmp_path: Path, model: str
) -> None:
    plans = make_plans([run(tmp_path, model, 0.5, late=0.5)], None)
    # gen(1 - s) = late + sync + gen(s): 1.2 + 4.8 (1 - s) = 0.5 + 0.4 + 1.2 + 4.8 s at s = 0.406
    assert [*explain(plans)][-1].startswith(
        "rollout.share: 0.5 in this run, best 0.4 in a new one: 11.8 s instead of 12.2 s a step (schedule overlap;"
    )
    best = make_plans([run(tmp_path, model, 0.4, late=0.5)], None)
    assert [*explain(best)][-1].startswith(
        "rollout.share: 0.4 in this run is the best: 11.8 s a step (schedule overlap;"
    )


def test_shares_are_dealt_in_whole_prompts(tmp_path: Path, model: str) -> None:
    plans = make_plans([run(tmp_path, model, 0.5, data__train_batch_size=4)], None)
    assert predicted(plans, 0.3, 0.45) == predicted(plans, 0.25, 0.25)


def test_a_reference_leaves_devices_that_sample_if_that_is_faster(tmp_path: Path, model: str) -> None:
    kl = {"algorithm__use_kl_in_reward": True, "placement__reference": "critic"}
    alone = run(tmp_path, model, 0.0, **kl)
    plans = make_plans([alone], None)
    assert {(plan.share, plan.reference) for plan in plans.shares if plan.share in (0.0, 0.5)} == {
        (0.0, "critic"),
        (0.5, "critic"),
        (0.5, "actor"),
    }
    alone = replace(alone, phase_s=alone.phase_s | {"values": 4.0, "ref": 1.0}, shared_s=alone.shared_s | {"ref": 0.0})
    # Without a group 6 s of generation and 5 s on the critic. With share 0.4 the group needs 3.12 s, the actor 4.08 s;
    # values of the group's part end after 4.72 s, those of the actor's after 7.12 s. Log-probs end after 4.08 + 3 s.
    assert (
        "0 in this run, best 0.4 in a new one with services.rollout on the critic's devices and the reference on the"
        " actor's: 12.6 s instead of 16.5 s a step"
    ) in [*explain(make_plans([alone], None))][-1]


def test_a_group_on_devices_of_its_own_is_as_fast_with_a_late_critic(tmp_path: Path, model: str) -> None:
    own = {"services__rollout": {"threads": 1, "cpus": [2]}}
    plans = make_plans([run(tmp_path, model, 0.5, late=0.0, **own)], None)
    late = make_plans([run(tmp_path, model, 0.5, late=1.5, **own)], None)
    assert predicted(late, *FIVE) == pytest.approx(predicted(plans, *FIVE))
    assert predicted(plans, *FIVE) == pytest.approx([step_s(share) for share in FIVE])
    assert [*explain(plans)][-1].startswith("rollout GPUs : actor GPUs (rollout.staleness 0): 1 : 1 in this run")


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm__adv_estimator": "grpo"},  # no devices but the actor's
        {"rollout__staleness": 1, "algorithm__rollout_correction__rollout_is": "token"},  # one group samples all
    ],
)
def test_where_groups_cannot_share_no_share_is_named(tmp_path: Path, model: str, changes: dict[str, Any]) -> None:
    plans = make_plans([run(tmp_path, model, 0.0, **{"run__schedule": "gather"} | changes)], 2)
    assert plans.shares == ()
    assert not any(sentence.startswith("rollout.share") for sentence in explain(plans))


def test_a_group_on_the_critics_devices_takes_no_devices_of_its_own(tmp_path: Path, model: str) -> None:
    on_gpus: dict[str, Any] = {  # critic and rollout group in turns
        "services__actor": {"devices": [0]},
        "services__critic": {"devices": [1]},
        "services__rollout": {"devices": [1]},
    }
    for changes in ({}, on_gpus):
        plans = make_plans([run(tmp_path, model, 0.5, **changes)], None)
        assert not plans.refused
        assert {row.layout for row in plans.rows if row.is_measured} == {"overlap"}
        assert {tuple(row.devices.values()) for row in plans.rows} == {(1, 1, 1)}
        assert {tuple(row.bubbles) for row in plans.rows} == {("actor", "critic")}
        wide = make_plans([run(tmp_path, model, 0.5, **changes)], 4)
        assert {tuple(row.devices.values()) for row in wide.rows} == {(1, 3, 3), (2, 2, 2), (3, 1, 1)}
        assert all(row.memory_gib.keys() == {"actor", "critic", "rollout"} for row in wide.rows)


def spans_of(*calls: tuple[str, str, float, float]) -> list[Span]:
    return [Span(pool, name, 1, begin, end) for pool, name, begin, end in calls]


def test_the_generations_of_both_groups_are_phases_of_their_own(tmp_path: Path, model: str) -> None:
    config = run(tmp_path, model, 0.5).config
    spans = spans_of(
        ("critic", "update_critic", -1, 1),
        ("actor", "gen", 0, 5),
        ("rollout", "sync", 1, 2),
        ("rollout", "gen", 2, 6),
        ("critic", "values", 6, 7),
        ("actor", "old_log_prob", 6, 8),
    )
    measured = measurement_of(config, [([{"step": 1, "timing_s/step": 8.5}], spans)], source="run")
    assert measured.phase_s == {
        "sync": 1.0,
        "gen": 5.0,
        "gen_rollout": 4.0,
        "old_log_prob": 2.0,
        "values": 1.0,
        "update_critic": 2.0,
    }
    # The actor generates beside the critic's update, the loading, and 3 of 4 s of the group's generation.
    assert measured.shared_s == {
        "sync": 1.0,
        "gen": 5.0,
        "gen_rollout": 3.0,
        "old_log_prob": 1.0,
        "values": 1.0,
        "update_critic": 1.0,
    }
    assert measured.share == 0.5


def test_two_schedules_of_one_share_show_how_samplers_slow_each_other_down(tmp_path: Path, model: str) -> None:
    serial = run(tmp_path, model, 0.5, run__schedule="serial")
    gather = run(tmp_path, model, 0.5, run__schedule="gather")
    longer = {"gen": 4.5, "gen_rollout": 4.5}  # 3.6 s of work, all of it beside the other group's
    gather = replace(gather, phase_s=gather.phase_s | longer, shared_s=gather.shared_s | longer)
    times, slowdown = phase_times([serial, gather])
    assert slowdown == pytest.approx(1.25)
    assert times["gen"].on(1)[0] == times["gen_rollout"].on(1)[0] == pytest.approx(GEN)
    # The actor samples alone at full speed. Then 1 s of values, and 5 s of both updates, take 1.25 times as long.
    alone = predicted(make_plans([gather, serial], None), 0.0)
    assert alone == pytest.approx([GEN + (1.25 + 1) + IDLE + (1.25 * UPDATE + PUBLISH)])


def test_two_runs_of_one_schedule_do_not_show_a_slowdown_if_one_was_slower_all_over(tmp_path: Path, model: str) -> None:
    quiet = run(tmp_path, model, 0.5)
    quiet = replace(quiet, shared_s=quiet.phase_s)
    slower = {name: 1.2 * seconds for name, seconds in quiet.phase_s.items()}
    assert phase_times([quiet, replace(quiet, phase_s=slower, shared_s=slower)])[1] == 1.0
