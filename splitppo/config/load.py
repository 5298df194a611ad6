"""Reads a YAML configuration file, applies `a.b=c` overrides, checks it, and computes the keys that were left open.

Every mistake of the user becomes one sentence in a ConfigError.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from splitppo.config.resolve import resolve
from splitppo.config.rules.table import check_rules
from splitppo.config.schema import Config
from splitppo.config_error import ConfigError, config_errors, did_you_mean, sentence_of
from splitppo.plain_file import read_plain


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads `1e-6` as a float, as YAML 1.2 does, and refuses a key that is given twice."""

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


def load_config(path: Path, overrides: Sequence[str] = (), *, is_stored: bool = False) -> Config:
    """Reads a YAML configuration file, applies overrides `key.path=value` (values are YAML), and checks the result.

    With `is_stored` the file is a copy in a run folder. An older version may have written it, so old names of keys are
    accepted.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value does not fit.
    """
    tree = read_tree(path, is_stored=is_stored)
    if is_stored:
        tree = with_renamed_keys(tree)
    for override in overrides:
        _apply_override(tree, override)
    return validate(tree, str(path), overrides)


def read_tree(path: Path, *, is_stored: bool = False) -> dict[str, Any]:
    """Reads a YAML configuration file as nested dicts, whose keys and values are not checked.

    That of a run folder (`is_stored`) is a file. A user may give another one as a pipe.

    Raises:
        ConfigError: the file cannot be read, or has no mapping.
    """
    with config_errors(OSError, UnicodeDecodeError, before=f"cannot read the config file {path}: "):
        content = read_plain(path) if is_stored else path.read_bytes()
        tree = _parse(content.decode(), str(path))
    if not isinstance(tree, dict):
        kind = "nothing" if tree is None else type(tree).__name__
        raise ConfigError(f"{path}: expected a mapping of sections, got {kind}")
    return tree


def validate(tree: Any, source: str, overrides: Sequence[str] = ()) -> Config:
    """Checks a configuration that is given as nested dicts, and returns a `Config` whose open keys are resolved.

    The dicts contain the `overrides` already; here they serve to name the origin of a mistake.

    Raises:
        ConfigError: it has a sentence for each mistake, which names `source`, or the override that made the mistake.
    """
    try:
        config = resolve(Config.model_validate(tree))
    except ValidationError as error:
        by_origin: dict[str, list[str]] = {}
        for path, sentence in _sentences(error):
            by_origin.setdefault(_origin(path, sentence, source, overrides), []).append(sentence)
        mistakes = [f"{origin}: {'; '.join(sentences)}" for origin, sentences in by_origin.items()]
        raise ConfigError("; ".join(mistakes)) from error
    try:
        check_rules(config)
    except ValueError as error:
        raise ConfigError(f"{_origin('', str(error), source, overrides)}: {error}") from error
    return config


def _origin(path: str, sentence: str, source: str, overrides: Sequence[str]) -> str:
    """Finds the origin of a mistake for the error message: the override that gives its key, or else `source`.

    `source` is e.g. a file. `path` is the dotted path of the wrong key; it is empty for a rule between sections. An
    override of a key below `path` also counts if the sentence of the mistake names that key, or says that `path` is
    unknown. Of several, the override of the key that the sentence names first; of the same key, the last one.
    """
    found: list[tuple[int, str]] = []
    for override in reversed(overrides):
        key = override.partition("=")[0]
        if f"{path}.".startswith(f"{key}."):  # it replaces what overrides before it have given
            found.append((len(sentence), override))
            break
        if key.startswith(f"{path}.") or not path:
            name = re.escape(key.removeprefix(f"{path}."))
            if named := re.search(rf"^unknown key|\b{name}\b", sentence):
                found.append((named.start(), override))
    return f"override {min(found, key=itemgetter(0))[1]!r}" if found else source


def dump_config(config: Config, *, with_defaults: bool = True) -> str:
    """Returns the resolved configuration as YAML text, which `load_config` reads back to an equal configuration.

    Without `with_defaults`, the text has only keys that the user has given and that differ from their defaults.
    """
    tree = config_tree(config, with_defaults=with_defaults)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def config_tree(config: Config, *, with_defaults: bool = True) -> dict[str, Any]:
    """Returns the resolved configuration as the nested dicts that the YAML text of `dump_config` holds."""
    tree = config.model_dump(mode="json", exclude_defaults=not with_defaults, exclude_unset=not with_defaults)
    if not with_defaults:
        tree = _without_empty_sections(tree)
        if config.services.rollout is not None:  # the section alone, with all of its defaults, makes a group
            tree.setdefault("services", {}).setdefault("rollout", {})
    return tree


