"""The type of a row of the table that translates verl's keys, and conversions of values that several rows use."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from controller.commands.from_verl.run import VerlRun

Rule = Literal["taken", "changed", "not needed", "not supported"]
Convert = Callable[[Any, VerlRun], Any]
NO_DEFAULT = object()


class NotNeeded(Exception):
    """Raised by a conversion for a value of verl that needs no key in SplitPPO; the text is the reason."""


class NotSupported(Exception):
    """Raised by a conversion for a value of verl that SplitPPO does not support; the text says what to do instead.

    `changes_results` is False if only speed or memory differ without the value.
    """

    def __init__(self, instead: str, *, changes_results: bool = True) -> None:
        super().__init__(instead)
        self.changes_results = changes_results


@dataclass(frozen=True)
class Noted:
    """The result of a conversion of a value of verl that the report lists as changed, with this note.

    `to` is the key of SplitPPO that gets the value, if it is not that of the row.
    """

    value: Any
    note: str
    to: str = ""


@dataclass(frozen=True)
class Row:
    """The rule that translates one key of verl into SplitPPO, or all verl keys that match a pattern.

    Attributes:
        key: verl's key or pattern: * matches one part, ** any number of characters, {a,b} either a or b.
        to: the key of SplitPPO; "" if SplitPPO has no such key.
        note: how the value is changed, why the key is not needed, or what to do instead.
        default: verl's default; it is used if the key is not given and SplitPPO's default differs.
        convert: converts verl's value into SplitPPO's value; may raise NotNeeded or NotSupported.
        off: values that switch something unsupported off, beside None, false and empty values.
        changes_results: True if a run without the key would learn something else; else only speed or memory differ.
        is_section: True if the value is a mapping that is taken as a whole.
    """

    key: str
    outcome: Rule
    to: str = ""
    note: str = ""
    default: Any = NO_DEFAULT
    convert: Convert | None = None
    off: tuple[Any, ...] = ()
    changes_results: bool = True
    is_section: bool = False

    @property
    def is_pattern(self) -> bool:
        return any(sign in self.key for sign in "*{")

    def matches(self, key: str) -> bool:
        """Returns True if this row is the rule for the verl key `key`, by name or by pattern."""
        return key == self.key or (self.is_pattern and _pattern(self.key).fullmatch(key) is not None)

    def is_off(self, value: Any) -> bool:
        """Returns True if the value of the verl key switches a feature off: None, False, empty, or listed in `off`."""
        return value is None or value is False or value in ("", [], {}) or value in self.off


@dataclass(frozen=True)
class Section:
    """Makes the translation rules (`Row`) for the keys of one section of verl's configuration.

    Attributes:
        verl: verl's section: the prefix of verl's keys in all rows.
        ours: SplitPPO's section: the prefix of SplitPPO's keys; "" if rows give these keys in full.
    """

    verl: str
    ours: str = ""

    def taken(self, key: str, default: Any = NO_DEFAULT, convert: Convert | None = None, **more: Any) -> Row:
        """Makes the rule for a verl key that has the same name and meaning in SplitPPO."""
        return self.renamed(key, key, default, convert, **more)

    def all_taken(self, convert: Convert | None = None, **defaults: Any) -> Iterator[Row]:
        """Makes the rules `taken` for several verl keys with the same conversion, given with verl's defaults."""
        return (self.taken(key, default, convert) for key, default in defaults.items())

    def renamed(self, key: str, to: str, default: Any = NO_DEFAULT, convert: Convert | None = None, **more: Any) -> Row:
        """Makes the rule for a verl key that has the same meaning but another name in SplitPPO."""
        return Row(self._key(key), "taken", _joined(self.ours, to), default=default, convert=convert, **more)

    def changed(self, key: str, to: str, how: str, convert: Convert | None = None, default: Any = NO_DEFAULT) -> Row:
        """Makes the rule that translates a verl key whose value must change, or whose meaning differs slightly."""
        return Row(self._key(key), "changed", _joined(self.ours, to), how, default, convert)

    def checked(self, key: str, how: str, convert: Convert, default: Any = NO_DEFAULT) -> Row:
        """Makes the rule for a verl key that SplitPPO lacks: `convert` raises NotNeeded or NotSupported for a value."""
        return Row(self._key(key), "changed", "", how, default, convert)

    def not_needed(self, key: str, why: str, default: Any = NO_DEFAULT) -> Row:
        """Makes the rule for a verl key that SplitPPO does not need, whatever the value; `why` is the reason.

        `key` may name several keys as {a,b}, but not by a wildcard: a later version of verl may have a key that the
        wildcard matches, and that changes what is learned.

        Raises:
            ValueError: `key` has a wildcard.
        """
        if "*" in key:
            raise ValueError(f"{self._key(key)}: expected the names of keys that are not needed, not a wildcard")
        return Row(self._key(key), "not needed", note=why, default=default)

    def all_not_needed(self, names: Mapping[str, str]) -> Iterator[Row]:
        """Makes the rules `not_needed` for many keys: `names` has, for each reason, verl's names between blanks."""
        return (self.not_needed(f"{{{','.join(keys.split())}}}", why) for why, keys in names.items())

    def tree_not_needed(self, key: str, why: str) -> Row:
        """Makes the rule for a whole tree of verl's keys, present and future, none of which can touch a number.

        `key` is a pattern. Such trees are about logs, profiles and Ray alone.
        """
        return Row(self._key(key), "not needed", note=why)

    def unsupported(self, key: str, instead: str, *off: Any, default: Any = NO_DEFAULT) -> Row:
        """Makes the rule for a verl key that is not supported; a training run without the key learns something else.

        Args:
            key: the key in verl's section.
            instead: what the user can do instead.
            off: values that switch the feature of the key off, which are accepted.
            default: verl's default.
        """
        return Row(self._key(key), "not supported", note=instead, default=default, off=off)

    def slower(self, key: str, instead: str, *off: Any, default: Any = NO_DEFAULT) -> Row:
        """Makes the rule for a verl key that is not supported; without the key only speed, memory or logs differ."""
        return Row(self._key(key), "not supported", note=instead, default=default, off=off, changes_results=False)

    def _key(self, key: str) -> str:
        return _joined(self.verl, key)


