"""Draws `report.png`: the curves of a run's metrics, and the timeline of the pools during one step."""

import io
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.tracking.plain_text import clock
from controller.tracking.step_file import METRICS_FILE, read_metrics
from controller.tracking.timeline import POOLS, read_trace
from controller.workers.span import Span, busy_s
from splitppo.atomic_write import write_atomically

_INK, _FAINT = "#22313f", "#8a99a6"
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
# The label of spans by name in the timeline, their colour, and True if text on this colour is white.
PHASES = {
    "gen": ("generate", "#4c78a8", True),
    "update_weights": ("sync", "#b5cf6b", False),
    "old_log_prob": ("old log-probs", "#72b7b2", False),
    "ref": ("reference", "#9ecae9", False),
    "teacher": ("teacher", "#59a14f", True),
    "values": ("values", "#f2cf5b", False),
    "reward_model": ("reward model", "#d67195", True),
    "score": ("reward", "#b279a2", True),
    "environment": ("environments", "#8cd17d", False),
    "adv": ("advantages", "#bab0ac", False),
    "update_actor": ("update", "#f58518", False),
    "publish": ("publish", "#e45756", True),
    "sync": ("sync", "#b5cf6b", False),
    "probe": ("probe", "#79706e", True),
    "update_critic": ("update", "#f58518", False),
    "testing": ("validation", "#d4a6c8", False),
    "save_checkpoint": ("checkpoint", "#9d755d", True),
    "load_checkpoint": ("restore", "#54a24b", True),
}
# The spans of a step's responses.
_SAMPLING = frozenset({"gen", "update_weights", "environment", "score", "reward_model"})
_MARGIN = 0.08  # of the step's length, shown before and after it
_CHARACTER_WIDTH = 0.0072  # share of the timeline's width
_LEGEND_COLUMNS = 9  # of the timeline, beside its title


@dataclass(frozen=True)
class Chart:
    """One chart of the report: curves of metrics over steps that share axes.

    Attributes:
        title, unit: the texts above the chart and beside its value axis.
        curves: (step, value) pairs by label, steps ascending.
        floor, ceiling: the limits of the value axis; None: the values set them. Values beyond them are cut off.
    """

    title: str
    unit: str
    curves: Mapping[str, Sequence[tuple[int, float]]]
    floor: float | None = None
    ceiling: float | None = None


def write_report(run_dir: Path, *, name: str, schedule: str, train_s: float) -> Path:
    """Draws `report.png` from the metrics and the trace in the run folder; returns the path of the file."""
    path = run_dir / "report.png"
    metrics, spans = read_metrics(run_dir / METRICS_FILE), read_trace(run_dir / "trace.json")
    title = f"{name} · {schedule} schedule · {clock(train_s)} in steps"
    write_atomically(path, render_report(metrics, spans, title=title))
    return path


def render_report(metrics: Sequence[Mapping[str, Any]], spans: Sequence[Span], *, title: str) -> bytes:
    """Draws the report as a PNG of 1600 x 1000 pixels, from the lines of metrics.jsonl and the spans of all steps.

    A chart without a metric is left out. A timeline without spans has a title that says so.
    """
    from matplotlib import rc_context  # slow to import, and drawn once per run
    from matplotlib.figure import Figure

    charts, image = charts_of(metrics), io.BytesIO()
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

    accuracy = {
        name: name.removeprefix("val-core/")
        for row in metrics
        for name in row
        if name.startswith("val-core/") and "/mean@" in name
    }
    kl = {
        "distillation/kl": "to the teacher",
        "actor/reward_kl_penalty": "to the reference",
        "actor/kl_loss": "to the reference (loss)",
        "actor/ppo_kl": "old to new policy",
    }
    charts = (
        Chart("Reward", "mean per response", curves({"critic/score/mean": "score", "critic/rewards/mean": "with KL"})),
        Chart("Validation accuracy", "share of held-out prompts", curves(accuracy), floor=-0.03, ceiling=1.03),
        Chart("KL", "nats per token", curves(kl)),
        Chart("Value loss", "half squared error", curves({"critic/vf_loss": ""}), floor=0.0),
        Chart("Explained variance", "of the returns", curves({"critic/vf_explained_var": ""}), -1.06, 1.06),
        Chart("Policy entropy", "nats per token", curves({"actor/entropy": ""})),
    )
    return [chart for chart in charts if chart.curves]


def step_to_show(spans: Sequence[Span]) -> int | None:
    """Chooses the step that the timeline shows: between two others, near the median duration; None without steps."""
    lengths = {
        step: max(call.finished_s for call in calls) - min(call.started_s for call in calls)
        for step, made in sorted(_made_in(spans).items())
        if (calls := [span for span in made if span.is_call])
    }
    inner = [step for step in lengths if step > 1 and {step - 1, step + 1} <= lengths.keys()] or list(lengths)
    if not inner:
        return None
    median = statistics.median(lengths[step] for step in inner)
    return min(inner, key=lambda step: abs(lengths[step] - median))


