"""Chooses the weights of a model that do not learn (`freeze`), by regular expressions of their names, without torch."""

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

_WORD = re.compile(r"[A-Za-z]\w+")


def frozen_names(patterns: Sequence[str], names: Collection[str], key: str, model: str) -> set[str]:
    """Returns the names in which one of the patterns is found (`re.search`).

    `key` is the configuration key that has the patterns; `model` says whose weights the names are, for errors.

    Raises:
        ValueError: a pattern is found in no name.
    """
    frozen: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if re.search(pattern, name)}
        if not found:
            raise ValueError(f"{key}: {pattern} matches no weight of {model}; {_nearest(pattern, names)}")
        frozen |= found
    return frozen


def refuse_all_frozen(key: str, model: str) -> ValueError:
    """Makes the error for patterns that leave no weight that learns."""
    return ValueError(f"{key} freezes all weights of {model}: nothing would learn; leave some out of it")


def _nearest(pattern: str, names: Iterable[str]) -> str:
    """Names the parts of names that are most like the words of a pattern; if none is like them, all that there are."""
    example = {part: name for name in sorted(names, reverse=True) for part in name.split(".") if not part.isdigit()}
    words = [word for word in _WORD.findall(re.sub(r"\\[A-Za-z]", " ", pattern)) if word not in example]
    near = [part for word in words for part in difflib.get_close_matches(word, example, n=2)]
    if near:
        return "near is " + ", ".join(f"{part} (as in {example[part]})" for part in dict.fromkeys(near))
    return f"parts of their names are {', '.join(sorted(example, key=example.__getitem__))}"
