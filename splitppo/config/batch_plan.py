"""Checks that the batch sizes of a configuration agree with each other, and describes the batches of a step as text."""

from collections.abc import Iterator
from math import ceil, floor

from splitppo.batch import MAX_BATCH_ROWS
from splitppo.config.schema import Config
from splitppo.config.section import TrainedRoleName
from splitppo.config_error import ConfigError

# A slot has room for 1024; each of two groups that sample has at least one part, also with a tiny share.
MAX_PARTS = 1023
_TOP_K_BYTES = 8  # a token id and its log-prob; the log-prob of the sampled token has 4 more


def batch_plan(config: Config) -> str:
    """Describes the batch sizes of a step as lines of text: for the step, dynamic sampling, and each trained role.

    Raises:
        ConfigError: one batch size is too large for another, or no multiple of it; the sentence has both, and the key
            to change.
    """
    _check_rollout(config)
    if config.rollout.backend == "vllm":
        _check_vllm(config)
    if config.teacher_host is not None and config.teacher.signal == "top_k":
        _check_top_k(config)
    prompts = config.data.train_batch_size
    samples = config.rollout.n
    lines = [f"step: {prompts} prompts x {samples} samples = {prompts * samples} responses"]
    if samples == 1 and "groups_B" in config.algorithm.needs:
        lines.append(f"{config.algorithm.adv_estimator}: a prompt has one sample to compare: advantages are the scores")
    filters = config.algorithm.filter_groups
    if filters.enable:
        most = filters.max_num_gen_batches
        lines.append(
            f"dynamic sampling: {config.data.draw_size} prompts are drawn and answered at a time,"
            f" {f'at most {most} times' if most else 'until the step is full'}; those whose samples are all alike in"
            f" {filters.metric!r} are dropped"
        )
    if config.rollout.max_step_tokens is not None:
        lines.append(f"partial rollouts: {_partial_plan(config, config.rollout.max_step_tokens)}")
    if config.uses_critic:
        lines += [f"critic: {line}" for line in _critic_plan(config)]
    if config.services.rollout is not None:
        lines.append(f"rollout: {_rollout_plan(config)}")
    return "\n".join([*lines, *(_role_plan(config, role) for role in config.trained_roles)])


def largest_age(config: Config, max_step_tokens: int) -> int:
    """Returns how many updates old a token of partial rollouts can be at most when a step learns from it.

    controller/step/partial.py has the proof.
    """
    return ceil(config.data.max_response_length / max_step_tokens)


def _partial_plan(config: Config, max_step_tokens: int) -> str:
    """Says in one sentence how many tokens of how many responses a step samples, and how old they can become."""
    prompts = config.data.train_batch_size
    # Waiting and pending prompts are never more than two batches.
    num_responses = ceil(min(config.rollout.overcommit, 2.0) * prompts * config.rollout.n)
    age = largest_age(config, max_step_tokens)
    return (
        f"up to {max_step_tokens} tokens at a time of each of {num_responses} unfinished responses"
        f" (rollout.overcommit {config.rollout.overcommit:g}; fewer while prompts wait, at most {prompts} of them);"
        f" a token is at most {age} updates old when it is learned from"
    )


def _critic_plan(config: Config) -> Iterator[str]:
    """Says in a sentence each which steps train the critic alone, and what it alone reads; nothing without these."""
    critic = config.critic
    if critic.warmup_steps:
        until = critic.warmup_until
        ends = "" if until is None else f", fewer once {until.patience} steps in a row explain no more of the returns"
        epochs = critic.warmup_epochs or critic.ppo_epochs
        num_updates = epochs * _num_mini_batches(config, "critic")
        yield (
            f"the first {critic.warmup_steps} steps train it alone{ends}, in {epochs} epochs = {num_updates} optimizer"
            " steps each"
        )
    if critic.privileged_prompt is not None:
        length = critic.max_privileged_length
        yield f"it alone reads {critic.privileged_prompt!r}, filled in, before a prompt: at most {length} tokens"


def _rollout_plan(config: Config) -> str:
    """Says in one sentence who samples the responses of a step, and how the rollout group gets its weights."""
    share = float(config.rollout.share)
    drawn = config.data.draw_size
    if not share:
        return (
            "the actor's group samples all responses, and services.rollout is not started, because rollout.share is 0"
            " (auto is 0 on the critic's devices if the critic's update takes longer than the actor's)"
        )
    which = "all responses are sampled"
    if share < 1.0:
        which = f"{floor(drawn * share)} of {drawn} prompts (rollout.share {share:g}) are answered"
    turns = ", in turns with the critic" if config.rollout_shares_devices else ""
    others = ", the others by the actor's group" if share < 1.0 else ""
    return (
        f"{which} by the rollout group on {config.services.of('rollout').num_processes} ranks{turns}{others};"
        f" the actor publishes weights in {config.weights_folder}"
    )


