"""Draws `report.png`: the curves of a run's metrics, and the timeline of the pools during one step."""

import io
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from controller.tracking.plain_text import clock
from splitppo.atomic_write import write_atomically
from splitppo.our_commands import missing_package
from splitppo.run_folder.metrics import FIGURES, Figure
from splitppo.run_folder.spans import Span
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics
from splitppo.run_folder.step_spans import MARGIN, PHASES, Phase, Steps
from splitppo.run_folder.trace import POOLS, TRACE_FILE, read_trace

_INK = "#22313f"
_FAINT = "#8a99a6"
_LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_STYLE = {
    **dict.fromkeys(("text.color", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"), _INK),
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), _FAINT),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "figure.facecolor": "white",
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlepad": 8,
    "axes.edgecolor": "#c5ced6",
    "axes.ymargin": 0.08,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6ebef",
    "grid.linewidth": 1,
    "lines.linewidth": 2.2,
    "lines.markersize": 4,
    "legend.fontsize": 9,
}
_CHARACTER_WIDTH = 0.0072  # share of the timeline's width
_LEGEND_COLUMNS = 9  # of the timeline, beside its title


class NoPlots(Exception):
    """Raised if this Python cannot draw; the message is a sentence that says what to install."""


class Chart(NamedTuple):
    """One figure of the report, with its (step, value) pairs by label, steps ascending."""

    figure: Figure
    curves: Mapping[str, Sequence[tuple[int, float]]]


def write_report(run_dir: Path, *, name: str, schedule: str, train_s: float) -> Path:
    """Draws `report.png` from the metrics and the trace in the run folder; returns the path of the file."""
    path = run_dir / "report.png"
    metrics = read_metrics(run_dir / METRICS_FILE)
    spans = read_trace(run_dir / TRACE_FILE)
    title = f"{name} · {schedule} schedule · {clock(train_s)} in steps"
    write_atomically(path, render_report(metrics, spans, title=title))
    return path


def render_report(metrics: Sequence[Mapping[str, Any]], spans: Sequence[Span], *, title: str) -> bytes:
    """Draws the report as a PNG of 1600 x 1000 pixels, from the lines of metrics.jsonl and the spans of all steps.

    A chart without a metric is left out. A timeline without spans has a title that says so.

    Raises:
        NoPlots: matplotlib is missing.
    """
    try:
        from matplotlib import rc_context  # slow to import, and drawn once per run
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise NoPlots(missing_package(error.name)) from error

    charts = charts_of(metrics)
    image = io.BytesIO()
    columns = {0: 1, 1: 1, 2: 2, 4: 2}.get(len(charts), 3)
    with rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(16, 10), dpi=100)
        figure.text(0.05, 0.955, title, fontsize=20, fontweight="bold")
        num_steps = sum(row["step"] > 0 for row in metrics)
        figure.text(0.95, 0.957, f"{num_steps} steps", fontsize=14, color=_FAINT, ha="right")
        area = {"left": 0.05, "right": 0.95, "top": 0.905, "bottom": 0.385, "hspace": 0.42, "wspace": 0.2}
        grid = figure.add_gridspec(max(1, math.ceil(len(charts) / columns)), columns, **area)
        for index, chart in enumerate(charts):
            axes = figure.add_subplot(grid[index])
            _draw_chart(axes, chart)
            axes.set_xlabel("step" if index + columns >= len(charts) else "")
        _draw_timeline(figure.add_axes((0.09, 0.09, 0.78, 0.195)), spans)
        figure.savefig(image, format="png")
    return image.getvalue()


