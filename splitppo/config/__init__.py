"""The configuration of a run: its sections, loading from YAML with overrides, the plan of batches, digests of keys."""

from splitppo.config.load import dump_config as dump_config
from splitppo.config.load import load_config as load_config
from splitppo.config.schema import Config as Config
from splitppo.config.sections.algorithm import AlgorithmConfig as AlgorithmConfig
from splitppo.config.sections.data import DataConfig as DataConfig
from splitppo.config.sections.models import ActorConfig as ActorConfig
from splitppo.config.sections.models import ComputedModelConfig as ComputedModelConfig
from splitppo.config.sections.models import TrainedModelConfig as TrainedModelConfig
from splitppo.config.sections.reward import RewardConfig as RewardConfig
from splitppo.config.sections.run import Schedule as Schedule
from splitppo.config.sections.services import ServiceConfig as ServiceConfig
from splitppo.config_error import ConfigError as ConfigError
