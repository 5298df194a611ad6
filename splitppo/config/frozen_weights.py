"""Chooses the weights of a model that do not learn (`freeze`), by regular expressions of their names, without torch."""

import difflib
import re
from collections.abc import Collection, Iterable

from splitppo.config.sections.models import TrainedModelConfig

_WORD = re.compile(r"[A-Za-z]\w+")


def frozen_names(config: TrainedModelConfig, names: Collection[str], role: str) -> set[str]:
    """Returns the names in which one of the patterns of `config.freeze` is found (`re.search`).

    `names` are those of the weights that learn without the key. `role` is the section of the configuration.

    Raises:
        ValueError: a pattern is found in no name, or B of a new adapter would be frozen, which is 0.
    """
    frozen: set[str] = set()
    for pattern in config.freeze:
        found = {name for name in names if re.search(pattern, name)}
        if not found:
            raise ValueError(
                f"{role}.freeze: {pattern} matches no weight of {_owner(config)}; {_nearest(pattern, names)}"
            )
        frozen |= found
    zeros = sorted(name for name in frozen if name.endswith(".lora_B.weight"))
    if zeros and config.lora_adapter_path is None:
        raise ValueError(
            f"{role}.freeze freezes {zeros[0]}, which is 0 in a new adapter: it would never change anything;"
            f" {role}.exclude_modules leaves adapters out"
        )
    return frozen


def refuse_all_frozen(config: TrainedModelConfig, role: str) -> ValueError:
    """Makes the error for patterns of `config.freeze` that leave no weight that learns."""
    return ValueError(
        f"{role}.freeze freezes all weights of {_owner(config)}: nothing would learn; leave some out of it"
    )


def _owner(config: TrainedModelConfig) -> str:
    """Says whose weights `freeze` names."""
    return f"the adapters of {config.model}" if config.lora_rank else config.model


def _nearest(pattern: str, names: Iterable[str]) -> str:
    """Names the parts of names that are most like the words of a pattern; if none is like them, all that there are."""
    example = {part: name for name in sorted(names, reverse=True) for part in name.split(".") if not part.isdigit()}
    words = [word for word in _WORD.findall(re.sub(r"\\[A-Za-z]", " ", pattern)) if word not in example]
    near = [part for word in words for part in difflib.get_close_matches(word, example, n=2)]
    if near:
        return "near is " + ", ".join(f"{part} (as in {example[part]})" for part in dict.fromkeys(near))
    return f"parts of their names are {', '.join(sorted(example, key=example.__getitem__))}"