def mapped(values: Mapping[str, str], instead: str) -> Convert:
    """Makes a conversion of verl's values by a mapping; other values raise NotSupported with the message `instead`."""

    def convert(value: Any, _: VerlRun) -> str:
        if value not in [*values]:  # the value may be a list
            raise NotSupported(instead)
        return values[value]

    return convert


def one_of(names: Iterable[str], instead: str = "") -> Convert:
    """Makes a conversion that keeps the listed values; others raise NotSupported with `instead`, or with the list."""
    return mapped({name: name for name in names}, instead or f"one of {', '.join(names)}")


def needless(values: Collection[Any], why: str, instead: str) -> Convert:
    """Makes a conversion that raises NotNeeded for the listed values of a verl key, and NotSupported for all others."""

    def convert(value: Any, _: VerlRun) -> Any:
        raise NotNeeded(why) if value in values else NotSupported(instead)

    return convert


def same_as(key: str, instead: str) -> Convert:
    """Makes a conversion that raises NotNeeded if a verl key equals the verl key `key`, and NotSupported otherwise."""

    def convert(value: Any, run: VerlRun) -> Any:
        raise NotNeeded(f"same value as {key}") if value == run.value(key) else NotSupported(instead)

    return convert


def none_if_same_as(key: str) -> Convert:
    """Makes a conversion that turns a verl value into None if it equals the verl key `key`, and keeps it otherwise."""
    return lambda value, run: None if value == run.value(key) else value


def only_if(condition: Convert, why_not: str, convert: Convert = lambda value, _: value) -> Convert:
    """Makes a conversion that applies `convert` if value and run meet `condition`, and raises NotNeeded otherwise."""

    def converted(value: Any, run: VerlRun) -> Any:
        if not condition(value, run):
            raise NotNeeded(why_not)
        return convert(value, run)

    return converted


def if_rewarded(convert: Convert = lambda value, _: value) -> Convert:
    """Makes a conversion for terms of the loss that verl leaves out if a teacher is alone."""
    return only_if(lambda _, run: not run.is_taught_alone, "verl uses it with use_task_rewards only", convert)


def _joined(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


@cache
def _pattern(key: str) -> re.Pattern[str]:
    """Converts a key pattern with *, ** and {a,b} into a regular expression."""
    signs = {"**": ".+", "*": "[^.]+", "{": "(?:", ",": "|", "}": ")"}
    return re.compile("".join(signs.get(part) or re.escape(part) for part in re.split(r"(\*\*|[*{,}])", key)))
