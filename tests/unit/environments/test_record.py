"""The record of conversations: what is found again, what a crash leaves, and which files go."""

from __future__ import annotations

import hashlib
import json
import os
import resource
from dataclasses import asdict
from pathlib import Path

import pytest

from environments.messages import Answer, NoRoom, Room, Said
from environments.record import Record, RecordedStep
from splitppo.config import ConfigError
from tests.support.disks import fill, mounted

NAMES = ("1.77", "1.78")
TURNS = (Said("hit", "stop"), Said("stand", "length"), None)
ANSWERS = (
    Answer(messages=({"role": "user", "content": "a 7 \u2603"},), privileged={"hidden": "7 \u2603"}),
    Answer(
        messages=({"role": "tool", "name": "hit", "tool_call_id": "c", "content": "9"},),
        reward=0.1 + 0.2,
        num_calls=3,
        num_bad_calls=1,
        num_tool_errors=1,
        num_timeouts=1,
        text="I hit",
        calls=({"id": "c", "type": "function", "function": {"name": "hit", "arguments": {"k": [1, None]}}},),
        timed_out_calls=(2,),
    ),
    Answer(messages=({"role": "user", "content": "on"},), notes={"effort": 1e-3}),
    Answer(is_over=True, final={"score": 1.5, "won": True}, lost="it broke"),
)


def play(step: RecordedStep, place: int = 0, answers: tuple[Answer, ...] = ANSWERS) -> list[bool]:
    """Holds the conversation; returns for each answer whether the record had it."""
    replay, found = step.replay(place), []
    for number, answer in enumerate(answers):
        known = replay.find(TURNS[:number])
        assert known in (None, answer)
        found.append(known is not None)
        if known is None:
            replay.add(answers[: number + 1])
    return found


def test_what_was_recorded_is_found_again_as_it_was(tmp_path: Path) -> None:
    record = Record(tmp_path / "episodes")
    assert play(record.at_step(3, NAMES)) == [False] * 4
    assert play(Record(tmp_path / "episodes").at_step(3, NAMES)) == [True] * 4
    assert len((tmp_path / "episodes" / "3.jsonl").read_text().splitlines()) == 1


def test_what_was_recorded_before_there_were_contexts_is_found_again(tmp_path: Path) -> None:
    """Its digests are of texts alone."""
    digests = [sha256(None)]
    for turn in TURNS:
        digests.append(sha256([digests[-1], turn and [turn.text, turn.ended_by]]))
    new = ("begins_context", "tools", "after_turn", "limits")
    answers = [{name: value for name, value in asdict(one).items() if name not in new} for one in ANSWERS]
    line = {"response": NAMES[0], "turns": digests, "answers": answers}
    (tmp_path / "3.jsonl").write_text(json.dumps({**line, "sha256": sha256(line)}) + "\n")
    assert play(Record(tmp_path).at_step(3, NAMES)) == [True] * 4


def sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def test_samples_of_a_prompt_and_steps_are_not_confused(tmp_path: Path) -> None:
    record = Record(tmp_path)
    step = record.at_step(3, NAMES)
    play(step)
    assert step.replay(1).find(()) is None
    assert record.at_step(4, NAMES).replay(0).find(()) is None
    assert record.at_step(3, ("3.77",)).replay(0).find(()) is None


def test_another_turn_is_answered_anew_and_the_turns_before_it_are_not(tmp_path: Path) -> None:
    step = Record(tmp_path).at_step(3, NAMES)
    play(step)
    assert step.replay(0).find(TURNS[:1]) == ANSWERS[1]
    with_room = (Said("stand", "length", Room(3, 4)), Said("stand", "length", num_tokens=2))
    for other in (Said("stand", "stop"), Said("stan", "length"), *with_room, NoRoom(Room(3, 4), 5), None):
        assert step.replay(0).find((TURNS[0], other)) is None
    assert step.replay(0).find((TURNS[1], TURNS[0])) is None
    replay, over = step.replay(0), Answer(is_over=True, reward=2.0)
    assert replay.find((TURNS[0], None)) is None
    replay.add((*ANSWERS[:2], over))
    again = Record(tmp_path).at_step(3, NAMES)
    assert again.replay(0).find((TURNS[0], None)) == over
    assert again.replay(0).find(TURNS) == ANSWERS[3]


def test_a_conversation_that_is_not_over_is_kept_for_the_next_attempt_and_not_written(tmp_path: Path) -> None:
    step = Record(tmp_path).at_step(3, NAMES)
    assert play(step, answers=ANSWERS[:2]) == [False, False]
    assert play(step, answers=ANSWERS) == [True, True, False, False]
    assert play(Record(tmp_path).at_step(3, NAMES)) == [True] * 4


