"""One row of the table of verl's keys: what becomes of a key here."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from controller.from_verl.run import VerlRun

Outcome = Literal["taken", "changed", "not needed", "not supported"]
Convert = Callable[[Any, VerlRun], Any]
NO_DEFAULT = object()


class NotNeeded(Exception):
    """This value needs no key here; the text says why."""


class NotSupported(Exception):
    """This value cannot be had here; the text says what instead."""

    def __init__(self, instead: str, *, changes_results: bool = True) -> None:
        super().__init__(instead)
        self.changes_results = changes_results


@dataclass(frozen=True)
class Row:
    """What becomes of the keys that a pattern matches.

    Attributes:
        key: verl's; * stands for one part, ** for any number of them, {a,b} for either.
        to: our key, if there is one.
        note: how it is changed, why it is not needed, or what to do instead.
        default: verl's; it holds where the key is not given, and our default is another.
        convert: from verl's value to ours; it may raise NotNeeded or NotSupported.
        off: values with which something unsupported is not asked for, beside None, false and what is empty.
        changes_results: whether a run without it would learn something else; if not, only speed or memory differ.
        is_section: the value is a mapping, taken as a whole.
    """

    key: str
    outcome: Outcome
    to: str = ""
    note: str = ""
    default: Any = NO_DEFAULT
    convert: Convert | None = None
    off: tuple[Any, ...] = ()
    changes_results: bool = True
    is_section: bool = False

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(_regex(self.key))

    @property
    def is_pattern(self) -> bool:
        return any(sign in self.key for sign in "*{")

    def matches(self, key: str) -> bool:
        """Whether this row says what becomes of the key."""
        return key == self.key or (self.is_pattern and self._pattern.fullmatch(key) is not None)

    def is_off(self, value: Any) -> bool:
        """Whether a value asks for nothing."""
        return value is None or value is False or value in ("", [], {}) or value in self.off


def taken(
    key: str,
    to: str,
    default: Any = NO_DEFAULT,
    *,
    convert: Convert | None = None,
    note: str = "",
    is_section: bool = False,
) -> Row:
    """The same meaning under our key."""
    return Row(key, "taken", to, note, default, convert, is_section=is_section)


def changed(key: str, to: str, how: str, convert: Convert | None = None, default: Any = NO_DEFAULT) -> Row:
    """The meaning is had by another value, or nearly so."""
    return Row(key, "changed", to, how, default, convert)


def not_needed(key: str, why: str, default: Any = NO_DEFAULT) -> Row:
    """Whatever its value, nothing is to be set here."""
    return Row(key, "not needed", note=why, default=default)


def unsupported(key: str, instead: str, *off: Any, default: Any = NO_DEFAULT) -> Row:
    """Not to be had, and a run without it learns something else."""
    return Row(key, "not supported", note=instead, default=default, off=off)


def slower(key: str, instead: str, *off: Any, default: Any = NO_DEFAULT) -> Row:
    """Not to be had, but only speed, memory or what is written down differ without it."""
    return Row(key, "not supported", note=instead, default=default, off=off, changes_results=False)


def _regex(pattern: str) -> str:
    """Of a pattern with *, ** and {a,b}."""
    signs = {"**": r".+", "*": r"[^.]+"}
    parts = re.split(r"(\*\*|\*|\{[^}]*\})", pattern)
    return "".join(signs.get(part) or (_either(part) if part[:1] == "{" else re.escape(part)) for part in parts)


def _either(part: str) -> str:
    return f"(?:{'|'.join(map(_regex, part[1:-1].split(',')))})"
