"""The configuration as YAML that people go on from: what differs from the defaults, in the order of the sections."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from splitppo.config import Config


def yaml_text(values: Mapping[str, Any], comments: Mapping[str, str], header: str) -> str:
    """Returns the dotted keys as nested sections, a comment behind those that have one."""
    return f"# {header}\n" + "\n".join(_section(Config, "", values, comments)) + "\n"


def _section(
    section: type[BaseModel], path: str, values: Mapping[str, Any], comments: Mapping[str, str]
) -> Iterator[str]:
    indent = "  " * path.count(".")
    for name, field in section.model_fields.items():
        key = f"{path}{name}"
        kind = field.annotation
        if key in values:
            comment = f"  # {comments[key]}" if key in comments else ""
            yield f"{indent}{name}: {_inline(values[key])}{comment}"
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            inner = list(_section(kind, f"{key}.", values, comments))
            if inner:
                yield f"{indent}{name}:"
                yield from inner


def _inline(value: Any) -> str:
    """Returns a value on one line, as our loader reads it back."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1 << 20).strip()
    return text.removesuffix("\n...").strip()
