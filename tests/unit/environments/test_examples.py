"""The examples of docs/environments.md can be loaded as they stand."""

import re
from pathlib import Path

from environments.chat import ToolCall
from environments.loading import load_environments, load_parser
from environments.messages import Setup
from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.multi_turn import EnvironmentConfig, MultiTurnConfig
from tests.support.groups import PROJECT

# The name in each example, in the order of the page.
NAMES = ("GuessNumber", "lookup", "Chess", "converse", "parse")
PAGE = "docs/environments.md"


def test_each_example_is_an_environment_or_a_tool(tmp_path: Path) -> None:
    text = (PROJECT / PAGE).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    configs = {}
    for name, block in zip(NAMES, blocks, strict=True):
        file = tmp_path / f"{name.lower()}.py"
        file.write_text(block)
        if name == "parse":
            continue
        given = {"tools": [f"{file}:{name}"]} if name == "lookup" else {"path": file, "name": name}
        configs[name] = EnvironmentConfig.model_validate(given)
    loaded = load_environments(Setup(MultiTurnConfig(environments=configs), None, None, CodeConfig()), {})
    tools = {name: [tool["function"]["name"] for tool in one.schemas] for name, one in loaded.items()}
    assert tools == {"GuessNumber": ["guess"], "lookup": ["lookup"], "Chess": [], "converse": []}
    parse = load_parser(f"{tmp_path / 'parse.py'}:parse")
    assert parse("Well. LOOK UP cat", ()) == ("Well. ", [ToolCall("lookup", {"key": "cat"})])
