"""The task "sort cadb", whose answer is "#### abcd": words, their division into disjoint sets, example responses.

The warm start sees three behaviours (ascending, descending, copy); PPO rewards one of them, ascending.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LETTERS = "abcdefghij"
WORD_LENGTHS = (3, 4, 5)
DATA_SOURCE = "sort_letters"
MARKER = "#### "
# Words per length that are kept for validation and for PPO; the warm start has the rest.
NUM_VAL_WORDS: Mapping[int, int] = {3: 128, 4: 192, 5: 192}
NUM_TRAIN_WORDS: Mapping[int, int] = {3: 256, 4: 896, 5: 896}


@dataclass(frozen=True)
class Words:
    """Three disjoint sets of words for validation, PPO and warm start; no letter occurs twice in a word.

    Attributes:
        val, train: shuffled.
        warm_start: lists of words by length, so that all lengths can be sampled equally often.
    """

    val: Sequence[str]
    train: Sequence[str]
    warm_start: Mapping[int, Sequence[str]]


def split_words(seed: int) -> Words:
    """Divides all words among validation, PPO and warm start; the result depends on `seed` only."""
    rng = random.Random(seed)
    val: list[str] = []
    train: list[str] = []
    warm_start: dict[int, list[str]] = {}
    for length in WORD_LENGTHS:
        words = ["".join(letters) for letters in itertools.permutations(LETTERS, length)]
        rng.shuffle(words)
        num_val = NUM_VAL_WORDS[length]
        num_train = NUM_TRAIN_WORDS[length]
        val += words[:num_val]
        train += words[num_val : num_val + num_train]
        warm_start[length] = words[num_val + num_train :]
    rng.shuffle(val)
    rng.shuffle(train)
    return Words(val, train, warm_start)


def prompt_of(word: str) -> str:
    """Returns the prompt that asks the model to sort the letters of a word: "sort cadb"."""
    return f"sort {word}"


def answer_of(word: str) -> str:
    """Returns the answer that PPO rewards: the letters of the word in ascending order."""
    return "".join(sorted(word))


# The letters of a demonstration, by behaviour.
BEHAVIOURS: Mapping[str, Callable[[str], str]] = {
    "ascending": answer_of,
    "descending": lambda word: answer_of(word)[::-1],
    "copy": str,
}


def demonstrate(word: str, behaviour: str) -> str:
    """Returns an example response for the warm start: the word's letters in the order of this behaviour."""
    return MARKER + BEHAVIOURS[behaviour](word)


def rows_of(words: Sequence[str], split: str) -> list[dict[str, object]]:
    """Makes rows of a prompt file in verl's schema; prompts are plain text, because the model has no chat template."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": prompt_of(word),
            "ability": "sorting",
            "reward_model": {"style": "rule", "ground_truth": answer_of(word)},
            "extra_info": {"split": split, "index": index, "word": word},
        }
        for index, word in enumerate(words)
    ]
