"""Prepares HellaSwag (Zellers et al., 2019) as prompt files, with the tiny model that cpu.yaml trains on them.

    python -m recipes.hellaswag.prepare --input Rowan/hellaswag --output .cache/hellaswag

A row of the input has "activity_label", "ctx_a" and "ctx_b", four "endings", and the number of the right one, from 0,
under "label". The hub's test split has no labels, so its validation split becomes the recipe's test split.
"""

import re
import sys
from typing import Any

from recipes.preparation import Recipe, command_line, run
from recipes.rows import BadInput, Example, Row
from rewards.scorers.hellaswag import letter_of

DATA_SOURCE = "Rowan/hellaswag"
INSTRUCTION = 'Which of these comes next? Output the letter of the right ending after "####".'
_MAX_ENDINGS = 26


def to_row(example: Example) -> Row:
    """Converts an example of HellaSwag into a row of a prompt file.

    Raises:
        BadInput: a text is missing, the endings are no list of texts, or the label is the number of none of them.
    """
    ctx_a, ctx_b = (example.text(name, may_be_empty=True) for name in ("ctx_a", "ctx_b"))
    context = cleaned(f"{example.text('activity_label')}: {ctx_a} {ctx_b.capitalize()}")
    choices = _choices(example)
    listed = "\n".join(f"{letter_of(number)}. {choice}" for number, choice in enumerate(choices))
    return example.verl_row(
        DATA_SOURCE,
        f"{context}\n\n{INSTRUCTION}\n{listed}",
        "nlp",
        {"style": "model", "eval": "multiple_choice", "ground_truth": _label(example, choices), "choices": choices},
        context=context,
    )


def cleaned(text: str) -> str:
    """Removes the markup of WikiHow's pages from a text.

    "[title]" ends a sentence; everything else in brackets is removed.
    """
    return re.sub(r" {2,}", " ", re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))).strip()


def _choices(example: Example) -> list[str]:
    endings: Any = example.fields.get("endings")
    is_list = isinstance(endings, list) and all(isinstance(ending, str) for ending in endings)
    if not is_list or not 2 <= len(endings) <= _MAX_ENDINGS:
        raise BadInput(f"{example.place}: expected 2 to {_MAX_ENDINGS} texts under 'endings'")
    return [cleaned(ending) for ending in endings]


def _label(example: Example, choices: list[str]) -> int:
    label = str(example.fields.get("label"))
    if not label.isdecimal() or int(label) >= len(choices):
        raise BadInput(f"{example.place}: expected a number from 0 to {len(choices) - 1} under 'label', got {label!r}")
    return int(label)


RECIPE = Recipe(
    name="hellaswag",
    to_row=to_row,
    files={
        "train": ("train.jsonl", "train.parquet", "data/train-*.parquet"),
        "test": (
            *("validation.jsonl", "val.jsonl", "validation.parquet", "data/validation-*.parquet"),
            *("test.jsonl", "test.parquet"),
        ),
    },
)


def main(arguments: list[str]) -> int:
    """Runs the command line, which makes prompt files of the HellaSwag data; returns the exit code."""
    return run(RECIPE, command_line(__doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
