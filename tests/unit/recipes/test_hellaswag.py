"""HellaSwag: contexts and endings without WikiHow's marks, labels as numbers or texts, and real rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from recipes.hellaswag.prepare import cleaned, to_row
from recipes.rows import BadInput, Example
from rewards.scorers.hellaswag import compute_score

FIELDS: dict[str, Any] = {
    "activity_label": "Roof repair",
    "ctx_a": "A man is on a roof.",
    "ctx_b": "he",
    "endings": ["[title] Sings. [step] Loud.", "lifts a tile.", "swims.", "sleeps."],
    "label": "1",
}


@pytest.mark.parametrize("label", ["1", 1])
def test_a_row_has_verls_schema_and_lists_the_endings(label: str | int) -> None:
    choices = ["Sings. Loud.", "lifts a tile.", "swims.", "sleeps."]
    row = to_row(Example("here", {**FIELDS, "label": label}, index=3))
    context = "Roof repair: A man is on a roof. He"
    assert row == {
        "data_source": "Rowan/hellaswag",
        "prompt": [
            {
                "role": "user",
                "content": f"{context}\n\n"
                'Which of these comes next? Output the letter of the right ending after "####".\n'
                "A. Sings. Loud.\nB. lifts a tile.\nC. swims.\nD. sleeps.",
            }
        ],
        "ability": "nlp",
        "reward_model": {"style": "model", "eval": "multiple_choice", "ground_truth": 1, "choices": choices},
        "extra_info": {"split": "train", "index": 3, "context": context},
    }
    assert compute_score(row["data_source"], "#### B", row["reward_model"]["ground_truth"]) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Sport: [header] How to win [title] Run. [step] Fast.", "Sport: How to win. Run. Fast."),
        ("  plain  text ", "plain text"),
        ("[substeps] only", "only"),
    ],
)
def test_titles_end_a_sentence_and_all_else_in_brackets_goes(text: str, expected: str) -> None:
    assert cleaned(text) == expected


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"label": ""}, "expected a number from 0 to 3 under 'label', got ''"),
        ({"label": 4}, "expected a number from 0 to 3 under 'label', got '4'"),
        ({"label": -1}, "expected a number from 0 to 3 under 'label', got '-1'"),
        ({"label": None}, "expected a number from 0 to 3 under 'label', got 'None'"),
        ({"endings": "one, two"}, "expected 2 to 26 texts under 'endings'"),
        ({"endings": ["one", 2]}, "expected 2 to 26 texts under 'endings'"),
        ({"ctx_b": None}, "expected a text under 'ctx_b', got None"),
    ],
)
def test_a_row_without_endings_or_a_label_among_them_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadInput) as caught:
        to_row(Example("here", {**FIELDS, **changes}))
    assert str(caught.value) == f"here: {complaint}"


def test_the_real_rows(prepare_real: Callable[..., Any], check_schema: Callable[[Any], None]) -> None:
    splits = prepare_real("hellaswag")
    check_schema(splits)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 800, "test": 200}
    first, second, _, wikihow = splits["train"][:4]
    # Read from the rows by eye.
    assert [row["reward_model"]["ground_truth"] for row in (first, second, wikihow)] == [3, 2, 2]
    assert first["extra_info"]["context"].startswith("Pole vault: Pole vault is")
    assert first["extra_info"]["context"].endswith("your body. A few women")
    assert second["reward_model"]["choices"][2].endswith("everyone applauds.")
    assert ": How to bowl the leg spinner's variations. To bowl" in wikihow["extra_info"]["context"]
    assert wikihow["reward_model"]["choices"][3].startswith("Only let the ball")
    for row in (row for rows in splits.values() for row in rows):
        assert len(row["reward_model"]["choices"]) == 4
        assert "[" not in row["prompt"][0]["content"]
