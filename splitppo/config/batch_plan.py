"""The resolved batch plan: prompts, rows and mini-batches of a step.

Sizes that do not divide are refused.
"""

from dataclasses import dataclass

from splitppo.batch import MAX_BATCH_ROWS
from splitppo.config.schema import Config
from splitppo.config.section import TrainedRoleName
from splitppo.config_error import ConfigError


@dataclass(frozen=True)
class RolePlan:
    """The batches of one trained role. A row is a response."""

    role: TrainedRoleName
    num_ranks: int
    mini_batch_prompts: int
    mini_batch_rows: int
    num_mini_batches: int
    ppo_epochs: int
    micro_batch: str

    @property
    def optimizer_steps(self) -> int:
        return self.num_mini_batches * self.ppo_epochs

    def __str__(self) -> str:
        return (
            f"{self.role}: {self.num_mini_batches} mini-batches of {self.mini_batch_prompts} prompts"
            f" ({self.mini_batch_rows} responses, about {self.mini_batch_rows / self.num_ranks:g} on each of"
            f" {self.num_ranks} ranks) x {self.ppo_epochs} epochs = {self.optimizer_steps} optimizer steps;"
            f" micro-batches of {self.micro_batch}"
        )


@dataclass(frozen=True)
class BatchPlan:
    """The batches of a step: prompts, samples, and the mini-batches of each trained role."""

    prompts: int
    samples_per_prompt: int
    roles: tuple[RolePlan, ...]
    dynamic_sampling: str = ""

    @property
    def rows(self) -> int:
        return self.prompts * self.samples_per_prompt

    def __str__(self) -> str:
        step = f"step: {self.prompts} prompts x {self.samples_per_prompt} samples = {self.rows} responses"
        return "\n".join([step, *filter(None, [self.dynamic_sampling]), *map(str, self.roles)])


def batch_plan(config: Config) -> BatchPlan:
    """Returns the plan of a step; a ConfigError names both numbers that do not divide or fit, and the key to change."""
    _check_rollout(config)
    if config.rollout.backend == "vllm":
        _check_vllm(config)
    roles = tuple(_role_plan(config, role) for role in config.trained_roles)
    return BatchPlan(config.data.train_batch_size, config.rollout.n, roles, _dynamic_sampling(config))


def _dynamic_sampling(config: Config) -> str:
    filters, data = config.algorithm.filter_groups, config.data
    if not filters.enable:
        return ""
    limit = f"at most {filters.max_num_gen_batches} times" if filters.max_num_gen_batches else "until the step is full"
    return (
        f"dynamic sampling: {data.draw_size} prompts are drawn and answered at a time, {limit}; those whose samples are"
        f" all alike in {filters.metric!r} are dropped"
    )


def _check_rollout(config: Config) -> None:
    prompts, parts = config.data.train_batch_size, config.rollout.stream_groups
    if int(parts) > prompts * config.rollout.n:
        raise ConfigError(
            f"rollout.stream_groups ({parts}) must not exceed data.train_batch_size ({prompts}) times rollout.n"
            f" ({config.rollout.n}), since a part holds at least one response; lower rollout.stream_groups"
        )
    # What is generated together must fit into one batch of the wire.
    for key, num_prompts, samples_key, num_samples in (
        ("data.train_batch_size", prompts, "rollout.n", config.rollout.n),
        (config.data.draw_key, config.data.draw_size, "rollout.n", config.rollout.n),
        ("evaluation.batch_size", config.evaluation.batch_size, "evaluation.n", config.evaluation.n),
    ):
        if num_prompts * num_samples > MAX_BATCH_ROWS:
            raise ConfigError(
                f"{key} ({num_prompts}) times {samples_key} ({num_samples}) must not exceed {MAX_BATCH_ROWS} responses;"
                f" lower {key}"
            )


def _check_vllm(config: Config) -> None:
    vllm, ranks, longest = config.rollout.vllm, config.services.actor.num_processes, config.data.longest_row
    if ranks % vllm.tensor_model_parallel_size:
        raise ConfigError(
            f"services.actor.num_processes ({ranks}) must be a multiple of rollout.vllm.tensor_model_parallel_size"
            f" ({vllm.tensor_model_parallel_size}); change rollout.vllm.tensor_model_parallel_size"
        )
    if vllm.max_model_len is not None and vllm.max_model_len < longest:
        raise ConfigError(
            f"rollout.vllm.max_model_len ({vllm.max_model_len}) must hold data.max_prompt_length +"
            f" data.max_response_length ({longest}) tokens; raise rollout.vllm.max_model_len"
        )


def _role_plan(config: Config, role: TrainedRoleName) -> RolePlan:
    model = config.trained_model_of(role)
    prompts, longest = config.data.train_batch_size, config.data.longest_row
    num_ranks, mini_batch = config.services.of(role).num_processes, model.ppo_mini_batch_size
    assert mini_batch is not None, "load resolves it"
    fixed, budget = model.ppo_micro_batch_size_per_gpu, model.ppo_max_token_len_per_gpu
    if prompts % mini_batch:
        raise ConfigError(
            f"data.train_batch_size ({prompts}) must be a multiple of {role}.ppo_mini_batch_size ({mini_batch});"
            f" change {role}.ppo_mini_batch_size"
        )
    if fixed is None and budget < longest:
        raise ConfigError(
            f"{role}.ppo_max_token_len_per_gpu ({budget}) must hold one row of data.max_prompt_length +"
            f" data.max_response_length ({longest}) tokens"
        )
    rows = mini_batch * config.rollout.n
    if rows < num_ranks:
        raise ConfigError(
            f"{role}.ppo_mini_batch_size ({mini_batch}) x rollout.n ({config.rollout.n}) gives fewer rows than"
            f" services.{role}.num_processes ({num_ranks}); raise {role}.ppo_mini_batch_size"
        )
    micro_batch = f"{fixed} rows" if fixed else f"at most {budget} tokens"
    return RolePlan(role, num_ranks, mini_batch, rows, prompts // mini_batch, model.ppo_epochs, micro_batch)
