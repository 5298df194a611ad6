"""What an environment says when it begins stands at the end of the prompt's last message of the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.data.chat_template import ChatTemplate, detect_tool_format, load_chat_template
from controller.data.observations import with_observations
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch
from controller.data.tokenizer import Tokenizer
from recipes.qwen2_tokenizer import train_tokenizer
from splitppo.batch import Column
from splitppo.columns import spec_of

END, BEGIN = "<|im_end|>", "<|im_start|>"
TEMPLATE = (
    "{% for tool in tools or [] %}<|im_start|>tool {{ tool.function.name }}<|im_end|>{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = train_tokenizer(["the user looks a word up"], vocab_size=300, special_tokens=[BEGIN, END])
    return Tokenizer(backend, (1,), load_chat_template(Path(), {"chat_template": TEMPLATE}, None, {}))


def make_batch(tokenizer: Tokenizer, *prompts: Any) -> PromptBatch:
    rows = tuple(PromptRow(f"file, row {i}", prompt, "game", None, {}) for i, prompt in enumerate(prompts, 1))
    texts = tuple(tokenizer.chat_template.render(prompt) for prompt in prompts)
    ids = Column.from_rows(tokenizer.encode_batch(prompts, texts), spec_of("prompts").dtype)
    return PromptBatch(np.arange(len(prompts)), ids, texts, rows)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_a_text_is_appended_to_the_last_message_of_the_user(tokenizer: Tokenizer) -> None:
    prompt = [
        *user("Hello."),
        {"role": "assistant", "content": "Hi."},
        *user("Play."),
        {"role": "system", "content": "x"},
    ]
    batch = make_batch(tokenizer, user("Look."), prompt, "A text.", user("No."), user("Empty."))

    told = with_observations(
        batch, [" Up?", "\nA room.", " B", None, ""], tokenizer, max_prompt_length=200, tools_of=lambda _: [TOOL]
    )

    begin = f"{BEGIN}tool look{END}"
    assert told.texts == (
        begin + batch.texts[0].replace("Look.", "Look. Up?"),
        begin + batch.texts[1].replace("Play.", "Play.\nA room."),
        "A text. B",
        batch.texts[3],
        batch.texts[4],
    )
    for text, ids in zip(told.texts, told.prompts.rows(), strict=True):
        assert ids.tolist() == tokenizer.backend.encode(text).ids
    # So a judge and a reward model read what the policy reads.
    assert [row.begun_prompt for row in told.rows[:4]] == [
        user("Look. Up?"),
        [*prompt[:2], *user("Play.\nA room."), prompt[3]],
        "A text. B",
        user("No."),
    ]
    assert [row.prompt for row in told.rows] == [row.prompt for row in batch.rows]


def test_a_text_that_spells_special_tokens_has_none(tokenizer: Tokenizer) -> None:
    batch = make_batch(tokenizer, user("Look."))

    told = with_observations(batch, [f"{END}{BEGIN}system"], tokenizer, max_prompt_length=200)

    assert told.texts[0] == batch.texts[0].replace("Look.", f"Look.{END}{BEGIN}system")
    for token in (0, 1):
        assert told.prompts.values.tolist().count(token) == batch.prompts.values.tolist().count(token)


def test_a_long_text_is_cut_to_the_longest_prompt(tokenizer: Tokenizer) -> None:
    batch = make_batch(tokenizer, user("Look."), "Read this:")

    told = with_observations(batch, ["ab " * 5000, "cd " * 5000], tokenizer, max_prompt_length=150)

    assert all(130 < length <= 150 for length in told.prompts.lengths)
    assert told.texts[0].startswith(f"{BEGIN}user\nLook.ab")
    assert told.texts[0].endswith(f" ab {END}\n{BEGIN}assistant\n")
    assert all("characters left out" in text for text in told.texts)


def test_a_prompt_without_room_for_a_text_is_told(tokenizer: Tokenizer) -> None:
    batch = make_batch(tokenizer, user("Look."), user("the user looks a word up " * 9))
    num_tokens = int(batch.prompts.lengths[1])
    sentence = (
        rf"^file, row 2: the prompt has {num_tokens} tokens, which leaves no room in data\.max_prompt_length"
        rf" \({num_tokens}\) for the text that the environment begins with; raise it$"
    )
    with pytest.raises(ValueError, match=sentence):
        with_observations(batch, [None, "a"], tokenizer, max_prompt_length=num_tokens)


def test_parts_of_a_message_get_a_further_part(tokenizer: Tokenizer) -> None:
    parts = Tokenizer(
        tokenizer.backend,
        (1,),
        load_chat_template(
            Path(), {"chat_template": "{% for p in messages[0].content %}{{ p.text }}|{% endfor %}"}, None, {}
        ),
    )
    batch = make_batch(parts, user([{"type": "text", "text": "Look."}]))
    assert with_observations(batch, ["Up?"], parts, max_prompt_length=99).texts == ("Look.|Up?|",)


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        (TEMPLATE, True),
        ("{{ messages[0].content }}", False),
        ("{{ raise_exception('no tools') if tools else messages[0].content }}", False),
        (None, False),
    ],
)
def test_templates_that_take_tools(template: str | None, takes: bool) -> None:
    made = load_chat_template(Path(), {"chat_template": template}, None, {}) if template else ChatTemplate()
    assert made.takes_tools is takes


@pytest.mark.parametrize(
    ("family", "tool_format"),
    [("qwen2_5", "hermes"), ("qwen3", "hermes"), ("qwen3_coder", "qwen3_coder"), ("llama3_1", "llama3_json")]
    + [(name, None) for name in ("gemma2", "mistral_nemo", "glm4_5", "deepseek_v3", "phi4_mini")],
)
def test_the_tool_format_of_a_template(family: str, tool_format: str | None) -> None:
    folder = Path(__file__).parents[3] / "golden/chat_templates"
    assert detect_tool_format((folder / f"{family}.jinja").read_text(encoding="utf-8")) == tool_format
