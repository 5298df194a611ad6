"""Tools that were written for verl, unchanged: their calls, rewards and errors, with verl and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from environments.pool import EnvironmentProcesses
from tests.support import verl_files
from tests.support.user_tools import call, contents, processes, reply, started, write

ROW = {"tools_kwargs": {"check_answer": {"create_kwargs": {"ground_truth": "42"}}}}


def of_files(*files: Path, **keys: Any) -> EnvironmentProcesses:
    return processes({"v": {"tools": [str(file) for file in files]}}, **keys)


async def test_a_class_is_created_for_each_call_with_the_rows_arguments_and_rewards_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    async with of_files(verl_files.write_classes(tmp_path)) as pool:
        shown = [dict(tool["function"]) for tool in pool.schemas_of("v")]
        assert [tool["name"] for tool in shown] == ["check_answer", "described"]
        assert shown[0]["parameters"]["properties"]["answer"] == {"type": "string", "description": "The answer"}
        episode, other = await started(pool, "v", **ROW), await started(pool, "v", **ROW)
        right = await episode.say(call("check_answer", answer="42"), "stop")
        assert contents(right) == ["score=1.0 call 1, 0 released, 1 open"]
        assert (right.reward, right.notes) == (1.0, {"length": 1})
        wrong = await episode.say(call("check_answer", answer="7"), "stop")
        assert contents(wrong) == ["score=0.0 call 2, 1 released, 1 open"]
        assert wrong.reward == -0.25
        assert await reply(other, call("check_answer", answer="42") + call("described")) == [
            "score=1.0 call 1, 2 released, 1 open",
            "hello",
        ]


async def test_a_class_that_raises_or_answers_with_a_picture_is_released_and_the_model_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    async with of_files(verl_files.write_classes(tmp_path)) as pool:
        episode = await started(pool, "v", **ROW)
        bad = await episode.say(call("check_answer") + call("check_answer", answer="a picture"), "stop")
        assert contents(bad) == ["'answer'", "expected a text, got an image or a video"]
        assert (bad.num_tool_errors, bad.num_bad_calls) == (2, 0)
        assert await reply(episode, call("check_answer", answer="42")) == ["score=1.0 call 3, 2 released, 1 open"]


async def test_decorated_functions_are_tools(tmp_path: Path) -> None:
    async with of_files(write(tmp_path, verl_files.FUNCTIONS)) as pool:
        described = {tool["function"]["name"]: tool["function"]["description"] for tool in pool.schemas_of("v")}
        assert described == {
            "weather": "Looks the weather up.",
            "rewarded": "Gives a reward.",
            "free": "Takes anything.",
        }
        answer = await (await started(pool, "v")).say(
            call("weather", city="Oslo") + call("rewarded", value=0.5) + call("free", b=1, a=2), "stop"
        )
        assert contents(answer) == ['{"city": "Oslo", "sky": "é"}', "gave 0.5", "['a', 'b']"]
        assert (answer.reward, answer.notes) == (0.5, {"given": 0.5})


INSTALLED = {
    "__init__.py": "",
    "tools/__init__.py": "",
    "tools/function_tool.py": "FUNCTION_TOOL_REGISTRY = {}",
    "tools/schemas.py": """
from pydantic import BaseModel
class OpenAIFunctionToolSchema(BaseModel, extra="allow"): ...
""",
    "tools/base_tool.py": """
class BaseTool:
    def __init__(self, config, tool_schema):
        self.tool_schema, self.name = tool_schema, "check_answer"
    async def create(self, **kwargs): return "7", None
    async def execute(self, instance_id, parameters, **kwargs): return "installed", 0.0, {}
    async def release(self, instance_id): ...
""",
    "tools/mine.py": "from .base_tool import BaseTool\nclass Mine(BaseTool): ...",
}


@pytest.mark.parametrize(
    ("init", "expected"), [("", "installed"), ("import something_that_is_not_here", "'Mine' object has no attribute")]
)
async def test_verl_is_used_where_it_is_installed_and_else_its_files_with_the_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str, expected: str
) -> None:
    for name, text in {**INSTALLED, "__init__.py": init}.items():
        file = tmp_path / "verl" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    entry = f"tools: [{{class_name: verl.tools.mine.Mine, config: {{}}, tool_schema: {verl_files.SCHEMA}}}]"
    async with of_files(write(tmp_path, entry, "one.yaml")) as pool:
        [text] = await reply(await started(pool, "v"), call("check_answer", answer="1"))
        assert text.startswith(expected)
