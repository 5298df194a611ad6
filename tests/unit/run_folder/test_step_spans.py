"""What report and viewer share: what a step's time was spent on, and what it waited for."""

from __future__ import annotations

import pytest

from splitppo.run_folder.spans import Span
from splitppo.run_folder.step_spans import WAITING, Steps

T0 = 1_760_000_000.0


def path(spans: list[Span], step: int) -> list[tuple[str, str, int, float, float]]:
    """The critical path, with times of two digits."""
    found = Steps(spans).critical_path(step)
    return [(one.pool, one.name, one.step, round(one.started_s, 2), round(one.finished_s, 2)) for one in found]


def test_the_step_shown_is_typical_and_has_neighbours() -> None:
    spans = [
        Span("actor", "gen", step, T0 + step, T0 + step + length) for step, length in enumerate((9, 1, 5, 2, 3), 1)
    ]
    assert Steps(spans).to_show() == 4
    assert Steps(spans[:1]).to_show() == 1
    assert Steps([]).to_show() is None


def test_what_happens_beside_a_step_makes_it_no_longer_and_a_checkpoint_not_typical() -> None:
    spans = [
        Span("actor", "gen", step, T0 + step, T0 + step + length) for step, length in enumerate((9, 1, 5, 2, 3), 1)
    ]
    beside = [
        Span("actor", "testing", 0, T0 - 9, T0),
        Span("critic", "save_checkpoint", 4, T0 + 8, T0 + 9),
        Span("actor", "load_checkpoint", 4, T0 + 1000, T0 + 1001),
    ]
    assert Steps([*spans, *beside]).to_show() == 2
    assert Steps([*spans, beside[0], beside[2]]).to_show() == 4
    assert Steps(beside).to_show() is None


def test_a_step_lasts_until_the_next_one_begins_unless_the_run_paused_in_between() -> None:
    first = [
        Span("actor", "gen", 1, 10.0, 15.0),
        Span("actor", "testing", 1, 15.0, 20.0),
        Span("actor", "load_checkpoint", 1, 100.0, 101.0),
    ]
    assert Steps([*first, Span("actor", "gen", 2, 20.5, 25.0)]).times(1) == (10.0, 20.0, 20.5)
    assert Steps([*first, Span("actor", "gen", 2, 102.0, 105.0)]).times(1) == (10.0, 20.0, 20.0)
    assert Steps(first).times(1) == (10.0, 20.0, 20.0)


def test_responses_that_were_sampled_ahead_belong_to_the_time_of_the_step_before() -> None:
    spans = [Span("rollout", "gen", 1, -1.0, 0.0)]
    for step in range(1, 5):
        start = 10.0 * step
        spans += [
            Span("actor", "old_log_prob", step, start, start + 1),
            Span("rollout", "gen", step + 1, start + 0.5, start + 8),
            Span("actor", "update_actor", step, start + 1, start + 5),
            Span("scoring", "score", step + 1, start + 8, start + 9.5),  # after the update
        ]
    assert Steps(spans).times(2) == (20.0, 29.5, 30.0)
    assert Steps(spans).times(1) == (-1.0, 19.5, 20.0)
    assert Steps(spans).to_show() in (2, 3)


def a_step(step: int, start: float, *, critic_s: float, values_at: float = 0.4) -> list[Span]:
    """A step of 1 s of its own; the critic's update begins at 0.7 of it and takes `critic_s`."""
    return [
        Span("actor", "gen", step, start, start + 0.4),
        Span("actor", "old_log_prob", step, start + 0.402, start + 0.55),
        Span("critic", "values", step, start + values_at, start + values_at + 0.18),
        Span("controller", "adv", step, start + values_at + 0.181, start + 0.7),
        Span("actor", "update_actor", step, start + 0.7, start + 1.0),
        Span("critic", "update_critic", step, start + 0.7, start + 0.7 + critic_s),
    ]


def test_the_path_leads_from_the_next_step_back_over_what_ended_last() -> None:
    spans = [*a_step(1, 0.0, critic_s=0.1), *a_step(2, 1.0, critic_s=0.1)]
    assert path(spans, 1) == [
        ("actor", "gen", 1, 0.0, 0.4),
        ("critic", "values", 1, 0.4, 0.58),
        ("controller", "adv", 1, 0.58, 0.7),
        ("actor", "update_actor", 1, 0.7, 1.0),
    ]
    assert Steps(spans).busy(1) == pytest.approx({"actor": 0.848, "critic": 0.28, "controller": 0.119})


def test_a_hidden_update_of_the_critic_is_on_no_path() -> None:
    spans = [*a_step(1, 0.0, critic_s=0.69), *a_step(2, 1.0, critic_s=0.69), *a_step(3, 2.0, critic_s=0.1)]
    assert Steps(spans).busy(2)["critic"] == pytest.approx(0.39 + 0.18 + 0.3)
    assert [name for _, name, *_ in path(spans, 2)] == ["gen", "values", "adv", "update_actor"]
    late = [span for span in spans if span.step < 3]  # its end is that of the run, which waits for it
    assert [name for _, name, *_ in path(late, 2)] == ["gen", "values", "adv", "update_critic"]


