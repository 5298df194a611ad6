"""HH-RLHF: prompts from pairs of transcripts, rows for three kinds of training; real rows are never printed."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.hh_rlhf.prepare import main, messages, to_rl_row, to_rm_row, to_sft_row, transcripts
from recipes.rows import BadInput, Example
from tests.support.datasets import real_rows

PROMPT = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: how are you?\n\nAssistant:"


def pair(chosen: str, rejected: str, prompt: str = PROMPT) -> Example:
    return Example("here", {"chosen": f"{prompt} {chosen}", "rejected": f"{prompt} {rejected}"}, index=4)


def test_the_prompt_is_the_common_part_up_to_the_last_turn_of_the_assistant() -> None:
    assert transcripts(pair("I am well", "I am ill")) == (PROMPT, " I am well", " I am ill")


def test_transcripts_that_part_before_their_last_turn_part_where_they_differ() -> None:
    further = "one\n\nHuman: and now?\n\nAssistant: three"
    example = pair(further, "two")
    assert transcripts(example) == (PROMPT, f" {further}", " two")
    sft, rm = to_sft_row(example), to_rm_row(example)
    assert sft is not None
    assert rm is not None
    assert sft["response"] == "one"
    assert rm["chosen"] == further


def test_rows_of_the_edition_with_a_prompt_of_its_own_are_the_same() -> None:
    other = Example("here", {"prompt": PROMPT, "chosen": " I am well", "rejected": " I am ill"})
    assert transcripts(other) == transcripts(pair("I am well", "I am ill"))


def test_a_row_for_each_kind_of_training() -> None:
    example = pair("I am well", "I am ill")
    origin = {"data_source": "Anthropic/hh-rlhf", "extra_info": {"split": "train", "index": 4}}
    assert to_sft_row(example) == {"prompt": PROMPT, "response": "I am well", **origin}
    assert to_rm_row(example) == {"prompt": PROMPT, "chosen": "I am well", "rejected": "I am ill", **origin}
    assert to_rl_row(example) == {
        "data_source": "Anthropic/hh-rlhf",
        "prompt": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "how are you?"},
        ],
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": "I am well"},
        "extra_info": {"split": "train", "index": 4},
    }


def test_turns_of_one_speaker_in_a_row_become_one_message() -> None:
    prompt = "\n\nHuman: hi\n\nAssistant: hello\n\nAssistant: there\n\nHuman: well?\n\nAssistant:"
    found = messages(prompt)
    assert found is not None
    assert [turn["content"] for turn in found] == ["hi", "hello\n\nthere", "well?"]


@pytest.mark.parametrize(
    "prompt", ["", "\n\nAssistant: hi\n\nHuman: yes?", "\n\nHuman: hi\n\nAssistant: oh", "\n\nHuman: "]
)
def test_what_is_no_conversation_is_left_out(prompt: str) -> None:
    assert messages(f"{prompt}\n\nAssistant:") is None


def test_answers_that_teach_nothing_are_left_out() -> None:
    assert to_sft_row(pair("", "no")) is None
    assert to_rm_row(pair("yes", "yes ")) is None


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"chosen": "secret"}, "expected a text under 'rejected', the row has chosen"),
        ({"chosen": ["secret"], "rejected": "secret"}, "expected a text under 'chosen', got list"),
        (
            {"chosen": "\n\nHuman: secret", "rejected": "\n\nHuman: secret"},
            "'chosen' and 'rejected' have no \"\\n\\nAssistant:\" in common",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_refused_without_its_text(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadInput) as caught:
        transcripts(Example("here", fields))
    assert str(caught.value) == f"here: {complaint}"


@pytest.mark.parametrize(("split", "num_train"), [("sft", 1996), ("rm", 2000), ("rl", 2000)])
def test_the_real_rows(
    split: str,
    num_train: int,
    prepare_real: Callable[..., Any],
    check_schema: Callable[[Any], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    splits = prepare_real("hh_rlhf", "--split", split)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": num_train, "test": 312}
    printed = capsys.readouterr().out
    if split == "rl":
        check_schema(splits)
    with gzip.open(Path(real_rows("hh_rlhf")[1]), "rt") as lines:
        pairs = [json.loads(line) for line in lines]
    of_split = {"train": pairs[:2000], "test": pairs[2000:]}
    untold = [
        (name, row["extra_info"]["index"])
        for name, rows in splits.items()
        for row in rows
        if not _is_told_by(of_split[name][row["extra_info"]["index"]], row)
    ]
    assert untold == []  # numbers alone: a failure shows no text
    texts = [text for row in splits["train"][:1] for text in _texts(row)]
    shown = [number for number, text in enumerate(texts) if _words(text)[:40] in printed]
    assert texts != []
    assert shown == []


def _is_told_by(original: dict[str, str], row: dict[str, Any]) -> bool:
    """Returns True if a row has the words of the transcripts, read in another way, without spaces."""
    if "response" in row:
        return _words(original["chosen"]).startswith(_words(f"{row['prompt']} {row['response']}"))
    if "chosen" in row:
        return all(_words(original[name]) == _words(f"{row['prompt']} {row[name]}") for name in ("chosen", "rejected"))
    text = " ".join([*(turn["content"] for turn in row["prompt"]), row["reward_model"]["ground_truth"]])
    return _words(re.sub(r"\n\n(Human|Assistant):", " ", original["chosen"])).startswith(_words(text))


def _words(text: str) -> str:
    return " ".join(text.split())


def _texts(row: dict[str, Any]) -> list[str]:
    """The longer texts of a row."""
    found = [row.get(key) for key in ("prompt", "response", "chosen", "rejected")]
    found += [turn["content"] for turn in row["prompt"]] if isinstance(row["prompt"], list) else []
    return [text for text in found if isinstance(text, str) and len(text) > 20]


def test_an_unknown_split_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--split", "dpo", "--input", "x", "--output", "y"])
    assert ended.value.code == 2
    assert "choose from" in capsys.readouterr().err
