"""The task "read a book page by page, with a note of three facts": its books, its prompt rows, and the warm start."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

NUM_PAGES = 5
FACTS_PER_PAGE = 3
FACTS_PER_NOTE = 3
MAX_NOTE_CHARACTERS = 4 * FACTS_PER_NOTE
DATA_SOURCE = "take_notes"
PEOPLE = (
    *("ann", "bob", "cid", "dan", "eve", "fay", "gus", "hal"),
    *("ida", "jon", "kim", "lee", "max", "ned", "oda", "pam"),
)
NUMBERS = "1234"
# All facts that there are, and all questions: one token each.
FACTS = tuple(person + number for person in PEOPLE for number in NUMBERS)
QUESTIONS = tuple(f"{person}?" for person in PEOPLE)
# The people that a question is about, in each book; the policy is not told.
ASKED = ("dan", "kim")
SHARE_OF_QUESTIONS = 0.4  # of the contexts of the warm start
NUM_TRAIN_ROWS = 16_384
NUM_VAL_ROWS = 256
PAGE = "|"  # stands between the note and what follows it


@dataclass(frozen=True)
class Book:
    """The facts of each page, the question at the end, "ann?", and the fact that answers it, "ann4"."""

    pages: Sequence[Sequence[str]]
    question: str
    answer: str


def book_of(seed: int) -> Book:
    """Draws a book: each person has a number and stands on one page at most, those that may be asked for on one."""
    rng = random.Random(seed)
    others = [person for person in PEOPLE if person not in ASKED]
    people = [*ASKED, *rng.sample(others, NUM_PAGES * FACTS_PER_PAGE - len(ASKED))]
    rng.shuffle(people)
    facts = [person + rng.choice(NUMBERS) for person in people]
    pages = [facts[start : start + FACTS_PER_PAGE] for start in range(0, len(facts), FACTS_PER_PAGE)]
    asked = rng.choice(ASKED)
    [answer] = [fact for fact in facts if fact.startswith(asked)]
    return Book(pages, f"{asked}?", answer)


def page_message(note: str, facts: Sequence[str]) -> dict[str, str]:
    """Returns the message that is a context while the book is read: the note so far, and a page."""
    return {"role": "user", "content": note + PAGE + "".join(facts)}


def question_message(note: str, question: str) -> dict[str, str]:
    """Returns the message that is the last context: the note, and the question."""
    return {"role": "user", "content": note + PAGE + question}


def rows_of(split: str) -> list[dict[str, object]]:
    """Makes rows of a prompt file in verl's schema; the books of the splits are drawn by other seeds."""
    first, num_rows = (0, NUM_VAL_ROWS) if split == "val" else (NUM_VAL_ROWS, NUM_TRAIN_ROWS)
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [page_message("", book_of(seed).pages[0])],
            "ability": "memory",
            "reward_model": {"style": "rule", "ground_truth": book_of(seed).answer},
            "extra_info": {"split": split, "index": seed - first, "book": seed},
        }
        for seed in range(first, first + num_rows)
    ]


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """Returns the messages of one context: a page, with a note of facts that are drawn, or a question with its answer.

    A question about somebody who is not in the note is answered by a fact about this person that is drawn.
    """
    people = rng.sample(PEOPLE, FACTS_PER_NOTE + FACTS_PER_PAGE)
    facts = [person + rng.choice(NUMBERS) for person in people]
    note = facts[:FACTS_PER_NOTE]
    if rng.random() < SHARE_OF_QUESTIONS:
        asked = rng.choice(people)
        answer = next((fact for fact in note if fact.startswith(asked)), asked + rng.choice(NUMBERS))
        return [question_message("".join(note), f"{asked}?"), {"role": "assistant", "content": answer}]
    if rng.random() < 1 / NUM_PAGES:
        note = []
    page = facts[FACTS_PER_NOTE:]
    known = [*note, *page]
    kept = sorted(rng.sample(known, FACTS_PER_NOTE), key=known.index)
    return [page_message("".join(note), page), {"role": "assistant", "content": "".join(kept)}]
