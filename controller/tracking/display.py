"""Shows the progress of a run to the user: lines of text, and on a terminal a live panel below them."""

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from controller.tracking.events import Event, LineComplete, Progressed, Validated
from controller.tracking.plain_text import clock
from rewards.samples import sample_text
from splitppo.config import Config
from splitppo.config.phase_plan import phase_plan
from splitppo.our_commands import our_command
from splitppo.printable import printable
from splitppo.run_folder.metrics import ACCURACY, KL, SCORE, STEP_S, declared
from splitppo.run_folder.summary import Accuracy, Summary

_REFRESH_S = 0.1
_RECENT_STEPS = 20
_BARS = "▁▂▃▄▅▆▇█"
_SPARKLINE_STEPS = 40
_SHOWN_CHARACTERS = 1200


def open_display(stream: TextIO | None = None) -> "Display":
    """Makes the display of a run for a stream (default stdout), with a live panel if the stream is a terminal."""
    console = _Console(file=sys.stdout if stream is None else stream, highlight=False)
    return Display(console, has_panel=console.is_terminal and not console.is_dumb_terminal)


class Display:
    """Shows the progress of a run on the screen. Each method shows one kind of event of the run."""

    def __init__(self, console: Console, *, has_panel: bool) -> None:
        self._console = console
        self._has_panel = has_panel
        self._progress = _Progress()
        self._panel: _LivePanel | None = None
        self._folder: Path | None = None

    def start(self, plan: str, config: Config, *, step: int = 0) -> None:
        """Shows models, algorithm and plan at the start of a run; `step` is the step from which the run goes on."""
        self._progress = _Progress(step=step, last_step=config.last_step)
        self._folder = config.run.dir
        self.line(f"SplitPPO · {config.run.name}", style="bold cyan")
        for line in _header(plan, config, step):
            self.line(line)
        if self._has_panel:
            title = f"SplitPPO · {config.run.name} · {config.run.schedule}"
            self._panel = _LivePanel(self._console, title, config.roles, self._progress)

    def receive(self, event: Event) -> None:
        """Shows an event of the run, if it is one for the screen."""
        match event:
            case Progressed():
                progress = event.progress
                self.phase(event.role, progress.phase or event.method, progress.done, progress.total)
            case LineComplete():
                self.step(event.step, event.metrics, event.completed_s)
                self.samples(event.step, event.samples)
            case Validated():
                self.validation(event.step, event.validation.accuracy)

    def phase(self, pool: str, name: str, done: int, total: int) -> None:
        """Shows on the panel what a pool works on, `done` of `total`; an empty name means that the pool is idle."""
        if self._panel is not None:
            self._panel.phase(pool, name, done, total)

    def step(self, step: int, metrics: Mapping[str, float], completed_s: float) -> None:
        """Shows that a step is finished, with a few of its metrics.

        The pace follows from the unix seconds at which steps were complete: some are shown later, with a checkpoint.
        """
        progress = self._progress
        progress.add(step, metrics, completed_s)
        if self._panel is not None:
            self._panel.refresh()
        else:
            figures = progress.figures(metrics.get(ACCURACY))
            self.line(f"step {step}/{progress.last_step}  " + "  ".join(map(" ".join, figures)))

    def validation(self, step: int, accuracy: Accuracy) -> None:
        """Shows the accuracy of a validation of the policy of this step, with each data source if there are several."""
        self._progress.accuracy = accuracy.overall
        sources = sorted(accuracy.by_source.items()) if len(accuracy.by_source) > 1 else []
        parts = "".join(f"  {source} {value:.3f}" for source, value in sources)
        self.line(f"validation after step {step}: accuracy {accuracy.overall:.3f}{parts}", style="bold green")

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Shows a few prompts and responses of a step with their scores; `samples` has rows of `sample_rows`."""
        for number, sample in enumerate(samples, start=1):
            style = "green" if sample["score"] > 0 else "red"
            texts = {name: str(sample[name]).strip() for name in ("prompt", "response", "ground_truth")}
            shown = {name.replace("_", " "): _shortened(printable(text)) for name, text in texts.items()}
            heading = f"sample {number} of step {step} ({sample['data_source']}), score {sample['score']:g}"
            self.line(sample_text(heading, shown), style=style)

    def line(self, text: str, style: str = "") -> None:
        """Shows one line of text, e.g. a message of the log."""
        self._console.print(Text(text, style), soft_wrap=True)

    def finish(self, summary: Summary) -> None:
        """Shows the results at the end of a run (accuracies, steps, times), and closes the display."""
        self.close()
        start = summary.this_start
        behind = f" from step {start.resumed_at_step} on" if start.resumed_at_step else ""
        if summary.exit_reason == "bad_input" and not summary.global_step:
            return  # nothing was trained, and the mistake stands above
        for name, *cells in _result_rows(summary):
            self.line(f"{name:<24}" + "".join(f"{cell:>10}" for cell in cells), "bold" if name == "overall" else "")
        if self._folder:
            self.line(f"see it in the browser: {our_command('viewer', self._folder)}")
        self.line(
            f"{summary.exit_reason} after step {summary.global_step} in {clock(start.wall_s)}{behind}"
            f" ({'in all ' if behind else ''}{clock(summary.train_s)} in steps, {summary.tokens:,} tokens trained)"
        )

    def close(self) -> None:
        """Stops the live panel and restores the terminal; may be called more than once."""
        if self._panel is not None:
            self._panel.close()
            self._panel = None


@dataclass
class _Progress:
    """How far a run is, and what its latest steps and its latest validation were like.

    Attributes:
        metrics: those of the last finished step.
        scores: the mean scores of the latest steps.
        moments: the latest (step, unix seconds at which it was complete), for the pace.
    """

    step: int = 0
    last_step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: deque[float] = field(default_factory=lambda: deque(maxlen=_SPARKLINE_STEPS))
    moments: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    accuracy: float | None = None

    def add(self, step: int, metrics: Mapping[str, float], completed_s: float) -> None:
        """Adds a finished step; after a recovery that has gone back, the pace begins anew."""
        self.step = step
        self.metrics = metrics
        if SCORE in metrics:
            self.scores.append(metrics[SCORE])
        if self.moments and step <= self.moments[-1][0]:
            self.moments.clear()
        if not self.moments:
            self.moments.append((step - 1, completed_s - metrics.get(STEP_S, 0.0)))
        self.moments.append((step, completed_s))

    def figures(self, accuracy: float | None) -> list[tuple[str, str]]:
        """Returns (name, formatted number) pairs to show: of reward, accuracy, KL, speed and ETA the known ones."""
        metrics = self.metrics
        kl = next((name for name in KL if name in metrics), KL[-1])
        num_tokens = metrics.get("perf/total_num_tokens")
        step_s = metrics.get("perf/time_per_step")
        figures = {
            declared(SCORE).terminal: _number(metrics.get(SCORE)),
            declared(ACCURACY).terminal: _number(accuracy),
            declared(kl).terminal: _number(metrics.get(kl), 5),
            "tokens/s": f"{num_tokens / step_s:,.0f}" if num_tokens is not None and step_s else "",
        }
        if self.moments:
            pace_s = self.pace_s()
            figures |= {"s/step": _number(pace_s, 2), "ETA": clock(pace_s * (self.last_step - self.step))}
        return [(name, text) for name, text in figures.items() if text]

    def pace_s(self) -> float:
        """Returns the mean seconds of the recent steps, with validations and checkpoints."""
        first, start_s = self.moments[0]
        last, end_s = self.moments[-1]
        return (end_s - start_s) / (last - first)


class _LivePanel:
    """The panel below the lines on a terminal: progress, figures, and what each pool works on."""

    def __init__(self, console: Console, title: str, pools: Sequence[str], progress: _Progress) -> None:
        """Shows the panel, which is drawn anew when something changes, at most ten times per second."""
        self._title = title
        self._phases: dict[str, tuple[str, int, int]] = dict.fromkeys(pools, ("", 0, 0))
        self._progress = progress
        self._drawn_s = 0.0
        self._live = Live(console=console, get_renderable=self._draw, auto_refresh=False, transient=True)
        self._live.start(refresh=True)

    def phase(self, pool: str, name: str, done: int, total: int) -> None:
        """Shows what a pool works on."""
        is_new = self._phases.get(pool, ("", 0, 0))[0] != name
        self._phases[pool] = (name, done, total)
        if is_new or time.monotonic() - self._drawn_s >= _REFRESH_S:
            self.refresh()

    def refresh(self) -> None:
        """Draws the panel anew."""
        self._drawn_s = time.monotonic()
        self._live.refresh()

    def close(self) -> None:
        """Removes the panel from the screen."""
        self._live.stop()

    def _draw(self) -> Panel:
        """Draws the panel: progress with a curve of the scores, the latest figures, and a row per pool with its phase.

        A pool that does nothing is shown as idle. A phase whose size is known has a bar.
        """
        run = self._progress
        progress = Table.grid(padding=(0, 1))
        progress.add_row(
            Text(f"step {run.step}/{run.last_step}", style="bold"),
            ProgressBar(total=max(run.last_step, 1), completed=run.step, width=30),
            Text(sparkline(run.scores), style="green"),
        )
        figures = Text("   ").join(
            Text.assemble((f"{name} ", "dim"), (text, "bold")) for name, text in run.figures(run.accuracy)
        )
        pools = Table.grid(padding=(0, 2))
        for pool, (name, done, total) in self._phases.items():
            bar = (ProgressBar(total=total, completed=done, width=20), f"{done}/{total}") if name and total else ()
            pools.add_row(Text(pool, style="cyan"), Text(name or "idle", style="" if name else "dim"), *bar)
        return Panel(Group(progress, figures, pools), title=Text(self._title), title_align="left", border_style="cyan")


class _Console(Console):
    """A rich console that stops printing once the reader of the pipe (e.g. `head`) has closed it; the run goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):  # else Python fails at its end, when it writes the rest
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def _header(plan: str, config: Config, step: int) -> list[str]:
    """Returns the lines that a run begins with: its folder, models, algorithm, phases, batch plan, checkpoints.

    `plan` is the text of the batch plan, `step` the step at which the run starts.
    """
    run = config.run
    critic = f"critic {config.critic.model}" if config.uses_critic else "no critic"
    frozen = [f"reward model {config.reward_model.model}"] if config.reward_model_host else []
    frozen += [f"teacher {folder}" for folder in config.teacher.folders]
    start = "from the initial models" if step == 0 else f"resumed after step {step}"
    return [
        f"run folder  {run.dir}",
        f"in pages    {our_command('viewer', run.dir)}",
        f"models      {', '.join([f'actor {config.actor.model}', critic, *frozen])}",
        f"algorithm   {config.algorithm.adv_estimator}, schedule {run.schedule}, seed {run.seed},"
        f" {config.last_step} steps, {start}",
        *(f"{'' if number else 'phases':<12}{line}" for number, line in enumerate(phase_plan(config))),
        "plan        " + plan.replace("\n", "\n" + 12 * " "),
        f"checkpoints {_price_of_a_loss(config, step)}",
    ]


