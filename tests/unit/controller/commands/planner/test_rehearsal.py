"""Step times of the schedules, worked by hand: the trainer makes the steps, and nothing but the groups is fake."""

from __future__ import annotations

from typing import Any

import pytest

from controller.commands.planner.rehearsal import Dataflow, Seconds, StepTime, step_time

PHASES = {
    "gen": 6.0,
    "old_log_prob": 3.0,
    "ref": 2.0,
    "values": 4.0,
    "score": 1.0,
    "adv": 0.5,
    "update_actor": 5.0,
    "update_critic": 8.0,
}


def rehearsed(
    phase_s: dict[str, float],
    layout: Any = "gather",
    *,
    idle_s: float = 0.0,
    response_share: float = 0.0,
    slowdown: float = 1.0,
    **flow: Any,
) -> StepTime:
    hosts = {"reference": "actor"} | ({"reward_model": "critic"} if "reward_model" in phase_s else {})
    return step_time(Dataflow(layout, **hosts | flow), Seconds(phase_s, idle_s, response_share, slowdown))


@pytest.mark.parametrize(
    ("layout", "reference", "expected_s"),
    [
        ("serial", "actor", 29.5),
        ("colocated", "actor", 29.5),
        ("gather", "actor", 6 + (3 + 2) + 0.5 + 8),
        ("gather", "critic", 6 + (4 + 2) + 0.5 + 8),
        ("overlap", "actor", 6 + (3 + 2) + 0.5 + 5),  # the critic's update ends 3 s into the next generation
        ("overlap", "critic", 6 + (4 + 2) + 0.5 + 5),
    ],
)
def test_each_schedule_takes_its_longest_chain(layout: str, reference: str, expected_s: float) -> None:
    assert rehearsed(PHASES, layout, reference=reference).step_s == pytest.approx(expected_s)


def test_a_critic_that_updates_longer_than_the_actor_updates_and_generates_is_waited_for() -> None:
    slow = PHASES | {"update_critic": 20.0}
    assert rehearsed(slow, "overlap").step_s == pytest.approx(4 + 0.5 + 20)


def test_bubbles_are_what_a_pool_does_not_work() -> None:
    bubbles = rehearsed(PHASES).bubbles
    assert bubbles == pytest.approx({"actor": 1 - 16 / 19.5, "critic": 1 - 12 / 19.5})
    assert rehearsed(PHASES, "colocated").bubbles == pytest.approx({"all": 1.5 / 29.5})


def test_time_in_which_nobody_works_is_on_top() -> None:
    for layout in ("serial", "gather", "overlap", "colocated"):
        plain = rehearsed(PHASES, layout).step_s
        assert rehearsed(PHASES, layout, idle_s=0.7).step_s == pytest.approx(plain + 0.7)


def test_with_streaming_the_critics_work_hides_behind_generation() -> None:
    # The first of four parts is there after 1.5 s: values and reference, 6 s, end at 7.5 s; old log-probs at 9 s.
    streamed = rehearsed(PHASES, reference="critic", num_parts=4)
    assert streamed.step_s == pytest.approx(6 + 3 + 0.5 + 8)


def test_phases_that_a_run_does_not_have_take_no_time() -> None:
    alone = {name: PHASES[name] for name in ("gen", "update_actor")}
    assert rehearsed(alone).step_s == pytest.approx(11.0)


def test_what_runs_at_the_same_time_is_slowed_down_while_both_work() -> None:
    two = {"gen": 6.0, "update_actor": 4.0, "update_critic": 2.0}
    # Both updates work for 2.5 s, in which each does 2 s of work; then the actor has 2 s left, alone.
    assert rehearsed(two, slowdown=1.25).step_s == pytest.approx(6 + 2.5 + 2)
    assert rehearsed(two, "serial", slowdown=1.25).step_s == pytest.approx(12)
    # Under overlap the critic's update is done before the next generation begins.
    assert rehearsed(two, "overlap", slowdown=1.25).step_s == pytest.approx(10.5)


def test_a_reward_group_works_beside_the_others() -> None:
    with_model = PHASES | {"reward_model": 5.0}
    on_critic = rehearsed(with_model)
    own_group = rehearsed(with_model, reward_model="reward")
    assert on_critic.step_s == pytest.approx(6 + (4 + 5) + 0.5 + 8)
    assert own_group.step_s == pytest.approx(6 + (3 + 2) + 0.5 + 8)
    assert own_group.bubbles["reward"] == pytest.approx(1 - 5 / 19.5)


