"""The recipe clerk: its environment, its tokenizer and template, and the conversations of its warm start."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from controller.data.tokenizer import load_tokenizer
from controller.data.turn_tokens import TurnTokens
from recipes.clerk import task
from recipes.clerk.environment import Clerk
from recipes.clerk.prepare import RECIPE, prepare
from recipes.conversations import examples
from recipes.warm_start import IGNORED
from splitppo.config import load_config
from tests.support.recipes import names_its_files

CARD = "afkpux"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("prepared") / "clerk"
    prepare(output, warm_start_steps=1)
    return output


def test_each_right_answer_has_its_reward_and_the_last_one_ends() -> None:
    environment = Clerk()
    request, rewards = environment.reset(seed=5, ground_truth=CARD), []
    for number in range(1, task.NUM_REQUESTS + 1):
        is_right = number % 3 > 0
        answered = environment.step(CARD[(task.RIGHT[request] + (not is_right)) % 6])
        rewards.append((answered.reward > 0) == is_right)
        assert answered.reward in (0, 1 / 16)
        assert answered.done == (number == task.NUM_REQUESTS)
        request = answered.text
    assert all(rewards)


@pytest.mark.parametrize("answer", ["", "af", " a", "a ", CARD])
def test_an_answer_is_one_letter_and_nothing_else(answer: str) -> None:
    environment = Clerk()
    environment.reset(seed=5, ground_truth="aaaaaa")
    assert environment.step(answer).reward == 0
    assert environment.step("a").reward == 1 / 16


def test_the_requests_follow_from_the_seed() -> None:
    def requests(seed: int) -> list[str]:
        environment = Clerk()
        return [environment.reset(seed=seed, ground_truth=CARD), *(environment.step("").text for _ in range(15))]

    assert requests(1) == requests(1) != requests(2)
    asked = Counter(request for seed in range(30) for request in requests(seed))
    assert set(asked) == set(task.RIGHT)
    assert min(asked.values()) > 100


def test_the_config_reads_what_prepare_makes_and_the_environment_of_this_recipe() -> None:
    config = load_config(RECIPE.config_file)
    names_its_files(config, RECIPE, task.DATA_SOURCE)
    assert config.rollout.multi_turn.max_turns == task.NUM_REQUESTS
    assert config.algorithm.turn_lam is not None


def test_validation_has_cards_that_training_has_not(prepared: Path) -> None:
    cards = {}
    for split in ("train", "val"):
        rows = pq.read_table(prepared / f"{split}.parquet").to_pylist()
        cards[split] = {row["reward_model"]["ground_truth"] for row in rows}
        assert all(row["prompt"] == [{"role": "user", "content": row["reward_model"]["ground_truth"]}] for row in rows)
    assert len(cards["val"]) == 32
    assert not cards["val"] & cards["train"]
    assert all(letter in entry for card in cards["val"] for letter, entry in zip(card, task.ENTRIES, strict=True))


def test_the_longest_conversation_fits_the_lengths_of_the_config(prepared: Path) -> None:
    data, tokenizer = load_config(RECIPE.config_file).data, load_tokenizer(str(prepared / "model"))
    [message, *rest] = task.conversation(random.Random(0))
    prompt = tokenizer.chat_template.render([message], ())
    whole = tokenizer.chat_template.render([message, *rest], (), add_generation_prompt=False)
    ids = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in (prompt, whole)]
    assert ids[1][: len(ids[0])] == ids[0]
    assert (len(ids[0]), len(ids[1]) - len(ids[0])) == (8, 62)
    assert data.max_prompt_length >= 8
    assert data.max_response_length > 62


def test_the_warm_start_says_the_entries_of_the_card_mostly_wrong_ones(prepared: Path) -> None:
    rng, tokenizer, distances = random.Random(0), AutoTokenizer.from_pretrained(prepared / "model"), Counter[int]()
    for ids, labels in islice(examples(prepared / "model", task.conversation, 0), 100):
        messages = task.conversation(rng)
        own = [message["content"] for message in messages if message["role"] == "assistant"]
        assert tokenizer.decode([label for label in labels if label != IGNORED]) == "".join(
            f"{text}<|im_end|>" for text in own
        )
        assert len(ids) == len(labels)
        card = messages[0]["content"][:6]
        requests = [message["content"][-5:] for message in messages if message["role"] == "user"]
        for request, answer in zip(requests, own, strict=True):
            distances[(card.index(answer) - task.RIGHT[request]) % 6] += 1
    shares = [distances[distance] / distances.total() for distance in range(6)]
    assert shares == pytest.approx(task.SAID, abs=0.05)


def test_the_model_is_trained_on_the_tokens_that_a_run_puts_between_turns(prepared: Path) -> None:
    tokenizer = load_tokenizer(str(prepared / "model"))
    end = tokenizer.backend.token_to_id("<|im_end|>")
    request = next(iter(task.RIGHT))
    reply = TurnTokens(tokenizer, 64).reply([{"role": "user", "content": request}], last_token=end).tolist()
    assert len(reply) == 2
    ids, _ = next(examples(prepared / "model", task.conversation, 0))
    assert any(ids[start : start + 3] == [end, *reply] for start in range(len(ids)))
