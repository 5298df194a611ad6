"""The table of layouts that the planner makes from a run folder."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.__main__ import main
from controller.commands.planner.measured import measurement_of, read_measurement
from controller.commands.planner.plans import Plan, make_plans
from controller.commands.planner.report import explain
from controller.commands.planner.scaling import PhaseTimes, phase_times
from splitppo.config import dump_config
from splitppo.run_folder.spans import Span
from splitppo.run_folder.step_file import StepFile, read_metrics
from splitppo.run_folder.trace import Trace, read_trace
from tests.support.fake_services import make_config
from tests.support.models import save_policy

# Seconds, in the order of a serial step; 1 s of it nobody works.
pytestmark = pytest.mark.slow

SERIAL = (
    ("actor", "gen", 6.0),
    ("actor", "old_log_prob", 2.0),
    ("actor", "ref", 2.0),
    ("critic", "values", 2.0),
    ("reward", "score", 0.5),
    ("controller", "adv", 0.5),
    ("actor", "update_actor", 6.0),
    ("critic", "update_critic", 6.0),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_policy(tmp_path_factory.mktemp("policy")))


def leave_run(
    run_dir: Path,
    model: str,
    *,
    speed: float = 1.0,
    num_steps: int = 3,
    checked_steps: Container[int] = range(1000),
    warm_up_steps: Container[int] = (),
    **changes: Any,
) -> Path:
    """Leaves the folder of a serial run with a reference on the actor, whose first step was slow.

    Only `checked_steps` compute old log-probs. A rollout group loads weights for 1 s, and the actor publishes for 1 s.
    In `warm_up_steps` the critic learns for four times as long, and the actor's update takes no time.
    """
    one_thread = {"services__actor__threads": 1, "services__critic__threads": 1}
    settings = {"run__schedule": "serial", "algorithm__use_kl_in_reward": True, "actor__model": model}
    run_dir.mkdir(parents=True, exist_ok=True)
    config = make_config(run_dir, **(settings | one_thread | changes))
    (run_dir / "config.yaml").write_text(dump_config(config))
    calls = [call for call in SERIAL if config.uses_critic or not (call[0] == "critic" or call[1] == "ref")]
    if "rollout" in config.sampling_roles:
        calls = [("rollout", "sync", 1.0), ("rollout", *calls[0][1:]), *calls[1:], ("actor", "publish", 1.0)]
    lines, trace, now_s = StepFile(run_dir / "metrics.jsonl"), Trace(run_dir / "trace.json"), 0.0
    for step in range(1, num_steps + 1):
        started_s = now_s
        for pool, name, seconds in calls:
            if name == "old_log_prob" and step not in checked_steps:
                continue
            warm_up = {"update_actor": 0.0, "update_critic": 4.0} if step in warm_up_steps else {}
            ended_s = now_s + warm_up.get(name, 1.0) * seconds / speed * (2.0 if step == 1 else 1.0)
            trace.add([Span(pool, name, step, now_s, ended_s)])
            now_s = ended_s
        now_s += 1.0
        learned = {} if step in warm_up_steps else {"actor/lr": 1e-6}
        lines.write(step, {"timing_s/step": now_s - started_s, **learned})
    return run_dir


def plan_of(rows: tuple[Plan, ...], layout: str, reference: str, actor: int) -> Plan:
    (found,) = [
        row for row in rows if (row.layout, row.reference, row.devices.get("actor")) == (layout, reference, actor)
    ]
    return found


def test_a_measurement_has_medians_without_the_first_step(tmp_path: Path, model: str) -> None:
    measured = read_measurement(leave_run(tmp_path / "run", model))
    assert measured.step_s == pytest.approx(26.0)
    assert measured.idle_s == pytest.approx(1.0, abs=1e-4)
    assert measured.phase_s == pytest.approx({name: seconds for _, name, seconds in SERIAL}, abs=1e-4)
    assert (measured.num_steps, measured.devices) == (2, {"actor": 1, "critic": 1})


def test_a_phase_that_most_steps_lack_takes_no_time_in_the_median_step(tmp_path: Path, model: str) -> None:
    measured = read_measurement(leave_run(tmp_path / "run", model, num_steps=6, checked_steps=(1, 3, 6)))
    assert measured.step_s == pytest.approx(24.0)
    assert "old_log_prob" not in measured.phase_s
    plans = make_plans([measured], None)
    assert plans.fitted_s == pytest.approx(24.0, abs=1e-3)


@pytest.mark.parametrize("until", [None, {"patience": 1}])
def test_steps_of_the_critics_warm_up_are_left_out_if_others_follow(
    tmp_path: Path, model: str, until: dict[str, Any] | None
) -> None:
    keys = {
        "critic__warmup_steps": 4 if until is None else 9,
        "critic__warmup_epochs": 4,
        "critic__warmup_until": until,
    }
    run = leave_run(tmp_path / "run", model, num_steps=6, warm_up_steps=range(5), **keys)
    measured = read_measurement(run)
    assert (measured.num_steps, measured.step_s) == (2, pytest.approx(26.0))
    assert measured.phase_s["update_critic"] == pytest.approx(6.0, abs=1e-4)

    alone = read_measurement(leave_run(tmp_path / "alone", model, num_steps=3, warm_up_steps=range(5), **keys))
    assert (alone.num_steps, alone.step_s) == (2, pytest.approx(38.0))
    assert "update_actor" not in alone.phase_s


@pytest.mark.promise("a plan")
def test_the_devices_of_the_run_give_its_own_phases_in_every_layout(tmp_path: Path, model: str) -> None:
    plans = make_plans([read_measurement(leave_run(tmp_path / "run", model))], None)
    assert plans.fitted_s == pytest.approx(26.0, abs=1e-3)
    assert plan_of(plans.rows, "gather", "actor", 1).step_s == pytest.approx(6 + 4 + 0.5 + 6 + 1, abs=1e-3)
    assert plan_of(plans.rows, "overlap", "critic", 1).laws == ()
    assert plans.colocated is not None
    assert plans.colocated.step_s == pytest.approx(24 / 2 + 0.5 + 0.5 + 1, abs=1e-3)
    assert plans.colocated.laws == ("1/n",)
    assert [row.step_s for row in plans.rows] == sorted(row.step_s for row in plans.rows)


def test_every_split_of_more_devices_is_there_and_marked_as_scaled(tmp_path: Path, model: str) -> None:
    plans = make_plans([read_measurement(leave_run(tmp_path / "run", model))], 4)
    assert len(plans.rows) == 3 * 3 * 2 + 1  # splits, schedules, hosts; colocated
    row = plan_of(plans.rows, "gather", "actor", 2)
    assert row.step_s == pytest.approx(3 + 2 + 0.5 + 3 + 1, abs=1e-3)
    assert row.laws == ("1/n",)
    assert all(gib is not None and gib > 0 for row in plans.rows for gib in row.memory_gib.values())
    assert plans.colocated is not None
    assert plans.best_split is not None
    shared = plans.colocated.memory_gib["all"]
    assert shared is not None
    assert shared > max(gib for gib in plans.best_split.memory_gib.values() if gib)


def test_a_run_on_more_devices_replaces_the_law_by_what_it_measured(tmp_path: Path, model: str) -> None:
    first = read_measurement(leave_run(tmp_path / "one", model))
    wide = {"services__actor__threads": 2, "services__critic__threads": 2}
    two = read_measurement(leave_run(tmp_path / "two", model, speed=1.5, **wide))
    colocated = make_plans([first, two], 2).colocated
    assert colocated is not None
    on_the_controller = 0.5 * (1.0 + 1.0 / 1.5)  # score and adv, mean of both runs
    assert colocated.step_s == pytest.approx(24 / 1.5 + on_the_controller + 1, abs=1e-3)
    assert colocated.laws == ()


def test_the_largest_critic_that_costs_no_time_is_that_whose_work_is_hidden(tmp_path: Path, model: str) -> None:
    plans = make_plans([read_measurement(leave_run(tmp_path / "run", model))], None)
    assert plans.critic is not None
    assert plans.critic.free_step_s == pytest.approx(6 + 4 + 0.5 + 6 + 1, abs=1e-3)
    assert plans.critic.step_s == pytest.approx(plans.critic.free_step_s, abs=1e-3)
    # Its values are hidden behind old log-probs and reference, 4 s, its update behind update and generation, 12 s.
    assert plans.critic.factor == pytest.approx(2.0, abs=0.05)
    assert plans.critic.of_policy == plans.critic.factor
    assert any(sentence.startswith("critic.model: under overlap a critic of up to 2") for sentence in explain(plans))
    half = str(save_policy(tmp_path / "half", num_hidden_layers=1))
    plans = make_plans([read_measurement(leave_run(tmp_path / "with_half", model, critic__model=half))], None)
    assert plans.critic is not None
    assert plans.critic.of_policy == pytest.approx(0.5 * plans.critic.factor, rel=1e-6)


def test_a_law_of_two_measurements_has_a_fixed_and_a_divided_part() -> None:
    times = PhaseTimes({1: 10.0, 2: 6.0})  # 2 + 8 / n
    assert times.on(2) == (6.0, "")
    assert times.on(8) == (pytest.approx(3.0), "a+b/n")
    assert PhaseTimes({1: 4.0, 2: 5.0}).on(8) == (4.5, "a+b/n")  # never slower for more devices
    assert PhaseTimes({4: 3.0}).on(8) == (1.5, "1/n")


def test_the_slowdown_of_shared_time_is_fitted_to_two_schedules(tmp_path: Path, model: str) -> None:
    serial = read_measurement(leave_run(tmp_path / "run", model))
    # In the other run everything shares half of its time, and takes 1.25 times as long then.
    phases = {name: seconds / 0.9 for name, seconds in serial.phase_s.items()}
    shared = {name: seconds / 2 for name, seconds in phases.items()}
    times, slowdown = phase_times([serial, replace(serial, phase_s=phases, shared_s=shared)])
    assert slowdown == pytest.approx(1.25)
    assert {name: times[name].on(1)[0] for name in serial.phase_s} == pytest.approx(serial.phase_s)
    assert phase_times([serial])[1] == 1.0


def test_runs_of_other_work_are_refused(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = leave_run(tmp_path / "one", model)
    other = leave_run(tmp_path / "other", model, rollout__n=4)
    assert main(["plan", str(first), str(other)]) == 2
    assert capsys.readouterr().err.endswith("lengths, on other devices; different: rollout.n\n")


def test_runs_with_other_adapters_are_refused(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, other = (leave_run(tmp_path / str(rank), model, actor__lora_rank=rank) for rank in (2, 4))
    assert main(["plan", str(first), str(other)]) == 2
    assert capsys.readouterr().err.endswith("lengths, on other devices; different: actor.lora_rank\n")


def test_the_reference_of_an_actor_with_adapters_takes_memory_on_the_critic_alone(tmp_path: Path, model: str) -> None:
    plans = make_plans([read_measurement(leave_run(tmp_path / "run", model, actor__lora_rank=2))], None)
    memory = {plan.reference: plan.memory_gib for plan in plans.rows if plan.layout == "serial"}
    assert (memory["critic"]["critic"] or 0) > (memory["actor"]["critic"] or 0), "a model of its own"
    assert memory["critic"]["actor"] == memory["actor"]["actor"], "the actor without its adapters"


def test_only_a_layout_that_was_run_is_called_measured(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = leave_run(tmp_path / "run", model)
    plans = make_plans([read_measurement(run_dir)], None)
    assert [(row.layout, row.reference) for row in plans.rows if row.is_measured] == [("serial", "actor")]
    assert main(["plan", str(run_dir)]) == 0
    told = capsys.readouterr().out
    rows = [line for line in told.splitlines() if line.endswith(("measured", "measured phases"))]
    assert [row.split()[2:6] for row in rows if row.endswith("  measured")] == [["serial", "1", "1", "actor"]]
    assert len(rows) == 6
    assert "measured phases: nobody has run this layout" in told


@pytest.mark.promise("a plan")
def test_the_table_is_best_first_and_says_why(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = leave_run(tmp_path / "run", model)
    assert main(["plan", str(run_dir)]) == 0
    output = capsys.readouterr().out
    assert "measured: 26 s a step (serial, reference on the actor, 1 actor + 1 critic; median of 2 steps)" in output
    assert "split placement is slower than colocated (17.5 s at best against 14 s)" in output
    assert "placement.reference: auto is the actor" in output
    assert max(map(len, output.splitlines())) <= 120
    assert main(["plan", str(run_dir), "--gpus", "8", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert len(content["plans"]) == 7 * 3 * 2 + 1
    assert content["plans"][0]["step_s"] == min(plan["step_s"] for plan in content["plans"])
    assert content["measured"]["predicted_step_s"] == pytest.approx(26.0, abs=1e-3)
    assert content["shares"][0] == {"share": 0.0, "reference": "actor", "step_s": pytest.approx(26.0, abs=1e-3)}


def test_a_difference_within_the_error_of_the_prediction_is_none(tmp_path: Path, model: str) -> None:
    plans = make_plans([read_measurement(leave_run(tmp_path / "run", model))], None)
    for fitted_s, said in ((plans.measured.step_s, "is slower than"), (plans.measured.step_s * 1.3, "is as fast as")):
        assert f"split placement {said} colocated (17.5 s at best against 14 s)" in next(
            explain(replace(plans, fitted_s=fitted_s))
        )


def test_a_run_without_critic_has_one_pool(tmp_path: Path, model: str) -> None:
    changes = {"algorithm__adv_estimator": "grpo", "algorithm__use_kl_in_reward": False}
    plans = make_plans([read_measurement(leave_run(tmp_path / "run", model, **changes))], 2)
    assert {row.layout for row in plans.rows} == {"serial", "gather"}
    assert all(set(row.devices) == {"actor"} for row in plans.rows)


ROLLOUT: dict[str, Any] = {"services__rollout": {"threads": 1}}


def test_a_run_with_a_rollout_group_is_measured_and_fitted(tmp_path: Path, model: str) -> None:
    plans = make_plans([read_measurement(leave_run(tmp_path / "run", model, **ROLLOUT))], None)
    assert plans.measured.devices == {"actor": 1, "critic": 1, "rollout": 1}
    assert {name: plans.measured.device_count_of(name) for name in ("sync", "gen", "publish", "score")} == {
        "sync": 1,
        "gen": 1,
        "publish": 1,
        "score": 0,
    }
    assert plans.fitted_s == pytest.approx(plans.measured.step_s) == 28.0
    assert plans.colocated is None
    assert plan_of(plans.rows, "gather", "actor", 1).step_s == pytest.approx(1 + 6 + 4 + 0.5 + 6 + 1 + 1, abs=1e-3)
    assert [list(row.memory_gib) for row in plans.rows[:1]] == [["actor", "critic", "rollout"]]


@pytest.mark.parametrize("devices", [{}, {"services__actor__devices": [0], "services__rollout": {"devices": [1]}}])
def test_more_devices_are_divided_between_rollout_group_and_the_others(
    tmp_path: Path, model: str, devices: dict[str, Any]
) -> None:
    stale = {"rollout__staleness": 1, "algorithm__rollout_correction__rollout_is": "token"}
    no_critic = {"algorithm__adv_estimator": "grpo", "algorithm__use_kl_in_reward": False, "rollout__n": 4}
    run_dir = leave_run(tmp_path / "run", model, **{**ROLLOUT, **stale, **no_critic, **devices})
    plans = make_plans([read_measurement(run_dir)], 8)
    gather = {row.devices["rollout"]: row.step_s for row in plans.rows if row.layout == "gather"}
    assert {row.devices["actor"] + row.devices["rollout"] for row in plans.rows} == {8}
    # load + gen beside log-probs, advantages with the second in which nobody works, update, publish
    assert gather == pytest.approx(
        {count: max((1 + 6) / count + 0.5, (2 + 6 + 1) / (8 - count) + 1.5) for count in range(1, 8)}, abs=1e-3
    )
    assert [*explain(plans)][-1] == (
        "rollout GPUs : actor GPUs (rollout.staleness 1): 1 : 1 in this run, 3 : 5 in the fastest layout, 3.3 s a step."
    )
    assert not plans.refused


def test_partial_rollouts_are_predicted_as_they_were_measured_and_never_shared(tmp_path: Path, model: str) -> None:
    partial = {"rollout__max_step_tokens": 64, "algorithm__rollout_correction__rollout_is": "token"}
    plans = make_plans([read_measurement(leave_run(tmp_path / "run", model, **partial))], 2)
    assert not plans.shares
    assert any(sentence.startswith("rollout.max_step_tokens 64: all steps are those") for sentence in explain(plans))


def test_a_probe_counts_as_work_of_the_groups_that_make_it(tmp_path: Path, model: str) -> None:
    run_dir = leave_run(tmp_path / "run", model, **ROLLOUT)
    before, lines = read_measurement(run_dir), read_metrics(run_dir / "metrics.jsonl")
    spans = read_trace(run_dir / "trace.json")
    for step in (1, 2, 3):
        started_s = min(span.started_s for span in spans if span.step == step)
        spans += [Span(pool, "probe", step, started_s, started_s + 0.25) for pool in ("rollout", "actor")]
    more = {"sync": 0.25, "old_log_prob": 0.25}
    expected = {name: seconds + more.get(name, 0.0) for name, seconds in before.phase_s.items()}
    measured = measurement_of(before.config, [(lines, spans)], source="run")
    assert measured.phase_s == pytest.approx(expected, abs=1e-4)


def test_three_groups_have_every_split_and_a_column_each(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = leave_run(tmp_path / "run", model, **ROLLOUT)
    assert len(make_plans([read_measurement(run_dir)], 5).rows) == 6 * 3 * 2  # splits, schedules, hosts
    assert main(["plan", str(run_dir)]) == 0
    output = capsys.readouterr().out
    assert "rollout GPUs : actor GPUs (rollout.staleness 0): 1 : 1 in this run" in " ".join(output.split())
    [head] = [line.split() for line in output.splitlines() if line.startswith("step s")]
    assert head[4:9] == ["layout", "actor", "critic", "rollout", "reference"]


def test_runs_with_and_without_a_rollout_group_are_compared(tmp_path: Path, model: str) -> None:
    alone = read_measurement(leave_run(tmp_path / "one", model))
    beside = read_measurement(leave_run(tmp_path / "two", model, **ROLLOUT))
    assert make_plans([alone, beside], None).fitted_s == pytest.approx(alone.step_s, abs=1e-3)
    assert make_plans([beside, alone], None).fitted_s == pytest.approx(beside.step_s, abs=1e-3)


@pytest.mark.parametrize(
    ("spoil", "arguments", "sentence"),
    [
        ("absent", [], "is no run folder: expected config.yaml and metrics.jsonl in it"),
        ("no steps", [], "holds no step"),
        ("no spans", [], "holds no step that can be used"),
        ("other version", [], "was left by another version: "),
        ("", ["--gpus", "1"], "--gpus 1: expected at least 2"),
        ("", ["--gpus", "100000"], "--gpus 100000: expected at least 2, one for each group (actor, critic), and"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str], spoil: str, arguments: list[str], sentence: str
) -> None:
    run_dir = tmp_path / "run"
    if spoil != "absent":
        leave_run(run_dir, model, num_steps=0 if spoil == "no steps" else 3)
    if spoil == "no spans":
        (run_dir / "trace.json").unlink()
    if spoil == "other version":
        with (run_dir / "config.yaml").open("a") as file:
            file.write("of_another_version: 1\n")
    assert main(["plan", str(run_dir), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert len(error.splitlines()) == 1
