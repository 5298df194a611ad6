"""Derives what depends on several keys of a verl configuration: use of a critic, GPUs of each role."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from controller.commands.from_verl.settings import Settings
from splitppo.config import ConfigError
from splitppo.config.section import ROLES
from splitppo.config.subsections.estimator import NEEDS

# The actor's share of verl's GPUs. The actor also generates; the critic has the rest.
ACTOR_SHARE = 0.75
_MAX_GPUS = 65_536


@dataclass(frozen=True)
class GpuGroups:
    """The number of ranks of each process group in SplitPPO; each rank has one GPU.

    `tensor_parallel` is the number of GPUs of a vLLM engine. `shared` is True if actor and critic share the only GPU.
    `idle` GPUs of verl's are left over: a mini-batch has fewer rows than the actor would have ranks.
    """

    actor: int
    critic: int
    reward: int
    rollout: int
    tensor_parallel: int
    shared: bool = False
    idle: int = 0

    def ranks(self) -> Mapping[str, int]:
        """Returns the number of ranks by role, without roles that have no process group."""
        return {role: count for role, count in asdict(self).items() if role in ROLES and count}


@dataclass(frozen=True)
class VerlRun:
    """A verl training run that is translated: its settings, and the GPUs of actor and critic that `--gpus` requests."""

    settings: Settings
    requested: tuple[int, int] | None = None

    def value(self, key: str) -> Any:
        return self.settings.value(key)

    @property
    def longest_row(self) -> int:
        """The number of tokens of the longest allowed prompt and the longest allowed response together."""
        return self._count("data.max_prompt_length") + self._count("data.max_response_length")

    @property
    def longest_context(self) -> int:
        """The number of tokens of the longest row: in conversations with vLLM no more than the engine takes."""
        rollout = "actor_rollout_ref.rollout"
        engine = self.value(f"{rollout}.max_model_len") or self.value(f"{rollout}.engine_kwargs.vllm.max_model_len")
        is_limit = engine and self.has_turns and self.uses_vllm
        return min(self.longest_row, int(engine)) if is_limit else self.longest_row

    @property
    def uses_vllm(self) -> bool:
        return str(self.value("actor_rollout_ref.rollout.name")) != "hf"

    @property
    def has_rollout_pool(self) -> bool:
        """True if the verl run samples rollouts on GPUs of their own, one step ahead of the training."""
        return not self.value("actor_rollout_ref.hybrid_engine")

    @property
    def uses_critic(self) -> bool:
        """True if the advantage estimator of the verl run needs values from a critic."""
        return "values_BT" in NEEDS.get(str(self.value("algorithm.adv_estimator")), ()) and not self.is_taught_alone

    @property
    def is_taught_alone(self) -> bool:
        """True if a teacher is all that the verl run learns from, whatever its estimator and its rewards are."""
        has_rewards = self.value("distillation.distillation_loss.use_task_rewards")
        return bool(self.value("distillation.enabled")) and not has_rewards

    def has_use_for(self, key: str) -> bool:
        """Returns False if a verl key is about the critic and the verl run has no critic; True otherwise."""
        return self.uses_critic or not (key.startswith("critic.") or key == "trainer.critic_warmup")

    @property
    def has_turns(self) -> bool:
        """True if responses of the verl run may have several turns: it has tools, or an agent loop for them."""
        rollout = "actor_rollout_ref.rollout"
        keys = ("enable", "tool_config_path", "function_tool_path", "interaction_config_path")
        loop = self.value(f"{rollout}.agent.default_agent_loop") or "single_turn_agent"
        return loop != "single_turn_agent" or any(self.value(f"{rollout}.multi_turn.{key}") for key in keys)

    @property
    def has_reward_model(self) -> bool:
        """True if the verl run learns from a reward model, enabled by the old or the new key."""
        is_enabled = self.value("reward.reward_model.enable") or self.value("reward_model.enable")
        return bool(is_enabled) and not self.is_taught_alone

    @property
    def teacher_nodes(self) -> int:
        """The number of machines of the teachers' own resource pool; 0 without one."""
        return self._count("distillation.nnodes") if self.value("distillation.enabled") else 0

    @property
    def has_reward_pool(self) -> bool:
        """True if the reward model has a process group: that of its resource pool, or, without a critic, any."""
        in_pool = self.value("reward.reward_model.enable_resource_pool")
        return self.has_reward_model and bool(in_pool or not self.uses_critic)

    @cached_property
    def groups(self) -> GpuGroups:
        """The number of GPUs for each process group: as requested, or three for the actor to one for the critic.

        In verl both models use all GPUs. The actor's share is rounded down to whole vLLM engines, if it has at least
        one. A reward model has as many GPUs as its resource pool in verl, and teachers as theirs. Without a pool the
        critic's process group runs the reward model; without a critic the reward model gets a quarter of the GPUs.
        Rollouts have as many GPUs as their own pool in verl, if they have one. The actor has no more ranks than a
        mini-batch has rows, times the ranks that divide a row: verl's Megatron uses more GPUs for parts of a model.

        Raises:
            ConfigError: there are fewer GPUs than process groups, or `--gpus` names GPUs for a critic and the run has
                none.
        """
        total = int(self.settings.number("trainer.nnodes") * self.settings.number("trainer.n_gpus_per_node"))
        wanted = self._count("actor_rollout_ref.rollout.tensor_model_parallel_size")
        reward = self._reward_gpus(total)
        rollout = self._count("rollout.nnodes") * self._count("rollout.n_gpus_per_node") if self.has_rollout_pool else 0
        shared = self.uses_critic and total == 1 and self.requested is None
        if self.requested is not None:
            actor, critic = self._check_requested(*self.requested)
        elif not self.uses_critic:
            in_pool = self.value("reward.reward_model.enable_resource_pool")
            actor = total - (0 if in_pool else reward)
            critic = 0
        elif shared:
            actor = 1
            critic = 1
        else:
            actor = min(total - 1, max(1, round(total * ACTOR_SHARE)))
            actor = actor - actor % wanted or actor
            critic = total - actor
        if actor < 1 or (self.has_rollout_pool and rollout < 1):
            pool, gpus = ("trainer", total) if actor < 1 else ("rollout", rollout)
            raise ConfigError(f"{pool}.n_gpus_per_node times {pool}.nnodes is {gpus}; expected at least one GPU")
        idle = 0 if self.requested else max(0, actor - self._rows_of_mini_batch())
        actor -= idle
        reward += self.teacher_nodes * self._count("distillation.n_gpus_per_node") if self.teacher_nodes else 0
        return GpuGroups(actor, critic, reward, rollout, math.gcd(wanted, rollout or actor), shared, idle)

    def _rows_of_mini_batch(self) -> int:
        """Returns how many ranks the rows of the actor's mini-batch occupy."""
        actor = "actor_rollout_ref.actor"
        keys = [f"{actor}.{engine}ulysses_sequence_parallel_size" for engine in ("", "fsdp_config.")]
        together = max([1, *(self._count(key) for key in keys if self.value(key) is not None)])
        return self._count(f"{actor}.ppo_mini_batch_size") * self._count("actor_rollout_ref.rollout.n") * together

    def _check_requested(self, actor: int, critic: int) -> tuple[int, int]:
        """Returns the GPUs of actor and critic that `--gpus` asks for; ConfigError: they do not fit the run."""
        if self.uses_critic and not (actor and critic):
            raise ConfigError(f"--gpus {actor}:{critic}: expected at least one GPU for each of actor and critic")
        if max(actor, critic) > _MAX_GPUS:
            raise ConfigError(f"--gpus {actor}:{critic}: expected at most {_MAX_GPUS} GPUs of a group")
        if critic and not self.uses_critic:
            estimator = self.value("algorithm.adv_estimator")
            raise ConfigError(
                f"--gpus {actor}:{critic}: algorithm.adv_estimator {estimator} has no critic; expected"
                f" {actor + critic}:0"
            )
        return actor, critic

    def _reward_gpus(self, total: int) -> int:
        """Returns the GPUs of the reward model's own process group; 0 if the critic's group runs the reward model."""
        if not self.has_reward_model:
            return 0
        if self.value("reward.reward_model.enable_resource_pool"):
            nodes, per_node = (self._count(f"reward.reward_model.{key}") for key in ("nnodes", "n_gpus_per_node"))
            return max(1, nodes * per_node)
        return 0 if self.uses_critic else max(1, total // 4)

    def _count(self, key: str) -> int:
        return int(self.settings.number(key))