def test_an_update_of_the_critic_that_ends_where_others_begin_is_on_no_path() -> None:
    spans = [*a_step(1, 0.0, critic_s=0.352), Span("actor", "testing", 1, 1.02, 1.2), *a_step(2, 1.25, critic_s=0.1)]
    assert [name for _, name, *_ in path(spans, 1)][-4:] == ["update_actor", WAITING, "testing", WAITING]
    assert [name for _, name, *_ in path(spans[:6] + a_step(2, 1.051, critic_s=0.1), 1)][-2:] == [
        "update_actor",
        WAITING,
    ]


def test_an_update_of_the_critic_counts_from_when_the_step_waited_for_it() -> None:
    spans = [*a_step(1, 0.0, critic_s=0.8), *a_step(2, 1.0, critic_s=0.1, values_at=0.502), *a_step(3, 2.0, critic_s=1)]
    assert path(spans, 2)[:3] == [
        ("actor", "gen", 2, 1.0, 1.4),
        ("critic", "update_critic", 1, 1.4, 1.5),
        ("critic", "values", 2, 1.5, 1.68),
    ]


def test_scores_that_are_made_while_generation_goes_on_are_on_the_path_only_after_its_end() -> None:
    spans = [Span("actor", "gen", 1, 0.0, 1.0)]
    spans += [Span("scoring", "score", 1, at / 50 + 0.001, at / 50 + 0.019) for at in range(10, 60)]
    spans += [Span("critic", "values", 1, 0.9, 1.4), Span("controller", "adv", 1, 1.4, 1.5)]
    streamed = [("actor", "gen", 1, 0.0, 1.0), ("critic", "values", 1, 1.0, 1.4), ("controller", "adv", 1, 1.4, 1.5)]
    assert path(spans, 1) == streamed
    late = [*spans, Span("scoring", "score", 1, 1.2, 1.45), Span("controller", "adv", 1, 1.45, 1.6)]
    assert path(late, 1)[0] == ("actor", "gen", 1, 0.0, 1.0)
    assert path(late, 1)[-2:] == [("scoring", "score", 1, 1.2, 1.45), ("controller", "adv", 1, 1.45, 1.6)]


def test_time_in_which_no_call_of_the_step_worked_is_waiting() -> None:
    spans = [Span("actor", "gen", 1, 0.0, 0.4), Span("actor", "update_actor", 1, 0.6, 0.98)]
    assert path([*spans, Span("actor", "gen", 2, 1.0, 1.3)], 1) == [
        ("actor", "gen", 1, 0.0, 0.4),
        ("", WAITING, 1, 0.4, 0.6),
        ("actor", "update_actor", 1, 0.6, 0.98),
        ("", WAITING, 1, 0.98, 1.0),
    ]


def test_a_call_that_goes_on_while_the_next_one_waits_for_its_rows_counts_until_then() -> None:
    spans = [Span("actor", "gen", 1, 0.0, 0.4), Span("actor", "ref", 1, 0.402, 0.65)]
    spans += [Span("critic", "values", 1, 0.5, 0.7), Span("controller", "adv", 1, 0.7, 0.8)]
    assert [name for _, name, *_ in path(spans, 1)] == ["gen", "ref", "values", "adv"]
    assert path(spans, 1)[1] == ("actor", "ref", 1, 0.4, 0.5)


def test_a_validation_and_a_checkpoint_that_a_step_waits_for_are_on_its_path() -> None:
    spans = [*a_step(1, 0.0, critic_s=0.1), Span("actor", "testing", 1, 1.001, 1.5)]
    spans += [Span("actor", "save_checkpoint", 1, 1.5, 1.6), Span("actor", "gen", 2, 1.601, 2.0)]
    assert [name for _, name, *_ in path(spans, 1)][-3:-1] == ["update_actor", "testing"]
    assert path(spans, 1)[-1][:2] == ("actor", "save_checkpoint")


@pytest.mark.parametrize("critic_s", [0.1, 0.5, 0.69, 0.8, 1.4])
def test_the_pieces_of_a_path_follow_one_another_and_fill_the_step(critic_s: float) -> None:
    spans = [span for step in range(1, 5) for span in a_step(step, 1.0 * step, critic_s=critic_s)]
    steps = Steps(spans)
    for step in range(1, 5):
        start, _, next_start = steps.times(step)
        found = steps.critical_path(step)
        edges = [found[0].started_s, *(piece.finished_s for piece in found)]
        assert (edges[0], edges[-1]) == (start, next_start)
        assert edges[1:-1] == [piece.started_s for piece in found[1:]]
        assert all(piece.duration_s > 0 for piece in found)
