"""Checks a deployment before any process of it starts: do the nodes of its worker groups fit its recipe?"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml

from deploy.checks import EXIT_BAD_INPUT
from deploy.placement import PORTS
from splitppo.config import ConfigError, load_config
from splitppo.config.batch_plan import batch_plan


def exit_status(check: Callable[[], str]) -> int:
    """Runs a check, prints its result or its error in one line, and returns the exit code, 0 or 2."""
    try:
        sys.stdout.write(f"{check()}\n")
    except (ValueError, OSError, yaml.YAMLError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return EXIT_BAD_INPUT
    return 0


def check_recipe(recipe: Path, overrides: Sequence[str], num_nodes: Mapping[str, int]) -> str:
    """Checks that a recipe fits these overrides and numbers of nodes; returns the batch plan of the run as text.

    Raises:
        ConfigError: the recipe cannot be used, has no such group, has a group without nodes, or another `nnodes`.
        OSError: the recipe cannot be read.
    """
    config = load_config(recipe, overrides)
    services = yaml.safe_load(recipe.read_text()).get("services") or {}
    for role in PORTS:
        name = f"{role.upper()}_NODES"
        has_group = role in config.roles
        if has_group and not num_nodes[role]:
            raise ConfigError(f"{name} is 0, but this recipe has a group {role}: expected 1 or more")
        if num_nodes[role] and not has_group:
            raise ConfigError(f"{name} is {num_nodes[role]}, but this recipe has no group {role}: expected 0")
        own = (services.get(role) or {}).get("nnodes")  # the overrides replace it
        if has_group and own not in (None, num_nodes[role]):
            raise ConfigError(f"{name} is {num_nodes[role]}, but services.{role}.nnodes of this recipe is {own}")
    return batch_plan(config)