def charts_of(metrics: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Makes the charts of the report from the lines of metrics.jsonl; charts without data are left out."""

    def curves(labels: Mapping[str, str]) -> dict[str, list[tuple[int, float]]]:
        points = {
            label: [(row["step"], float(row[name])) for row in metrics if isinstance(row.get(name), int | float)]
            for name, label in labels.items()
        }
        return {label: curve for label, curve in points.items() if curve}

    names = dict.fromkeys(name for row in metrics for name in row)
    charts = [Chart(figure, curves(figure.curves(names))) for figure in FIGURES if "report" in figure.pages]
    return [chart for chart in charts if chart.curves]


def _draw_chart(axes: Any, chart: Chart) -> None:
    """Draws the curves of a chart over the steps.

    From 80 points on, the line is a centred moving average over a twentieth of the run, above the values in pale. A
    chart of a single curve shows the last value instead of a legend, with the curve's label if the figure may have
    others: which KL it is depends on the run.
    """
    from matplotlib.ticker import MaxNLocator

    axes.set_title(chart.figure.title)
    axes.set_ylabel(chart.figure.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    for (label, points), colour in zip(chart.curves.items(), _LINES, strict=False):
        steps = [step for step, _ in points]
        values = [value for _, value in points]
        half = len(values) // 40  # half of the smoothing window, which is a twentieth of the run
        if half >= 2:
            axes.plot(steps, values, color=colour, linewidth=1, alpha=0.3)
            values = [statistics.fmean(values[max(0, at - half) : at + half + 1]) for at in range(len(values))]
        axes.plot(steps, values, color=colour, marker="o" if len(steps) <= 40 else "", label=label)
    axes.set_ylim(chart.figure.floor, chart.figure.ceiling)
    if len(chart.curves) > 1:
        axes.legend()
    else:
        ((label, points),) = chart.curves.items()
        name = f"{label} " if len(chart.figure.metrics) > 1 else ""
        axes.set_title(f"{name}{points[-1][1]:.3g}", loc="right", color=_LINES[0])


def _draw_timeline(axes: Any, spans: Sequence[Span]) -> None:
    """Draws the work of each pool during one step and beside it, that of neighbouring steps in pale colours."""
    steps = Steps(spans)
    step = steps.to_show()
    if step is None:
        axes.set_title("Timeline: no step was traced")
        axes.set_axis_off()
        return
    start, end, next_start = steps.times(step)
    margin = MARGIN * (end - start)
    shown = [span for span in spans if span.finished_s > start - margin and span.started_s < end + margin]
    pools = [pool for pool in POOLS if any(span.pool == pool for span in shown)]
    axes.set_title(f"Step {step}: who worked when")
    axes.grid(visible=False)
    axes.set_yticks(range(len(pools)), labels=pools, fontsize=12)
    axes.set_ylim(len(pools) - 0.5, -0.5)
    axes.set_xlim(-margin, end - start + margin)
    axes.set_xlabel("seconds since the step began (dashed: the step's own time; pale: work for neighbouring steps)")
    for span in shown:
        # The step begins at 0, and what lies beyond the axes is cut off.
        left = max(span.started_s - start, -margin)
        right = min(span.finished_s - start, end - start + margin)
        share_of_width = (right - left) / (end - start + 2 * margin)
        _draw_span(axes, pools.index(span.pool), span, (left, right), share_of_width, is_own=span.step == step)
    busy = steps.busy(step)
    for row, pool in enumerate(pools):
        share = busy.get(pool, 0.0) / max(next_start - start, 1e-9)
        axes.text(1.01, row, f"{share:.0%} busy", transform=axes.get_yaxis_transform(), va="center", fontsize=11)
    for boundary in (0.0, next_start - start):
        axes.axvline(boundary, color=_FAINT, linestyle=(0, (4, 3)), linewidth=1)
    own = sorted(steps.made[step], key=lambda span: span.started_s)
    _draw_legend(axes, dict.fromkeys(PHASES[span.name] for span in [*own, *shown]))


def _draw_legend(axes: Any, phases: Collection[Phase]) -> None:
    """Draws what the colours of the timeline mean, above it."""
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=phase.colour, label=phase.label) for phase in phases],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(phases) if len(phases) <= _LEGEND_COLUMNS else math.ceil(len(phases) / 2),
        handlelength=0.9,
        columnspacing=1.0,
    )


def _draw_span(
    axes: Any, row: int, span: Span, edges: tuple[float, float], share_of_width: float, *, is_own: bool
) -> None:
    """Draws a span as a bar between its edges, and its name if it fits; pale if it is not the step's own."""
    left, right = edges
    phase = PHASES[span.name]
    style = {"height": 0.62, "edgecolor": "white", "linewidth": 1.2, "alpha": 1.0 if is_own else 0.3}
    axes.barh(row, right - left, left=left, color=phase.colour, **style)
    words = phase.label.split(" ")
    if share_of_width <= _CHARACTER_WIDTH * max(map(len, words)):
        return
    ink = "white" if phase.is_dark else _INK
    axes.text(
        (left + right) / 2,
        row,
        "\n".join(words),
        color=ink if is_own else _FAINT,
        fontsize=10 if len(words) == 1 else 8.5,
        linespacing=1.0,
        ha="center",
        va="center",
    )
