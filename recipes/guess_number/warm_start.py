"""The conversations that the model of guess_number is warm-started on; each turn shows a behaviour drawn anew."""

import random
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer

from recipes.guess_number.task import CALL_END, CALL_START, MAX_GUESSES, PROMPT, TOP
from recipes.warm_start import IGNORED, Example

# The probabilities of the behaviours.
SCAN, RANDOM, BISECTION = 0.4, 0.2, 0.4
_TOOLS = [{"type": "function", "function": {"name": "guess"}}]  # the chat template shows the name alone


def examples(model: Path, seed: int) -> Iterator[Example]:
    """Yields conversations without end, in the chat template of a model's folder; the model learns its own turns."""
    rng, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(model)
    while True:
        rendered = tokenizer.apply_chat_template(
            conversation(rng), tools=_TOOLS, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, is_said = rendered["input_ids"], rendered["assistant_masks"]
        yield ids, [token if said else IGNORED for token, said in zip(ids, is_said, strict=True)]


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """Returns the chat messages of a conversation about a random number."""
    hidden, low, high = rng.randint(1, TOP), 1, TOP
    messages = [{"role": "user", "content": PROMPT}]
    for _ in range(MAX_GUESSES):
        behaviours = (low, rng.randint(low, high), (low + high) // 2)
        [guess] = rng.choices(behaviours, (SCAN, RANDOM, BISECTION))
        messages.append({"role": "assistant", "content": f"{CALL_START}{guess}{CALL_END}"})
        if guess == hidden:
            break
        low, high = (guess + 1, high) if guess < hidden else (low, guess - 1)
        messages.append({"role": "tool", "content": "higher" if guess < hidden else "lower"})
    return messages
