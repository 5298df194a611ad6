"""`report.png`: the curves of a run, and what the pools did during one of its steps."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.files import write_atomically
from controller.trace import POOLS, Span, busy_s, read_trace
from controller.trackers import METRICS_FILE, read_metrics

WIDTH_PIXELS, HEIGHT_PIXELS, _DPI = 1600, 1000, 100

_INK, _FAINT = "#22313f", "#8a99a6"
_LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
PHASE_COLOURS = {
    "generate": "#4c78a8",
    "old log-probs": "#72b7b2",
    "reference": "#9ecae9",
    "values": "#f2cf5b",
    "reward": "#b279a2",
    "advantages": "#bab0ac",
    "update": "#f58518",
    "validation": "#d4a6c8",
    "checkpoint": "#9d755d",
    "restore": "#54a24b",
}
_OTHER_COLOUR = "#a0a0a0"
_DARK_PHASES = {"generate", "reward", "checkpoint", "restore"}
_MARGIN = 0.08  # of the step's length, shown before and after it
_CHARACTER_WIDTH = 0.0072  # share of the timeline's width
# What spans of each name are called, and coloured as.
PHASES = {
    "gen": "generate",
    "old_log_prob": "old log-probs",
    "ref": "reference",
    "values": "values",
    "score": "reward",
    "adv": "advantages",
    "update_actor": "update",
    "update_critic": "update",
    "testing": "validation",
    "save_checkpoint": "checkpoint",
    "load_checkpoint": "restore",
}


@dataclass(frozen=True)
class Curve:
    """One line of a chart: (step, value) pairs, steps ascending."""

    label: str
    points: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Chart:
    """Curves that share axes."""

    title: str
    unit: str
    curves: Sequence[Curve]
    floor: float | None = None
    ceiling: float | None = None


def write_report(run_dir: Path, *, name: str, schedule: str, wall_s: float) -> Path:
    """Draws `report.png` from the metrics and the trace in the run folder; returns its path."""
    path = run_dir / "report.png"
    metrics = read_metrics(run_dir / METRICS_FILE)
    title = f"{name} · {schedule} schedule · {_duration(wall_s)}"
    write_atomically(path, render_report(metrics, read_trace(run_dir / "trace.json"), title=title))
    return path


def render_report(metrics: Sequence[Mapping[str, Any]], spans: Sequence[Span], *, title: str) -> bytes:
    """The report as PNG of WIDTH_PIXELS x HEIGHT_PIXELS.

    Args:
        metrics: lines of metrics.jsonl; a chart without a metric is left out.
        spans: of all steps; without any the timeline says so.
        title: run name, schedule, wall time.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and drawn once per run
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_PIXELS / _DPI, HEIGHT_PIXELS / _DPI), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    steps = sum(1 for row in metrics if row["step"] > 0)
    figure.text(0.05, 0.955, title, fontsize=20, fontweight="bold", color=_INK)
    figure.text(0.95, 0.957, f"{steps} steps", fontsize=14, color=_FAINT, ha="right")
    charts = charts_of(metrics)
    columns = {0: 1, 1: 1, 2: 2, 4: 2}.get(len(charts), 3)
    rows = max(1, math.ceil(len(charts) / columns))
    top = figure.add_gridspec(rows, columns, left=0.05, right=0.95, top=0.905, bottom=0.385, hspace=0.42, wspace=0.2)
    for index, chart in enumerate(charts):
        axes = figure.add_subplot(top[index // columns, index % columns])
        _draw_chart(axes, chart, with_step_label=index + columns >= len(charts))
    bottom = figure.add_gridspec(1, 1, left=0.09, right=0.87, top=0.285, bottom=0.09)
    _draw_timeline(figure.add_subplot(bottom[0, 0]), spans)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=_DPI)
    return image.getvalue()


def charts_of(metrics: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """The charts that these metrics can fill."""

    def curves(labels: Mapping[str, str]) -> list[Curve]:
        found = [Curve(label, _points(metrics, name)) for name, label in labels.items()]
        return [curve for curve in found if curve.points]

    accuracy = {
        name: name.removeprefix("val-core/")
        for row in metrics
        for name in row
        if name.startswith("val-core/") and "/mean@" in name
    }
    charts = [
        Chart("Reward", "mean per response", curves({"critic/score/mean": "score", "critic/rewards/mean": "with KL"})),
        Chart("Validation accuracy", "share of held-out prompts", curves(accuracy), 0.0, 1.0),
        Chart(
            "KL",
            "nats per token",
            curves(
                {
                    "actor/reward_kl_penalty": "to the reference",
                    "actor/kl_loss": "to the reference (loss)",
                    "actor/ppo_kl": "old to new policy",
                }
            ),
        ),
        Chart("Value loss", "half squared error", curves({"critic/vf_loss": "value loss"}), 0.0),
        Chart("Explained variance", "of the returns", curves({"critic/vf_explained_var": "explained variance"}), -1, 1),
        Chart("Policy entropy", "nats per token", curves({"actor/entropy": "entropy"})),
    ]
    return [chart for chart in charts if chart.curves]


def step_to_show(spans: Sequence[Span]) -> int | None:
    """A typical step: of those with neighbours the one whose calls take nearest to the median of all."""
    lengths: dict[int, float] = {}
    calls = [span for span in spans if span.is_call]
    for step in {span.step for span in calls}:
        own = [span for span in calls if span.step == step]
        lengths[step] = max(span.finished_s for span in own) - min(span.started_s for span in own)
    inner = [step for step in lengths if step - 1 in lengths and step + 1 in lengths and step > 1]
    candidates = sorted(inner or lengths)
    if not candidates:
        return None
    median = statistics.median(lengths[step] for step in candidates)
    return min(candidates, key=lambda step: abs(lengths[step] - median))


def times_of(spans: Sequence[Span], step: int) -> tuple[float, float, float]:
    """When a step began, when the last work for it had ended, and when the next step began, unix seconds.

    Where the run paused in between, or nothing came after it, the step's own end is the last.
    """
    own = _own(spans, step)
    start, end = min(span.started_s for span in own), max(span.finished_s for span in own)
    next_start = min((span.started_s for span in spans if span.step == step + 1 and span.is_call), default=end)
    return start, end, next_start if next_start <= end + _MARGIN * (end - start) else end


def _own(spans: Sequence[Span], step: int) -> list[Span]:
    """A step's calls, its validation and its checkpoint; a restore of it may come much later."""
    return [span for span in spans if span.step == step and span.name != "load_checkpoint"]


def _points(metrics: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["step"], float(row[name])) for row in metrics if isinstance(row.get(name), int | float)]


def _draw_chart(axes: Any, chart: Chart, *, with_step_label: bool) -> None:
    _plain_axes(axes, chart.title)
    for curve, colour in zip(chart.curves, _LINES, strict=False):
        steps = [step for step, _ in curve.points]
        values = [value for _, value in curve.points]
        marker = "o" if len(steps) <= 40 else ""
        smooth = _running_mean(values)
        if smooth is None:
            axes.plot(steps, values, color=colour, linewidth=2.2, marker=marker, markersize=4, label=curve.label)
        else:
            axes.plot(steps, values, color=colour, linewidth=1, alpha=0.3)
            axes.plot(steps, smooth, color=colour, linewidth=2.2, label=curve.label)
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set_ylabel(chart.unit, fontsize=10, color=_FAINT)
    if with_step_label:
        axes.set_xlabel("step", fontsize=10, color=_FAINT)
    _limit(axes, chart)
    if len(chart.curves) > 1:
        axes.legend(fontsize=9, frameon=False, labelcolor=_INK)
    else:
        _mark_last(axes, chart.curves[0])


def _limit(axes: Any, chart: Chart) -> None:
    """Keeps the value axis within what the quantity can be; wild values of the first steps leave the chart."""
    low, high = axes.get_ylim()
    high += 0.05 * (high - low)
    if chart.floor is not None and (low < chart.floor or chart.floor == 0.0):
        low = chart.floor - 0.03 * ((chart.ceiling or high) - chart.floor)
    if chart.ceiling is not None:
        high = chart.ceiling + 0.03 * (chart.ceiling - (chart.floor or 0.0))
    axes.set_ylim(min(low, high - 1e-9), high)


def _mark_last(axes: Any, curve: Curve) -> None:
    """Writes the last value into the chart's upper right corner."""
    axes.set_title(f"{curve.points[-1][1]:.3g}", loc="right", fontsize=13, color=_LINES[0], fontweight="bold", pad=8)


def _running_mean(values: Sequence[float]) -> list[float] | None:
    """Mean over a centred window of a twentieth of the run; None for short runs, which are shown as they are."""
    half = len(values) // 40
    if half < 2:
        return None
    return [statistics.fmean(values[max(0, index - half) : index + half + 1]) for index in range(len(values))]


def _draw_timeline(axes: Any, spans: Sequence[Span]) -> None:
    """What each pool did during one step and beside it; the neighbours' work is pale."""
    step = step_to_show(spans)
    if step is None:
        _plain_axes(axes, "Timeline: no step was traced")
        axes.set_axis_off()
        return
    start, end, next_start = times_of(spans, step)
    margin = _MARGIN * (end - start)
    left, right = start - margin, end + margin
    own = _own(spans, step)
    shown = [span for span in spans if span.finished_s > left and span.started_s < right]
    pools = [pool for pool in POOLS if any(span.pool == pool for span in shown)]
    _plain_axes(axes, f"Step {step}: who worked when", grid=False)
    for row, pool in enumerate(pools):
        _draw_pool(axes, row, [span for span in shown if span.pool == pool], step, start, (left, right))
        share = busy_s([span for span in spans if span.pool == pool], start, next_start) / max(next_start - start, 1e-9)
        axes.text(
            1.01, row, f"{share:.0%} busy", transform=axes.get_yaxis_transform(), va="center", fontsize=11, color=_INK
        )
    for boundary in (0.0, next_start - start):
        axes.axvline(boundary, color=_FAINT, linestyle=(0, (4, 3)), linewidth=1)
    axes.set_yticks(range(len(pools)), labels=pools, fontsize=12, color=_INK)
    axes.set_ylim(len(pools) - 0.5, -0.5)
    axes.set_xlim(left - start, right - start)
    axes.set_xlabel(
        "seconds since the step began (dashed: the step's own time; pale: neighbouring steps)",
        fontsize=10,
        color=_FAINT,
    )
    _draw_phase_legend(axes, [*sorted(own, key=lambda span: span.started_s), *shown])


def _draw_pool(
    axes: Any, row: int, spans: Sequence[Span], step: int, start_s: float, window: tuple[float, float]
) -> None:
    left, right = window
    for span in spans:
        begin, end = max(span.started_s, left), min(span.finished_s, right)
        label, own = _phase(span), span.step == step
        axes.barh(
            row,
            end - begin,
            left=begin - start_s,
            height=0.62,
            color=PHASE_COLOURS.get(label, _OTHER_COLOUR),
            alpha=1.0 if own else 0.3,
            edgecolor="white",
            linewidth=1.2,
        )
        lines = label.split(" ")
        if (end - begin) / (right - left) > _CHARACTER_WIDTH * max(map(len, lines)):
            colour = "white" if own and label in _DARK_PHASES else _INK if own else _FAINT
            middle = (begin + end) / 2 - start_s
            axes.text(
                middle,
                row,
                "\n".join(lines),
                ha="center",
                va="center",
                fontsize=10 if len(lines) == 1 else 8.5,
                linespacing=1.0,
                color=colour,
            )


def _draw_phase_legend(axes: Any, spans: Sequence[Span]) -> None:
    from matplotlib.patches import Patch

    labels = dict.fromkeys(_phase(span) for span in spans)
    patches = [Patch(color=PHASE_COLOURS.get(label, _OTHER_COLOUR), label=label) for label in labels]
    axes.legend(
        handles=patches,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(patches),
        fontsize=9,
        frameon=False,
        labelcolor=_INK,
        handlelength=0.9,
        columnspacing=1.0,
    )


def _phase(span: Span) -> str:
    return PHASES.get(span.name, span.name.replace("_", " "))


def _plain_axes(axes: Any, title: str, *, grid: bool = True) -> None:
    axes.set_title(title, loc="left", fontsize=13, color=_INK, fontweight="bold", pad=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c5ced6")
    axes.tick_params(colors=_FAINT, labelcolor=_INK, labelsize=10)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis="y", color="#e6ebef", linewidth=1)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
