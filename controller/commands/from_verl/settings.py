"""Stores the configuration of a verl run: the given keys, and verl's defaults for all other keys."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from splitppo.config import ConfigError
from splitppo.dotted_keys import leaves, nested

Version = tuple[int, ...]  # 0.4.0 is (0, 4)
LATEST: Version = (0, 9)
# After LATEST, in development: its scores are known, and the keys that it has in common with LATEST.
NEXT: Version = (0, 10)
# The value of a key that verl requires.
MISSING = "???"
# The files that a defaults list may name: their keys are in the table.
_OF_VERL = ("_self_", "ppo_trainer", "ppo_megatron_trainer", "legacy_reward_impl")
OmegaConf.register_resolver("verl_not", lambda value: not value, replace=True)


class Settings:
    """The configuration tree of a verl run, with a list of the keys that the user gave.

    Args:
        source: the name of the file in error sentences.
        defaults: the defaults of verl that the translation needs, by key.
        sections: keys whose value is a mapping that is taken as a whole.

    Attributes:
        given: the given keys in order, each with its line in the script; 0 if it has none.
        from_environment: the environment variables that a launch script has read.
        unread: the files of this machine that a launch script would run, and that were not read.
        version: the version of verl that the keys are for, such as (0, 4); the latest if nothing tells it.
        age: a sentence on the version of verl whose defaults are taken; "" if the version makes no difference.
        asks_age: True if the user must give the version: no key tells it, and defaults that are not overridden differ.
    """

    def __init__(self, source: str, defaults: Mapping[str, Any], sections: Sequence[str] = ()) -> None:
        self.source = source
        self.given: dict[str, int] = {}
        self.from_environment: Collection[str] = ()
        self.unread: Collection[str] = ()
        self.version: Version = LATEST
        self.age = ""
        self.asks_age = False
        self._defaults = defaults
        self._sections = sections
        self._tree: DictConfig = OmegaConf.create(nested(defaults))
        self._known: dict[str, Any] = {}  # final values that are no sections, until the tree changes

    def add_yaml(self, text: str, name: str) -> None:
        """Adds a primary Hydra configuration in YAML to the settings; keys at verl's default do not count as given.

        Raises:
            ConfigError: the text is not a mapping in YAML, or its defaults list names a file that is not verl's.
        """
        try:
            tree = OmegaConf.create(text)
        except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(tree, DictConfig) or not tree:
            raise ConfigError(f"{name}: expected a mapping of verl's sections (data, actor_rollout_ref, ...)")
        plain = tree_of(tree)
        _check_defaults_list(plain.pop("defaults", []), name)
        for key, value in leaves(plain):
            if value == MISSING:
                continue
            self._set(key, value)
            default = self._defaults.get(key, MISSING)
            if value != default and not (_is_interpolation(value) and _is_interpolation(default)):
                self._note(key, 0)

    def add_override(self, text: str, line: int = 0) -> None:
        """Adds an override of Hydra's command line: `key=value`, `+key=value`, `++key=value` or `~key`.

        Raises:
            ConfigError: the text is no override, or its value cannot be read.
        """
        key, separator, value = text.partition("=")
        where = f"{self.source}, line {line}: " if line else ""
        if text.startswith("~"):
            self._remove(key.removeprefix("~"))
            return
        key = key.lstrip("+")
        if not separator or not re.fullmatch(r"[\w@/]+([.@][\w@/-]+)*", key):
            raise ConfigError(f"{where}{text!r} is no override of Hydra's: expected key=value, +key=value or ~key")
        try:
            content = tree_of(OmegaConf.from_dotlist([f"value={_as_yaml(value)}"]))
        except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{where}the value of {text!r} cannot be read") from error
        for inner, leaf in leaves({key: content["value"]}):
            self._set(inner, leaf)
            self._note(inner, line)

    def value(self, key: str) -> Any:
        """Returns the final value of a verl key, with interpolations resolved; None if the key has no value.

        Raises:
            ConfigError: an interpolation cannot be resolved.
        """
        if key in self._known:
            return self._known[key]
        try:
            value = OmegaConf.select(self._tree, key)
            if OmegaConf.is_config(value):
                return OmegaConf.to_container(value, resolve=True)
            return self._known.setdefault(key, value)
        except OmegaConfBaseException as error:
            raw = OmegaConf.to_container(self._tree)
            for part in key.split("."):
                raw = raw.get(part, {}) if isinstance(raw, dict) else {}
            why = str(error).splitlines()[0]
            raise ConfigError(f"{self.source}: {key} is {raw}, which cannot be resolved: {why}; give {key}") from error

    def resolved(self, value: Any) -> Any:
        """Returns a value with its interpolations resolved by the keys of this configuration."""
        if "${" not in str(value):
            return value
        tree = self._tree.copy()
        OmegaConf.update(tree, "value", value, force_add=True)
        return OmegaConf.select(tree, "value")

    def number(self, key: str) -> float:
        """Returns the final value of a verl key; ConfigError that names the key unless it is a finite number."""
        return num_of(self.value(key), key)

    def _note(self, key: str, line: int) -> None:
        whole = next((section for section in self._sections if key.startswith(f"{section}.")), key)
        self.given.pop(whole, None)
        self.given[whole] = line

    def _set(self, key: str, value: Any) -> None:
        self._known.clear()
        try:
            OmegaConf.update(self._tree, key, value, force_add=True, merge=False)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{self.source}: {key} cannot be set: {str(error).splitlines()[0]}") from error

    def _remove(self, key: str) -> None:
        """Removes a key, or a section with all its keys, as `~key` does in Hydra."""
        self._known.clear()
        for name in [name for name in self.given if name == key or name.startswith(f"{key}.")]:
            del self.given[name]
        parent, _, leaf = key.rpartition(".")
        section = OmegaConf.select(self._tree, parent) if parent else self._tree
        if isinstance(section, DictConfig) and leaf in section:
            del section[leaf]


def tree_of(config: DictConfig) -> dict[str, Any]:
    """Converts an OmegaConf configuration into plain dictionaries; interpolations stay text."""
    return cast("dict[str, Any]", OmegaConf.to_container(config))


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _check_defaults_list(entries: Any, name: str) -> None:
    """Checks that a Hydra defaults list names only files of verl: other files are not read; else ConfigError."""
    for entry in entries if isinstance(entries, list) else [entries]:
        if isinstance(entry, str) and entry not in _OF_VERL:
            raise ConfigError(
                f"{name}: its defaults list names {entry!r}, which is not verl's: expected ppo_trainer, or the resolved"
                " configuration that verl prints at its start"
            )


def _as_yaml(value: str) -> str:
    """Converts a value in Hydra's grammar into YAML: adds blanks to `{a:1}`, and quotes to an empty value."""
    if value.startswith("{"):
        return re.sub(r"(?<=[\w'\"]):(?=[^\s/])", ": ", value)
    return value or "''"


def num_of(value: Any, key: str) -> float:
    """Returns the value of a configuration key unchanged; ConfigError that names the key unless it is a finite number.

    A bool is no number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{key}: expected a number, got {value!r}")
    return value
