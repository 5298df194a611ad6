"""The examples of docs/environments.md can be loaded as they stand."""

import re
from pathlib import Path
from typing import Any

from environments.chat import ToolCall, Turn
from environments.loading import load_environments, load_parser
from environments.messages import Room, Setup
from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.multi_turn import EnvironmentConfig, MultiTurnConfig
from tests.support.groups import PROJECT
from tests.support.scripted_chat import ScriptedChat

# The name in each example, in the order of the page.
NAMES = ("GuessNumber", "lookup", "Chess", "converse", "research", "Hidden", "parse")
PAGE = "docs/environments.md"


def examples() -> dict[str, str]:
    """The code of each example, by its name."""
    text = (PROJECT / PAGE).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return dict(zip(NAMES, blocks, strict=True))


def test_each_example_is_an_environment_or_a_tool(tmp_path: Path) -> None:
    configs = {}
    for name, block in examples().items():
        file = tmp_path / f"{name.lower()}.py"
        file.write_text(block)
        if name == "parse":
            continue
        given = {"tools": [f"{file}:{name}"]} if name == "lookup" else {"path": file, "name": name}
        configs[name] = EnvironmentConfig.model_validate(given)
    loaded = load_environments(Setup(MultiTurnConfig(environments=configs), None, None, CodeConfig()), {}, None)
    tools = {name: [tool["function"]["name"] for tool in one.schemas] for name, one in loaded.items()}
    with_tools = {"GuessNumber": ["guess"], "lookup": ["lookup"]}
    assert tools == {name: with_tools.get(name, []) for name in configs}
    parse = load_parser(f"{tmp_path / 'parse.py'}:parse")
    assert parse("Well. LOOK UP cat", ()) == ("Well. ", [ToolCall("lookup", {"key": "cat"})])


async def test_the_example_of_contexts_compacts_when_there_is_little_room() -> None:
    """The fourth page would not fit: the model is asked for a note, and reads the page in a context of its own."""
    example: dict[str, Any] = {"open_page": lambda text: f"the page of {text}"}
    exec(examples()["research"], example)
    said = ["a", "b", "c", "a note", "answer: 7"]
    rooms = [6000, 4000, 2000, 1500, 5000]
    chat = ScriptedChat([Turn(text, (), "stop", Room(room, 9000)) for text, room in zip(said, rooms, strict=True)])
    assert await example["research"](chat, {"question": "Which?", "ground_truth": "7"}) == 1.0
    told = [(answer.begins_context, [message["content"] for message in answer.messages]) for answer in chat.answers]
    assert told == [
        (False, []),
        (False, ["the page of a"]),
        (False, ["the page of b"]),
        (False, ["Write down what you know."]),
        (True, ["Which?\n\nYour notes: a note\n\nthe page of c"]),
    ]