def _price_of_a_loss(config: Config, step: int) -> str:
    """Returns a sentence for the user: how many steps the run repeats after the loss of a worker group.

    `step` is the one at which the run starts, 0 or that of a checkpoint. Until the first save it goes back there.
    """
    save_freq = config.checkpoint.save_freq
    first_save = step + save_freq - step % save_freq if save_freq > 0 else None
    if first_save is None or first_save >= config.last_step:
        return f"checkpoint.save_freq is {save_freq}: after the loss of a group the run starts again at step {step}"
    return f"every {save_freq} steps (checkpoint.save_freq): the loss of a group costs up to {save_freq} steps"


def _result_rows(summary: Summary) -> list[tuple[str, str, str, str]]:
    """Makes a table of validation accuracies: head, data sources if several, overall; [] without a validation."""
    old = _by_source(summary.validation.before)
    new = _by_source(summary.validation.after)
    if not old and not new:
        return []
    sources = sorted({*old, *new} - {"overall"})
    rows = [("data source", "before", "after", "change")]
    for name in [*(sources if len(sources) > 1 else []), "overall"]:
        change = f"{new[name] - old[name]:+.3f}" if name in old and name in new else ""
        rows.append((name, _number(old.get(name)) or "-", _number(new.get(name)) or "-", change))
    return rows


def _by_source(accuracy: Accuracy | None) -> dict[str, float]:
    return {} if accuracy is None else {**accuracy.by_source, "overall": accuracy.overall}


def sparkline(values: Sequence[float]) -> str:
    """Draws values as a text, one bar character per value, scaled from minimum to maximum; "" for a single value."""
    if len(values) < 2:
        return ""
    low = min(values)
    high = max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def _shortened(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:z.{digits}f}"
