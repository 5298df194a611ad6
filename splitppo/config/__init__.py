"""Configuration of a run: its sections, loading with overrides, the batch plan, digests."""

from splitppo.config.load import dump_config, load_config
from splitppo.config.schema import Config
from splitppo.config.sections.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from splitppo.config.sections.data import DataConfig
from splitppo.config.sections.models import ActorConfig, ComputedModelConfig, CriticConfig, TrainedModelConfig
from splitppo.config.sections.reward import RewardConfig
from splitppo.config.sections.reward_model import RewardModelConfig
from splitppo.config.sections.rollout import RolloutConfig
from splitppo.config.sections.run import Schedule
from splitppo.config.sections.services import ServiceConfig
from splitppo.config.sections.tracking import TrackingConfig
from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.security import SecurityConfig
from splitppo.config_error import ConfigError

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "CodeConfig",
    "ComputedModelConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DataConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "Schedule",
    "SecurityConfig",
    "ServiceConfig",
    "TrackingConfig",
    "TrainedModelConfig",
    "dump_config",
    "load_config",
]
