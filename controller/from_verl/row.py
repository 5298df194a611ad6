"""Rows of the table that translates verl's keys, and the conversions that several rows use."""

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
    """Raised for a value that needs no key here; the text is the reason."""


class NotSupported(Exception):
    """Raised for a value that is not supported here; the text says what to do instead.

    `changes_results` is False if only speed or memory differ without the value.
    """

    def __init__(self, instead: str, *, changes_results: bool = True) -> None:
        super().__init__(instead)
        self.changes_results = changes_results


@dataclass(frozen=True)
class Row:
    """The rule for one key of verl, or for all keys that match a pattern.

    Attributes:
        key: verl's key or pattern: * matches one part, ** any number of characters, {a,b} either a or b.
        to: our key; "" if there is none.
        note: how the value is changed, why the key is not needed, or what to do instead.
        default: verl's default; it is used if the key is not given and our default differs.
        convert: returns our value of verl's value; it may raise NotNeeded or NotSupported.
        off: values that switch something unsupported off, beside None, false and empty values.
        changes_results: True if a run without the key would learn something else; else only speed or memory differ.
        is_section: True if the value is a mapping that is taken as a whole.
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
        """Returns True if this row is the rule for the key."""
        return key == self.key or (self.is_pattern and self._pattern.fullmatch(key) is not None)

    def is_off(self, value: Any) -> bool:
        """Returns True if the value switches the key off."""
        return value is None or value is False or value in ("", [], {}) or value in self.off


@dataclass(frozen=True)
class Section:
    """Makes the rows of one section of verl's configuration.

    Attributes:
        verl: verl's section: the prefix of verl's keys in all rows.
        ours: our section: the prefix of our keys; "" if rows give our keys in full.
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
        """Makes a row for a key whose meaning needs another value here, or is only nearly the same."""
        return Row(self._key(key), "changed", _joined(self.ours, to), how, default, convert)

    def checked(self, key: str, how: str, convert: Convert, default: Any = NO_DEFAULT) -> Row:
        """Makes a row for a key that we do not have: `convert` raises NotNeeded or NotSupported for each value."""
        return Row(self._key(key), "changed", "", how, default, convert)

    def not_needed(self, key: str, why: str, default: Any = NO_DEFAULT) -> Row:
        """Makes a row for a key that is not needed here, whatever its value."""
        return Row(self._key(key), "not needed", note=why, default=default)

    def unsupported(self, key: str, instead: str, *off: Any, default: Any = NO_DEFAULT) -> Row:
        """Makes a row for a key that is not supported; a run without it learns something else."""
        return Row(self._key(key), "not supported", note=instead, default=default, off=off)

    def slower(self, key: str, instead: str, *off: Any, default: Any = NO_DEFAULT) -> Row:
        """Makes a row for a key that is not supported; without it only speed, memory or logs differ."""
        return Row(self._key(key), "not supported", note=instead, default=default, off=off, changes_results=False)

    def _key(self, key: str) -> str:
        return _joined(self.verl, key)


def mapped(values: Mapping[str, str], instead: str) -> Convert:
    """Returns the conversion by this mapping; for other values the message is `instead`."""

    def convert(value: Any, _: VerlRun) -> str:
        if value not in [*values]:  # the value may be a list
            raise NotSupported(instead)
        return values[value]

    return convert


def one_of(names: Iterable[str], instead: str = "") -> Convert:
    """Returns the conversion that keeps these values; for others the message is `instead`, or a list of them."""
    return mapped({name: name for name in names}, instead or f"one of {', '.join(names)}")


def needless(values: Collection[Any], why: str, instead: str) -> Convert:
    """Returns the conversion for which these values are not needed, and all others are not supported."""

    def convert(value: Any, _: VerlRun) -> Any:
        raise NotNeeded(why) if value in values else NotSupported(instead)

    return convert


def same_as(key: str, instead: str) -> Convert:
    """Returns the conversion for which the value of another key is not needed, and others are not supported."""

    def convert(value: Any, run: VerlRun) -> Any:
        raise NotNeeded(f"same value as {key}") if value == run.value(key) else NotSupported(instead)

    return convert


def none_if_same_as(key: str) -> Convert:
    """Returns the conversion that keeps the value, or returns None if it is the value of another key."""
    return lambda value, run: None if value == run.value(key) else value


def only_if(condition: Callable[[VerlRun], bool], why_not: str) -> Convert:
    """Returns the conversion that keeps the value if the run meets the condition; else it is not needed."""

    def convert(value: Any, run: VerlRun) -> Any:
        if not condition(run):
            raise NotNeeded(why_not)
        return value

    return convert


def _joined(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _regex(pattern: str) -> str:
    """Returns the regular expression for a pattern with *, ** and {a,b}."""
    signs = {"**": ".+", "*": "[^.]+", "{": "(?:", ",": "|", "}": ")"}
    return "".join(signs.get(part) or re.escape(part) for part in re.split(r"(\*\*|[*{,}])", pattern))
