"""The controller's tokenizer gives the tokens of transformers without importing it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from controller.data.chat_template import Prompt, load_chat_template
from controller.data.tokenizer import load_tokenizer
from splitppo.config import ConfigError

QWEN_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- continue %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
           (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- generation %}{{- message.content }}{%- endgeneration %}
        {{- '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA_TEMPLATE = """\
{{ bos_token }}
{% for message in messages %}
    {% if message.role not in ('user', 'assistant') %}
        {{ raise_exception('only user and assistant, not ' + message.role) }}
    {% endif %}
[{{ message.role }}] {{ message.content | trim }} {{ eos_token if message.role == 'assistant' else '' }}
{% endfor %}
"""
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "sort cadb"}],
    [{"role": "system", "content": 'Be <brief> & "kind".'}, {"role": "user", "content": "  2 + 2 =\n\n ?  "}],
    [
        {"role": "user", "content": "Grüße, 数学 \U0001f600 <|im_end|> literally"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "and now?"},
    ],
]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>")


def save_model(folder: Path, *, bos: str | None = None, **config: Any) -> Path:
    """A byte-level BPE tokenizer, trained on the spot, with its config files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=list(SPECIAL[:3])
    )
    tokenizer.train_from_iterator(["the assistant and the user sort letters; you are a helpful assistant"] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        config["bos_token"] = bos
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.enable_truncation(4)  # as published tokenizers have it: must not shorten prompts
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def encode(folder: Path, *prompts: Prompt) -> list[list[int]]:
    tokenizer = load_tokenizer(str(folder))
    texts = [tokenizer.chat_template.render(prompt) for prompt in prompts]
    return [ids.tolist() for ids in tokenizer.encode_batch(prompts, texts)]


@pytest.fixture(scope="module")
def auto_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=["short", "system", "unicode"])
@pytest.mark.parametrize(
    ("bos", "template", "extra"),
    [
        (None, QWEN_TEMPLATE, {}),
        (None, QWEN_TEMPLATE, {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False}),
        ("<|endoftext|>", QWEN_TEMPLATE, {}),
        ("<|endoftext|>", LLAMA_TEMPLATE, {"pad_token": "<|endoftext|>"}),
    ],
    ids=["qwen", "qwen-class", "post-processor-adds-bos", "template-adds-bos"],
)
def test_chat_prompts_equal_those_of_transformers(
    tmp_path: Path, auto_tokenizer: Any, conversation: Any, bos: str | None, template: str, extra: Any
) -> None:
    save_model(tmp_path, bos=bos, chat_template=template, **extra)
    if template is LLAMA_TEMPLATE:
        conversation = [message for message in conversation if message["role"] != "system"]
    reference = auto_tokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert encode(tmp_path, conversation) == [expected]
    decoded = load_tokenizer(str(tmp_path)).decode_batch([np.array(expected), np.array(expected[:2])])
    assert decoded == [reference.decode(ids, skip_special_tokens=True) for ids in (expected, expected[:2])]


@pytest.mark.parametrize("bos", [None, "<|endoftext|>"])
@pytest.mark.parametrize("extra", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_plain_prompts_equal_those_of_transformers(tmp_path: Path, auto_tokenizer: Any, bos: Any, extra: Any) -> None:
    save_model(tmp_path, bos=bos, chat_template=QWEN_TEMPLATE, **extra)
    reference = auto_tokenizer.from_pretrained(tmp_path)
    for text in ("sort cadb", " a  <|im_end|>\n", "数学"):
        assert encode(tmp_path, text) == [reference(text)["input_ids"]]


def test_template_variables_come_from_the_config(tmp_path: Path, auto_tokenizer: Any) -> None:
    save_model(tmp_path, chat_template=QWEN_TEMPLATE)
    variables = {"enable_thinking": False, "tools": [{"name": "<calc>", "über": 1}]}
    expected = auto_tokenizer.from_pretrained(tmp_path).apply_chat_template(
        CONVERSATIONS[0], add_generation_prompt=True, tokenize=False, **variables
    )
    assert (
        load_tokenizer(str(tmp_path), chat_template_kwargs=variables).chat_template.render(CONVERSATIONS[0]) == expected
    )


def test_encoding_many_prompts_keeps_their_order(tmp_path: Path) -> None:
    save_model(tmp_path, bos="<|endoftext|>", chat_template=QWEN_TEMPLATE)
    prompts = ["plain text", CONVERSATIONS[0], CONVERSATIONS[2], "more", CONVERSATIONS[1]]
    assert encode(tmp_path, *prompts) == [ids for prompt in prompts for ids in encode(tmp_path, prompt)]


def test_a_base_model_without_template_sees_the_contents(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_model(tmp_path, bos="<|endoftext|>")))
    messages = [{"role": "system", "content": "one"}, {"role": "user", "content": "two"}]
    assert tokenizer.chat_template.render(messages) == "one\ntwo"
    of_messages, of_text = encode(tmp_path, messages, "one\ntwo")
    assert of_messages == of_text
    assert of_messages[0] == tokenizer.backend.token_to_id("<|endoftext|>")


def test_the_template_is_the_override_else_the_file_else_the_named_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    folder = save_model(tmp_path, chat_template=named)
    assert load_tokenizer(str(folder)).chat_template.render(CONVERSATIONS[0]) == "named"
    (folder / "chat_template.jinja").write_text("from file")
    assert load_tokenizer(str(folder)).chat_template.render(CONVERSATIONS[0]) == "from file"
    override = tmp_path / "mine.jinja"
    override.write_text("{{ messages[0].content }}!")
    assert load_tokenizer(str(folder), chat_template=override).chat_template.render(CONVERSATIONS[0]) == "sort cadb!"


