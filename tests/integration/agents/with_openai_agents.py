"""An agent of the framework openai-agents, as its documentation writes one: a tool, an agent, a runner."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(disabled=True)
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=600.0)


async def run(endpoint: Any, row: Mapping[str, Any]) -> float:
    """Hides the number of a row; the agent may guess five times. Returns 1 if it has found the number."""
    hidden = int(row["ground_truth"])
    is_found = False

    @function_tool
    def guess(number: int) -> str:
        """Compares a guess with the hidden number.

        Args:
            number: the guess.
        """
        nonlocal is_found
        is_found = is_found or number == hidden
        return "right" if number == hidden else "higher" if number < hidden else "lower"

    client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    model = OpenAIChatCompletionsModel(model=endpoint.model, openai_client=client)
    agent = Agent(name="Guesser", model=model, tools=[guess])
    with suppress(MaxTurnsExceeded):
        await Runner.run(agent, "Find 1-31", max_turns=5)
    return float(is_found)
