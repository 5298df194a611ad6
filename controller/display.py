"""What the user watches: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from controller.summary import Accuracy, Summary
from splitppo.config import Config
from splitppo.config.plan import BatchPlan

_REFRESH_S = 0.1
_RECENT_STEPS = 20
_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_CHARACTERS = 1200


@dataclass(frozen=True)
class Sample:
    """One generation to show."""

    prompt: str
    response: str
    score: float
    ground_truth: Any
    data_source: str


class Display(Protocol):
    """Shown progress; the trainer tells it what happens, it decides what is drawn."""

    def start(self, plan: BatchPlan, config: Config, *, step: int = 0) -> None:
        """Shows the header; `step` is the step that the run goes on from."""

    def phase(self, pool: str, name: str, done: int, total: int) -> None:
        """What a pool is doing; an empty name means that it is idle."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done, with its metrics."""

    def validation(self, step: int, accuracy: Accuracy) -> None:
        """A validation of the policy of this step is done."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Shows a few generations."""

    def line(self, text: str) -> None:
        """Shows one line, e.g. of the log."""

    def finish(self, summary: Summary) -> None:
        """Shows the end of the run; ends the display."""

    def close(self) -> None:
        """Gives the terminal back; may be called more than once."""


def open_display(stream: TextIO | None = None) -> Display:
    """The display for a stream (default stdout): live where it is a terminal."""
    stream = sys.stdout if stream is None else stream
    console = Console(file=stream, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(stream)


class StepFigures:
    """The few numbers of the last steps that a user follows."""

    def __init__(self, first_step: int, last_step: int) -> None:
        self.step = first_step
        self.last_step = last_step
        self.reward: float | None = None
        self.kl: float | None = None
        self.tokens_per_s: float | None = None
        self.accuracy: float | None = None
        self.rewards: list[float] = []
        self._moments: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes over a step's metrics; missing ones are not shown."""
        self.step = step
        self.reward = metrics.get("critic/score/mean", metrics.get("critic/rewards/mean"))
        self.kl = metrics.get("actor/reward_kl_penalty", metrics.get("actor/kl_loss", metrics.get("actor/ppo_kl")))
        num_tokens, step_s = metrics.get("perf/total_num_tokens"), metrics.get("perf/time_per_step")
        self.tokens_per_s = num_tokens / step_s if num_tokens is not None and step_s else None
        if self.reward is not None:
            self.rewards.append(self.reward)
        if not self._moments:
            self._moments.append((step - 1, time.monotonic() - metrics.get("timing_s/step", 0.0)))
        self._moments.append((step, time.monotonic()))

    @property
    def step_s(self) -> float | None:
        """Seconds per step, lately; validation and checkpoints included."""
        if not self._moments:
            return None
        (first, start), (last, end) = self._moments[0], self._moments[-1]
        return (end - start) / (last - first)

    @property
    def eta_s(self) -> float | None:
        step_s = self.step_s
        return None if step_s is None else step_s * (self.last_step - self.step)

    def columns(self) -> list[tuple[str, str]]:
        """Names and values, those that are known."""
        values = [
            ("reward", _number(self.reward)),
            ("accuracy", _number(self.accuracy)),
            ("KL", _number(self.kl, digits=5)),
            ("tokens/s", None if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f}"),
            ("s/step", _number(self.step_s, digits=2)),
            ("ETA", None if self.eta_s is None else _clock(self.eta_s)),
        ]
        return [(name, value) for name, value in values if value is not None]


class PlainDisplay:
    """One line per event."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._figures = StepFigures(0, 0)

    def start(self, plan: BatchPlan, config: Config, *, step: int = 0) -> None:
        self._figures = StepFigures(step, _last_step(config))
        for line in header_lines(plan, config, step):
            self.line(line)

    def phase(self, pool: str, name: str, done: int, total: int) -> None:
        """Not shown: lines that scroll past are for what is done."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._figures.add(step, metrics)
        figures = "  ".join(f"{name} {value}" for name, value in self._figures.columns())
        self.line(f"step {step}/{self._figures.last_step}  {figures}")

    def validation(self, step: int, accuracy: Accuracy) -> None:
        self._figures.accuracy = accuracy.overall
        self.line(_validation_line(step, accuracy))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for number, sample in enumerate(samples, start=1):
            self.line(f"sample {number} of step {step} ({sample.data_source}), score {sample.score:g}")
            for name, text in _sample_fields(sample):
                self.line(f"  {name}: {text}".replace("\n", "\n    "))

    def line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def finish(self, summary: Summary) -> None:
        for row in result_rows(summary):
            self.line("{:<24}{:>10}{:>10}{:>10}".format(*row))
        self.line(closing_line(summary))

    def close(self) -> None:
        """Nothing is held."""


class LiveDisplay:
    """A panel at the bottom of the terminal that follows the run; what is done scrolls above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._figures = StepFigures(0, 0)
        self._phases: dict[str, tuple[str, int, int]] = {}
        self._title = "SplitPPO"
        self._live: Live | None = None
        self._drawn_s = 0.0

    def start(self, plan: BatchPlan, config: Config, *, step: int = 0) -> None:
        self._figures = StepFigures(step, _last_step(config))
        self._phases = {role.role: ("", 0, 0) for role in plan.roles}
        self._title = f"SplitPPO · {config.run.name} · {config.run.schedule}"
        title, *lines = header_lines(plan, config, step)
        self._console.print(Panel(Text("\n".join(lines)), title=Text(title), title_align="left", border_style="cyan"))
        self._live = Live(console=self._console, get_renderable=self._panel, auto_refresh=False, transient=True)
        self._live.start(refresh=True)

    def phase(self, pool: str, name: str, done: int, total: int) -> None:
        changed = self._phases.get(pool, ("", 0, 0))[0] != name
        self._phases[pool] = (name, done, total)
        self._draw(now=changed)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._figures.add(step, metrics)
        self._draw(now=True)

    def validation(self, step: int, accuracy: Accuracy) -> None:
        self._figures.accuracy = accuracy.overall
        self._console.print(Text(_validation_line(step, accuracy), style="bold green"))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            table = Table.grid(padding=(0, 1))
            table.add_column(style="dim", no_wrap=True)
            table.add_column()
            for name, text in _sample_fields(sample):
                table.add_row(name, Text(text, style="bold" if name == "response" else ""))
            style = "green" if sample.score > 0 else "red"
            title = Text(f"step {step} · {sample.data_source} · score {sample.score:g}")
            self._console.print(Panel(table, title=title, title_align="left", border_style=style))

    def line(self, text: str) -> None:
        self._console.print(Text(text))

    def finish(self, summary: Summary) -> None:
        self.close()
        rows = result_rows(summary)
        if rows:
            table = Table(title="held-out accuracy", title_justify="left")
            for name, justify in zip(rows[0], ("left", "right", "right", "right"), strict=True):
                table.add_column(name, justify=justify)  # type: ignore[arg-type]
            for row in rows[1:]:
                table.add_row(*(Text(cell) for cell in row), style="bold" if row[0] == "overall" else "")
            self._console.print(table)
        self._console.print(Text(closing_line(summary)))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, *, now: bool) -> None:
        """Redraws, at most every `_REFRESH_S` seconds unless something new is to be seen."""
        moment = time.monotonic()
        if self._live is not None and (now or moment - self._drawn_s >= _REFRESH_S):
            self._drawn_s = moment
            self._live.refresh()

    def _panel(self) -> Panel:
        figures = self._figures
        progress = Table.grid(padding=(0, 1))
        progress.add_row(
            Text(f"step {figures.step}/{figures.last_step}", style="bold"),
            ProgressBar(total=max(figures.last_step, 1), completed=figures.step, width=30),
            Text(sparkline(figures.rewards, 40), style="green"),
        )
        numbers = Text("   ").join(
            Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in figures.columns()
        )
        pools = Table.grid(padding=(0, 2))
        for pool, (name, done, total) in self._phases.items():
            bar = ProgressBar(total=total, completed=done, width=20) if name and total else Text("")
            count = f"{done}/{total}" if name and total else ""
            pools.add_row(Text(pool, style="cyan"), Text(name or "idle", style="" if name else "dim"), bar, count)
        return Panel(Group(progress, numbers, pools), title=Text(self._title), title_align="left", border_style="cyan")


def header_lines(plan: BatchPlan, config: Config, step: int) -> list[str]:
    """What will be trained, how, and the resolved batch plan; the first line is a title."""
    run = config.run
    models = f"actor {config.actor.model}" + (
        f", critic {config.critic.model}" if config.uses_critic else ", no critic"
    )
    start = "from the initial models" if step == 0 else f"resumed after step {step}"
    return [
        f"SplitPPO · {run.name}",
        f"run folder  {run.dir}",
        f"models      {models}",
        f"algorithm   {config.algorithm.adv_estimator}, schedule {run.schedule}, seed {run.seed},"
        f" {_last_step(config)} steps, {start}",
        *(f"plan        {line}" if number == 0 else f"            {line}" for number, line in _numbered(plan)),
        f"checkpoints {_price_of_a_loss(config, step)}",
    ]


def _price_of_a_loss(config: Config, step: int) -> str:
    """What it costs if a group is lost: the way back to the last checkpoint, or to where this process began."""
    save_freq = config.checkpoint.save_freq
    first = step + save_freq - step % save_freq if save_freq > 0 else None
    if first is None or first >= _last_step(config):
        return f"checkpoint.save_freq is {save_freq}: a group that is lost starts again at step {step}"
    return f"every {save_freq} steps: a group that is lost costs up to that many (checkpoint.save_freq)"


def result_rows(summary: Summary) -> list[tuple[str, str, str, str]]:
    """Table of held-out accuracy: head, sources (if more than one), overall. Empty where nothing was validated."""
    before, after = summary.validation.before, summary.validation.after
    if before is None and after is None:
        return []
    sources = sorted({source for part in (before, after) if part is not None for source in part.by_source})
    rows = [("data source", "before", "after", "change")]
    for source in sources if len(sources) > 1 else []:
        rows.append(
            _result_row(source, *(None if part is None else part.by_source.get(source) for part in (before, after)))
        )
    rows.append(_result_row("overall", *(None if part is None else part.overall for part in (before, after))))
    return rows


def closing_line(summary: Summary) -> str:
    """How the run ended, in one line."""
    return (
        f"{summary.exit_reason} after step {summary.global_step} in {_clock(summary.wall_s)}"
        f" ({_clock(summary.train_s)} in steps, {summary.tokens:,} tokens trained)"
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars of eight heights, between their own minimum and maximum."""
    shown = list(values)[-width:]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def printable(text: str) -> str:
    """Text that cannot move the cursor or change colours: control characters as escapes, except line breaks."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def _sample_fields(sample: Sample) -> list[tuple[str, str]]:
    fields = [("prompt", sample.prompt), ("response", sample.response), ("ground truth", str(sample.ground_truth))]
    return [(name, _shortened(printable(text.strip()))) for name, text in fields]


def _shortened(text: str) -> str:
    """Long texts lose their middle."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def _validation_line(step: int, accuracy: Accuracy) -> str:
    sources = accuracy.by_source if len(accuracy.by_source) > 1 else {}
    parts = "".join(f"  {source} {value:.3f}" for source, value in sorted(sources.items()))
    return f"validation after step {step}: accuracy {accuracy.overall:.3f}{parts}"


def _result_row(name: str, before: float | None, after: float | None) -> tuple[str, str, str, str]:
    change = "" if before is None or after is None else f"{after - before:+.3f}"
    return name, _number(before) or "-", _number(after) or "-", change


def _number(value: float | None, digits: int = 3) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _last_step(config: Config) -> int:
    return min(config.run.total_steps, config.run.stop_after_step or config.run.total_steps)


def _numbered(plan: BatchPlan) -> list[tuple[int, str]]:
    return list(enumerate(str(plan).splitlines()))
