"""An agent of the framework smolagents, as its documentation writes one: a program that prints what it is worth."""

from __future__ import annotations

import json
import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

row = json.loads(sys.stdin.readline())


@tool
def count(word: str) -> int:
    """Counts the letters of a word.

    Args:
        word: The word.
    """
    return len(word)


agent = ToolCallingAgent(tools=[count], model=OpenAIModel(model_id=os.environ["OPENAI_MODEL"]), max_steps=1)
answer = str(agent.run(f"Say many times the letter {row['ground_truth']}."))
print(json.dumps({"score": answer.count(row["ground_truth"]) / max(1, len(answer))}))  # noqa: T201 - its output
