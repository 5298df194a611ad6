"""The table of metrics: every name is in it once, and whatever shows metrics shows them by it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from controller.tracking.plots import charts_of
from splitppo.run_folder.metrics import (
    AXES,
    COMPARED,
    FIGURES,
    KL,
    METRICS,
    Metric,
    check_declared,
    declared,
    label_of,
    row_of,
)

ROOT = Path(__file__).resolve().parents[3]
ROWS = [row for rows in METRICS.values() for row in rows]


def test_names_that_dashboards_know_are_declared() -> None:
    check_declared(
        [
            "critic/score/mean",
            "actor/pg_clipfrac_lower",
            "timing_s/update_actor_critic",
            "perf/mfu/critic",
            "global_seqlen/minmax_diff",
            "val-core/openai/gsm8k/acc/mean@1",
            "val-aux/openai/gsm8k/reward/best@4/std",
            "val-aux/math/acc/std@8",
            "reward_extra/my_field/max",
            "rollout_corr/k3_kl",
        ]
    )


@pytest.mark.parametrize("name", ["critic/scores/mean", "critic/score", "val-core/mean@1", "reward_extra//x", ""])
def test_an_undeclared_name_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="is not declared"):
        check_declared(["critic/score/mean", name])


def test_every_name_is_declared_once_with_a_unit_and_a_meaning() -> None:
    assert len({row.names for row in ROWS}) == len(ROWS)
    assert all(row.unit and row.meaning for row in ROWS)


def test_a_metric_has_section_unit_and_meaning_of_its_row() -> None:
    found = row_of("val-core/gsm8k/reward/mean@1")
    assert found is not None
    section, row = found
    assert (section, row.unit, row.when) == ("Run and validation", "1", "steps with a validation")
    assert row_of("something/else") is None


def test_labels_hold_what_a_name_stands_for() -> None:
    assert label_of("response_length/max") == "max"
    assert label_of("val-core/openai/gsm8k/acc/mean@4") == "openai/gsm8k/acc/mean@4"
    assert label_of("actor/kl_loss") == "to the reference (loss)"
    assert label_of("actor/pg_loss") == "actor/pg_loss"
    assert label_of("something/else") == "something/else"


def test_whatever_is_drawn_is_in_the_table() -> None:
    drawn = chain(AXES, KL, *COMPARED.values(), *(figure.curves(["val-core/a/acc/mean@1"]) for figure in FIGURES))
    check_declared(drawn)
    assert all(declared(name).terminal for name in KL)


def test_a_figure_of_many_metrics_has_a_curve_for_each_that_the_run_has() -> None:
    [figure] = [figure for figure in FIGURES if figure.title == "Accuracy by data source"]
    names = ["val-core/a/acc/mean@1", "val-core/b/acc/mean@1", "val-core/a/acc/best@4/mean", "actor/lr"]
    assert figure.curves(names) == {"val-core/a/acc/mean@1": "a/acc/mean@1", "val-core/b/acc/mean@1": "b/acc/mean@1"}
    assert figure.curves([]) == {}


def test_the_charts_of_the_report_are_figures_with_their_titles_units_and_limits() -> None:
    row = {"step": 1.0, "val-core/gsm8k/acc/mean@1": 0.5}
    row |= {name: 0.5 for figure in FIGURES for name in figure.curves(row)}
    wanted = [figure for figure in FIGURES if "report" in figure.pages]
    charts = charts_of([row])
    assert [chart.figure for chart in charts] == wanted
    assert [[*chart.curves] for chart in charts] == [[*figure.curves(row).values()] for figure in wanted]


def words_of(row: Metric) -> Iterator[str]:
    """Yields the last words of a row's names, without what code puts together: prefixes and statistics."""
    literal = re.sub(r"<\w+>|(?:rollout_(?:is|rs)|symbolic)_(?=\w)", "", row.names)
    for part in re.findall(r"{(.*?)}", literal) or [literal.rpartition("/")[2]]:
        yield from part.split(",")


def test_no_row_has_outlived_its_metric() -> None:
    """What code puts together of parts is found by its parts."""
    sources = [file for name in ("controller", "services", "rewards") for file in (ROOT / name).rglob("*.py")]
    text = "\n".join(file.read_text() for file in sources)
    missing = {row.names: word for row in ROWS for word in words_of(row) if word.rpartition("@")[0] not in text}
    assert missing == {}
