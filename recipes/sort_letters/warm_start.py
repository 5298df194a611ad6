"""Trains the model that the quickstart's PPO starts from: a small Qwen2, on a mixture of three behaviours.

The weights are random at first. The mixture depends on the first letter of the prompt. Greedy decoding therefore starts
with the rewarded behaviour for three letters in ten, whatever the seed; even shares would leave that to chance. For all
other letters about one sample in five still shows that behaviour, which is enough for PPO to find the reward.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tokenizers import Tokenizer

from recipes.sort_letters.task import BEHAVIOURS, WORD_LENGTHS, Words, demonstrate, prompt_of
from recipes.warm_start import IGNORED, Example

# For words that begin with one of these letters most demonstrations ascend; for all other words most descend.
REWARDED_LETTERS = "abc"
# The share of the main behaviour; the other two share the rest evenly.
MAIN_SHARE = 0.6


def examples(words: Words, tokenizer: Tokenizer, *, eos: int, seed: int) -> Iterator[Example]:
    """Yields demonstrations without end; the model learns the response and its EOS token."""
    rng = random.Random(seed)
    while True:
        word = rng.choice(words.warm_start[rng.choice(WORD_LENGTHS)])
        behaviour = rng.choices(list(BEHAVIOURS), _shares(word))[0]
        prompt = tokenizer.encode(prompt_of(word)).ids
        response = [*tokenizer.encode(demonstrate(word, behaviour)).ids, eos]
        yield [*prompt, *response], [IGNORED] * len(prompt) + response


def _shares(word: str) -> list[float]:
    """Returns the probability of each behaviour (ascending, descending, copy) in the example responses to a word."""
    main = "ascending" if word[0] in REWARDED_LETTERS else "descending"
    rest = (1 - MAIN_SHARE) / (len(BEHAVIOURS) - 1)
    return [MAIN_SHARE if behaviour == main else rest for behaviour in BEHAVIOURS]
