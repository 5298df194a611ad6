"""The recipe take_notes: its books, its environment, its tokenizer and template, and the contexts of its warm start."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from controller.data.tokenizer import load_tokenizer
from environments.chat import Turn
from environments.messages import Answer
from recipes.conversations import examples
from recipes.take_notes import task
from recipes.take_notes.environment import take_notes
from recipes.take_notes.prepare import RECIPE, prepare
from recipes.warm_start import IGNORED
from splitppo.config import load_config
from tests.support.recipes import names_its_files
from tests.support.scripted_chat import ScriptedChat

NUM_BOOKS = 200
NUM_TURNS = task.NUM_PAGES + 1


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("prepared") / "take_notes"
    prepare(output, warm_start_steps=1)
    return output


def facts_in(text: str) -> list[str]:
    return [text[start : start + 4] for start in range(0, len(text), 4)]


async def score(book: int, choose: Callable[[list[str]], list[str]]) -> tuple[float, ScriptedChat]:
    """Plays a book: `choose` makes a note out of the facts that are seen, and an answer is what the note says."""

    def speak(answer: Answer) -> Turn:
        [message] = answer.messages or [task.page_message("", task.book_of(book).pages[0])]
        note, page = message["content"].split(task.PAGE)
        if page in task.QUESTIONS:
            known = [fact for fact in facts_in(note) if fact.startswith(page[:-1])]
            return Turn(known[0] if known else "", (), "stop")
        return Turn("".join(choose(facts_in(note) + facts_in(page))), (), "stop")

    chat = ScriptedChat([speak] * NUM_TURNS)
    return await take_notes(chat, {"book": book}), chat


def about_the_asked(facts: list[str]) -> list[str]:
    return [fact for fact in facts if fact[:-1] in task.ASKED]


async def test_who_writes_down_what_is_asked_for_answers_every_question() -> None:
    for book in range(NUM_BOOKS):
        reward, chat = await score(book, about_the_asked)
        assert reward == 1.0
        assert chat.pending.notes == {"has_noted": 1.0}


async def test_who_writes_down_the_latest_facts_answers_those_about_the_last_page() -> None:
    """A note of the first facts knows the first page alone; each has one of five pages."""
    for choose in (lambda facts: facts[-3:], lambda facts: facts[:3]):
        rewards = [(await score(book, choose))[0] for book in range(NUM_BOOKS)]
        assert sum(rewards) / NUM_BOOKS == pytest.approx(1 / task.NUM_PAGES, abs=0.08)


async def test_each_page_and_the_question_is_a_context_of_its_own_that_holds_a_bounded_note() -> None:
    _, chat = await score(3, lambda facts: facts)  # a note of all that is seen
    first, *later = chat.answers
    assert first == Answer()  # the prompt as it is
    assert [answer.begins_context for answer in later] == [True] * task.NUM_PAGES
    book = task.book_of(3)
    notes, shown = zip(*(answer.messages[0]["content"].split(task.PAGE) for answer in later), strict=True)
    assert shown == (*map("".join, book.pages[1:]), book.question)
    assert notes == ("".join(book.pages[0]),) * task.NUM_PAGES


def test_a_book_has_each_person_once_and_those_that_are_asked_for() -> None:
    for number in range(NUM_BOOKS):
        book = task.book_of(number)
        people = [fact[:-1] for page in book.pages for fact in page]
        assert len(people) == len({*people}) == task.NUM_PAGES * task.FACTS_PER_PAGE
        assert {*task.ASKED} <= {*people} <= {*task.PEOPLE}
        assert book.answer[:-1] == book.question[:-1]
        assert sum(book.answer in page for page in book.pages) == 1
    questions = [task.book_of(number).question for number in range(NUM_BOOKS)]
    assert {*questions} == {f"{person}?" for person in task.ASKED}


def test_the_config_reads_what_prepare_makes_and_the_environment_of_this_recipe() -> None:
    config = load_config(RECIPE.config_file)
    names_its_files(config, RECIPE, task.DATA_SOURCE)
    assert config.rollout.multi_turn.max_turns == NUM_TURNS


def test_validation_has_books_that_training_has_not(prepared: Path) -> None:
    books = {}
    for split, num_rows in (("train", task.NUM_TRAIN_ROWS), ("val", task.NUM_VAL_ROWS)):
        rows = pq.read_table(prepared / f"{split}.parquet").to_pylist()
        books[split] = {row["extra_info"]["book"] for row in rows}
        assert len(books[split]) == len(rows) == num_rows
        for row in rows[:20]:
            book = task.book_of(row["extra_info"]["book"])
            assert row["prompt"] == [{"role": "user", "content": task.PAGE + "".join(book.pages[0])}]
            assert row["reward_model"]["ground_truth"] == book.answer
    assert not books["val"] & books["train"]


async def test_contexts_fit_the_lengths_of_the_config_and_the_book_does_not(prepared: Path) -> None:
    config = load_config(RECIPE.config_file)
    tokenizer = load_tokenizer(str(prepared / "model"))

    def length(text: str) -> int:
        return len(tokenizer.backend.encode(text, add_special_tokens=False).ids)

    def rendered(message: dict[str, str]) -> int:
        return length(tokenizer.chat_template.render([message], ()))

    _, chat = await score(3, lambda facts: facts)
    contexts = [rendered(dict(answer.messages[0])) for answer in chat.answers[1:]]
    book = task.book_of(3)
    assert rendered(task.page_message("", book.pages[0])) <= config.data.max_prompt_length
    assert contexts == [8] * (task.NUM_PAGES - 1) + [6]
    turn = config.rollout.multi_turn.max_turn_length
    assert turn == task.FACTS_PER_NOTE + 1
    most = config.rollout.multi_turn.max_context_length
    assert max(contexts) + turn <= most < length("".join(map("".join, book.pages)))
    assert sum(contexts) + task.NUM_PAGES * turn + 2 <= config.data.max_response_length


def test_the_warm_start_keeps_facts_in_their_order_and_reads_its_notes(prepared: Path) -> None:
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(prepared / "model")
    num_asked = 0
    for ids, labels in islice(examples(prepared / "model", task.conversation, 0), 200):
        context, own = task.conversation(rng)
        assert tokenizer.decode([label for label in labels if label != IGNORED]) == own["content"] + "<|im_end|>"
        assert len(ids) == len(labels)
        note, page = context["content"].split(task.PAGE)
        if page in task.QUESTIONS:
            num_asked += 1
            assert own["content"] in task.FACTS
            assert own["content"] in note or page[:-1] not in note
            continue
        seen = facts_in(note) + facts_in(page)
        kept = facts_in(own["content"])
        assert len(kept) == task.FACTS_PER_NOTE
        assert kept == [fact for fact in seen if fact in kept]
    assert num_asked == pytest.approx(200 * task.SHARE_OF_QUESTIONS, abs=30)
