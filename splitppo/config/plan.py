"""The resolved batch plan: what a step consists of, in numbers, and refusal of what does not divide."""

from __future__ import annotations

from dataclasses import dataclass

from splitppo.batch import MAX_BATCH_ROWS
from splitppo.config.load import ConfigError
from splitppo.config.schema import Config, DataConfig, ServiceConfig, TrainedModelConfig


@dataclass(frozen=True)
class RolePlan:
    """Batches of one trained role. Counts of rows are responses, not prompts."""

    role: str
    num_ranks: int
    mini_batch_prompts: int
    mini_batch_rows: int
    num_mini_batches: int
    ppo_epochs: int
    micro_batch: str

    @property
    def optimizer_steps(self) -> int:
        return self.num_mini_batches * self.ppo_epochs


@dataclass(frozen=True)
class BatchPlan:
    """What one step does."""

    prompts: int
    samples_per_prompt: int
    roles: tuple[RolePlan, ...]

    @property
    def rows(self) -> int:
        return self.prompts * self.samples_per_prompt

    def __str__(self) -> str:
        lines = [f"step: {self.prompts} prompts x {self.samples_per_prompt} samples = {self.rows} responses"]
        for role in self.roles:
            lines.append(
                f"{role.role}: {role.num_mini_batches} mini-batches of {role.mini_batch_prompts} prompts"
                f" ({role.mini_batch_rows} responses, about {role.mini_batch_rows / role.num_ranks:g} on each of"
                f" {role.num_ranks} ranks) x {role.ppo_epochs} epochs = {role.optimizer_steps} optimizer steps;"
                f" micro-batches of {role.micro_batch}"
            )
        return "\n".join(lines)


def batch_plan(config: Config) -> BatchPlan:
    """Resolves the plan.

    Raises:
        ConfigError: numbers that do not divide or do not fit, with both numbers and the key to change.
    """
    _check_rollout(config)
    roles = [_role_plan(config, "actor", config.actor, config.services.actor)]
    if config.uses_critic:
        roles.append(_role_plan(config, "critic", config.critic, config.services.critic))
    return BatchPlan(config.data.train_batch_size, config.rollout.n, tuple(roles))


def longest_row(data: DataConfig) -> int:
    """Tokens of the longest prompt with the longest response."""
    return data.max_prompt_length + data.max_response_length


def _check_rollout(config: Config) -> None:
    prompts, groups = config.data.train_batch_size, config.rollout.stream_groups
    if groups > prompts:
        raise ConfigError(
            f"rollout.stream_groups ({groups}) must not exceed data.train_batch_size ({prompts}), since a group holds"
            " at least one prompt; lower rollout.stream_groups"
        )
    _check_rows(config)
    if config.rollout.backend != "vllm":
        return
    vllm, ranks = config.rollout.vllm, config.services.actor.num_processes
    if ranks % vllm.tensor_model_parallel_size:
        raise ConfigError(
            f"services.actor.num_processes ({ranks}) must be a multiple of rollout.vllm.tensor_model_parallel_size"
            f" ({vllm.tensor_model_parallel_size}); change rollout.vllm.tensor_model_parallel_size"
        )
    if vllm.max_model_len is not None and vllm.max_model_len < longest_row(config.data):
        raise ConfigError(
            f"rollout.vllm.max_model_len ({vllm.max_model_len}) must hold data.max_prompt_length +"
            f" data.max_response_length ({longest_row(config.data)}) tokens; raise rollout.vllm.max_model_len"
        )


def _check_rows(config: Config) -> None:
    """What is generated together must fit into one batch of the wire."""
    for prompts, prompts_key, samples, samples_key in (
        (config.data.train_batch_size, "data.train_batch_size", config.rollout.n, "rollout.n"),
        (config.evaluation.batch_size, "evaluation.batch_size", config.evaluation.n, "evaluation.n"),
    ):
        if prompts * samples > MAX_BATCH_ROWS:
            raise ConfigError(
                f"{prompts_key} ({prompts}) times {samples_key} ({samples}) must not exceed {MAX_BATCH_ROWS} responses;"
                f" lower {prompts_key}"
            )


def _role_plan(config: Config, role: str, model: TrainedModelConfig, service: ServiceConfig) -> RolePlan:
    prompts = config.data.train_batch_size
    mini_batch = model.ppo_mini_batch_size or prompts
    if prompts % mini_batch:
        raise ConfigError(
            f"data.train_batch_size ({prompts}) must be a multiple of {role}.ppo_mini_batch_size ({mini_batch});"
            f" change {role}.ppo_mini_batch_size"
        )
    longest = longest_row(config.data)
    if model.ppo_micro_batch_size_per_gpu is None and model.ppo_max_token_len_per_gpu < longest:
        raise ConfigError(
            f"{role}.ppo_max_token_len_per_gpu ({model.ppo_max_token_len_per_gpu}) must hold one row of"
            f" data.max_prompt_length + data.max_response_length ({longest}) tokens"
        )
    rows = mini_batch * config.rollout.n
    if rows < service.num_processes:
        raise ConfigError(
            f"{role}.ppo_mini_batch_size ({mini_batch}) x rollout.n ({config.rollout.n}) gives fewer rows than"
            f" services.{role}.num_processes ({service.num_processes}); raise {role}.ppo_mini_batch_size"
        )
    fixed = model.ppo_micro_batch_size_per_gpu
    micro = f"{fixed} rows" if fixed else f"at most {model.ppo_max_token_len_per_gpu} tokens"
    return RolePlan(role, service.num_processes, mini_batch, rows, prompts // mini_batch, model.ppo_epochs, micro)
