"""Environments that are not deterministic: what is asked again, what is not, and how a run finds out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.conversations.checks import must_record
from controller.data.prompt_files import PromptRow
from environments.messages import Answer
from environments.pool import EnvironmentProcesses, Episode
from environments.record import Record, RecordedStep
from splitppo.config import ConfigError
from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.multi_turn import EnvironmentConfig, MultiTurnConfig
from tests.support.user_tools import call, contents, processes, write

OWN = '''
import os, time
from environments.chat import Step

class Dice:
    """Tells time and process; notes each beginning and each roll in a file."""

    def __init__(self, file):
        self.file = file

    def _tell(self, what):
        with open(self.file, "a") as file:
            file.write(what + " ")
        return f"{what} {time.perf_counter_ns()} {os.getpid()}"

    def reset(self):
        return self._tell("began")

    def roll(self, die: str) -> Step:
        """Rolls.

        Args:
            die: which one.
        """
        if die == "kill" and not os.path.exists(self.file + ".killed"):
            open(self.file + ".killed", "w").close()
            os.kill(os.getpid(), 9)
        return Step(self._tell(die), reward=time.perf_counter_ns() / 1e20, info={"pid": os.getpid()})

    def get_reward(self):
        return {"score": time.perf_counter_ns() / 1e20, "at": self._tell("ended")}

class Paid:
    def reset(self): ...
    def step(self, text): return Step("same", reward=time.perf_counter_ns() / 1e20)

class Fair(Paid):
    def reset(self, *, seed): return str(seed)
    def step(self, text): return "same"
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path, OWN)


def dice(file: Path) -> dict[str, Any]:
    return {"dice": {"path": str(file), "name": "Dice", "kwargs": {"file": str(file.with_name("notes"))}}}


def notes(file: Path) -> str:
    path = file.with_name("notes")
    return path.read_text() if path.exists() else ""


async def begun(pool: EnvironmentProcesses, step: RecordedStep | None) -> tuple[Episode, Answer]:
    episode = pool.begin("dice", {"data_source": "dice"}, 1, None if step is None else step.replay(0))
    return episode, await episode.start()


async def played(pool: EnvironmentProcesses, step: RecordedStep | None, *dies: str) -> list[Answer]:
    episode, first = await begun(pool, step)
    return [first, *[await episode.say(call("roll", die=die), "stop") for die in dies], await episode.end()]


async def test_a_recorded_conversation_is_replayed_exactly_without_the_environment(file: Path, tmp_path: Path) -> None:
    record = Record(tmp_path / "episodes")
    async with processes(dice(file)) as pool:
        answers = await played(pool, record.at_step(1, "a"), "one", "two")
        assert notes(file) == "began one two ended "
        assert await played(pool, Record(tmp_path / "episodes").at_step(1, "a"), "one", "two") == answers
        assert notes(file) == "began one two ended "
        assert await played(pool, record.at_step(2, "a"), "one", "two") != answers


async def test_one_that_goes_otherwise_has_an_environment_that_was_told_its_turns(file: Path, tmp_path: Path) -> None:
    record = Record(tmp_path / "episodes")
    async with processes(dice(file)) as pool:
        answers = await played(pool, record.at_step(1, "a"), "one", "two")
        other = await played(pool, record.at_step(1, "a"), "one", "three")
        assert other[:2] == answers[:2]
        assert contents(other[2])[0].startswith("three")
        assert notes(file) == "began one two ended began one three ended "
        assert await played(pool, record.at_step(1, "a"), "one", "three") == other


async def test_a_recorded_conversation_outlives_its_process(file: Path, tmp_path: Path) -> None:
    async with processes(dice(file)) as pool:
        answers = await played(pool, Record(tmp_path).at_step(1, "a"), "one", "kill", "two")
    assert not any(answer.lost for answer in answers)
    assert notes(file) == "began one began one kill two ended "
    assert answers[1].notes != answers[2].notes == answers[3].notes


async def test_one_that_is_not_recorded_fails_if_it_gives_other_answers(file: Path) -> None:
    async with processes(dice(file)) as pool:
        episode, _ = await begun(pool, None)
        assert "it gave other messages than before" in (await episode.say(call("roll", die="kill"), "stop")).lost


async def test_a_conversation_that_was_cut_off_keeps_what_it_was_told(file: Path, tmp_path: Path) -> None:
    step = Record(tmp_path).at_step(1, ())
    async with processes(dice(file)) as pool:
        episode, first = await begun(pool, step)
        one = await episode.say(call("roll", die="one"), "stop")
        episode.abandon()
        answers = await played(pool, step, "one", "two")
    assert answers[:2] == [first, one]
    assert notes(file) == "began one began one two ended "


def section(file: Path, name: str = "Dice", **keys: Any) -> dict[str, Any]:
    environment = dice(file)["dice"] if name == "Dice" else {"path": str(file), "name": name}
    return {"environments": {"default": environment}, "reply_steps": 4, "num_workers": 1, **keys}


def rows(num: int = 5) -> list[PromptRow]:
    return [PromptRow(f"row {row}", "go", "a", "truth", {"row": row}) for row in range(num)]


async def decided(config: dict[str, Any]) -> bool:
    own = MultiTurnConfig.model_validate(config)
    async with EnvironmentProcesses(own, CodeConfig(), tool_format="hermes") as pool:
        return await must_record(own, pool, rows())


async def test_auto_records_what_answers_otherwise_for_the_same_seed(file: Path) -> None:
    assert await decided(section(file))
    assert await decided(section(file, "Paid"))
    assert not await decided(section(file, "Fair"))


async def test_environments_are_not_asked_where_it_does_not_matter(file: Path) -> None:
    assert await decided(section(file, record=True))
    assert not await decided(section(file, reply_steps=0))
    assert not await decided(section(file, reply_steps=0, record=False))
    assert notes(file) == ""


@pytest.mark.parametrize(("name", "what"), [("Dice", "texts"), ("Paid", "rewards")])
async def test_record_false_is_refused_for_what_answers_otherwise(file: Path, name: str, what: str) -> None:
    with pytest.raises(ConfigError) as error:
        await decided(section(file, name, record=False))
    assert str(error.value) == (
        f"rollout.multi_turn.record is false, but environments.default ({name} of {file}) gave other {what} for the"
        " same seed: a resumed run would differ"
    )


def test_servers_of_others_are_remote() -> None:
    kinds = {"openenv": True, "gymnasium": False}
    assert {name: EnvironmentConfig.model_construct(name=name).is_remote for name in kinds} == kinds
    assert EnvironmentConfig.model_construct(tools=("python", "mcp:search")).is_remote
    assert not EnvironmentConfig.model_validate({"tools": "mine.py:add"}).is_remote
