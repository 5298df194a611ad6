"""The task "find a number from 1 to 31 in five guesses": its texts, its prompt rows, and what a warm start says."""

import random

TOP = 31
MAX_GUESSES = 5  # 31 = 2 ** 5 - 1: bisection finds every number
DATA_SOURCE = "guess_number"
PROMPT = f"Find 1-{TOP}"
# What stands before and behind the number in a turn of the policy: a call in hermes' form.
CALL_START = '<tool_call>\n{"name": "guess", "arguments": {"number": '
CALL_END = "}}\n</tool_call>"
NUM_TRAIN_ROWS_EACH = 64
# The probabilities of the behaviours that the warm start shows, drawn anew for each turn.
SCAN = 0.4
RANDOM = 0.2
BISECTION = 0.4
TOOLS = ({"type": "function", "function": {"name": "guess"}},)  # the chat template shows the name alone


def rows_of(split: str, num_each: int) -> list[dict[str, object]]:
    """Makes rows of a prompt file in verl's schema, `num_each` for each hidden number; all prompts are equal."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": PROMPT}],
            "ability": "search",
            "reward_model": {"style": "rule", "ground_truth": str(1 + index % TOP)},
            "extra_info": {"split": split, "index": index},
        }
        for index in range(TOP * num_each)
    ]


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """Returns the chat messages of a conversation about a random number."""
    hidden = rng.randint(1, TOP)
    low = 1
    high = TOP
    messages = [{"role": "user", "content": PROMPT}]
    for _ in range(MAX_GUESSES):
        behaviours = (low, rng.randint(low, high), (low + high) // 2)
        [guess] = rng.choices(behaviours, (SCAN, RANDOM, BISECTION))
        messages.append({"role": "assistant", "content": f"{CALL_START}{guess}{CALL_END}"})
        if guess == hidden:
            break
        low, high = (guess + 1, high) if guess < hidden else (low, guess - 1)
        messages.append({"role": "tool", "content": "higher" if guess < hidden else "lower"})
    return messages
