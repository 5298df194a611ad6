"""The output for the user, on a terminal and in a file."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from controller.tracking.display import Display, open_display, sparkline
from controller.tracking.events import LineComplete, StepBegun, Worked
from splitppo.config import Config
from splitppo.config.batch_plan import batch_plan
from splitppo.config.load import validate
from splitppo.config.subsections.phases import Phase
from splitppo.our_commands import our_command
from splitppo.printable import printable
from splitppo.run_folder.summary import Accuracy, Summary, ThisStart, Validation

SAMPLE = {
    "data_source": "sort_letters",
    "prompt": "sort cadb",
    "response": "#### abcd [bold]\x1b[31m",
    "ground_truth": "abcd",
    "score": 1.0,
}
SUMMARY = Summary(
    global_step=3,
    validation=Validation(
        before=Accuracy(overall=0.25, by_source={"a": 0.2, "b": 0.3}),
        after=Accuracy(overall=0.95, by_source={"a": 0.9, "b": 1.0}),
    ),
    this_start=ThisStart(resumed_at_step=0, wall_s=3723.0),
    train_s=75.0,
    tokens=123_456,
    exit_reason="completed",
)


def config(**checkpoint: int) -> Config:
    tree = {
        "run": {"dir": "runs/x", "name": "quickstart", "total_steps": 30, "stop_after_step": 3},
        "data": {"train_files": "train.parquet", "train_batch_size": 64, "max_prompt_length": 8},
        "rollout": {"n": 4},
        "actor": {"model": "models/tiny"},
        "checkpoint": checkpoint,
    }
    return validate(tree, "test")


def drive(display: Display) -> None:
    display.start(batch_plan(config()), config())
    display.validation(0, Accuracy(overall=0.25, by_source={"a": 0.2, "b": 0.3}))
    speed = {"perf/total_num_tokens": 8643.2, "perf/time_per_step": 2.0}
    for step in (1, 2, 3):
        display.phase("actor", "Generate", 5, 11)
        validated = {"val/accuracy": 0.75} if step == 3 else {}
        display.step(step, {"critic/score/mean": 0.3 * step, **speed, "actor/ppo_kl": 0.00123, **validated}, 2.0 * step)
    display.samples(3, [SAMPLE])
    display.line("a line of the log")
    display.phase("actor", "Update", 1, 8)
    display.phase("critic", "Update", 2, 8)


def test_plain_output_tells_the_whole_run_in_lines() -> None:
    stream = io.StringIO()
    display = open_display(stream)
    drive(display)
    display.finish(SUMMARY)
    display.close()
    text = stream.getvalue()
    assert "step: 64 prompts x 4 samples = 256 responses" in text
    assert "models      actor models/tiny, critic models/tiny" in text
    assert "validation after step 0: accuracy 0.250  a 0.200  b 0.300\n" in text
    assert "step 1/3  reward 0.300  ppo_kl 0.00123  tokens/s 4,322  s/step " in text
    assert "step 3/3  reward 0.900  accuracy 0.750  ppo_kl 0.00123  tokens/s 4,322  s/step " in text
    assert "ETA 0:00\n" in text
    assert "sample 1 of step 3 (sort_letters), score 1\n  prompt: sort cadb\n" in text
    assert "  ground truth: abcd\n" in text
    assert "\na line of the log\n" in text
    assert "overall                      0.250     0.950    +0.700\n" in text
    assert f"in pages    {our_command('viewer', 'runs/x')}\n" in text
    assert f"see it in the browser: {our_command('viewer', 'runs/x')}\n" in text
    assert text.endswith("completed after step 3 in 1:02:03 (1:15 in steps, 123,456 tokens trained)\n")
    assert "\x1b" not in text


def test_the_display_shows_the_events_of_a_run_that_are_for_the_screen() -> None:
    stream = io.StringIO()
    display = open_display(stream)
    display.start(batch_plan(config()), config())
    display.receive(StepBegun(1))
    display.receive(LineComplete(1, {"critic/score/mean": 0.5}, [SAMPLE], completed_s=1.0))
    display.receive(Worked([]))
    text = stream.getvalue()
    assert text.index("step 1/3  reward 0.500") < text.index("sample 1 of step 1 (sort_letters), score 1")


def test_the_live_panel_shows_both_pools_and_the_figures() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system=None, width=120, height=40)
    display = Display(console, has_panel=True)
    drive(display)
    panel = stream.getvalue()[stream.getvalue().rindex("╭─ SplitPPO") :]
    for text in ("quickstart · gather", "step 3/3", "reward 0.900", "accuracy 0.250", "tokens/s 4,322", "▁▅█"):
        assert text in panel
    actor, critic = (next(line for line in panel.splitlines() if pool in line) for pool in ("actor", "critic"))
    assert "Update" in actor
    assert "1/8" in actor
    assert "2/8" in critic
    display.finish(SUMMARY)
    display.close()
    end = stream.getvalue()[stream.getvalue().rindex("data source") :]
    assert "+0.700" in end
    assert "completed after step 3" in end


def test_what_a_model_writes_cannot_steer_the_terminal() -> None:
    stream = io.StringIO()
    display = Display(Console(file=stream, force_terminal=True, color_system=None, width=120), has_panel=True)
    display.samples(1, [SAMPLE])
    assert "#### abcd [bold]\\x1b[31m" in stream.getvalue()
    assert "\x1b[31m" not in stream.getvalue()
    assert printable("a\tb\rc\x07\n\u202ed é 数") == "a\\tb\\rc\\x07\n\\u202ed é 数"


def test_long_generations_lose_their_middle() -> None:
    stream = io.StringIO()
    open_display(stream).samples(1, [SAMPLE | {"response": "a" * 5000 + "end", "score": 0.0, "ground_truth": None}])
    assert "characters ...]" in stream.getvalue()
    assert "end\n" in stream.getvalue()
    assert len(stream.getvalue()) < 2000


def test_a_run_without_validation_and_with_unknown_metrics_is_shown() -> None:
    stream = io.StringIO()
    display = open_display(stream)
    display.start(batch_plan(config()), config(), step=2)
    display.step(3, {}, 1.0)
    display.finish(SUMMARY.model_copy(update={"validation": Validation(), "exit_reason": "interrupted"}))
    assert "resumed after step 2" in stream.getvalue()
    assert "step 3/3  s/step" in stream.getvalue()
    assert "interrupted after step 3" in stream.getvalue()
    assert "before" not in stream.getvalue()


@pytest.mark.parametrize(
    ("save_freq", "step", "line"),
    [
        (-1, 0, "checkpoint.save_freq is -1: after the loss of a group the run starts again at step 0"),
        (-1, 1, "checkpoint.save_freq is -1: after the loss of a group the run starts again at step 1"),
        (3, 0, "checkpoint.save_freq is 3: after the loss of a group the run starts again at step 0"),  # of 3 steps
        (2, 0, "every 2 steps (checkpoint.save_freq): the loss of a group costs up to 2 steps"),
        (2, 2, "checkpoint.save_freq is 2: after the loss of a group the run starts again at step 2"),
    ],
)
def test_the_start_says_what_the_loss_of_a_group_would_cost(save_freq: int, step: int, line: str) -> None:
    stream, run = io.StringIO(), config(save_freq=save_freq)
    open_display(stream).start(batch_plan(run), run, step=step)
    assert f"\ncheckpoints {line}\n" in stream.getvalue()


def test_the_start_says_what_holds_in_which_steps() -> None:
    stream, run = io.StringIO(), config()
    phases = (Phase(from_step=2, entropy_coeff=0.5),)
    run = run.model_copy(update={"algorithm": run.algorithm.model_copy(update={"phases": phases})})
    open_display(stream).start(batch_plan(run), run)
    first, rest = "loss vanilla, entropy_coeff 0", "loss vanilla, entropy_coeff 0.5"
    assert f"\nphases      steps 1 to 1: {first}\n            steps 2 to 3: {rest}\nplan  " in stream.getvalue()


def test_a_sparkline_spans_its_own_range() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1]) == "▁▁"
    assert sparkline([1]) == ""


def test_the_pace_is_that_of_the_steps_not_of_the_lines_about_them() -> None:
    stream = io.StringIO()
    display = open_display(stream)
    display.start(batch_plan(config()), config())
    for step, completed_s in ((1, 104.0), (2, 108.0)):  # shown at once, after a checkpoint
        display.step(step, {"timing_s/step": 4.0}, completed_s)
    assert [line.split("  ")[1:] for line in stream.getvalue().splitlines()[-2:]] == [
        ["s/step 4.00", "ETA 0:08"],
        ["s/step 4.00", "ETA 0:04"],
    ]


def test_a_recovery_that_goes_back_starts_the_pace_afresh() -> None:
    stream = io.StringIO()
    display = open_display(stream)
    display.start(batch_plan(config()), config())
    for step in (*range(1, 40), 21, 22):  # the pace is that of the last 20 moments
        display.step(step, {}, 1.0)
    assert "s/step -" not in stream.getvalue()
    assert stream.getvalue().count("\nstep ") == 41


def test_a_mistake_before_the_first_step_is_followed_by_no_result() -> None:
    stream = io.StringIO()
    start = ThisStart(resumed_at_step=0, wall_s=0.1)
    mistake = Summary(global_step=0, train_s=0.0, tokens=0, exit_reason="bad_input", this_start=start)
    open_display(stream).finish(mistake)
    assert stream.getvalue() == ""


def test_a_resumed_run_says_which_figures_are_of_this_start() -> None:
    stream = io.StringIO()
    start = ThisStart(resumed_at_step=2, wall_s=60.0)
    open_display(stream).finish(SUMMARY.model_copy(update={"this_start": start}))
    assert stream.getvalue().endswith(
        "completed after step 3 in 1:00 from step 2 on (in all 1:15 in steps, 123,456 tokens trained)\n"
    )


def test_a_small_negative_number_is_zero_without_a_sign() -> None:
    stream = io.StringIO()
    display = open_display(stream)
    display.start(batch_plan(config()), config())
    display.step(1, {"actor/ppo_kl": -1e-9}, 1.0)
    assert "  ppo_kl 0.00000  " in stream.getvalue()


def test_a_run_goes_on_if_the_reader_of_its_output_goes_away() -> None:
    """In a process of its own, whose output is a pipe without a reader."""
    code = (
        "from controller.tracking.display import open_display\n"
        "import sys\n"
        "display = open_display()\n"
        "for number in range(3):\n"
        "    display.line(f'line {number}')\n"
        "sys.stderr.write('still here')\n"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "still here")
