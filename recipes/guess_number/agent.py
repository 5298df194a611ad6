"""guess_number as an agent program: it has its own loop and its own tool, and asks a chat API for what to do next.

environments: {default: {agent: recipes/guess_number/agent.py:run}}
"""

import json
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from environments.gateway.session import Endpoint
from recipes.guess_number import task
from recipes.guess_number.environment import GuessNumber

TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Compares a guess with the hidden number.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer", "description": "the guess."}},
                "required": ["number"],
            },
        },
    }
]
# All conversations of a process share its connections; each has a key of its own. The client's own time limit for a new
# connection, 5 s, is short for hundreds of agents in one process.
_CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=600.0)


async def run(endpoint: Endpoint, row: Mapping[str, Any]) -> float:
    """Lets the model guess until it has found the number, calls no tool, or has had its guesses; returns the reward."""
    client = _CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    game = GuessNumber(task.TOP)
    game.reset(ground_truth=row["ground_truth"])
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": task.PROMPT}]
    for _ in range(task.MAX_GUESSES):
        completion = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=TOOLS)
        answer = completion.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": _result(game, call)})
        if game.is_found or not answer.tool_calls:
            break
    return game.get_reward()


def _result(game: GuessNumber, call: Any) -> str:
    """Makes a call, and returns what the model reads of it."""
    if call.function.name != "guess":
        return f"there is no tool {call.function.name!r}; expected one of guess"
    try:
        told = game.guess(**json.loads(call.function.arguments))
    except (TypeError, ValueError) as error:
        return str(error)
    return told if isinstance(told, str) else told.text
