"""Reading a configuration: YAML, then `a.b=c` overrides, then validation. Every mistake is one sentence."""

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from splitppo.config.renamed_keys import with_renamed_keys
from splitppo.config.schema import Config


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key or file and what was expected."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's view of numbers: `1e-6` is a float, not a string; a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if key in keys:
                raise ConfigError(f"key {key!r} is given twice, again in line {key_node.start_mark.line + 1}")
            keys.append(key)
        return super().construct_mapping(node, deep)


_FLOAT = re.compile(r"^[-+]?(\d[\d_]*)?\.?\d+([eE][-+]?\d+)$|^[-+]?\d+\.([eE][-+]?\d+)?$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads `path`, applies `key.path=value` overrides (values are YAML) and validates.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value does not fit.
    """
    return _load(path, overrides, is_stored=False)


def load_stored_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """As `load_config`, of the file that a run folder keeps, which an older version may have written."""
    return _load(path, overrides, is_stored=True)


def _load(path: Path, overrides: Sequence[str], *, is_stored: bool) -> Config:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from error
    tree = _parse(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, got {type(tree).__name__}")
    if is_stored:
        tree = with_renamed_keys(tree)
    for override in overrides:
        _apply_override(tree, override)
    return validate(tree, str(path))


def validate(tree: Any, source: str) -> Config:
    """Validates a plain tree; `source` names it in errors."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: " + "; ".join(_sentences(error))) from error


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML; `load_config` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} must look like key.path=value")
    *parents, leaf = key.split(".")
    node: Any = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is not a section")
    node[leaf] = _parse(value, f"override {override!r}")


def _sentences(error: ValidationError) -> Iterator[str]:
    for item in error.errors(include_url=False):
        path = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            yield f"unknown key {path!r}{_suggestion(item['loc'])}"
        elif item["type"] == "missing":
            yield f"key {path!r} is missing"
        else:
            message = item["msg"].removeprefix("Value error, ")
            where = f"key {path!r}: " if path else ""
            # What stands where the name of a secret belongs may be the secret.
            is_hidden = isinstance(item["input"], dict | BaseModel) or "security" in item["loc"]
            given = "" if is_hidden else f", got {item['input']!r}"
            meant = _nearest_value(item["input"], item["ctx"]["expected"]) if item["type"] == "literal_error" else ""
            yield f"{where}{message[:1].lower()}{message[1:]}{given}{meant}"


def _nearest_value(given: Any, expected: str) -> str:
    """Nearest of the values that pydantic lists in quotes, for typing mistakes."""
    close = difflib.get_close_matches(str(given), re.findall(r"'([^']*)'", expected), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _suggestion(location: Sequence[int | str]) -> str:
    """Nearest known key of the same section, for typing mistakes."""
    section: Any = Config
    for part in location[:-1]:
        if isinstance(part, int):  # an entry of a list
            section = next(iter(get_args(section)), None)
            continue
        fields = getattr(section, "model_fields", {})
        section = fields[part].annotation if part in fields else None
    known = list(getattr(section, "model_fields", {}))
    if close := difflib.get_close_matches(str(location[-1]), known, n=1):
        return f", did you mean {'.'.join(map(str, [*location[:-1], *close]))!r}?"
    return f"; known here: {', '.join(known)}" if known else ""