def _check_rollout(config: Config) -> None:
    """Raises ConfigError if a part, the rollout group's share or the wire would get too few or too many responses."""
    prompts = config.data.train_batch_size
    parts = config.rollout.stream_groups
    if int(parts) > prompts * config.rollout.n:
        raise ConfigError(
            f"rollout.stream_groups ({parts}) must not exceed data.train_batch_size ({prompts}) times rollout.n"
            f" ({config.rollout.n}), since a part holds at least one response; lower rollout.stream_groups"
        )
    if int(parts) > MAX_PARTS:
        raise ConfigError(f"rollout.stream_groups ({parts}) must not exceed {MAX_PARTS}; lower rollout.stream_groups")
    drawn = config.data.draw_size
    share = config.rollout.share
    if "rollout" in config.sampling_roles and floor(drawn * float(share)) == 0:
        raise ConfigError(
            f"rollout.share ({share}) of {config.data.draw_key} ({drawn}) is not one prompt, so the rollout group would"
            f" have nothing to sample; set rollout.share to 0, or to 1/{drawn} or more"
        )
    # All responses that are generated together must fit into one batch of the wire. Partial rollouts are those of at
    # most two steps.
    most_of_training = MAX_BATCH_ROWS if config.rollout.max_step_tokens is None else MAX_BATCH_ROWS // 2
    for key, num_prompts, samples_key, num_samples, most in (
        ("data.train_batch_size", prompts, "rollout.n", config.rollout.n, most_of_training),
        (config.data.draw_key, config.data.draw_size, "rollout.n", config.rollout.n, most_of_training),
        ("evaluation.batch_size", config.evaluation.batch_size, "evaluation.n", config.evaluation.n, MAX_BATCH_ROWS),
    ):
        if num_prompts * num_samples > most:
            raise ConfigError(
                f"{key} ({num_prompts}) times {samples_key} ({num_samples}) must not exceed {most} responses;"
                f" lower {key}"
            )


def _check_top_k(config: Config) -> None:
    """Checks that the columns of the teachers' most likely tokens fit into what a service receives and holds."""
    rows = config.data.train_batch_size * config.rollout.n
    length = config.data.max_response_length
    top_k = config.teacher.top_k
    num_bytes = rows * length * (top_k * _TOP_K_BYTES + 4)
    services = config.services
    travels = config.teacher_host != "actor"
    limit, key = (
        (services.max_batch_bytes, "max_batch_bytes") if travels else (services.max_held_bytes, "max_held_bytes")
    )
    if num_bytes > limit:
        other = ", or set placement.teacher to actor, where they need not travel" if travels else ""
        raise ConfigError(
            f"teacher.top_k ({top_k}) makes up to {num_bytes} bytes for {rows} responses of {length} tokens, more than"
            f" services.{key} ({limit}): lower teacher.top_k or raise services.{key}{other}"
        )


def _check_vllm(config: Config) -> None:
    """Raises ConfigError if vLLM's engines cannot share the ranks of a group, or take shorter rows than the run has."""
    vllm = config.rollout.vllm
    longest = config.longest_context
    for role in config.sampling_roles:
        ranks = config.services.of(role).num_processes
        if ranks % vllm.tensor_model_parallel_size:
            key = "rollout.vllm.tensor_model_parallel_size"
            raise ConfigError(
                f"services.{role}.num_processes ({ranks}) must be a multiple of {key}"
                f" ({vllm.tensor_model_parallel_size}); change {key}"
            )
    if vllm.max_model_len is not None and vllm.max_model_len < longest:
        raise ConfigError(
            f"rollout.vllm.max_model_len ({vllm.max_model_len}) must hold {config.longest_context_keys}"
            f" ({longest}) tokens; raise rollout.vllm.max_model_len"
        )


def _num_mini_batches(config: Config, role: TrainedRoleName) -> int:
    """Returns the number of mini-batches into which the prompts of a step are divided for a trained model."""
    mini_batch = config.trained_model_of(role).ppo_mini_batch_size
    assert mini_batch is not None, "load resolves it"
    return config.data.train_batch_size // mini_batch


def _role_plan(config: Config, role: TrainedRoleName) -> str:
    """Says in one sentence how actor or critic divides a step into mini-batches, ranks and micro-batches.

    Raises:
        ConfigError: a mini-batch does not divide the step, has fewer rows than ranks, or a row fits no micro-batch.
    """
    model = config.trained_model_of(role)
    prompts = config.data.train_batch_size
    longest = config.longest_row_of(role)
    num_ranks = config.services.of(role).num_processes
    mini_batch = model.ppo_mini_batch_size
    assert mini_batch is not None, "load resolves it"
    together = model.ulysses_sequence_parallel_size
    times = ""
    ranks = f"{num_ranks} ranks"
    num_shares = num_ranks // together
    if together > 1:
        times = f" x ulysses_sequence_parallel_size ({together})"
        ranks = f"{num_shares} x {together} ranks that divide rows"
    fixed = model.ppo_micro_batch_size_per_gpu
    budget = model.ppo_max_token_len_per_gpu
    if prompts % mini_batch:
        raise ConfigError(
            f"data.train_batch_size ({prompts}) must be a multiple of {role}.ppo_mini_batch_size ({mini_batch});"
            f" change {role}.ppo_mini_batch_size"
        )
    if fixed is None and budget * together < longest:
        raise ConfigError(
            f"{role}.ppo_max_token_len_per_gpu ({budget}){times} must hold one row of"
            f" {config.longest_row_keys_of(role)}"
            f" ({longest}) tokens; raise it, or {role}.ulysses_sequence_parallel_size, so that ranks divide rows"
        )
    rows = mini_batch * config.rollout.n
    if rows < num_shares:
        raise ConfigError(
            f"{role}.ppo_mini_batch_size ({mini_batch}) x rollout.n ({config.rollout.n}){times} gives fewer rows than"
            f" services.{role}.num_processes ({num_ranks}); raise {role}.ppo_mini_batch_size"
        )
    num_mini_batches = _num_mini_batches(config, role)
    epochs = model.ppo_epochs
    return (
        f"{role}: {num_mini_batches} mini-batches of {mini_batch} prompts ({rows} responses, about"
        f" {rows / num_shares:g} on each of {ranks}) x {epochs} epochs = {num_mini_batches * epochs} optimizer"
        f" steps; micro-batches of {f'{fixed} rows' if fixed else f'at most {budget * together} tokens'}"
    )
