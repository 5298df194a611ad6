"""GSM8K: the rows, and the reward of a worked answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from recipes.gsm8k.prepare import to_row
from recipes.rows import Example
from rewards.scorers.gsm8k import compute_score

EXAMPLES = [
    {"question": "Ann has 2 boxes of 600 nails. How many nails?", "answer": "2*600 = <<2*600=1200>>1200\n#### 1,200"},
    {"question": "Bo owes $3 and pays $5. What is left?", "answer": "3-5 = -2\n#### -2"},
]


def test_a_row_has_verls_schema() -> None:
    assert to_row(Example("here", EXAMPLES[0], index=7)) == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": "Ann has 2 boxes of 600 nails. How many nails?"
                ' Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200"},
        "extra_info": {"split": "train", "index": 7, **EXAMPLES[0]},
    }


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_worked_answer_gets_the_reward(example: dict[str, str]) -> None:
    truth = to_row(Example("here", example))["reward_model"]["ground_truth"]
    assert compute_score("openai/gsm8k", example["answer"], truth) == 1.0


def test_the_real_rows(prepare_real: Callable[..., Any], check_schema: Callable[[Any], None]) -> None:
    splits = prepare_real("gsm8k")
    check_schema(splits)
    train, test = ([row["reward_model"]["ground_truth"] for row in splits[name]] for name in ("train", "test"))
    assert (len(train), len(test)) == (7473, 1319)
    # Read from the solutions by eye.
    assert [train[row] for row in (0, 345, 367, 5715, 5844)] == ["72", "1080", "850000", "-7", "-47"]
    assert [test[row] for row in (0, 1, 700, 1318)] == ["18", "3", "135", "14"]
