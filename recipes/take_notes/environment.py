"""The environment that shows a book page by page; after each page nothing is left to the model but its own note."""

from collections.abc import Mapping
from typing import Any

from environments.chat import Chat
from recipes.take_notes.task import MAX_NOTE_CHARACTERS, book_of, page_message, question_message


async def take_notes(chat: Chat, row: Mapping[str, Any]) -> float:
    """Begins a context for each page, with the note so far, and one for the question; a right answer scores 1."""
    book = book_of(row["book"])
    turn = await chat.turn()  # the prompt is the first page
    for page in book.pages[1:]:
        turn = await chat.restart(page_message(turn.text[:MAX_NOTE_CHARACTERS], page))
    note = turn.text[:MAX_NOTE_CHARACTERS]
    answer = await chat.restart(question_message(note, book.question))
    chat.note(has_noted=float(book.answer in note))
    return float(answer.text == book.answer)