def test_without_names_nothing_is_written(tmp_path: Path) -> None:
    record = Record(tmp_path / "episodes")
    step = record.at_step(3, ())
    assert play(step) == [False] * 4
    assert play(step) == [True] * 4
    assert play(step, 1) == [False] * 4
    step.sync()
    assert not (tmp_path / "episodes").exists()
    assert play(record.at_step(3, ())) == [False] * 4


def test_a_last_line_that_a_crash_has_cut_off_is_forgotten(tmp_path: Path) -> None:
    record, file = Record(tmp_path), tmp_path / "3.jsonl"
    step = record.at_step(3, NAMES)
    play(step)
    whole = file.read_bytes()
    play(step, 1)
    file.write_bytes(file.read_bytes()[:-9])
    step = record.at_step(3, NAMES)
    assert file.read_bytes() == whole
    assert play(step, 1) == [False] * 4
    assert play(record.at_step(3, NAMES), 1) == [True] * 4
    file.write_bytes(whole[:5])
    record.at_step(3, NAMES)
    assert file.read_bytes() == b""


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"3",
        b"\xff",
        b"{}",
        b'{"response": "1.1", "turns": ["a"], "answers": []}',
        b'{"response": "1.1", "turns": ["a"], "answers": [3]}',
        b'{"response": "1.1", "turns": ["a"], "answers": [{"other": 3}]}',
    ],
)
def test_another_line_that_is_damaged_is_one_sentence(tmp_path: Path, line: bytes) -> None:
    record, file = Record(tmp_path), tmp_path / "3.jsonl"
    play(record.at_step(3, NAMES))
    whole = file.read_bytes()
    file.write_bytes(whole + line + b"\n" + whole)
    with pytest.raises(ConfigError, match=r"3\.jsonl, line 2: expected a recorded conversation.*remove the file") as e:
        record.at_step(3, NAMES)
    assert "\n" not in str(e.value)


def test_an_edited_line_is_damaged(tmp_path: Path) -> None:
    record, file = Record(tmp_path), tmp_path / "3.jsonl"
    play(record.at_step(3, NAMES))
    file.write_text(file.read_text().replace("1.5", "2.5"))
    with pytest.raises(ConfigError, match=r"3\.jsonl, line 1: expected a recorded conversation"):
        record.at_step(3, NAMES)


def test_a_conversation_about_something_else_is_held_anew(tmp_path: Path) -> None:
    step = Record(tmp_path).at_step(3, NAMES)
    step.replay(0, {"truth": 3}).add(ANSWERS[:1])
    assert step.replay(0, {"truth": 3}).find(()) == ANSWERS[0]
    assert step.replay(0, {"truth": 4}).find(()) is None


def test_the_disk_has_the_record_before_sync_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    step = Record(tmp_path).at_step(3, NAMES)
    step.sync()
    assert synced == []
    play(step)
    step.sync()
    assert synced == [(tmp_path / "3.jsonl").stat().st_ino, tmp_path.stat().st_ino]


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        step = Record(disk).at_step(3, NAMES)
        fill(disk)
        with pytest.raises(OSError, match="No space left on device") as error:
            play(step)
        assert error.value.filename == str(disk / "3.jsonl")


def test_a_line_that_could_not_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    record, file = Record(tmp_path), tmp_path / "3.jsonl"
    step = record.at_step(3, NAMES)
    play(step)
    whole, limits = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            play(step, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == whole
    assert play(record.at_step(3, NAMES), 1) == [False] * 4
    assert play(record.at_step(3, NAMES), 1) == [True] * 4


def test_a_new_conversation_makes_the_record_of_later_steps_worthless(tmp_path: Path) -> None:
    record = Record(tmp_path)
    for number in (2, 3, 10):
        play(record.at_step(number, NAMES))
    (tmp_path / "notes.jsonl").touch()
    assert play(record.at_step(2, NAMES)) == [True] * 4
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["10", "2", "3", "notes"]
    play(record.at_step(3, NAMES), 1)
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["2", "3", "notes"]


def test_files_that_no_checkpoint_needs_are_removed(tmp_path: Path) -> None:
    record = Record(tmp_path)
    for number in (9, 10, 11):
        play(record.at_step(number, NAMES))
    record.remove(up_to=9)
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["10", "11"]
    record.remove(after=10)
    assert [file.stem for file in tmp_path.iterdir()] == ["10"]
    assert json.loads((tmp_path / "10.jsonl").read_text())["response"] == "1.77"