def test_eos_ids_of_all_files_count_and_those_for_generation_come_first(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert load_tokenizer(str(folder)).eos_token_ids == (0, 2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    assert load_tokenizer(str(folder)).eos_token_ids == (2, 1, 0)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("value", ["</s>", [1, "</s>"], {"id": 1}, 1.5])
def test_an_end_of_sequence_id_that_is_no_id_is_one_sentence(tmp_path: Path, name: str, value: object) -> None:
    folder = save_model(tmp_path)
    (folder / name).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=rf"{name}: expected eos_token_id to be a token id or a list of them, got "):
        load_tokenizer(str(folder))


def test_special_tokens_are_read_from_the_older_file_and_as_objects(tmp_path: Path) -> None:
    folder = save_model(tmp_path, eos_token=None, chat_template="{{ eos_token }}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ eos_token }}"}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert load_tokenizer(str(folder)).chat_template.render(CONVERSATIONS[0]) == "<|im_end|>"


def test_missing_or_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model folder /no/such/model does not exist"):
        load_tokenizer("/no/such/model")
    with pytest.raises(ConfigError, match=f"{tmp_path} has no tokenizer.json; save the tokenizer there"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a readable tokenizer"):
        load_tokenizer(str(tmp_path))
    folder = save_model(tmp_path, chat_template="{% if %}")
    with pytest.raises(ConfigError, match="the chat template is not valid Jinja"):
        load_tokenizer(str(folder))
    with pytest.raises(ConfigError, match=r"data\.chat_template: no such file"):
        load_tokenizer(str(folder), chat_template=tmp_path / "absent.jinja")
    save_model(tmp_path, chat_template=[{"name": "rag", "template": ""}])
    with pytest.raises(ConfigError, match="the chat templates rag, but no default one"):
        load_tokenizer(str(folder))
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object, got list"):
        load_tokenizer(str(folder))


def test_messages_that_cannot_be_rendered_are_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_model(tmp_path / "chat", chat_template=LLAMA_TEMPLATE)))
    with pytest.raises(ValueError, match="refuses the messages: only user and assistant, not system"):
        tokenizer.chat_template.render([{"role": "system", "content": "x"}])
    with pytest.raises(ValueError, match="expected messages with 'role' and 'content'"):
        tokenizer.chat_template.render([{"role": "user"}])
    with pytest.raises(ValueError, match="at least one message"):
        tokenizer.chat_template.render([])
    plain = load_tokenizer(str(save_model(tmp_path / "base")))
    with pytest.raises(ValueError, match="a message's content must be text"):
        plain.chat_template.render([{"role": "user", "content": [{"type": "text", "text": "x"}]}])


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_model(tmp_path, chat_template="{{ messages.__class__.__mro__ }}")))
    with pytest.raises(ValueError, match="refuses the messages"):
        tokenizer.chat_template.render(CONVERSATIONS[0])


def test_the_modules_of_data_and_look_load_neither_torch_nor_transformers(tmp_path: Path) -> None:
    save_model(tmp_path, chat_template=QWEN_TEMPLATE)
    code = f"""
import sys
import controller.data.prompts
from controller.tracking import display, plots
from splitppo.run_folder import spans, trace
from controller.tracking.trackers import feed, process
from controller.tracking.trackers.catalog import connect
from controller.tracking.trackers.protocol import Run
from pathlib import Path
from controller.data.tokenizer import load_tokenizer
load_tokenizer({str(tmp_path)!r}).encode_batch(["x"], ["x"])
tracker = connect("tensorboard", Run("0" * 16, "n", "p", Path({str(tmp_path)!r}), {{}}), -1)
tracker.log(1, {{"a": 1.0}}, [])
tracker.close(has_failed=False)
controller.tracking.plots.write_report(Path({str(tmp_path)!r}), name="n", schedule="gather", train_s=1.0)
print(*[name for name in ("torch", "transformers", "tensorflow") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def test_a_template_that_writes_half_of_a_surrogate_pair_is_refused_in_one_sentence() -> None:
    template = load_chat_template(
        Path(), {"chat_template": "{{ messages[0].content }}{{ word }}"}, None, {"word": "\ud83d"}
    )
    with pytest.raises(
        ValueError, match=r"the chat template writes a text that has no tokens: .*\(\\ud83d, character 2\)"
    ):
        template.render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("message", [{"role": "user", "content": None}, {"role": None, "content": "a"}])
def test_a_message_that_says_nothing_is_refused(message: dict[str, Any]) -> None:
    template = load_chat_template(Path(), {"chat_template": "{{ messages[0].content }}"}, None, {})
    with pytest.raises(ValueError, match="expected messages with 'role' and 'content'"):
        template.render([message])


def test_texts_have_the_same_tokens_however_many_are_encoded_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(str(save_model(tmp_path / "base")))
    texts = ["sort", "", "cadb" * 9, *["ab"] * 5]
    expected = [ids.tolist() for ids in tokenizer.encode_batch(texts, texts)]
    monkeypatch.setattr("controller.data.tokenizer._CHUNK_CHARACTERS", 6)
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts, texts)] == expected
