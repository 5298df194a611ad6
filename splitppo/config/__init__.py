"""Configuration of a run: schema, loading with overrides, the batch plan, digests."""

from splitppo.config.load import ConfigError, dump_config, load_config
from splitppo.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    CriticConfig,
    DataConfig,
    EvaluationConfig,
    RewardConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
    RunConfig,
    ServiceConfig,
    ServicesConfig,
    TrackingConfig,
    TrainedModelConfig,
)
from splitppo.config.security import SecurityConfig

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DataConfig",
    "EvaluationConfig",
    "RewardConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RunConfig",
    "SecurityConfig",
    "ServiceConfig",
    "ServicesConfig",
    "TrackingConfig",
    "TrainedModelConfig",
    "dump_config",
    "load_config",
]
