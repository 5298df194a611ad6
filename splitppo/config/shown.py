"""Shows a configuration to others without the secrets in it: on the screen, in logs, to trackers.

Keys that this package knows hold no secret. What a user adds to a mapping of his own, such as
`reward.custom_function_kwargs`, may be one.
"""

from typing import Any

import yaml

from splitppo.config.keys import KEYS
from splitppo.config.load import config_tree
from splitppo.config.schema import Config
from splitppo.dotted_keys import leaves
from splitppo.secret_names import HIDDEN, SECRET_KEY

_NO_SECRETS = ("_env", "_file")  # ends of names that hold the name of a variable or a file


def is_secret(path: str) -> bool:
    """Returns True if the value at a dotted path of a configuration is a secret, by its name."""
    known = path
    while known and known not in KEYS:
        known = known.rpartition(".")[0]
    added = path[len(known) :]
    return SECRET_KEY.search(added) is not None and not path.endswith(_NO_SECRETS)


def shown_tree(config: Config, *, with_defaults: bool = True) -> dict[str, Any]:
    """Returns the resolved configuration as nested dicts, with HIDDEN in place of secrets."""
    tree = config_tree(config, with_defaults=with_defaults)
    return {name: _hidden(value, name) for name, value in tree.items()}


def shown_config(config: Config, *, with_defaults: bool = True) -> str:
    """Returns the resolved configuration as YAML text, with HIDDEN in place of secrets."""
    return yaml.safe_dump(shown_tree(config, with_defaults=with_defaults), sort_keys=False, allow_unicode=True)


def secret_keys(config: Config) -> list[str]:
    """Returns the dotted paths of all secrets in a configuration."""
    plain = dict(leaves(config_tree(config)))
    return [path for path, value in leaves(shown_tree(config)) if value != plain[path]]


def _hidden(value: Any, path: str) -> Any:
    """Returns a value of the configuration to show, in which every secret text is hidden."""
    if isinstance(value, dict):
        return {name: _hidden(item, f"{path}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [_hidden(item, path) for item in value]
    return HIDDEN if isinstance(value, str) and value and is_secret(path) else value