@pytest.mark.parametrize(
    ("teacher", "expected_s"),
    [("critic", 6 + (4 + 5) + 0.5 + 8), ("reward", 6 + (3 + 2) + 0.5 + 8), ("actor", 6 + (3 + 2 + 5) + 0.5 + 8)],
)
def test_a_teacher_works_on_its_host(teacher: str, expected_s: float) -> None:
    step = rehearsed(PHASES | {"teacher": 5.0}, teacher=teacher)
    assert step.step_s == pytest.approx(expected_s)
    assert ("reward" in step.bubbles) == (teacher == "reward")


def test_the_last_of_the_parts_has_more_tokens_than_responses() -> None:
    # Two parts of half of the responses. Of long responses the second holds three quarters of the tokens; its 4.5 s of
    # values and reference begin after generation, which takes 6 s, and last longer than old log-probs.
    streamed = rehearsed(PHASES, reference="critic", num_parts=2, response_share=1.0)
    assert streamed.step_s == pytest.approx(6 + 4.5 + 0.5 + 8)
    assert rehearsed(PHASES, reference="critic", num_parts=2).step_s == pytest.approx(6 + 3 + 0.5 + 8)


WITH_GROUP = PHASES | {"sync": 1.0, "gen_rollout": 6.0, "publish": 0.5}


@pytest.mark.parametrize(
    ("layout", "staleness", "expected_s"),
    [
        ("serial", 0, 31.0),
        ("serial", 1, 31.0),
        ("gather", 0, 1 + 6 + (3 + 2) + 0.5 + 8),
        ("overlap", 0, 1 + 6 + (3 + 2) + 0.5 + 5 + 0.5),
        ("gather", 1, (3 + 2) + 0.5 + 8),  # both updates are waited for; 1 + 6 + 1 s of sampling and scoring are hidden
        ("overlap", 1, 4 + 0.5 + 8),  # values wait for the critic's update of the step before
    ],
)
def test_a_rollout_group_samples_before_the_rest_of_a_step_or_beside_it(
    layout: str, staleness: int, expected_s: float
) -> None:
    step = rehearsed(WITH_GROUP, layout, rollout_share=1.0, staleness=staleness)
    assert step.step_s == pytest.approx(expected_s)
    assert step.bubbles["rollout"] == pytest.approx(1 - 7 / expected_s)


@pytest.mark.parametrize(("gen_s", "expected_s"), [(6.0, 3 + 0.5 + 5 + 0.5), (20.0, 1 + 20)])
def test_at_staleness_1_the_longer_one_of_sampling_and_learning_is_the_step(gen_s: float, expected_s: float) -> None:
    phases = {"sync": 1.0, "gen_rollout": gen_s, "old_log_prob": 3.0, "adv": 0.5, "update_actor": 5.0, "publish": 0.5}
    step = rehearsed(phases, rollout_share=1.0, staleness=1)
    assert step.step_s == pytest.approx(expected_s)
    assert step.bubbles["actor"] == pytest.approx(1 - 8.5 / expected_s)


def test_the_rollout_group_waits_until_what_it_sampled_is_scored() -> None:
    phases = {"sync": 1.0, "gen_rollout": 6.0, "score": 4.0, "reward_model": 5.0, "update_actor": 5.0, "publish": 0.5}
    step = rehearsed(phases, rollout_share=1.0, staleness=1, reward_model="reward")
    assert step.step_s == pytest.approx(1 + 6 + 5)


@pytest.mark.parametrize(("gen", "rows", "reward_model"), [("gen_rollout", 1.0, "critic"), ("gen", 0.0, "reward")])
def test_updates_wait_for_the_scores_of_the_next_step_if_their_groups_make_them(
    gen: str, rows: float, reward_model: str
) -> None:
    phases = {gen: 6.0, "values": 2.0, "reward_model": 5.0, "update_actor": 5.0, "update_critic": 4.0}
    step = rehearsed(phases, rollout_share=rows, staleness=1, reward_model=reward_model)
    assert step.step_s == pytest.approx(6 + 5 + 5)


def test_without_a_rollout_group_staleness_makes_no_step_of_the_actor_shorter() -> None:
    phases = {"gen": 6.0, "old_log_prob": 3.0, "update_actor": 5.0}
    for staleness in (0, 1):
        assert rehearsed(phases, staleness=staleness).step_s == pytest.approx(14.0)


