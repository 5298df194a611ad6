"""The records of steps: one line each, in order, with spans and rollouts; and those of a resumed run."""

from __future__ import annotations

import gc
import io
import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.ppo.experience import assemble_experience
from controller.ppo.scores import Scores, Text, objects
from controller.tracking.display import Display, open_display
from controller.tracking.events import Event, Sink
from controller.tracking.recorder import Recorder
from controller.tracking.sinks.step_files import StepFiles
from controller.tracking.sinks.trackers import waking
from controller.tracking.step_record import StepRecord
from controller.validation.result import ValidationResult
from controller.workers.command import CommandReply
from splitppo.batch import Batch
from splitppo.config import Config
from splitppo.run_folder.spans import Span
from splitppo.run_folder.step_file import read_metrics
from splitppo.run_folder.summary import Accuracy, Overlap
from splitppo.run_folder.trace import read_trace
from splitppo.v1.batch_pb2 import Slot
from splitppo.v1.worker_pb2 import CommandResult
from tests.support.call_log import CallLog
from tests.support.fake_services import FakeActor, make_config
from tests.support.scores import make_scores


class Book:
    """A recorder, its files and its display."""

    def __init__(
        self,
        run_dir: Path,
        *,
        at_step: int = 0,
        metrics: dict[str, float] | None = None,
        display: Display | None = None,
        sinks: Sequence[Sink] = (),
        **changes: Any,
    ) -> None:
        self.run_dir = run_dir
        self.config = make_config(run_dir, **changes)
        self.stream = io.StringIO()
        self.client = FakeActor(CallLog())
        files, shown = StepFiles(self.config, run_dir), display or open_display(self.stream)
        self.recorder = Recorder(self.config, [files.receive, shown.receive, *sinks])
        self.recorder.restart_at(at_step, [self.client], metrics)

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.run_dir / "metrics.jsonl")

    def begin(self, step: int) -> StepRecord:
        record = self.recorder.begin(step, epoch=(step - 1) // 3)
        fill(record, self.config)
        return record

    def run_step(self, step: int) -> None:
        self.recorder.close(self.begin(step))
        self.recorder.complete_oldest()


@pytest.fixture
async def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def scores_of(responses: dict[str, float], **columns: Any) -> Scores:
    """Responses of data source "a" with their scores."""
    texts = objects(Text("", response, "t") for response in responses)
    sources = objects("a" for _ in responses)
    return make_scores(np.array(list(responses.values()), np.float32), texts=texts, data_sources=sources, **columns)


def fill(record: StepRecord, config: Config) -> None:
    """Records a step with two responses and both updates, one second apart on their own clock."""
    rollouts = Batch.from_rows(prompts=[[1], [1]], responses=[[5, 6], [5]], values=[[0.0, 0.0], [0.0]])
    record.scores = scores_of({"good": 1.0, "bad": 0.0})
    record.experience = assemble_experience(config.algorithm, rollouts, record.scores, num_samples=2)
    start_s = record.started_s
    record.add_reply("actor", "update_actor", CommandReply(CommandResult(), start_s, start_s + 4.0))
    record.add_reply("critic", "update_critic", CommandReply(CommandResult(), start_s + 3.0, start_s + 5.0))


def validation(accuracy: float) -> ValidationResult:
    scores = scores_of({"held out": 1.0})
    return ValidationResult(Accuracy(overall=accuracy), {"val/accuracy": accuracy}, scores, {"testing": 1.5})


# Lines.


async def test_every_step_leaves_one_line_in_order(book: Book) -> None:
    for step in (1, 2, 3, 4):
        book.run_step(step)
    assert book.steps == [1, 2, 3, 4]
    assert [row["training/epoch"] for row in book.rows] == [0, 0, 0, 1]
    assert book.recorder.last_step == 4


async def test_a_line_is_written_when_the_step_is_completed_not_when_it_is_closed(book: Book) -> None:
    book.recorder.close(book.begin(1))
    assert book.steps == []
    book.recorder.complete_oldest()
    assert book.steps == [1]


async def test_two_open_steps_are_completed_in_their_order(book: Book) -> None:
    first = book.begin(1)
    book.recorder.close(first)
    second = book.begin(2)
    assert book.recorder.current is second
    book.recorder.complete_oldest()
    assert book.steps == [1]
    book.recorder.close(second)
    book.recorder.complete_oldest()
    assert book.steps == [1, 2]


async def test_a_held_line_and_those_after_it_wait_for_the_release(book: Book) -> None:
    book.run_step(1)
    record = book.begin(2)
    metrics = book.recorder.hold(2)
    book.recorder.close(record)
    assert not metrics.done()
    book.recorder.complete_oldest()
    book.run_step(3)
    assert book.steps == [1]
    assert (await metrics)["training/global_step"] == 2.0
    book.recorder.release(2)
    assert book.steps == [1, 2, 3]


async def test_a_line_that_still_waits_is_written_at_the_end(book: Book) -> None:
    record = book.begin(1)
    book.recorder.hold(1)
    book.recorder.close(record)
    book.recorder.complete_oldest()
    book.recorder.release_all()
    assert book.steps == [1]


async def test_bytes_moved_during_a_step_are_the_steps(book: Book) -> None:
    batch = Batch.from_rows(prompts=[[1, 2, 3]])
    await book.client.put_batch(Slot(step=1), batch)
    record = book.begin(1)
    await book.client.put_batch(Slot(step=2), batch)
    book.recorder.close(record)
    await book.client.put_batch(Slot(step=3), batch)
    book.recorder.complete_oldest()
    assert book.rows[0]["rpc/bytes_sent"] == 12.0


# Validation.


async def test_validation_before_the_run_has_a_line_of_its_own(book: Book) -> None:
    book.recorder.add_validation(0, validation(0.25))
    book.run_step(1)
    assert [(row["step"], row.get("val/accuracy")) for row in book.rows] == [(0, 0.25), (1, None)]
    assert book.rows[0]["timing_s/testing"] == 1.5


async def test_validation_after_a_step_joins_the_steps_line(book: Book) -> None:
    book.recorder.close(book.begin(1))
    book.recorder.add_validation(1, validation(0.75))
    book.recorder.complete_oldest()
    assert [(row["step"], row["val/accuracy"], row["timing_s/testing"]) for row in book.rows] == [(1, 0.75, 1.5)]
    assert "validation after step 1: accuracy 0.750" in book.stream.getvalue()


# Spans and overlap.


async def test_the_spans_of_completed_steps_are_in_the_trace(book: Book, tmp_path: Path) -> None:
    book.run_step(1)
    book.begin(2)
    spans = read_trace(tmp_path / "trace.json")
    assert [(span.pool, span.name, span.step) for span in spans] == [
        ("actor", "update_actor", 1),
        ("critic", "update_critic", 1),
    ]


async def test_a_validation_is_in_the_trace_before_the_run_and_after_a_step(book: Book, tmp_path: Path) -> None:
    spans = [Span("actor", "testing", step, float(step), step + 0.5) for step in (0, 1)]
    book.recorder.add_validation(0, replace(validation(0.25), spans=spans[:1]))
    assert read_trace(tmp_path / "trace.json") == spans[:1]
    book.recorder.close(book.begin(1))
    book.recorder.add_validation(1, replace(validation(0.75), spans=spans[1:]))
    book.recorder.complete_oldest()
    assert [span for span in read_trace(tmp_path / "trace.json") if not span.is_call] == spans


async def test_the_restore_of_a_step_survives_the_next_one(tmp_path: Path) -> None:
    Book(tmp_path).run_step(1)
    for start_s in (10.0, 20.0):
        book = Book(tmp_path, at_step=1)
        book.recorder.restart_at(1, [], None, [Span("actor", "load_checkpoint", 1, start_s, start_s + 1.0)])
        book.run_step(2)
    restored = [span for span in read_trace(tmp_path / "trace.json") if span.name == "load_checkpoint"]
    assert [(span.step, span.started_s) for span in restored] == [(1, 10.0), (1, 20.0)]


class Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


@pytest.mark.slow
async def test_what_the_recorder_holds_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    book = Book(tmp_path, display=open_display(Nowhere()))  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        held_bytes = []
        for step in range(1, 401):
            record = book.begin(step)
            for place, span in enumerate(record.spans):  # one step after another, though they take no time here
                record.spans[place] = replace(span, step=step, started_s=2.0 * step, finished_s=2.0 * step + 1.0)
            book.recorder.close(record)
            book.recorder.complete_oldest()
            if step in (300, 400):
                gc.collect()
                # Caches of libraries, such as the widths of rich's lines, fill up to a bound of their own.
                ours = [tracemalloc.Filter(True, name) for name in ("*/controller/*", "<string>")]
                allocated = tracemalloc.take_snapshot().filter_traces(ours).statistics("filename")
                held_bytes.append(sum(statistic.size for statistic in allocated))
    finally:
        tracemalloc.stop()
    assert held_bytes[1] - held_bytes[0] < 100 * 64


async def test_a_run_without_a_critic_has_no_overlap(book: Book) -> None:
    record = book.begin(1)
    record.spans[:] = [span for span in record.spans if span.pool == "actor"]
    book.recorder.close(record)
    book.recorder.complete_oldest()
    assert Overlap.over(book.rows) is None


# Generations.


async def test_rollouts_are_dumped_if_asked(tmp_path: Path) -> None:
    book = Book(tmp_path, tracking__dump_rollouts=True)
    book.run_step(1)
    train = [json.loads(line) for line in (tmp_path / "rollouts" / "train" / "1.jsonl").read_text().splitlines()]
    assert [(row["response"], row["score"]) for row in train] == [("good", 1.0), ("bad", 0.0)]
    Book(tmp_path / "another").run_step(1)
    assert not (tmp_path / "another" / "rollouts").exists()


async def test_the_responses_of_a_validation_are_dumped_unless_told_not_to(tmp_path: Path) -> None:
    Book(tmp_path).recorder.add_validation(0, validation(0.25))
    assert "held out" in (tmp_path / "rollouts" / "val" / "0.jsonl").read_text()
    silent = Book(tmp_path / "silent", evaluation__dump_generations=False)
    silent.recorder.add_validation(0, validation(0.25))
    assert not (tmp_path / "silent" / "rollouts").exists()


async def test_a_validation_alone_joins_the_line_of_its_step(tmp_path: Path) -> None:
    first = Book(tmp_path)
    first.run_step(1)
    first.run_step(2)
    before = first.rows
    alone = Book(
        tmp_path,
        at_step=2,
        metrics={name: value for name, value in before[1].items() if name != "step"},
        evaluation__val_only=True,
        data__val_files="val.jsonl",
    )
    alone.recorder.add_validation(2, validation(0.75))
    assert alone.steps == [1, 2]
    assert alone.rows[0] == before[0]
    assert alone.rows[1] == {
        **before[1],
        **validation(0.75).metrics,
        "timing_s/testing": alone.rows[1]["timing_s/testing"],
    }


async def test_samples_are_shown_every_few_steps(tmp_path: Path) -> None:
    book = Book(tmp_path, tracking__sample_freq=2, tracking__num_samples=1)
    for step in (1, 2, 3):
        book.run_step(step)
    shown = book.stream.getvalue()
    assert shown.count("sample 1 of step 2") == 1
    assert "of step 1 " not in shown
    assert "good" in shown
    assert "bad" not in shown


async def test_who_reads_the_lines_is_told_of_each(tmp_path: Path) -> None:
    book = Book(tmp_path)
    seen: list[list[int]] = []
    files = StepFiles(book.config, tmp_path)
    recorder = Recorder(book.config, [files.receive, waking(lambda: seen.append(book.steps))])
    recorder.restart_at(0, [], None)
    recorder.add_validation(0, validation(0.25))
    assert seen == [[], [0]]


# Events.


async def test_what_happens_is_told_once_and_in_its_order(tmp_path: Path) -> None:
    told: list[Event] = []
    book = Book(tmp_path, sinks=[told.append])
    book.recorder.add_validation(0, validation(0.25))
    record = book.begin(1)
    book.recorder.hold(1)
    book.recorder.close(record)
    book.recorder.complete_oldest()
    book.run_step(2)
    book.recorder.release(1)
    book.recorder.add_spans([])
    assert [type(event).__name__ for event in told] == [
        *("Restored", "Validated", "StepBegun", "StepDone", "StepBegun", "StepDone"),
        *("CheckpointCommitted", "LineComplete", "LineComplete", "Worked"),
    ]


async def test_a_file_that_cannot_be_written_is_an_error_of_the_step(book: Book, tmp_path: Path) -> None:
    record = book.begin(1)
    book.recorder.close(record)
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        book.recorder.complete_oldest()
    assert book.recorder.last_step == 0


# Going on with a run.


async def test_a_resumed_run_cuts_every_record_back_and_goes_on(tmp_path: Path) -> None:
    first = Book(tmp_path, tracking__dump_rollouts=True)
    for step in (1, 2, 3):
        first.run_step(step)
    again = Book(tmp_path, at_step=1, tracking__dump_rollouts=True)
    assert again.steps == [1]
    assert {span.step for span in read_trace(tmp_path / "trace.json")} == {1}
    assert [file.stem for file in (tmp_path / "rollouts" / "train").iterdir()] == ["1"]
    again.run_step(2)
    assert again.steps == [1, 2]


async def test_a_line_that_a_kill_prevented_comes_from_the_checkpoint(tmp_path: Path) -> None:
    Book(tmp_path).run_step(1)
    again = Book(tmp_path, at_step=2, metrics={"critic/score/mean": 0.5})
    assert again.rows[1] == {"step": 2, "critic/score/mean": 0.5}
    assert Book(tmp_path, at_step=2, metrics={"critic/score/mean": 0.5}).steps == [1, 2]


async def test_a_run_that_starts_afresh_forgets_what_was_there(tmp_path: Path) -> None:
    first = Book(tmp_path)
    first.recorder.add_validation(0, validation(0.25))
    first.run_step(1)
    assert Book(tmp_path).steps == []
    assert read_trace(tmp_path / "trace.json") == []


async def test_recovery_drops_open_steps_and_what_came_after_the_restored_one(book: Book) -> None:
    book.run_step(1)
    record = book.begin(2)
    record.spans[:] = [Span("actor", "update_actor", 2, 0.0, 1.0), Span("critic", "update_critic", 2, 0.0, 1.0)]
    book.recorder.close(record)
    book.recorder.complete_oldest()
    book.begin(3)
    book.recorder.restart_at(1, [book.client], None)
    assert book.recorder.last_step == 1
    assert book.steps == [1]
    book.run_step(2)
    assert book.steps == [1, 2]
    before, after = book.rows
    assert (before["recovery/num_restarts"], before["recovery/num_repeated_steps"]) == (0, 0)
    assert (after["recovery/num_restarts"], after["recovery/num_repeated_steps"]) == (1, 1)
