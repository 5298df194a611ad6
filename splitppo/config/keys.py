"""Collects the marks (`Key`) of every configuration key, which say e.g. whether a resumed run may change the key."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from splitppo.config.schema import Config
from splitppo.config.section import Key, Section


def _marks(section: type[Section], path: str, around: Key) -> Iterator[tuple[str, Key]]:
    """Yields (dotted path, marks) of a configuration section and all keys in it; a key inherits marks that it lacks."""
    yield path, around
    for name, field in section.model_fields.items():
        own = next((mark for mark in field.metadata if isinstance(mark, Key)), Key())
        given = {mark.name: value for mark in fields(Key) if (value := getattr(own, mark.name)) is not None}
        key = replace(around, **given)
        inner = f"{path}.{name}".lstrip(".")
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _marks(field.annotation, inner, key)
        else:
            yield inner, key


KEYS: Mapping[str, Key] = dict(_marks(Config, "", Key(may_change=False)))


def may_change(path: str) -> bool:
    """Returns True if a resumed run may change the configuration key at this dotted path, or the entry of its value."""
    while path not in KEYS:
        path = path.rpartition(".")[0]
    return bool(KEYS[path].may_change)


def step_work(config: Config) -> Mapping[str, Any]:
    """Returns the values of the configuration keys that decide what a step computes on any machine, by dotted path."""
    return {path: attrgetter(path)(config) for path, key in KEYS.items() if key.is_work}