# Both groups sample half of the responses, in 4 and 3 s. PHASES without its generation takes 5 s of log-probs on the
# actor, 4 s of values, 0.5 s of advantages, 5 and 8 s of updates.
SHARED = PHASES | {"sync": 1.0, "gen": 4.0, "gen_rollout": 3.0, "publish": 0.5}


@pytest.mark.parametrize(
    ("layout", "takes_turns", "expected_s"),
    [
        ("serial", True, 1 + 4 + 3 + (3 + 2 + 4 + 1) + 0.5 + 5 + 8 + 0.5),
        ("gather", False, 4 + (3 + 2) + 0.5 + 8),  # sync and the group's share take 4 s, too; values begin then
        ("gather", True, 4 + (3 + 2) + 0.5 + 8),
        ("overlap", False, 4 + (3 + 2) + 0.5 + 5 + 0.5),  # the critic's update ends 2.5 s into the generation
        ("overlap", True, (8 - 5 - 0.5) + 1 + 3 + (3 + 2) + 0.5 + 5 + 0.5),  # the group's devices are busy until then
    ],
)
def test_two_groups_sample_at_the_same_time(layout: str, takes_turns: bool, expected_s: float) -> None:
    step = rehearsed(SHARED, layout, rollout_share=0.5, takes_turns=takes_turns)
    assert step.step_s == pytest.approx(expected_s)
    busy = {"actor": 4 + 5 + 5 + 0.5} | ({"critic": 1 + 3 + 12} if takes_turns else {"critic": 12, "rollout": 1 + 3})
    assert step.bubbles == pytest.approx({pool: 1 - seconds / expected_s for pool, seconds in busy.items()})


def test_a_late_update_of_the_critic_takes_the_gain_of_a_share_away() -> None:
    """gen(all) - max(gen(actor's rows), late + load + gen(group's rows)) - publish."""
    alone = rehearsed(PHASES, "overlap").step_s
    for update_critic, late in ((5.5, 0.0), (7.0, 1.5), (9.0, 3.5)):
        phases = SHARED | {"update_critic": update_critic}
        shared = rehearsed(phases, "overlap", rollout_share=0.5, takes_turns=True)
        assert alone - shared.step_s == pytest.approx(6 - max(4, late + 1 + 3) - 0.5, abs=1e-6)


def test_on_the_critics_devices_values_of_all_parts_wait_until_the_group_has_sampled() -> None:
    # The actor samples half of the responses in 4 s, the group in 1 + 6 s. Beside the group the critic values the
    # actor's two parts, of 1 s each, when they end: after 2 s and 4 s. Then 2 s of the group's parts at 4 s and 7 s.
    phases = {"sync": 1.0, "gen": 4.0, "gen_rollout": 6.0, "values": 4.0, "update_actor": 5.0}
    apart = rehearsed(phases, num_parts=4, rollout_share=0.5)
    assert apart.step_s == pytest.approx(7 + 1 + 5)
    in_turns = rehearsed(phases, num_parts=4, rollout_share=0.5, takes_turns=True)
    assert in_turns.step_s == pytest.approx(7 + 4 + 5)
    # Both groups' responses are long: the last of two parts has three quarters of a group's tokens.
    long = rehearsed(phases, num_parts=4, rollout_share=0.5, response_share=1.0)
    assert long.step_s == pytest.approx(7 + 1.5 + 5)


def test_groups_that_sample_at_the_same_time_slow_each_other_down() -> None:
    phases = {"gen": 4.0, "gen_rollout": 3.0, "update_actor": 5.0}
    for takes_turns in (False, True):
        step = rehearsed(phases, rollout_share=0.5, takes_turns=takes_turns, slowdown=1.25)
        # Both work for 3.75 s, in which each does 3 s of work; then the actor has 1 s left, alone.
        assert step.step_s == pytest.approx(3.75 + 1 + 5)


def test_parts_that_end_at_the_same_time_are_scored_one_after_the_other_as_in_a_run() -> None:
    phases = {"gen": 4.0, "gen_rollout": 4.0, "score": 3.0, "update_actor": 5.0}
    step = rehearsed(phases, num_parts=2, rollout_share=0.5)
    assert step.step_s == pytest.approx(4 + 3 + 5)
