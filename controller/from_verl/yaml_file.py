"""The configuration as YAML that people go on from: what differs from the defaults, in the order of the sections."""

from collections.abc import Mapping
from typing import Any

import yaml

from splitppo.config.keys import KEYS


def yaml_text(values: Mapping[str, Any], comments: Mapping[str, str], header: str) -> str:
    """Returns the dotted keys as nested sections, a comment behind those that have one."""
    lines = [f"# {header}"]
    for key in KEYS:
        indent, name = "  " * key.count("."), key.rpartition(".")[-1]
        if key in values:
            comment = f"  # {comments[key]}" if key in comments else ""
            lines.append(f"{indent}{name}: {_inline(values[key])}{comment}")
        elif any(other.startswith(f"{key}.") for other in values):
            lines.append(f"{indent}{name}:")
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    """Returns a value on one line, as our loader reads it back."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1 << 20).strip()
    return text.removesuffix("\n...").strip()
