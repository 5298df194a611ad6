"""The configuration of a run: its sections, loading from YAML with overrides, the plan of batches, digests of keys.

A name is loaded when it is first used: processes of environments need two sections, and start in half the time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitppo.config.load import config_tree as config_tree
    from splitppo.config.load import dump_config as dump_config
    from splitppo.config.load import load_config as load_config
    from splitppo.config.schema import Config as Config
    from splitppo.config.sections.algorithm import AlgorithmConfig as AlgorithmConfig
    from splitppo.config.sections.data import DataConfig as DataConfig
    from splitppo.config.sections.models import ActorConfig as ActorConfig
    from splitppo.config.sections.models import ComputedModelConfig as ComputedModelConfig
    from splitppo.config.sections.models import CriticConfig as CriticConfig
    from splitppo.config.sections.models import TrainedModelConfig as TrainedModelConfig
    from splitppo.config.sections.reward import RewardConfig as RewardConfig
    from splitppo.config.sections.run import Schedule as Schedule
    from splitppo.config.sections.services import ServiceConfig as ServiceConfig
    from splitppo.config_error import ConfigError as ConfigError

_MODULES = {
    "splitppo.config.load": ("config_tree", "dump_config", "load_config"),
    "splitppo.config.schema": ("Config",),
    "splitppo.config.sections.algorithm": ("AlgorithmConfig",),
    "splitppo.config.sections.data": ("DataConfig",),
    "splitppo.config.sections.models": ("ActorConfig", "ComputedModelConfig", "CriticConfig", "TrainedModelConfig"),
    "splitppo.config.sections.reward": ("RewardConfig",),
    "splitppo.config.sections.run": ("Schedule",),
    "splitppo.config.sections.services": ("ServiceConfig",),
    "splitppo.config_error": ("ConfigError",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