def times_of(spans: Sequence[Span], step: int) -> tuple[float, float, float]:
    """Returns the start of a step, the end of its last work, and the start of the next step, in unix seconds.

    If the run paused or ended after the step, the third time is the end of the last work.
    """
    made = _made_in(spans)
    start, end = min(span.started_s for span in made[step]), max(span.finished_s for span in made[step])
    next_start = min((span.started_s for span in made[step + 1] if span.is_call), default=end)
    return start, end, next_start if next_start <= end + _MARGIN * (end - start) else end


def _made_in(spans: Sequence[Span]) -> dict[int, list[Span]]:
    """Returns the spans by the step in whose time they were made, without restores, which may come much later.

    Responses that were sampled before the actor's update of the step before (rollout.staleness 1) belong to that step.
    """
    updated_s = {span.step: span.finished_s for span in spans if span.name == "update_actor"}
    ahead = {
        span.step for span in spans if span.name == "gen" and span.started_s < updated_s.get(span.step - 1, -math.inf)
    }
    made = defaultdict(list)
    for span in spans:
        if span.name != "load_checkpoint":
            made[span.step - (span.step in ahead and span.name in _SAMPLING)].append(span)
    return made


def _draw_chart(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(chart.title)
    axes.set_ylabel(chart.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    for (label, points), colour in zip(chart.curves.items(), _LINES, strict=False):
        steps, values = map(list, zip(*points, strict=True))
        half = len(values) // 40  # half of the smoothing window, which is a twentieth of the run
        if half >= 2:
            axes.plot(steps, values, color=colour, linewidth=1, alpha=0.3)
            values = [statistics.fmean(values[max(0, at - half) : at + half + 1]) for at in range(len(values))]
        axes.plot(steps, values, color=colour, marker="o" if len(steps) <= 40 else "", label=label)
    axes.set_ylim(chart.floor, chart.ceiling)
    if len(chart.curves) > 1:
        axes.legend()
    else:
        (points,) = chart.curves.values()
        axes.set_title(f"{points[-1][1]:.3g}", loc="right", color=_LINES[0])


def _draw_timeline(axes: Any, spans: Sequence[Span]) -> None:
    """Draws the work of each pool during one step and beside it, that of neighbouring steps in pale colours."""
    from matplotlib.patches import Patch

    step = step_to_show(spans)
    if step is None:
        axes.set_title("Timeline: no step was traced")
        axes.set_axis_off()
        return
    start, end, next_start = times_of(spans, step)
    margin = _MARGIN * (end - start)
    shown = [span for span in spans if span.finished_s > start - margin and span.started_s < end + margin]
    pools = [pool for pool in POOLS if any(span.pool == pool for span in shown)]
    for span in shown:
        _draw_span(axes, pools.index(span.pool), span, step, (start, start - margin, end + margin))
    for row, pool in enumerate(pools):
        share = busy_s([span for span in spans if span.pool == pool], start, next_start) / max(next_start - start, 1e-9)
        axes.text(1.01, row, f"{share:.0%} busy", transform=axes.get_yaxis_transform(), va="center", fontsize=11)
    for boundary in (0.0, next_start - start):
        axes.axvline(boundary, color=_FAINT, linestyle=(0, (4, 3)), linewidth=1)
    axes.set_title(f"Step {step}: who worked when")
    axes.grid(visible=False)
    axes.set_yticks(range(len(pools)), labels=pools, fontsize=12)
    axes.set_ylim(len(pools) - 0.5, -0.5)
    axes.set_xlim(-margin, end - start + margin)
    axes.set_xlabel("seconds since the step began (dashed: the step's own time; pale: work for neighbouring steps)")
    own = sorted(_made_in(spans)[step], key=lambda span: span.started_s)
    phases = dict.fromkeys(PHASES[span.name] for span in [*own, *shown])
    axes.legend(
        handles=[Patch(color=colour, label=label) for label, colour, _ in phases],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(phases) if len(phases) <= _LEGEND_COLUMNS else math.ceil(len(phases) / 2),
        handlelength=0.9,
        columnspacing=1.0,
    )


def _draw_span(axes: Any, row: int, span: Span, step: int, times: tuple[float, float, float]) -> None:
    """Draws a span as a bar, and its name if it fits; `times`: the step's start, the plot's first and last time."""
    start, left, right = times
    begin, end = max(span.started_s, left), min(span.finished_s, right)
    (label, colour, is_dark), own = PHASES[span.name], span.step == step
    bar = {"height": 0.62, "edgecolor": "white", "linewidth": 1.2, "alpha": 1.0 if own else 0.3}
    axes.barh(row, end - begin, left=begin - start, color=colour, **bar)
    words = label.split(" ")
    if (end - begin) / (right - left) > _CHARACTER_WIDTH * max(map(len, words)):
        style = {"fontsize": 10 if len(words) == 1 else 8.5, "linespacing": 1.0, "ha": "center", "va": "center"}
        ink = _FAINT if not own else "white" if is_dark else _INK
        axes.text((begin + end) / 2 - start, row, "\n".join(words), color=ink, **style)
