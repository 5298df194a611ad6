"""The policy that the user plays: calls as a chat template writes them, and turns that end where a group's end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from controller.commands.play.by_hand import HandPolicy, call_text
from controller.commands.play.transcript import Transcript
from controller.data.chat_template import detect_tool_format, load_chat_template
from controller.data.tokenizer import Tokenizer
from environments.tool_calls import hermes, llama3_json, qwen3_coder
from recipes.qwen2_tokenizer import train_tokenizer
from splitppo.batch import Batch
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import Slot
from splitppo.v1.conversation_pb2 import Conversation, FirstTurn, Turn, TurnLimits, TurnReply, TurnsEnded
from tests.support.fake_services import make_config

TEMPLATES = Path(__file__).parents[4] / "golden/chat_templates"
ENDS = ("<|im_end|>", "</s>", "<|eot_id|>")
PARSERS = {"hermes": hermes.parse, "qwen3_coder": qwen3_coder.parse, "llama3_json": llama3_json.parse}


def tokenizer_of(template: str) -> Tokenizer:
    backend = train_tokenizer(["a word"], vocab_size=300, special_tokens=ENDS)
    chat_template = load_chat_template(
        TEMPLATES, {"chat_template": template}, None, {"bos_token": "", "eos_token": "</s>"}
    )
    return Tokenizer(backend, tuple(map(backend.token_to_id, ENDS)), chat_template)


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "qwen3_coder", "llama3_1"])
def test_a_call_is_read_as_it_was_written(family: str) -> None:
    source = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    written = call_text(tokenizer_of(source), "look_up", {"key": 'a "word"\nor two', "number": 3})
    tool_format = detect_tool_format(source)
    assert tool_format is not None
    schema = {"properties": {"key": {"type": "string"}, "number": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": schema}}]
    before, [call] = PARSERS[tool_format](written, tools)
    assert (before.strip(), call.name, call.error) == ("", "look_up", "")
    assert call.arguments == {"key": 'a "word"\nor two', "number": 3}


def test_a_template_without_calls_is_told() -> None:
    with pytest.raises(ValueError, match="the chat template writes no calls of tools"):
        call_text(tokenizer_of("{% for m in messages %}{{ m.content }}</s>{% endfor %}"), "look_up", {})


class Typed:
    """Turns of a list."""

    def __init__(self, tokenizer: Tokenizer, *texts: str) -> None:
        self._turns = [tokenizer.backend.encode(text).ids for text in texts]

    async def tokens(self, number: int) -> list[int]:
        return list(self._turns[number - 1])


async def test_turns_end_at_the_limits_of_turn_context_and_response(tmp_path: Path) -> None:
    """Contexts of at most 8 tokens, behind a prompt of 3; a response of 18; a stop text, and limits of single turns."""
    tokenizer = tokenizer_of("{{ messages }}")
    config = make_config(tmp_path, data__max_prompt_length=4, data__max_response_length=18, rollout__stop=["x"])
    typed: Any = Typed(tokenizer, "123456789", "123456789", "1x34", "1y3", "123456789")
    policy = HandPolicy(config, tokenizer, typed, Transcript(config, tokenizer, shows_tokens=False))
    await policy.put_batch(Slot(), Batch.from_rows(prompts=[[5, 6, 7]]))
    turns: list[Turn] = []
    replies = iter(
        [
            TurnReply(turn=1, tokens=[9, 9], begins_context=True, limits=TurnLimits(max_tokens=2)),
            TurnReply(turn=2, tokens=[9]),
            TurnReply(turn=3, tokens=[9, 9], begins_context=True, limits=TurnLimits(stop=["y"])),
            TurnReply(turn=4, tokens=[9]),
        ]
    )

    def end(ended: TurnsEnded) -> None:
        turns.extend(ended.turns)
        if not ended.turns[0].is_last:
            asyncio.get_running_loop().create_task(policy.reply(Slot(), [next(replies)]))

    conversation = Conversation(
        max_turn_length=6, max_context_length=8, first_turns=[FirstTurn(limits=TurnLimits(max_tokens=50))]
    )
    reply = await policy.generate(
        Slot(), SamplingParams(max_response_length=18), on_turns=end, base_step=4, conversation=conversation
    )
    assert reply.result.policy_version == 4
    assert [tokenizer.decode(turn.tokens) for turn in turns] == ["12345", "12", "1x", "1y", "1"]
    assert [turn.is_last for turn in turns] == [False] * 4 + [True]
    rows = await policy.get_batch(Slot(), ["responses", "response_mask", "segments"])
    assert rows["response_mask"].rows()[0].tolist() == [1] * 5 + [0] * 2 + [1] * 2 + [0] + [1] * 2 + [0] * 2 + [
        1
    ] * 2 + [0, 1]
    assert rows["segments"].rows()[0].tolist() == [5, 2, 12, 2]
