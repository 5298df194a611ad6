"""Prepares GSM8K (Cobbe et al., 2021) as prompt files, with the tiny model that cpu.yaml trains on them.

    python -m recipes.gsm8k.prepare --input openai/gsm8k --output .cache/gsm8k

A row of the input has "question" and "answer", a worked solution with the final number behind "####".
"""

import re
import sys

from recipes.preparation import Recipe, command_line, run
from recipes.rows import BadInput, Example, Row

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_FINAL_ANSWER = re.compile(r"#### *(-?[0-9.,]+)")


def to_row(example: Example) -> Row:
    """Converts an example of GSM8K into a row of a prompt file.

    Raises:
        BadInput: there is no question or no answer, or the answer has no number behind "####".
    """
    question = example.text("question")
    answer = example.text("answer")
    numbers = _FINAL_ANSWER.findall(answer)
    if not numbers:
        raise BadInput(f'{example.place}: the answer has no number after "####"')
    return example.verl_row(
        DATA_SOURCE,
        f"{question} {INSTRUCTION}",
        "math",
        {"style": "rule", "ground_truth": numbers[-1].replace(",", "")},
        answer=answer,
        question=question,
    )


# The hub's data set has a second configuration, "socratic", with other answers.
RECIPE = Recipe(
    name="gsm8k",
    to_row=to_row,
    files={split: (f"{split}.jsonl", f"{split}.parquet", f"main/{split}-*.parquet") for split in ("train", "test")},
)


def main(arguments: list[str]) -> int:
    """Runs the command line, which makes prompt files of the GSM8K data; returns the exit code."""
    return run(RECIPE, command_line(__doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
