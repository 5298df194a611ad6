"""Tools for verl: yaml files that name classes of BaseTool, and Python files with functions of @function_tool."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import yaml

from environments.chat import Step
from environments.tools import Tool
from splitppo.config_error import ConfigError
from splitppo.user_file import describe, import_file

_KEY = "rollout.multi_turn.environments"
_SERVERS = "rollout.multi_turn.mcp_servers, and tools: [mcp:SERVER]"
_AGENT_DATA = "verl's agent_data"  # the field of a row in which the tools of a conversation find what they share


@cache
def load_verl_tools(path: Path) -> Sequence[Tool]:
    """Returns the tools of a file for verl; ConfigError says in one sentence what is wrong with it."""
    try:
        import_module("verl.tools.base_tool"), import_module("verl.tools.function_tool")
    except Exception:  # noqa: BLE001 - verl is not here, or not all that it needs
        import_module("environments.adapters.verl_stand_in").install()
    if path.suffix == ".py":
        tools = import_module("verl.tools.function_tool").FUNCTION_TOOL_REGISTRY
        before = {*tools}
        import_file(path, _KEY)
        registered_by_file = [_tool(tool, tool.fn) for name, tool in tools.items() if name not in before]
        if not registered_by_file:
            raise ConfigError(f"key '{_KEY}': {path} has no function with verl's decorator @function_tool")
        return registered_by_file
    try:
        entries = yaml.safe_load(path.read_bytes())["tools"]
        if not isinstance(entries, list):
            raise ValueError(f"tools must be a list, got {entries!r}")
        return [_of_class(**entry) for entry in entries]
    except Exception as error:
        raise ConfigError(f"key '{_KEY}': {path}: {describe(error)}; expected tools, as verl reads them") from error


def _of_class(
    class_name: str = "", config: Mapping[str, Any] | None = None, tool_schema: Any = None, **others: Any
) -> Tool:
    """Makes a tool from an entry of verl's yaml file: a class of BaseTool, and the arguments of its constructor.

    Each call of the tool makes an instance, runs it, and releases it, as verl does.

    Raises:
        ValueError: the entry has other keys, no class, or a class that is not of verl's kind `native`.
    """
    config = config or {}
    if (kind := config.get("type", "native")) != "native":
        raise ValueError(f"{class_name}: expected native as config.type, got {kind!r}; servers of MCP: {_SERVERS}")
    if others or not class_name:
        raise ValueError(f"expected class_name, config, tool_schema, got {', '.join(others) or 'no class_name'}")
    module, _, name = class_name.rpartition(".")
    schema = import_module("verl.tools.schemas").OpenAIFunctionToolSchema
    given = None if tool_schema is None else schema.model_validate(tool_schema)
    tool = getattr(import_module(module), name)(config=config, tool_schema=given)

    async def call(row: dict[str, Any], /, **arguments: Any) -> Any:
        """Calls the tool with the model's arguments; the calls of one conversation share the agent_data in its row."""
        kwargs = row.get("tools_kwargs") or {}
        fresh = SimpleNamespace(tools_kwargs=kwargs, extra_fields={}, metrics={}, request_id=uuid4().hex)
        agent_data = row.setdefault(_AGENT_DATA, fresh)
        created = await tool.create(create_kwargs=(kwargs.get(tool.name) or {}).get("create_kwargs") or {})
        instance_id = created[0] if isinstance(created, tuple) else created
        try:
            return await tool.execute(instance_id, arguments, agent_data=agent_data)
        finally:
            await tool.release(instance_id)

    return _tool(tool, call, takes_row=True)


def _tool(tool: Any, function: Callable[..., Any], *, takes_row: bool = False) -> Tool:
    schema = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
    return Tool(function, schema, takes_row=takes_row, read=_step)


def _step(returned: Any) -> Step:
    """Reads what a tool returned: an answer, or a tuple of it, a reward and metrics."""
    response, reward, metrics = (*returned, None, None)[:3] if isinstance(returned, tuple) else (returned, None, None)
    if getattr(response, "image", None) or getattr(response, "video", None):
        raise ValueError("expected a text, got an image or a video")
    text = response.text or "" if hasattr(response, "text") else response
    text = json.dumps(text, ensure_ascii=False) if isinstance(text, dict) else str(text)
    return Step(text, float(reward or 0.0), info=metrics or {})
