"""One row of the table of verl's keys: what becomes of a key here."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
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
    """The rule for the keys that a pattern matches.

    Attributes:
        key: verl's; * stands for one part, ** for any number of them, {a,b} for either.
        to: our key, if there is one.
        note: how it is changed, why it is not needed, or what to do instead.
        default: verl's; it holds where the key is not given, and our default is another.
        convert: from verl's value to ours; it may raise NotNeeded or NotSupported.
        off: values with which something unsupported is not asked for, beside None, false and what is empty.
        changes_results: True if a run without it would learn something else; else only speed or memory differ.
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
        """Returns True if this row says what becomes of the key."""
        return key == self.key or (self.is_pattern and self._pattern.fullmatch(key) is not None)

    def is_off(self, value: Any) -> bool:
        """Returns True if a value asks for nothing."""
        return value is None or value is False or value in ("", [], {}) or value in self.off


@dataclass(frozen=True)
class Section:
    """Makes the rows of one section of verl's.

    Attributes:
        verl: the section there, which stands before the keys of all its rows.
        ours: the section here, before our keys; "" where they are given as a whole.
    """

    verl: str
    ours: str = ""

    def taken(self, key: str, default: Any = NO_DEFAULT, convert: Convert | None = None, **more: Any) -> Row:
        """Makes a row for a key with the same name and meaning here."""
        return self.renamed(key, key, default, convert, **more)

    def renamed(self, key: str, to: str, default: Any = NO_DEFAULT, convert: Convert | None = None, **more: Any) -> Row:
        """Makes a row for a key whose meaning has another name here."""
        return Row(self._key(key), "taken", _joined(self.ours, to), default=default, convert=convert, **more)

    def changed(self, key: str, to: str, how: str, convert: Convert | None = None, default: Any = NO_DEFAULT) -> Row:
        """Makes a row for a key whose meaning is had by another value, or nearly so."""
        return Row(self._key(key), "changed", _joined(self.ours, to), how, default, convert)

    def checked(self, key: str, how: str, convert: Convert, default: Any = NO_DEFAULT) -> Row:
        """Makes a row for a key without one here: `convert` raises NotNeeded or NotSupported for each value."""
        return Row(self._key(key), "changed", "", how, default, convert)

    def not_needed(self, key: str, why: str, default: Any = NO_DEFAULT) -> Row:
        """Makes a row for a key that needs no setting here, whatever its value."""
        return Row(self._key(key), "not needed", note=why, default=default)

    def unsupported(self, key: str, instead: str, *off: Any, default: Any = NO_DEFAULT) -> Row:
        """Makes a row for what cannot be had; a run without it learns something else."""
        return Row(self._key(key), "not supported", note=instead, default=default, off=off)

    def slower(self, key: str, instead: str, *off: Any, default: Any = NO_DEFAULT) -> Row:
        """Makes a row for what cannot be had; only speed, memory or what is written down differ without it."""
        return Row(self._key(key), "not supported", note=instead, default=default, off=off, changes_results=False)

    def _key(self, key: str) -> str:
        return _joined(self.verl, key)


def mapped(values: Mapping[str, str], instead: str) -> Convert:
    """Returns the conversion of verl's values to ours; `instead` is what to do for others."""

    def convert(value: Any, _: VerlRun) -> str:
        if value not in [*values]:  # it may be a list
            raise NotSupported(instead)
        return values[value]

    return convert


def one_of(names: Iterable[str], instead: str = "") -> Convert:
    """Returns the conversion that takes these values; `instead` is what to do for others, else they are listed."""
    return mapped({name: name for name in names}, instead or f"one of {', '.join(names)}")


def needless(values: Collection[Any], why: str, instead: str) -> Convert:
    """Returns the conversion by which these values are not needed, and all others not supported."""

    def convert(value: Any, _: VerlRun) -> Any:
        raise NotNeeded(why) if value in values else NotSupported(instead)

    return convert


def same_as(key: str, instead: str) -> Convert:
    """Returns the conversion by which the value of another key is not needed, and all others not supported."""

    def convert(value: Any, run: VerlRun) -> Any:
        raise NotNeeded(f"same value as {key}") if value == run.value(key) else NotSupported(instead)

    return convert


def none_if_same_as(key: str) -> Convert:
    """Returns the conversion to None, which stands for the value of another key, where the value is that."""
    return lambda value, run: None if value == run.value(key) else value


def only_if(condition: Callable[[VerlRun], bool], why_not: str) -> Convert:
    """Returns the conversion that takes the value in some runs; in others it is not needed."""

    def convert(value: Any, run: VerlRun) -> Any:
        if not condition(run):
            raise NotNeeded(why_not)
        return value

    return convert


def _joined(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _regex(pattern: str) -> str:
    """Returns the regular expression of a pattern with *, ** and {a,b}."""
    signs = {"**": ".+", "*": "[^.]+", "{": "(?:", ",": "|", "}": ")"}
    return "".join(signs.get(part) or re.escape(part) for part in re.split(r"(\*\*|[*{,}])", pattern))
