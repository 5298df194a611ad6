"""The report: its charts, the step that it shows, and the size of its picture."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from controller.tracking.plots import NoPlots, charts_of, render_report, write_report
from splitppo.run_folder.spans import Span
from splitppo.run_folder.step_file import StepFile
from splitppo.run_folder.step_spans import PHASES
from splitppo.run_folder.trace import Trace

T0 = 1_760_000_000.0
SCORE, ACCURACY = "Score and held-out accuracy", "Accuracy by data source"


def metrics_of(num_steps: int, *, critic: bool = True) -> list[dict[str, float | None]]:
    rows: list[dict[str, float | None]] = [{"step": 0, "val-core/sort_letters/acc/mean@1": 0.25}]
    for step in range(1, num_steps + 1):
        row: dict[str, float | None] = {"step": step, "critic/score/mean": step / 10, "actor/ppo_kl": 0.001 * step}
        if critic:
            row |= {"critic/vf_loss": 1 / step, "critic/vf_explained_var": -30.0 if step == 1 else 0.9}
        rows.append(row)
    rows[-1]["val-core/sort_letters/acc/mean@1"] = 0.95
    return rows


def spans_of(num_steps: int) -> list[Span]:
    """Overlap: the critic's update reaches into the next step."""
    spans = []
    for step in range(1, num_steps + 1):
        start = T0 + step
        spans += [
            Span("actor", "gen", step, start, start + 0.4),
            Span("critic", "values", step, start + 0.4, start + 0.5),
            Span("actor", "update_actor", step, start + 0.5, start + 0.95),
            Span("critic", "update_critic", step, start + 0.5, start + 1.2),
        ]
    return spans


def size_of(png: bytes) -> tuple[int, ...]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def test_charts_follow_the_metrics() -> None:
    titles = [chart.figure.title for chart in charts_of(metrics_of(4))]
    assert titles == [SCORE, ACCURACY, "KL", "Explained variance of the critic", "Value loss"]
    without_critic = [chart.figure.title for chart in charts_of(metrics_of(4, critic=False))]
    assert without_critic == [SCORE, ACCURACY, "KL"]
    assert charts_of([]) == []


def test_without_matplotlib_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        NoPlots, match=r"does not have the package matplotlib: \S+ -m pip install 'splitppo\[report\]'$"
    ):
        render_report(metrics_of(1), (), title="")


def test_a_curve_holds_the_steps_that_have_the_metric_as_a_number() -> None:
    rows = metrics_of(3)
    rows[2]["critic/score/mean"] = None
    reward, accuracy = charts_of(rows)[:2]
    assert reward.curves == {"score": [(1, 0.1), (3, 0.3)]}
    assert accuracy.curves == {"sort_letters/acc/mean@1": [(0, 0.25), (3, 0.95)]}


@pytest.mark.parametrize(("num_steps", "critic"), [(120, True), (3, False), (1, True), (0, False)])
def test_the_picture_has_its_size_whatever_is_missing(num_steps: int, critic: bool) -> None:
    png = render_report(metrics_of(num_steps, critic=critic), spans_of(num_steps), title="a run · overlap · 1 min 2 s")
    assert size_of(png) == (1600, 1000)


def test_the_title_of_a_step_with_many_kinds_of_work_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    others = [Span("actor", name, 2, T0 + 2.1, T0 + 2.2) for name in PHASES]
    render_report(metrics_of(3), [*spans_of(3), *others], title="a run")
    figures[0].draw_without_rendering()
    timeline = figures[0].axes[-1]
    [title] = timeline.findobj(lambda artist: isinstance(artist, Text) and artist.get_text().startswith("Step "))
    legend = timeline.get_legend()
    assert legend is not None
    assert legend.get_window_extent().x0 > title.get_window_extent().x1


def test_the_report_is_drawn_from_the_files_of_the_run_folder(tmp_path: Path) -> None:
    lines = StepFile(tmp_path / "metrics.jsonl")
    for row in metrics_of(3):
        lines.write(int(row["step"] or 0), {name: value for name, value in row.items() if name != "step" and value})
    Trace(tmp_path / "trace.json").add(spans_of(3))
    path = write_report(tmp_path, name="quickstart", schedule="overlap", train_s=3723.0)
    assert path == tmp_path / "report.png"
    assert size_of(path.read_bytes()) == (1600, 1000)


def test_an_interrupted_run_without_files_still_gets_a_picture(tmp_path: Path) -> None:
    assert size_of(write_report(tmp_path, name="n", schedule="serial", train_s=0.0).read_bytes()) == (1600, 1000)
