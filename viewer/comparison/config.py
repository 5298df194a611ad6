"""The configuration of a run as one text per key, for a comparison with other runs."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import yaml

from splitppo.run_folder.files import RunDir, Unreadable
from splitppo.secret_names import HIDDEN, SECRET_KEY
from viewer.redaction import redacted

MAX_BYTES = 1 << 20
MAX_KEYS = 5_000
MAX_DEPTH = 32
MAX_TEXT = 500
_NOTHING = ("", '""', "~", "null", "true", "false", "[]", "{}")


def read_config(folder: RunDir) -> dict[str, str]:
    """Reads config.yaml as {"actor.lr": "1.0e-06", ...}, in its order; values as they stand there, lists on one line.

    What may open something is HIDDEN: by the words of its key, or by what it looks like. The events of the parser are
    enough for all this: nothing is constructed, so no file makes more of itself than it holds.

    Raises:
        Unreadable: the file is missing, too large, no YAML, or has what no run writes, such as aliases.
    """
    with folder.open("config.yaml", max_bytes=MAX_BYTES) as file:
        content = file.read().decode(errors="replace")
    found: dict[str, str] = {}
    try:
        events = iter(yaml.parse(content, Loader=yaml.CSafeLoader))
        next(events), next(events)  # the begin of the file and of its document
        _take(next(events, None), events, "", found)
    except (yaml.YAMLError, ValueError) as error:
        raise Unreadable(f"config.yaml is no YAML: {' '.join(str(error).split())[:200]}.") from error
    return {key.removeprefix("."): text for key, text in found.items()}


def _take(event: Any, events: Iterator[Any], key: str, found: dict[str, str], depth: int = 0) -> None:
    """Adds the values below `key`, which `event` begins; an empty section is one."""
    if depth > MAX_DEPTH or len(found) > MAX_KEYS or len(key) > MAX_TEXT:
        raise Unreadable(
            f"config.yaml has more than {MAX_KEYS:,} values, or one below {MAX_DEPTH} others or a long key."
        )
    if isinstance(event, yaml.ScalarEvent):
        _add(key, json.dumps(event.value, ensure_ascii=False) if event.style else event.value, found)
    elif isinstance(event, yaml.MappingStartEvent):
        num_before = len(found)
        while isinstance(name := next(events), yaml.ScalarEvent):
            _take(next(events), events, f"{key}.{_short(name.value)}", found, depth + 1)
        if not isinstance(name, yaml.MappingEndEvent):
            raise Unreadable("config.yaml has a key that is no text.")
        if len(found) == num_before:
            _add(key, "{}", found)
    elif isinstance(event, yaml.SequenceStartEvent):
        items = list[Any]()
        inner = dict[str, str]()
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            _take(item, events, f"{key}.{len(items)}", inner, depth + 1)
            items.append(item)
        is_flat = all(isinstance(item, yaml.ScalarEvent) for item in items)
        if is_flat:
            _add(key, f"[{', '.join(inner.values())}]", found)
        else:
            found |= inner
    else:
        raise Unreadable("config.yaml has an alias, or no content; no run writes that.")


def _add(key: str, text: str, found: dict[str, str]) -> None:
    """Adds a value, hidden if its key or one above it is secret; a number behind `token` is one of a model's."""
    name = SECRET_KEY.search(key)
    is_secret = name is not None and not (text.isdigit() and "token" in name[0].lower())
    found[key] = HIDDEN if is_secret and text not in _NOTHING else _short(redacted(text))


def _short(text: str) -> str:
    """Cuts a long text, and lets it still differ from all others."""
    end = f"… ({len(text):,} characters, {hashlib.sha256(text.encode(errors='replace')).hexdigest()[:8]})"
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + end
