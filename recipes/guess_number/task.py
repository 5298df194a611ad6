"""The task "find a number from 1 to 31 in five guesses": the texts of its conversations, and its prompt rows."""

TOP = 31
MAX_GUESSES = 5  # 31 = 2 ** 5 - 1: bisection finds every number
DATA_SOURCE = "guess_number"
PROMPT = f"Find 1-{TOP}"
# What stands before and behind the number in a turn of the policy: a call in hermes' form.
CALL_START, CALL_END = '<tool_call>\n{"name": "guess", "arguments": {"number": ', "}}\n</tool_call>"
NUM_TRAIN_ROWS_EACH = 64


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
