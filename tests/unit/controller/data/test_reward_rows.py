"""Rows of the reward model: whole conversations in its own template and tokens, and refused input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.data.chat_template import Messages
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch
from controller.data.reward_rows import RewardTokenizer, as_answer, load_reward_tokenizer
from splitppo.batch import Column
from splitppo.config import ConfigError
from splitppo.config.sections.reward_model import RewardModelConfig
from tests.support.models import POSITIONS, VOCABULARY, save_reward_model, save_tokenizer

MESSAGES = [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("models") / "reward")


def asked(*prompts: Any) -> PromptBatch:
    rows = tuple(
        PromptRow(f"train.jsonl, line {index}", prompt, "hh", "", {}) for index, prompt in enumerate(prompts, 1)
    )
    ids = Column.from_rows([[1]] * len(rows), np.dtype(np.int32))
    return PromptBatch(np.arange(len(rows)), ids, tuple(map(str, prompts)), rows)


def load(model: Path, *prompts: Any, is_model_here: bool = True, **section: Any) -> RewardTokenizer:
    config = RewardModelConfig(model=str(model), **section)
    return load_reward_tokenizer(config, asked(*(prompts or (MESSAGES,))), is_model_here=is_model_here)


def texts(tokenizer: RewardTokenizer, prompts: list[Any], responses: list[str]) -> list[str]:
    return encoded(tokenizer, asked(*prompts).rows, *map(as_answer, responses))


def encoded(tokenizer: RewardTokenizer, prompts: Sequence[PromptRow], *responses: Messages) -> list[str]:
    rows = tokenizer.encode(prompts, responses)["reward_tokens"].rows()
    return ["".join(VOCABULARY[token] for token in row) for row in rows]


def test_the_response_is_the_turn_of_the_assistant_without_a_generation_prompt(model: Path) -> None:
    assert texts(load(model), [MESSAGES], ["ef"]) == ["s:ab\nu:cd\na:ef\n"]


def test_a_plain_prompt_is_continued_and_rows_keep_their_order(model: Path) -> None:
    encoded = texts(load(model), [MESSAGES, "gh", MESSAGES], ["1", " ij", ""])
    assert encoded == ["s:ab\nu:cd\na:1\n", "gh ij", "s:ab\nu:cd\na:\n"]


SAID = [
    {"role": "assistant", "content": "ef"},
    {"role": "tool", "content": "gh<eos>"},
    {"role": "assistant", "content": "ij"},
]
SPELT = ["<unk>", *"eos", "<unk>"]  # the characters of <eos>


def test_a_conversation_has_its_roles_and_what_an_environment_spells_is_no_special_token(model: Path) -> None:
    rows = [replace(row, observation=text) for row, text in zip(asked(MESSAGES, "kl").rows, ["<eos>", ""], strict=True)]
    spelt = "".join(SPELT)
    assert encoded(load(model), rows, SAID, SAID) == [
        f"s:ab\nu:cd{spelt}\na:ef\nt:gh{spelt}\na:ij\n",
        f"klefgh{spelt}ij",
    ]


def test_a_template_that_refuses_who_answers_is_told_before_the_run(model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )

    def load_for(*roles: str, **section: Any) -> RewardTokenizer:
        config = RewardModelConfig(model=str(model), chat_template=own, **section)
        return load_reward_tokenizer(config, asked(MESSAGES), roles, is_model_here=True)

    load_for("user")
    load_for("tool", conversation="last_turn")
    with pytest.raises(ConfigError, match=r"line 1: reward_model: .*: no tools; reward_model.conversation: last_turn"):
        load_for("tool")


def test_a_template_of_ones_own_takes_the_place_of_the_tokenizers(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}.{% endfor %}")
    assert texts(load(model, chat_template=tmp_path / "own.jinja"), [MESSAGES], ["ef"]) == ["ab.cd.ef."]


def test_a_long_row_loses_its_first_tokens(model: Path) -> None:
    assert texts(load(model, max_length=5), [MESSAGES], ["ef"]) == ["a:ef\n"]
    assert len(texts(load(model), [MESSAGES], ["e" * 2 * POSITIONS])[0]) == POSITIONS


def test_a_model_that_is_elsewhere_needs_its_tokenizer_here_alone(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    tokenizer = load(Path("/not/here"), tokenizer=str(tmp_path / "tokenizer"), is_model_here=False)
    assert tokenizer.max_length is None
    assert texts(tokenizer, ["ab"], ["c"]) == ["abc"]


def test_messages_without_a_chat_template_are_refused(model: Path, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer_config.json").unlink()
    assert load(model, "plain", tokenizer=str(tmp_path / "bare"))
    with pytest.raises(
        ConfigError, match=r"train\.jsonl, line 2: .* has no chat template; set reward_model\.chat_template"
    ):
        load(model, "plain", MESSAGES, tokenizer=str(tmp_path / "bare"))


def test_what_the_template_refuses_is_said_before_the_run(model: Path, tmp_path: Path) -> None:
    (tmp_path / "no.jinja").write_text("{{ raise_exception('no system turn') }}")
    with pytest.raises(
        ConfigError, match=r"line 1: reward_model: the chat template refuses the messages: no system turn"
    ):
        load(model, chat_template=tmp_path / "no.jinja")


def test_other_mistakes_are_told_with_their_key(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a sequence classifier with one label, it has 2"):
        load(save_reward_model(tmp_path / "two", num_labels=2))
    with pytest.raises(
        ConfigError, match=rf"reward_model\.tokenizer\) has {len(VOCABULARY)} tokens, .* vocabulary of 9"
    ):
        load(save_reward_model(tmp_path / "small", vocab_size=9))
    with pytest.raises(ConfigError, match=rf"reward_model\.max_length \({POSITIONS + 1}\) must not exceed"):
        load(model, max_length=POSITIONS + 1)
    with pytest.raises(ConfigError, match=r"no such file .*gone\.jinja"):
        load(model, chat_template=tmp_path / "gone.jinja")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json; .* set reward_model\.tokenizer"):
        load(model, tokenizer=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"/no/such/model does not exist .*reward_model\.model"):
        load(Path("/no/such/model"))
