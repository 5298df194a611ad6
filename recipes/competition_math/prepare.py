r"""Prepares MATH (Hendrycks et al., 2021) as prompt files, with the tiny model that cpu.yaml trains on them.

    python -m recipes.competition_math.prepare --input DigitalLearningGmbH/MATH-lighteval --output DIR

A row of the input has a problem under "problem" or "question", and a solution with the final answer in its last
\boxed{...}, under "solution" or "answer"; or the final answer alone, under "answer".
"""

import sys

from recipes.preparation import Recipe, command_line, run
from recipes.rows import BadInput, Example, Row
from rewards.scorers.competition_math import last_boxed

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def to_row(example: Example) -> Row | None:
    """Converts an example of MATH into a row of a prompt file; None for an empty answer, which a few examples have.

    Raises:
        BadInput: there is no problem or no answer, or the solution has no box.
    """
    problem = example.text("problem", "question")
    solution = example.text("solution", "answer", may_be_empty=True)
    if not solution.strip():
        return None
    truth = last_boxed(solution)
    if truth is None:
        if "solution" in example.fields or "\\boxed" in solution or "\\fbox" in solution:
            raise BadInput(f"{example.place}: the solution has no complete \\boxed{{...}}")
        truth = solution.strip()
    return example.verl_row(
        DATA_SOURCE,
        f"{problem} {INSTRUCTION}",
        "math",
        {"style": "rule", "ground_truth": truth},
        answer=solution,
        question=problem,
        level=example.fields.get("level"),
        subject=example.fields.get("subject", example.fields.get("type")),
    )


RECIPE = Recipe(
    name="competition_math",
    to_row=to_row,
    files={
        split: (f"{split}.jsonl", f"{split}.parquet", f"data/{split}-*.parquet", f"*/{split}-*.parquet")
        for split in ("train", "test")
    },
)


def main(arguments: list[str]) -> int:
    """Runs the command line, which makes prompt files of the MATH data; returns the exit code."""
    return run(RECIPE, command_line(__doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
