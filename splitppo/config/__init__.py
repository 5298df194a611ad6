"""The configuration of a run: its sections, loading from YAML with overrides, the plan of batches, digests of keys."""

from splitppo.config.load import dump_config, load_config
from splitppo.config.schema import Config
from splitppo.config.sections.algorithm import AlgorithmConfig
from splitppo.config.sections.data import DataConfig
from splitppo.config.sections.models import ActorConfig, ComputedModelConfig, TrainedModelConfig
from splitppo.config.sections.reward import RewardConfig
from splitppo.config.sections.run import Schedule
from splitppo.config.sections.services import ServiceConfig
from splitppo.config_error import ConfigError

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "ComputedModelConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "RewardConfig",
    "Schedule",
    "ServiceConfig",
    "TrainedModelConfig",
    "dump_config",
    "load_config",
]
