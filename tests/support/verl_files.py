"""Files of tools as people write them for verl: a class with its yaml file, and decorated functions."""

from __future__ import annotations

from pathlib import Path

import yaml

CLASSES = '''
import logging
import os
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class CheckAnswer(BaseTool):
    """Compares an answer with the row's; a wrong one costs a little."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instances = {}
        self.num_released = 0

    async def create(
        self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._instances[instance_id] = ground_truth or kwargs.get("create_kwargs", {}).get("ground_truth")
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        extra_fields = kwargs["agent_data"].extra_fields
        extra_fields["num_calls"] = extra_fields.get("num_calls", 0) + 1
        if parameters["answer"] == "a picture":
            return ToolResponse(image=["pixels"]), 0.0, {}
        score = await self.calc_reward(instance_id, answer=parameters["answer"])
        counts = f"call {extra_fields['num_calls']}, {self.num_released} released, {len(self._instances)} open"
        return ToolResponse(text=f"{score=} {counts}"), score or self.config["penalty"], {"length": len(parameters)}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        truth = self._instances[instance_id]
        return gsm8k.compute_score("#### " + kwargs["answer"], truth, method="flexible", format_score=0.0, score=1.0)

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instances[instance_id]
        self.num_released += 1


class Described(BaseTool):
    """Has its schema in its class, and keeps what the base class does."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        function = {"name": "described", "description": "Says hello."}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        return ToolResponse(text="hello"), 0.0, {}
'''

SCHEMA = {
    "type": "function",
    "function": {
        "name": "check_answer",
        "description": "Compares an answer with the right one.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer", "unknown": 1}},
            "required": ["answer"],
        },
    },
}

FUNCTIONS = '''
from verl.tools.function_tool import function_tool


@function_tool
def weather(city: str) -> dict:
    """Looks the weather up.

    Args:
        city: the place.
    """
    return {"city": city, "sky": "é"}


@function_tool("rewarded")
async def some_function(value: float) -> tuple:
    """Gives a reward.

    Args:
        value: how large it is.
    """
    return f"gave {value}", value, {"given": value}


@function_tool(schema={"type": "function", "function": {"name": "free", "description": "Takes anything."}})
def free(**anything):
    return sorted(anything)


def not_a_tool() -> None:
    """Does nothing."""
'''


def write_classes(folder: Path, module: str = "checked_answers") -> Path:
    """Writes a module with tools and its yaml file; returns the yaml file."""
    (folder / f"{module}.py").write_text(CLASSES)
    checked = {"config": {"type": "native", "penalty": -0.25}, "tool_schema": SCHEMA}
    described = {"class_name": f"{module}.Described", "config": {"type": "native"}}
    path = folder / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": [{"class_name": f"{module}.CheckAnswer", **checked}, described]}))
    return path
