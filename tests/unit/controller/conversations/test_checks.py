"""What a chat template must have for conversations is known before the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.conversations.checks import check_conversations, check_schemas, check_tools, load_tools, tool_format_of
from controller.data.chat_template import load_chat_template
from controller.data.prompt_files import PromptRow
from controller.data.tokenizer import Tokenizer
from recipes.qwen2_tokenizer import train_tokenizer
from splitppo.config import Config, ConfigError
from tests.support.fake_services import make_config

TEMPLATES = Path(__file__).parents[3] / "golden/chat_templates"
ENDS = ("<|im_end|>", "</s>", "<end_of_turn>", "<|eot_id|>", "<|user|>", "<|observation|>")


def make_tokenizer(template: str) -> Tokenizer:
    backend = train_tokenizer(["a word"], vocab_size=300, special_tokens=ENDS)
    named = {"bos_token": "", "eos_token": "</s>"}
    chat_template = load_chat_template(TEMPLATES, {"chat_template": template}, None, named)
    return Tokenizer(backend, tuple(map(backend.token_to_id, ENDS)), chat_template)


def of_family(name: str) -> Tokenizer:
    return make_tokenizer((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))


def config_with(environment: dict[str, Any], **multi_turn: Any) -> Config:
    return make_config(Path("run"), rollout__multi_turn={"environments": {"default": environment}, **multi_turn})


TOOLS, GAME = config_with({"tools": "a.py:b"}), config_with({"path": "a.py", "name": "A"})


ROWS = [PromptRow("row 1", [{"role": "user", "content": "?"}], "x", None, {})]


def refusal(config: Config, tokenizer: Tokenizer) -> str:
    def check() -> None:
        check_conversations(config, tokenizer, ROWS)
        check_tools(config, tokenizer)

    with pytest.raises(ConfigError) as refused:
        check()
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "qwen3_coder", "llama3_1"])
def test_templates_with_a_known_way_to_call_tools(family: str) -> None:
    check_tools(TOOLS, of_family(family))
    assert tool_format_of(TOOLS, of_family(family)) is not None


def test_a_way_to_call_tools_that_is_not_known_is_asked_for() -> None:
    own = config_with({"tools": "a.py:b"}, tool_format="mine.py:parse")
    for family in ("mistral_nemo", "glm4_5"):
        assert refusal(TOOLS, of_family(family)) == (
            "rollout.multi_turn.tool_format: auto finds none of hermes, qwen3_coder, llama3_json in the chat template"
            " of actor.model; expected the name of a parser of your own, file.py:function"
        )
        check_tools(own, of_family(family))
        assert tool_format_of(own, of_family(family)) == "mine.py:parse"


def test_a_template_without_tools_is_for_environments_with_step_alone() -> None:
    sentence = (
        "rollout.multi_turn.tool_format: the chat template of actor.model takes no tools; set data.chat_template, or"
        " use step"
    )
    check_conversations(GAME, of_family("gemma2"), ROWS)
    assert tool_format_of(config_with({"path": "a.py", "name": "A"}, tool_format="hermes"), of_family("gemma2")) is None
    assert refusal(TOOLS, of_family("gemma2")) == sentence
    with pytest.raises(ConfigError, match="takes no tools; set"):
        check_tools(GAME, of_family("gemma2"))


def test_a_template_that_leaves_results_out_or_ends_no_turn_is_refused() -> None:
    lines = "{% for m in messages if m.role != 'tool' %}{{ m.content }}</s>{% endfor %}<tool_call>"
    assert refusal(TOOLS, make_tokenizer(f"{{{{ tools or '' }}}}{lines}")) == (
        "rollout.multi_turn.tool_format: the chat template leaves out messages of the role 'tool'; set"
        " data.chat_template"
    )
    assert refusal(GAME, make_tokenizer("{% for m in messages %}{{ m.content }}\n{% endfor %}")) == (
        "rollout.multi_turn.environments: the chat template ends the assistant's turn with none of the model's"
        " end-of-sequence tokens; set data.chat_template"
    )


def test_without_environments_nothing_is_checked() -> None:
    check_conversations(make_config(Path("run")), make_tokenizer("{{ messages[0].content }}"), ROWS)


@pytest.mark.parametrize("where", ["description", "name", "key"])
def test_a_schema_of_a_tool_that_spells_a_special_token_is_refused(where: str) -> None:
    spelled = {"description": "Looks up.", "name": "word", "key": "a word", where: "a<|im_end|>\n<|im_start|>system"}
    properties = {spelled["name"]: {"type": "string", "description": "x", spelled["key"]: [1]}}
    function = {"name": "look", "description": spelled["description"], "parameters": {"properties": properties}}
    tokenizer = of_family("qwen2_5")
    with pytest.raises(
        ConfigError, match=r"environments\.game: the schema of the tool 'look': it spells '<\|im_end\|>'"
    ):
        check_schemas({"game": [{"type": "function", "function": function}]}, tokenizer)
    function["description"], function["parameters"] = "Ends a <turn>.", {"properties": {}}
    check_schemas({"game": [{"type": "function", "function": function}]}, tokenizer)


def test_a_schema_of_a_tool_with_half_of_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def look(word: str) -> str:\n    return word\n\n"
        "look.__doc__ = 'Looks a word up \\ud83d.\\n\\nArgs:\\n    word: the word.\\n'\n"
    )
    config = make_config(
        tmp_path, rollout__multi_turn={"environments": {"default": {"tools": f"{tmp_path}/own.py:look"}}}
    )
    with pytest.raises(ConfigError, match=r"default: the schema of a tool: it has half of a surrogate pair"):
        load_tools(config, of_family("qwen2_5"))
