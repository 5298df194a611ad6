"""Step times of the schedules, worked by hand."""

from __future__ import annotations

from typing import Literal

import pytest

from controller.planner.step_model import step_time

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
    assert step_time(PHASES, 0.0, layout, reference).step_s == pytest.approx(expected_s)  # type: ignore[arg-type]


def test_a_critic_that_updates_longer_than_the_actor_updates_and_generates_is_waited_for() -> None:
    slow = PHASES | {"update_critic": 20.0}
    assert step_time(slow, 0.0, "overlap", "actor").step_s == pytest.approx(4 + 0.5 + 20)


def test_bubbles_are_what_a_pool_does_not_work() -> None:
    bubbles = step_time(PHASES, 0.0, "gather", "actor").bubbles
    assert bubbles == pytest.approx({"actor": 1 - 16 / 19.5, "critic": 1 - 12 / 19.5})
    assert step_time(PHASES, 0.0, "colocated", "actor").bubbles == pytest.approx({"all": 1.5 / 29.5})


def test_time_in_which_nobody_works_is_on_top() -> None:
    for layout in ("serial", "gather", "overlap", "colocated"):
        plain = step_time(PHASES, 0.0, layout, "actor").step_s  # type: ignore[arg-type]
        assert step_time(PHASES, 0.7, layout, "actor").step_s == pytest.approx(plain + 0.7)  # type: ignore[arg-type]


def test_with_streaming_the_critics_work_hides_behind_generation() -> None:
    # The first of four parts is there after 1.5 s: values and reference, 6 s, end at 7.5 s; old log-probs at 9 s.
    streamed = step_time(PHASES, 0.0, "gather", "critic", num_parts=4)
    assert streamed.step_s == pytest.approx(6 + 3 + 0.5 + 8)


def test_phases_that_a_run_does_not_have_take_no_time() -> None:
    alone = {name: PHASES[name] for name in ("gen", "update_actor")}
    assert step_time(alone, 0.0, "gather", "actor").step_s == pytest.approx(11.0)


def test_what_runs_at_the_same_time_is_slowed_down_while_both_work() -> None:
    two = {"gen": 6.0, "update_actor": 4.0, "update_critic": 2.0}
    # Both updates work for 2.5 s, in which each does 2 s of work; then the actor has 2 s left, alone.
    assert step_time(two, 0.0, "gather", "actor", slowdown=1.25).step_s == pytest.approx(6 + 2.5 + 2)
    assert step_time(two, 0.0, "serial", "actor", slowdown=1.25).step_s == pytest.approx(12)
    # Under overlap the critic's update is done before the next generation begins.
    assert step_time(two, 0.0, "overlap", "actor", slowdown=1.25).step_s == pytest.approx(10.5)


def test_a_reward_group_works_beside_the_others() -> None:
    with_model = PHASES | {"reward_model": 5.0}
    on_critic = step_time(with_model, 0.0, "gather", "actor")
    own_group = step_time(with_model, 0.0, "gather", "actor", has_reward_group=True)
    assert on_critic.step_s == pytest.approx(6 + (4 + 5) + 0.5 + 8)
    assert own_group.step_s == pytest.approx(6 + (3 + 2) + 0.5 + 8)
    assert own_group.bubbles["reward"] == pytest.approx(1 - 5 / 19.5)


def test_the_last_of_the_parts_has_more_tokens_than_responses() -> None:
    # Two parts of half of the responses. Of long responses the second holds three quarters of the tokens; its 4.5 s of
    # values and reference begin after generation, which takes 6 s, and last longer than old log-probs.
    streamed = step_time(PHASES, 0.0, "gather", "critic", num_parts=2, response_share=1.0)
    assert streamed.step_s == pytest.approx(6 + 4.5 + 0.5 + 8)
    assert step_time(PHASES, 0.0, "gather", "critic", num_parts=2).step_s == pytest.approx(6 + 3 + 0.5 + 8)


WITH_GROUP = PHASES | {"sync": 1.0, "publish": 0.5}


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
    step = step_time(WITH_GROUP, 0.0, layout, "actor", sampler="rollout", staleness=staleness)  # type: ignore[arg-type]
    assert step.step_s == pytest.approx(expected_s)
    assert step.bubbles["rollout"] == pytest.approx(1 - 7 / expected_s)


@pytest.mark.parametrize(("gen_s", "expected_s"), [(6.0, 3 + 0.5 + 5 + 0.5), (20.0, 1 + 20)])
def test_at_staleness_1_the_longer_one_of_sampling_and_learning_is_the_step(gen_s: float, expected_s: float) -> None:
    phases = {"sync": 1.0, "gen": gen_s, "old_log_prob": 3.0, "adv": 0.5, "update_actor": 5.0, "publish": 0.5}
    step = step_time(phases, 0.0, "gather", "actor", sampler="rollout", staleness=1)
    assert step.step_s == pytest.approx(expected_s)
    assert step.bubbles["actor"] == pytest.approx(1 - 8.5 / expected_s)


def test_the_rollout_group_waits_until_what_it_sampled_is_scored() -> None:
    phases = {"sync": 1.0, "gen": 6.0, "score": 4.0, "reward_model": 5.0, "update_actor": 5.0, "publish": 0.5}
    step = step_time(phases, 0.0, "gather", "actor", sampler="rollout", staleness=1, has_reward_group=True)
    assert step.step_s == pytest.approx(1 + 6 + 5)


@pytest.mark.parametrize(("sampler", "has_reward_group"), [("rollout", False), ("actor", True)])
def test_updates_wait_for_the_scores_of_the_next_step_if_their_groups_make_them(
    sampler: Literal["actor", "rollout"], has_reward_group: bool
) -> None:
    phases = {"gen": 6.0, "values": 2.0, "reward_model": 5.0, "update_actor": 5.0, "update_critic": 4.0}
    step = step_time(phases, 0.0, "gather", "actor", sampler=sampler, staleness=1, has_reward_group=has_reward_group)
    assert step.step_s == pytest.approx(6 + 5 + 5)


def test_without_a_rollout_group_staleness_makes_no_step_of_the_actor_shorter() -> None:
    phases = {"gen": 6.0, "old_log_prob": 3.0, "update_actor": 5.0}
    for staleness in (0, 1):
        assert step_time(phases, 0.0, "gather", "actor", staleness=staleness).step_s == pytest.approx(14.0)
