"""A verl run as a whole: its settings, what follows from several of them, and the GPUs that each group gets here."""

import math
from dataclasses import dataclass
from typing import Any

from controller.from_verl.settings import Settings, num_of, rows_in
from splitppo.config import ConfigError
from splitppo.config.estimator import NEEDS

_TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
# Of the GPUs that verl gives to all models, for the actor, which also generates; the critic has the rest.
ACTOR_SHARE = 0.75


@dataclass(frozen=True)
class GpuGroups:
    """Ranks of each group, a GPU for each; `shared`: there is one GPU for all."""

    actor: int
    critic: int
    reward: int
    tensor_parallel: int
    shared: bool = False


@dataclass(frozen=True)
class VerlRun:
    """What converts a value may ask for."""

    settings: Settings
    groups: GpuGroups

    def value(self, key: str) -> Any:
        return self.settings.value(key)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        keys = ("data.max_prompt_length", "data.max_response_length")
        return sum(int(num_of(self.value(key), key)) for key in keys)

    @property
    def uses_vllm(self) -> bool:
        return str(self.value("actor_rollout_ref.rollout.name")) != "hf"

    @property
    def uses_critic(self) -> bool:
        return uses_critic(self.settings)

    @property
    def has_reward_model(self) -> bool:
        return has_reward_model(self.settings)

    def num_steps(self) -> int | None:
        """PPO steps of the run; None where the epochs' length is not known here."""
        if (steps := self.value("trainer.total_training_steps")) is not None:
            return int(num_of(steps, "trainer.total_training_steps"))
        rows, batch = rows_in(self.value("data.train_files")), self.value("data.train_batch_size")
        limit = int(num_of(self.value("data.train_max_samples"), "data.train_max_samples"))
        if rows is None:
            return None
        rows = min(rows, limit) if limit > 0 else rows
        epochs = int(num_of(self.value("trainer.total_epochs"), "trainer.total_epochs"))
        return rows // int(num_of(batch, "data.train_batch_size")) * epochs


def uses_critic(settings: Settings) -> bool:
    """As in this project: iff the estimator needs values."""
    return "values_BT" in NEEDS.get(str(settings.value("algorithm.adv_estimator")), ())


def has_reward_model(settings: Settings) -> bool:
    """Whether one is switched on, by its old name or the new one."""
    return bool(settings.value("reward.reward_model.enable") or settings.value("reward_model.enable"))


def divide_gpus(settings: Settings, requested: tuple[int, int] | None) -> GpuGroups:
    """Actor and critic side by side, where verl has both on all GPUs: three to one, or as requested.

    The actor's share is rounded down to whole vLLM engines, where that leaves it one. A reward model has the GPUs of
    its pool in verl; without a pool and without a critic to host it, a quarter.

    Raises:
        ConfigError: fewer GPUs than groups, or a number of GPUs for a critic that there is not.
    """
    nodes, per_node = (settings.value(f"trainer.{key}") for key in ("nnodes", "n_gpus_per_node"))
    total = int(num_of(nodes, "trainer.nnodes") * num_of(per_node, "trainer.n_gpus_per_node"))
    wanted = int(num_of(settings.value(_TENSOR_PARALLEL), _TENSOR_PARALLEL))
    reward = _reward_gpus(settings, total)
    if not uses_critic(settings):
        if requested is not None and requested[1]:
            estimator = settings.value("algorithm.adv_estimator")
            raise ConfigError(
                f"--gpus {requested[0]}:{requested[1]}: algorithm.adv_estimator {estimator} has no critic; expected"
                f" {sum(requested)}:0"
            )
        in_pool = settings.value("reward.reward_model.enable_resource_pool")
        actor = requested[0] if requested else total - (0 if in_pool else reward)
        return GpuGroups(_positive(actor, total), 0, reward, math.gcd(wanted, actor))
    if requested is not None:
        actor, critic = requested
        if not actor or not critic:
            raise ConfigError(f"--gpus {actor}:{critic}: expected at least one GPU for each of actor and critic")
        return GpuGroups(actor, critic, reward, math.gcd(wanted, actor))
    if total == 1:
        return GpuGroups(1, 1, reward, 1, shared=True)
    actor = min(total - 1, max(1, round(total * ACTOR_SHARE)))
    actor = actor - actor % wanted or actor
    return GpuGroups(_positive(actor, total), total - actor, reward, math.gcd(wanted, actor))


def _reward_gpus(settings: Settings, total: int) -> int:
    """Of a reward group; 0 where there is none, as the critic's group hosts the model."""
    if not has_reward_model(settings):
        return 0
    if settings.value("reward.reward_model.enable_resource_pool"):
        keys = (f"reward.reward_model.{key}" for key in ("nnodes", "n_gpus_per_node"))
        nodes, per_node = (int(num_of(settings.value(key), key)) for key in keys)
        return max(1, nodes * per_node)
    return 0 if uses_critic(settings) else max(1, total // 4)


def _positive(actor: int, total: int) -> int:
    if actor < 1:
        raise ConfigError(f"trainer.n_gpus_per_node times trainer.nnodes is {total}; expected at least one GPU")
    return actor
