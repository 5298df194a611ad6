"""Configuration of a run: its sections, loading with overrides, the batch plan, digests."""

from splitppo.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from splitppo.config.checkpoint import CheckpointConfig
from splitppo.config.code import CodeConfig
from splitppo.config.data import DataConfig
from splitppo.config.load import ConfigError, dump_config, load_config, load_stored_config
from splitppo.config.models import ActorConfig, ComputedModelConfig, CriticConfig, TrainedModelConfig
from splitppo.config.reward import RewardConfig
from splitppo.config.reward_model import RewardModelConfig
from splitppo.config.rollout import RolloutConfig
from splitppo.config.run import Schedule
from splitppo.config.schema import Config
from splitppo.config.security import SecurityConfig
from splitppo.config.services import ServiceConfig
from splitppo.config.tracking import TrackingConfig

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
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
    "load_stored_config",
]
