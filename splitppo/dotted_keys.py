"""Converts nested dicts of settings to dotted keys such as `actor.lr`, and back.

This module needs the standard library only.
"""

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for every value in nested dicts that is not a dict; an empty dict is a value."""
    for name, value in tree.items():
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, key)
        else:
            yield key, value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts {dotted key: value} to nested dicts."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, leaf = key.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return tree
