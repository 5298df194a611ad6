r"""Prepares Geometry3K (Lu et al., 2021) as prompt files, as verl's script does.

    python -m recipes.geo3k.prepare --input hiyouga/geometry3k --output .cache/geo3k

A row of the input has "problem" with <image> where its figure stands, "answer", and "images", a list of {"bytes",
"path"} or of paths. Images stay as they are, so that paths count from the folder of the written file.
"""

import sys
from typing import Any

from recipes.preparation import Recipe, command_line, run
from recipes.rows import BadInput, Example, Row

DATA_SOURCE = "hiyouga/geometry3k"
INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. "
    "The final answer MUST BE put in \\boxed{}."
)


def to_row(example: Example) -> Row:
    """Converts an example of Geometry3K into a row of a prompt file; its images stay as they are.

    Raises:
        BadInput: there is no problem, no answer, or other than one image for each <image> of the problem.
    """
    problem = example.text("problem")
    answer = example.text("answer")
    images: Any = example.fields.get("images")
    num_images = len(images) if isinstance(images, list) else 0
    num_places = problem.count("<image>")
    if num_images != num_places:
        raise BadInput(f"{example.place}: the problem has {num_places} <image>, 'images' has {num_images}")
    row = example.verl_row(
        DATA_SOURCE,
        f"{problem} {INSTRUCTION}",
        "math",
        {"style": "rule", "ground_truth": answer},
        answer=answer,
        question=problem,
    )
    return {**row, "images": images}


RECIPE = Recipe(
    name="geo3k",
    to_row=to_row,
    files={
        split: (f"{split}.parquet", f"data/{split}-*.parquet", f"*/{split}-*.parquet") for split in ("train", "test")
    },
    tiny_models=(),
)


def main(arguments: list[str]) -> int:
    """Runs the command line, which makes prompt files of the Geometry3K data; returns the exit code."""
    return run(RECIPE, command_line(__doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
