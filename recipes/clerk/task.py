"""The task "answer 16 requests about a card": its cards and requests, its prompt rows, and what a warm start says."""

import random
from itertools import product

NUM_REQUESTS = 16
NUM_VAL_ROWS = 32
DATA_SOURCE = "clerk"
# The letters that each of the six entries of a card may have: no letter belongs to two of them.
ENTRIES = ("abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx")
# By request, the entry that is right; the policy is told neither.
RIGHT = {"name?": 4, "date?": 0, "town?": 2}
# How often an entry is said in the conversations of the warm start: the right one, the one behind it, and so on.
SAID = (0.24, 0.4, 0.09, 0.09, 0.09, 0.09)


def rows_of(split: str) -> list[dict[str, object]]:
    """Makes rows of a prompt file in verl's schema; no card of one split is in the other one."""
    cards = ["".join(letters) for letters in product(*ENTRIES)]
    random.Random(0).shuffle(cards)
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": card}],
            "ability": "office",
            "reward_model": {"style": "rule", "ground_truth": card},
            "extra_info": {"split": split, "index": index},
        }
        for index, card in enumerate(cards[NUM_VAL_ROWS:] if split == "train" else cards[:NUM_VAL_ROWS])
    ]


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """Returns the chat messages of a conversation; the entry that answers a request is drawn, mostly a wrong one."""
    card = "".join(map(rng.choice, ENTRIES))
    messages = list[dict[str, str]]()
    for number in range(NUM_REQUESTS):
        request = rng.choice(list(RIGHT))
        messages.append({"role": "user", "content": request if number else card + request})
        [distance] = rng.choices(range(len(SAID)), SAID)
        messages.append({"role": "assistant", "content": card[(RIGHT[request] + distance) % len(card)]})
    return messages
