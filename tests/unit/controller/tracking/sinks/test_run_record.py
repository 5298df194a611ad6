"""The record of a start: what it writes, and that nothing is written before it is sure that the run goes on."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from controller.tracking.events import (
    Ended,
    Event,
    GroupLost,
    GroupsUp,
    Progressed,
    RolloutRestarted,
    Started,
    StepBegun,
)
from controller.tracking.recorder import Recorder
from controller.tracking.sinks.run_record import RunRecord
from controller.tracking.sinks.step_files import StepFiles
from controller.validation.result import ValidationResult
from splitppo.config import Config
from splitppo.rpc.errors import Place
from splitppo.run_folder.events import append_event
from splitppo.run_folder.live import LiveFile
from splitppo.run_folder.processes import Group, Rank
from splitppo.run_folder.spans import Span
from splitppo.run_folder.summary import Accuracy
from splitppo.v1 import worker_pb2
from tests.support.recorded import byte_tokenizer, random_experience, record_config

BACKEND = byte_tokenizer()


class Run:
    """A recorder with a record of its own, in a folder; `end` waits until all is written."""

    def __init__(self, config: Config, *, epoch: int = 1) -> None:
        self.config, self.folder = config, config.run.dir
        self.folder.mkdir(parents=True, exist_ok=True)
        self.record = RunRecord(config, self.folder, run_id="run", epoch=epoch)
        self.recorder = Recorder(config, [StepFiles(config, self.folder).receive, self.record.receive])

    def start(self, step: int = 0) -> None:
        self.tell(Started(BACKEND, 9, step, ["actor.lr: 1 in the folder, 2 now"]))
        self.recorder.restart_at(step, [], None)

    def step(self, step: int) -> None:
        record = self.recorder.begin(step)
        record.experience, record.scores = random_experience(self.config, [3, 4], seed=step)
        record.spans.append(Span("actor", "gen", step, 1.0 * step, 1.5 + step))
        self.recorder.close(record)
        self.recorder.complete_oldest()

    def end(self) -> list[dict[str, Any]]:
        self.tell(Ended("completed", 0))
        self.record.close()
        return self.events

    def tell(self, event: Event) -> None:
        self.recorder.emit(event)

    def live(self) -> dict[str, Any]:
        """The content of live.json, which is written at once."""
        self.record._live.file.write_if_due(at_once=True)
        return live_content(self.folder)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]

    @property
    def files(self) -> list[str]:
        return sorted(str(file.relative_to(self.folder / "rollouts")) for file in self.folder.rglob("*.parquet"))


def client(role: str, instance_id: str) -> Any:
    group = Group(role, "here:1", instance_id, [Rank(0, 7, "here")])
    return SimpleNamespace(role=role, worker=SimpleNamespace(instance_id=instance_id), group=group)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(record_config(tmp_path / "run"))


def test_a_start_that_is_refused_writes_nothing(run: Run) -> None:
    for event in (StepBegun(1), GroupLost(Place(role="actor"), "gone", 1.0), Ended("bad_input", 2)):
        run.record.receive(event)
    run.record.close()
    assert list(run.folder.iterdir()) == []


async def test_every_step_and_validation_has_a_file_and_an_event(run: Run) -> None:
    run.start()
    _, scores = random_experience(run.config, [1, 1])
    lengths = random_experience(run.config, [1, 1])[0].batch["responses"].lengths
    validation = ValidationResult(
        Accuracy(overall=0.5), {"val/accuracy": 0.5}, scores, {"testing": 2.0}, lengths=lengths
    )
    run.recorder.add_validation(0, validation)
    run.step(1)
    run.recorder.begin(2)
    events = run.end()
    assert run.files == ["train/1.parquet", "val/0.parquet"]
    assert [event["kind"] for event in events] == ["start", "validation", "step", "end"]
    assert {event["epoch"] for event in events} == {1}
    assert events[0]["changes"] == ["actor.lr: 1 in the folder, 2 now"]
    assert (events[1]["accuracy"], events[1]["seconds"]) == (0.5, 2.0)
    assert events[2]["step"] == 1
    assert events[2]["score"] == pytest.approx(random_experience(run.config, [3, 4], seed=1)[1].scores.mean())
    assert (events[3]["step"], events[3]["reason"], events[3]["exit_status"]) == (2, "completed", 0)


async def test_a_way_back_removes_files_and_keeps_the_evidence(run: Run) -> None:
    run.start()
    run.tell(GroupsUp([client("actor", "a"), client("critic", "c")], 0))
    for step in (1, 2, 3):
        run.step(step)
    run.recorder.begin(4).spans.append(Span("critic", "values", 4, 4.0, 4.5))
    place = Place(role="critic", rank=1, step=4, method="Update", phase="update")
    run.tell(GroupLost(place, "it died; by the kernel", 2.5))
    live = run.live()
    assert live["phase"] == "recovering"
    assert (live["pools"]["critic"]["state"], live["pools"]["critic"]["method"]) == ("lost", "")
    run.tell(GroupsUp([client("actor", "a"), client("critic", "d")], 1))
    run.recorder.restart_at(1, [], None)
    run.step(2)
    events = {event["kind"]: event for event in run.end()}
    assert run.files == ["train/1.parquet", "train/2.parquet"]
    lost = {name: events["group_lost"][name] for name in ("role", "rank", "method", "phase", "cause", "step")}
    assert lost == {
        "role": "critic",
        "rank": 1,
        "method": "Update",
        "phase": "update",
        "step": 4,
        "cause": "it died; by the kernel",
    }
    recovery = {name: events["recovery"][name] for name in ("from_step", "to_step", "restarted", "kept", "pause_s")}
    assert recovery == {"from_step": 4, "to_step": 1, "restarted": ["critic"], "kept": ["actor"], "pause_s": 2.5}
    assert (events["recovered"]["repeated_steps"], events["recovered"]["to_step"]) == (2, 1)
    assert events["recovered"]["seconds"] >= 0.0
    assert [span[:3] for span in events["cut"]["spans"]] == [
        ["actor", "gen", 2],
        ["actor", "gen", 3],
        ["critic", "values", 4],
    ]
    assert [event["step"] for event in run.events if event["kind"] == "step"] == [1, 2, 3, 2]


async def test_a_run_whose_rollout_group_is_there_again_trains_on(run: Run) -> None:
    run.start()
    run.step(1)
    run.tell(GroupLost(Place(role="rollout", rank=0), "it died", 0.5))
    run.tell(RolloutRestarted("it died"))
    assert run.live()["phase"] == "training"


async def test_the_next_start_goes_on_with_the_events_and_cuts_files_back(run: Run) -> None:
    run.start()
    for step in (1, 2):
        run.step(step)
    run.end()
    again = Run(run.config, epoch=2)
    again.start(step=1)
    assert [event["epoch"] for event in again.end()] == [1] * 4 + [2] * 3
    assert again.files == ["train/1.parquet"]
    assert [event["kind"] for event in again.events[4:]] == ["start", "cut", "end"]


async def test_without_rollouts_there_are_events_all_the_same(tmp_path: Path) -> None:
    run = Run(record_config(tmp_path / "run", tracking__rollouts__enable=False))
    run.start()
    run.step(1)
    assert [event["kind"] for event in run.end()] == ["start", "step", "end"]
    assert run.files == []


async def test_a_folder_that_cannot_be_written_costs_the_rollouts_alone(run: Run) -> None:
    (run.folder / "rollouts").write_text("a file where the folder should be")
    run.start()
    for step in (1, 2):
        run.step(step)
    kinds = [event["kind"] for event in run.end()]
    assert kinds.count("record_failed") == 2
    assert kinds[-1] == "end"
    assert run.recorder.last_step == 2
    failed = next(event for event in run.events if event["kind"] == "record_failed")
    assert failed["why"].startswith("step 1: ")


async def test_a_checkpoint_has_an_event_with_its_seconds(run: Run) -> None:
    run.start()
    record = run.recorder.begin(1)
    record.experience, record.scores = random_experience(run.config, [3, 4])
    run.recorder.close(record)
    run.recorder.hold(1)
    run.recorder.complete_oldest()
    run.recorder.release(1)
    checkpoint = next(event for event in run.end() if event["kind"] == "checkpoint")
    assert (checkpoint["step"], checkpoint["seconds"] >= 0.0) == (1, True)


async def test_a_rollout_group_that_comes_back_repeats_no_step(run: Run) -> None:
    run.start()
    run.tell(GroupLost(Place(role="rollout"), "it died", 1.0))
    run.tell(GroupsUp([client("rollout", "r")]))
    run.tell(RolloutRestarted("it died"))
    kinds = [event["kind"] for event in run.end()]
    assert kinds == ["start", "group_lost", "group_up", "rollout_restart", "end"]


def test_a_line_that_a_full_disk_has_cut_off_spoils_no_other_line(tmp_path: Path) -> None:
    append_event(tmp_path, {"kind": "start"})
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"kind": "st')
    append_event(tmp_path, {"kind": "end"})
    assert (tmp_path / "events.jsonl").read_bytes() == b'{"kind": "start"}\n{"kind": "st\n{"kind": "end"}\n'


async def test_the_parquet_file_of_a_step_is_whole(run: Run) -> None:
    run.start()
    run.step(1)
    run.end()
    table = pq.read_table(run.folder / "rollouts/train/1.parquet")
    assert table["response"].to_pylist() == [BACKEND.decode(ids) for ids in table["ids"].to_pylist()]
    assert [file.name for file in (run.folder / "rollouts/train").iterdir()] == ["1.parquet"]


def live_content(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "live.json").read_text())
    return content


def test_live_says_what_each_group_does_and_since_when(tmp_path: Path) -> None:
    live = LiveFile(tmp_path, run_id="r", epoch=3)
    live.set(step=4, total_steps=9, phase="training")
    live.set_pool("actor", method="Generate", phase="generate", done=1, total=8)
    live.write_if_due(at_once=True)
    first = live_content(tmp_path)
    live.set_pool("actor", method="Generate", phase="generate", done=2, total=8)
    live.set_pool("critic", state="idle", queue=0, committed_step=3)
    live.write_if_due(at_once=True)
    second = live_content(tmp_path)
    assert second["pid"] == os.getpid()
    assert {second[name] for name in ("run_id", "epoch", "step", "total_steps", "phase")} == {"r", 3, 4, 9, "training"}
    assert second["pools"]["actor"]["done"] == 2
    assert second["pools"]["actor"]["since_s"] == first["pools"]["actor"]["since_s"]
    assert second["pools"]["critic"]["committed_step"] == 3
    live.end()
    live.write_if_due(at_once=True)
    assert live_content(tmp_path)["phase"] == "ended"
    assert live_content(tmp_path)["pools"]["actor"]["method"] == ""


def test_live_is_not_written_again_without_a_change(tmp_path: Path) -> None:
    live = LiveFile(tmp_path, run_id="r", epoch=3)
    live.set(step=1)
    live.write_if_due()
    (tmp_path / "live.json").unlink()
    live.write_if_due()
    live.set(step=2)
    live.write_if_due()  # too soon after the last one
    assert not (tmp_path / "live.json").exists()


def test_a_live_file_that_cannot_be_written_is_no_matter(tmp_path: Path) -> None:
    LiveFile(tmp_path / "gone", run_id="r", epoch=3).write_if_due(at_once=True)


class Told:
    """A client whose group answers with a status, or does not answer."""

    role = "critic"

    def __init__(self, *answers: worker_pb2.GetStatusResponse | BaseException) -> None:
        self._answers = iter(answers)
        self.was_asked = asyncio.Event()

    async def get_status(self) -> worker_pb2.GetStatusResponse:
        self.was_asked.set()
        answer = next(self._answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.mark.parametrize("error", [None, OSError("gone"), asyncio.CancelledError()])
async def test_the_status_of_each_group_is_in_the_live_file(run: Run, error: BaseException | None) -> None:
    """A call is cancelled if its channel is closed; the polling goes on."""
    run.tell(Progressed("critic", "Update", worker_pb2.Progress(phase="update", done=1, total=2)))
    status = worker_pb2.GetStatusResponse(state=worker_pb2.WORKER_STATE_IDLE, queued_commands=2, committed_step=5)
    told: Any = Told(error or status)
    polling = asyncio.create_task(run.record.poll(lambda: [told]))
    await told.was_asked.wait()
    for _ in range(10):  # until what was told has reached the record
        await asyncio.sleep(0)
    assert not polling.done()
    polling.cancel()
    critic = run.live()["pools"]["critic"]
    assert (critic["state"], critic["queue"]) == ((None, None) if error else ("idle", 2))
    assert critic["method"] == ("Update" if error else "")
