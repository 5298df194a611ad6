"""The exception for a configuration that cannot be used, and parts of its sentences.

This module needs no package, so any process can import it.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """Raised for a configuration or argument that cannot be used; the message names it and says what was expected."""


@contextmanager
def config_errors(*kinds: type[Exception], before: str = "", after: str = "", instead: str = "") -> Iterator[None]:
    """Turns errors of these kinds, in a `with` block, into a ConfigError.

    Its sentence is theirs with a text `before` and `after`, or the text `instead` of theirs.
    """
    try:
        yield
    except kinds as error:
        raise ConfigError(instead or f"{before}{sentence_of(error)}{after}") from error


def sentence_of(error: BaseException) -> str:
    """Returns the message of an exception in one line; the name of its type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Returns the end of an error message for an unknown name: " (did you mean CHOICE?)"; "" if none is similar."""
    close = difflib.get_close_matches(name, [*choices], n=1)
    return f" (did you mean {close[0]}?)" if close else ""
