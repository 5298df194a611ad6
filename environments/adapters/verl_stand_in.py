"""The names that tool files for verl import from it, for machines on which verl is not installed.

This module stands for all modules of verl with such names.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

from pydantic import BaseModel

from environments.schemas import schema_of
from rewards.scorers import gsm8k

_PACKAGES = ("verl", "verl.tools", "verl.utils", "verl.utils.reward_score")
_MODULES = (
    "tools.base_tool",
    "tools.function_tool",
    "tools.schemas",
    "utils.rollout_trace",
    "utils.reward_score.gsm8k",
)


def install() -> None:
    """Makes verl's names importable; verl's other files are those of its folder, if there is one."""
    found = find_spec("verl")
    roots = [] if found is None else [*(found.submodule_search_locations or ())]
    for name in _PACKAGES:
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(Path(root, *name.split(".")[1:])) for root in roots]
    sys.modules.update({f"verl.{name}": sys.modules[__name__] for name in _MODULES})


class OpenAIFunctionPropertySchema(BaseModel):
    """The schema of an argument of a tool."""

    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The schemas of a tool's arguments."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = []


class OpenAIFunctionSchema(BaseModel):
    """The name of a tool, its description, and the schemas of its arguments."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema(type="object", properties={})
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool, as chat templates take it."""

    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """A tool's answer."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """The base class of tools that are created and released for each call."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Returns the schema of a tool whose configuration has none."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **_: Any) -> tuple[str, ToolResponse]:
        """Begins a call; returns its id."""
        return instance_id or str(uuid4()), ToolResponse()

    async def release(self, instance_id: str, **_: Any) -> None:
        """Ends a call."""


FUNCTION_TOOL_REGISTRY: dict[str, SimpleNamespace] = {}


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Registers a function as a tool, as `@function_tool`, or `@function_tool("name", schema=...)`."""

    def register(function: Callable[..., Any], called: str | None = name) -> Callable[..., Any]:
        try:
            tool_schema = OpenAIFunctionToolSchema.model_validate(schema_of(function) if schema is None else schema)
        except ValueError as error:
            raise ValueError(f"{function.__name__}: {error}") from error
        tool_schema.function.name = called or tool_schema.function.name
        place = f"{function.__module__}:{tool_schema.function.name}"
        FUNCTION_TOOL_REGISTRY[place] = SimpleNamespace(fn=function, tool_schema=tool_schema)
        return function

    return register(name, None) if callable(name) else register


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as it is; verl's records its calls."""
    return function


def compute_score(solution_str: str, ground_truth: str, *, score: float = 1.0, **how: Any) -> float:
    """Scores an answer to GSM8K, as verl's function of this name."""
    return score * gsm8k.compute_score("gsm8k", solution_str, ground_truth, **how)
