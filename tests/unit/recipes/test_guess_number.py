"""The recipe guess_number: its environment, its tokenizer and template, and the conversations of its warm start."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from controller.data.chat_template import detect_tool_format
from controller.data.tokenizer import load_tokenizer
from controller.data.turn_tokens import TurnTokens
from environments.chat import Step
from environments.gateway.session import Gateway
from environments.messages import Answer
from recipes.conversations import examples
from recipes.guess_number import task
from recipes.guess_number.agent import run
from recipes.guess_number.environment import GuessNumber
from recipes.guess_number.prepare import RECIPE, prepare
from recipes.warm_start import IGNORED
from splitppo.config import load_config
from tests.support.recipes import names_its_files
from tests.support.scripted_policy import ScriptedPolicy


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("prepared") / "guess_number"
    prepare(output, warm_start_steps=1)
    return output


def found(hidden: int, behaviour: int) -> float:
    """The reward of a strategy: that of the lowest number which is possible (0), or of the middle (1)."""
    environment, low, high = GuessNumber(), 1, task.TOP
    environment.reset(ground_truth=str(hidden))
    for _ in range(task.MAX_GUESSES):
        guess = (low, (low + high) // 2)[behaviour]
        said = environment.guess(guess)
        if isinstance(said, Step):
            assert (said.text, said.done) == ("right", True)
            break
        low, high = (guess + 1, high) if said == "higher" else (low, guess - 1)
    return environment.get_reward()


def test_bisection_finds_every_number_and_scanning_five() -> None:
    rewards = [sum(found(hidden, behaviour) for hidden in range(1, task.TOP + 1)) for behaviour in (0, 1)]
    assert rewards == [5, 31]


def test_a_number_out_of_range_is_an_error_that_the_policy_reads() -> None:
    with pytest.raises(ValueError, match="expected 1 to 31"):
        GuessNumber().guess(32)


def test_the_config_reads_what_prepare_makes_and_the_environment_of_this_recipe() -> None:
    config = load_config(RECIPE.config_file)
    names_its_files(config, RECIPE, task.DATA_SOURCE)
    assert config.rollout.multi_turn.max_turns == task.MAX_GUESSES


async def test_the_agent_program_says_what_the_class_says() -> None:
    bisected = {"higher": iter((24,)), "lower": iter((20,)), "": iter((16,))}  # for 20

    def speak(answer: Answer, _num_turns: int) -> str:
        told = answer.messages[-1]["content"] if answer.messages[-1]["role"] == "tool" else ""
        return f"{task.CALL_START}{next(bisected[told])}{task.CALL_END}"

    gateway = await Gateway.open("127.0.0.1", 0)
    policy = ScriptedPolicy(speak)
    session = gateway.session(policy.chat)
    assert await run(session.endpoint, {"ground_truth": "20"}) == 1.0
    session.close()
    await gateway.close()
    first, *others = policy.answers
    assert (first.begins_context, first.messages) == (True, ({"role": "user", "content": task.PROMPT},))
    assert [answer.messages[0]["content"] for answer in others] == ["higher", "lower"]
    assert not any(answer.begins_context for answer in others)


def test_validation_asks_for_each_number_once(prepared: Path) -> None:
    rows = pq.read_table(prepared / "val.parquet").to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in rows] == [str(number) for number in range(1, 32)]
    assert len({str(row["prompt"]) for row in rows}) == 1


def test_the_longest_conversation_fits_the_lengths_of_the_config(prepared: Path) -> None:
    data, tokenizer = load_config(RECIPE.config_file).data, load_tokenizer(str(prepared / "model"))
    [message, *rest] = next(said for said in iter_conversations(0) if len(said) == 2 * task.MAX_GUESSES + 1)
    prompt = tokenizer.chat_template.render([message], task.TOOLS)
    whole = tokenizer.chat_template.render([message, *rest[:-1]], task.TOOLS, add_generation_prompt=False)
    ids = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in (prompt, whole)]
    assert ids[1][: len(ids[0])] == ids[0]
    assert (len(ids[0]), len(ids[1]) - 1 - len(ids[0])) == (12, 52)
    assert data.max_prompt_length >= 12
    assert data.max_response_length > 52


def iter_conversations(seed: int) -> list[list[dict[str, str]]]:
    rng = random.Random(seed)
    return [task.conversation(rng) for _ in range(50)]


def test_the_warm_start_learns_the_models_own_turns(prepared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared / "model")
    said = iter_conversations(0)
    for messages, (ids, labels) in zip(
        said, islice(examples(prepared / "model", task.conversation, 0, task.TOOLS), 50), strict=True
    ):
        assert [label for label in labels if label not in (IGNORED, *ids)] == []
        learned = tokenizer.decode([label for label in labels if label != IGNORED])
        own = [message["content"] for message in messages if message["role"] == "assistant"]
        assert learned == "".join(f"{text}<|im_end|>" for text in own)


def test_the_model_is_trained_on_the_tokens_that_a_run_puts_between_turns(prepared: Path) -> None:
    tokenizer = load_tokenizer(str(prepared / "model"))
    assert tokenizer.chat_template.takes_tools
    assert detect_tool_format(tokenizer.chat_template.source) == "hermes"
    end = tokenizer.backend.token_to_id("<|im_end|>")
    reply = TurnTokens(tokenizer, 64).reply([{"role": "tool", "name": "guess", "content": "lower"}], last_token=end)
    ids, _ = next(
        example for example in examples(prepared / "model", task.conversation, 0, task.TOOLS) if len(example[0]) > 40
    )
    text = tokenizer.backend.decode(ids, skip_special_tokens=False)
    assert "lower" in text
    assert tokenizer.backend.decode(reply.tolist(), skip_special_tokens=False) in text
    assert any(list(ids[start : start + len(reply)]) == reply.tolist() for start in range(len(ids)))