def _without_empty_sections(tree: dict[str, Any]) -> dict[str, Any]:
    inner = {name: _without_empty_sections(value) if isinstance(value, dict) else value for name, value in tree.items()}
    return {name: value for name, value in inner.items() if value != {}}


def with_renamed_keys(stored: Any) -> Any:
    """Returns a stored configuration (nested dicts) in which keys with former names have the names of today.

    Only `actor.loss_mode` was renamed: it is now `actor.policy_loss.loss_mode`.
    """
    actor = stored.get("actor") if isinstance(stored, dict) else None
    if not isinstance(actor, dict) or "loss_mode" not in actor or "policy_loss" in actor:
        return stored
    kept = {key: value for key, value in actor.items() if key != "loss_mode"}
    return {**stored, "actor": {**kept, "policy_loss": {"loss_mode": actor["loss_mode"]}}}


def _parse(text: str, source: str) -> Any:
    too_deep = config_errors(RecursionError, instead="lists and sections are nested too deeply")
    try:
        with too_deep:
            return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"{source} is not valid YAML: {sentence_of(error)}") from error


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Changes one key of the tree of a configuration file, by `a.b=c`; makes sections that are missing.

    Raises:
        ConfigError: the override has another form, its value is not valid YAML, or a part before the last one is a
            value, not a section.
    """
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} must look like key.path=value")
    *parents, leaf = key.split(".")
    node: Any = tree
    for depth, parent in enumerate(parents, start=1):
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(parents[:depth])!r} is not a section")
    try:
        node[leaf] = _parse(value, f"override {override!r}")
    except ConfigError as error:
        raise ConfigError(
            f"{error}; a text with YAML's own characters needs quotes inside those of the shell"
        ) from error


def _sentences(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yields (dotted path of the key, sentence for the user) for every mistake that pydantic has found.

    An unknown key gets the names that it may have meant; a message of a section that begins with one of its keys (`key:
    ...`) is about that key.
    """
    for item in error.errors(include_url=False):
        path = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            yield path, f"unknown key {path!r}{_suggestion(item['loc'])}"
        elif item["type"] == "missing":
            yield path, f"key {path!r} is missing"
        else:
            message = _IN_YAML.get(item["type"], item["msg"]).removeprefix("Value error, ")
            if name := _KEY_OF_SECTION.match(message):
                path = f"{path}.{name[1]}"
                message = message[name.end() :]
            where = f"key {path!r}: " if path else ""
            # A value in place of the name of a secret may be the secret itself.
            is_hidden = isinstance(item["input"], dict | BaseModel) or "security" in item["loc"]
            given = "" if is_hidden else f", got {item['input']!r}"
            # pydantic lists the values of a literal_error in quotes.
            values = re.findall(r"'([^']*)'", item["ctx"]["expected"]) if item["type"] == "literal_error" else []
            meant = did_you_mean(str(item["input"]), values)
            yield path, f"{where}{message[:1].lower()}{message[1:]}{given}{meant}"


# A check of a whole section may name the key that is wrong: `loss_mode: expected ...`.
_KEY_OF_SECTION = re.compile(r"([\w.]+): ")
# Messages in which pydantic uses names of Python.
_IN_YAML = {
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping",
    "model_type": "expected a section of keys",
    "path_type": "expected a path",
}


def _suggestion(location: Sequence[int | str]) -> str:
    """Returns the hint that ends the error message for an unknown key: the most similar key of the section, or all."""
    section: Any = Config
    for part in location[:-1]:
        if isinstance(part, int):  # an entry of a list, whose annotation is that of its entries here
            continue
        fields = getattr(section, "model_fields", {})
        annotation = fields[part].annotation if part in fields else None
        section = next(iter(get_args(annotation)), annotation)  # a section that may be null is one of two
    keys = list(getattr(section, "model_fields", {}))
    name = str(location[-1])
    initials = "".join(word[:1] for word in name.split("_"))  # for learning_rate the key lr
    if close := [key for key in keys if key == initials] or difflib.get_close_matches(name, keys, n=1):
        return f", did you mean {'.'.join(map(str, [*location[:-1], *close]))!r}?"
    return f"; known here: {', '.join(keys)}" if keys else ""
