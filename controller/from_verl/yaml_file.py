"""Writes a translated configuration as YAML for people: only values other than defaults, in SplitPPO's key order."""

from collections.abc import Mapping
from typing import Any

import yaml

from splitppo.config.keys import KEYS


def yaml_text(values: Mapping[str, Any], comments: Mapping[str, str], header: str) -> str:
    """Formats values by dotted key as nested YAML, with a header line and with comments behind values."""
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
    """Formats a configuration value as YAML on one line; the loader of SplitPPO reads the same value from the line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1 << 20).strip()
    return text.removesuffix("\n...").strip()
