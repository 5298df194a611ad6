"""Loads and checks the inputs of a run before any worker group is started: models, tokenizers, prompts, rewards."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from controller.conversations.checks import check_conversations, load_tools
from controller.conversations.conversation import Conversation
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch, PromptDataset, PromptSource, load_prompts
from controller.data.reward_rows import RewardTokenizer, load_reward_tokenizer
from controller.data.row_values import is_missing
from controller.data.sampled_prompts import SampledPrompts
from controller.data.tokenizer import Tokenizer, load_tokenizer
from controller.models.folder import model_folder, read_description
from controller.models.shape import is_linear, read_tensor_shapes
from controller.models.tied_weights import check_tied_weights
from controller.ppo.advantages.registry import try_estimator
from controller.run.folder import check_folder
from controller.scoring.scorer import Scorer
from controller.tracking.trackers.process import check_trackers
from controller.workers.worker_groups import configured_addresses
from rewards.code.cases import parse_cases
from rewards.manager import RewardManager
from rewards.samples import Sample
from rewards.terms import (
    check_scorers,
    needs_ground_truth,
    numeric_fields,
    runs_code,
    scored_sources,
    terms_of,
    uses_built_in,
)
from splitppo.batch import Batch
from splitppo.config import ComputedModelConfig, Config, ConfigError, RewardConfig, TrainedModelConfig
from splitppo.config.adapter_files import check_adapter
from splitppo.config.attention_heads import check_heads
from splitppo.config.batch_plan import batch_plan
from splitppo.config.compiled import check_compiler
from splitppo.config.rollout_packages import check_adapter_packages, check_rollout_packages
from splitppo.config.rope import rope_switch
from splitppo.config.section import TrainedRoleName
from splitppo.config.subsections.filter_groups import SCORE_METRICS
from splitppo.config.subsections.multi_turn import MultiTurnConfig
from splitppo.config_error import config_errors
from splitppo.rpc.credentials import load_credentials
from splitppo.weight_files import EXPECTED

log = logging.getLogger(__name__)

_MAX_TRUTH = 10_000  # characters of a ground truth that is scored as a trial


@dataclass(frozen=True)
class Inputs:
    """The loaded inputs of a run: tokenizers of policy and reward model, prompts for training and maybe validation.

    `multi_turn` has the environments that the prompts of all data sources begin conversations with, if there are any.
    `teacher_only` is that of the configuration.
    """

    tokenizer: Tokenizer
    prompts: PromptSource
    val_prompts: PromptBatch | None
    reward_tokenizer: RewardTokenizer | None = None
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    teacher_only: bool = False

    @property
    def data_sources(self) -> frozenset[str]:
        """The data sources of all prompts for training and validation."""
        return self.prompts.table.data_sources | (self.val_prompts.data_sources if self.val_prompts else frozenset())

    def with_last_step(self, config: Config) -> Config:
        """Sets `run.total_steps` in a copy of `config` to the run's last step, also if `run.total_epochs` limits it."""
        run = config.run
        if run.total_epochs is None:
            return config
        steps = self.prompts.num_steps(run.total_epochs)
        return config.changed("run", {"total_steps": min(run.total_steps or steps, steps)})

    def scored_sources(self, config: RewardConfig) -> frozenset[str]:
        """Returns the data sources scored by a reward function: all, or those with a function if others give scores.

        An environment gives scores, but tools alone do not. A teacher alone needs none.
        """
        if self.reward_tokenizer is not None or self.teacher_only:
            return scored_sources(config, self.data_sources)
        environments = {source: self.multi_turn.environment_of(source) for source in self.data_sources}
        unscored = frozenset(source for source, own in environments.items() if own is None or own.tools)
        return unscored | scored_sources(config, self.data_sources)


def check_config(config: Config) -> None:
    """Checks certificates and tokens, and all that `check_keys` does; ConfigError if something cannot be used."""
    load_credentials(config.services.security, "controller")
    check_keys(config)


def check_keys(config: Config) -> None:
    """Checks how the numbers of a configuration fit together, and the files and packages that the configuration names.

    Certificates and tokens are left out: a run has loaded them already, and no longer has a token in its environment.

    Raises:
        ConfigError: numbers do not divide or fit; an estimator fails on three tokens; moments would be offloaded from a
            CPU; ranks that are started here would not find the rollout backend, peft, a compiler or the file of a
            policy loss, or could not make the folder of the published weights; a group that is started elsewhere has no
            address.
    """
    batch_plan(config)
    for phase in config.in_every_phase:
        try_estimator(phase.algorithm, num_samples=phase.rollout.n)
    for trained in config.trained_roles:
        if config.trained_model_of(trained).optimizer_offload and not config.services.of(trained).devices:
            raise ConfigError(f"{trained}.optimizer_offload needs GPUs (services.{trained}.devices)")
    if config.services.launch == "local":
        check_adapter_packages(config)
        for role in config.roles:
            check_compiler(config, role)
        for role in config.samplers:
            check_rollout_packages(config, role)
        for phase in config.in_every_phase:
            phase.actor.policy_loss.check_file()
        publishes = "rollout" in config.samplers or config.checkpoint.weights_save_freq
        if publishes and config.rollout.sync_dir:
            try:
                check_folder(config.weights_folder)
            except OSError as error:
                raise ConfigError(
                    f"rollout.sync_dir: cannot use the folder: {error.strerror}: {error.filename}"
                ) from error
    else:
        configured_addresses(config)


def load_inputs(config: Config) -> Inputs:
    """Checks a configuration, and loads all that it names; see `check_config`, `check_setup` and `read_inputs`."""
    load_credentials(config.services.security, "controller")
    return read_inputs(config, check_setup(config))


def check_setup(config: Config) -> int | None:
    """Checks what can be checked before prompts are read, which may take minutes, but for certificates and tokens.

    Returns:
        `check_models`.

    Raises:
        ConfigError: a key, a tracker or a model cannot be used.
    """
    check_keys(config)
    check_trackers(config.tracking)
    return check_models(config)


def read_inputs(config: Config, vocab_size: int | None) -> Inputs:
    """Loads the tokenizers and the prompts that a configuration names, and checks them and what scores them.

    The user's environments are loaded in a process of their own. `vocab_size` is that of the policy, in tokens.

    Raises:
        ConfigError: something is missing, cannot be read or does not fit together.
    """
    data = config.data
    assert data.tokenizer is not None, "load resolves it"
    tokenizer = load_tokenizer(
        data.tokenizer,
        chat_template=data.chat_template,
        chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    tokenizer.check_fits(vocab_size, key="data.tokenizer", model_key="actor.model")
    multi_turn = config.rollout.multi_turn
    tools_of = load_tools(config, tokenizer)
    needs_truth = partial(needs_ground_truth, config.reward)
    table = load_prompts(data, tokenizer, "train", tools_of, needs_truth)
    prompts = _prompt_source(config, table)
    val_prompts = load_prompts(data, tokenizer, "val", tools_of, needs_truth) if data.val_files else None
    reward_tokenizer = None
    if config.reward_model_host is not None:
        is_model_here = config.services.launch == "local"
        roles = {"tool" if tools_of(source) else "user" for source in table.data_sources if multi_turn.environments}
        reward_tokenizer = load_reward_tokenizer(config.reward_model, table, roles, is_model_here=is_model_here)
    if (reward_tokenizer or config.teacher.only) and val_prompts and not multi_turn.environments:
        val_prompts = _with_functions(val_prompts, config)
    check_validation_metrics(config, val_prompts.data_sources if val_prompts else frozenset())
    _check_teachers(config, tokenizer, table.data_sources)
    inputs = Inputs(tokenizer, prompts, val_prompts, reward_tokenizer, multi_turn, config.teacher.only)
    rows = (*table.rows, *(val_prompts.rows if val_prompts else ()))
    _warn_of_no_template(tokenizer, rows)
    check_conversations(config, tokenizer, rows)
    scored = inputs.scored_sources(config.reward)
    for source in sorted(scored):
        if (own := multi_turn.environment_of(source)) and own.tools:
            with config_errors(ValueError, before="tools alone give no reward: "):
                terms_of(config.reward, source)
    check_scorers(config.reward, scored)
    if not multi_turn.environments:
        _check_filter_metric(config, table.data_sources & scored)
    _check_ground_truths(config.reward, [row for row in rows if row.data_source in scored])
    return inputs


def _warn_of_no_template(tokenizer: Tokenizer, rows: Iterable[PromptRow]) -> None:
    """Warns if prompts are chat messages that no chat template renders: roles and ends of turns are then left out."""
    first = next((row for row in rows if not isinstance(row.prompt, str)), None)
    if first is not None and tokenizer.chat_template.template is None:
        log.warning(
            "%s: the prompt has chat messages, but the tokenizer has no chat template: the model reads their contents"
            " alone, one per line (data.chat_template sets a template)",
            first.place,
        )


def _check_filter_metric(config: Config, data_sources: Iterable[str]) -> None:
    """Checks that built-in scorers give the metric by which dynamic sampling compares samples; ConfigError if not.

    What a user's reward function or environment returns is known only when the run calls it.
    """
    filters = config.algorithm.filter_groups
    for source in sorted(data_sources) if filters.enable and not filters.compares_scores else ():
        fields = numeric_fields(config.reward, source)
        if fields is not None and filters.metric not in fields:
            raise ConfigError(
                f"algorithm.filter_groups.metric: the scorer of data_source {source!r} gives no numeric field"
                f" {filters.metric!r}; expected one of {', '.join((*SCORE_METRICS, *fields))}"
            )


def _check_ground_truths(config: RewardConfig, rows: Iterable[PromptRow]) -> None:
    """Checks that every prompt row has the ground truth that a built-in scorer needs; ConfigError if one has none.

    Rows whose answers are run as programs need test cases. What a user's function needs, only the function knows.
    """
    for row in rows:
        if is_missing(row.ground_truth) and uses_built_in(config, row.data_source):
            raise ConfigError(
                f"{row.place}: column 'reward_model' has no 'ground_truth', which the scorer of data_source"
                f" {row.data_source!r} compares responses with"
            )
        if runs_code(config, row.data_source):
            with config_errors(ValueError, before=f"{row.place}: reward_model.ground_truth: "):
                parse_cases(row.ground_truth)


def _prompt_source(config: Config, table: PromptBatch) -> PromptSource:
    """Makes the source of training prompts: a user's sampler, which is tried first, or an order by seed and epoch."""
    data = config.data
    seed = config.run.seed
    if data.sampler.class_path is not None:
        SampledPrompts(table, data, seed=seed).check_repeats()
        return SampledPrompts(table, data, seed=seed)
    size = data.draw_size
    key = data.draw_key
    return PromptDataset(table, size, seed, shuffle=data.shuffle, weights=data.train_weights, batch_key=key)


def check_validation_metrics(config: Config, data_sources: frozenset[str]) -> None:
    """Checks that validation will compute the metrics that the configuration names, as far as is known before the run.

    Raises:
        ConfigError: nothing is validated, or no validation prompt has the data source of the metric, or a prompt has
            fewer responses than the metric needs.
    """
    named = {
        "evaluation.early_stop.metric": config.evaluation.early_stop.metric,
        "checkpoint.best_metric": config.checkpoint.best_metric,
    }
    if config.evaluation.val_only and not data_sources:
        raise ConfigError("evaluation.val_only: no validation prompt has a reward function")
    for key, metric in ((key, metric) for key, metric in named.items() if metric is not None):
        sources = ", ".join(sorted(data_sources)) or "none"
        sections = [f"{section}/{source}/" for section in ("val-core", "val-aux") for source in data_sources]
        if metric != "val/accuracy" and not metric.startswith(tuple(sections)):
            raise ConfigError(f"{key}: no validation prompt has the data_source of {metric!r}; they have {sources}")
        if not data_sources:
            raise ConfigError(f"{key}: nothing is validated, no validation prompt has a reward function")
        number = re.search(r"@(\d+)(/|$)", metric)
        if number and int(number[1]) > config.evaluation.n:
            raise ConfigError(
                f"{key}: {metric!r} needs {number[1]} responses, but evaluation.n is {config.evaluation.n}"
            )


async def check_rewards(config: Config, inputs: Inputs) -> str:
    """Starts and ends all that scores once, as a trial; has functions score a row of each data source.

    No judge is asked and no program run. The response is the ground truth of the row. Returns a line with the scores.

    Raises:
        ConfigError: a user's function cannot be loaded, or gives no score; `reward.max_error_rate` 1 allows the latter.
    """
    everything = PromptBatch.join([table for table in (inputs.prompts.table, inputs.val_prompts) if table is not None])
    told: list[str] = []
    async with RewardManager(config.reward, inputs.scored_sources(config.reward)) as manager:
        first_of = {row.data_source: place for place, row in reversed(list(enumerate(everything.rows)))}
        places = [place for source, place in sorted(first_of.items()) if source in manager.data_sources]
        prompts = everything.take(np.array(places, np.int64))
        samples = _trial_samples(Scorer(inputs.tokenizer, manager), prompts, config)
        for row, result in zip(prompts.rows, await manager.try_functions(samples), strict=True):
            if result is None:
                continue
            if result.failure is None:
                told.append(f"{row.data_source} {result.total:g}")
            elif config.reward.max_error_rate < 1:
                raise ConfigError(
                    f"{row.place}, data_source {row.data_source!r}: its ground truth as the response gets no score:"
                    f" {result.message}"
                )
    remark = "0 or less where more than the ground truth is expected, such as a box"
    return f"scores of a ground truth as the response ({remark}): {', '.join(told)}\n" if told else ""


def _trial_samples(scorer: Scorer, prompts: PromptBatch, config: Config) -> list[Sample]:
    """Makes a sample for each prompt: its ground truth as the response, in a conversation if there are environments.

    The response has ended by itself, as a whole answer does.
    """
    truths = ["" if row.ground_truth is None else str(row.ground_truth)[:_MAX_TRUTH] for row in prompts.rows]
    encode = scorer.tokenizer.backend.encode
    end = scorer.tokenizer.eos_token_ids[:1]
    responses = [[*encode(truth, add_special_tokens=False).ids, *end] for truth in truths]
    conversations = [
        Conversation(
            turn_rewards=(0.0,),
            turn_ends=(max(0, len(ids) - 1),),
            messages=({"role": "assistant", "content": truth},),
            last_turn=truth,
        )
        for truth, ids in zip(truths, responses, strict=True)
        if config.rollout.multi_turn.environments
    ]
    return scorer.samples(prompts, Batch.from_rows(responses=responses), conversations)


def _with_functions(val_prompts: PromptBatch, config: Config) -> PromptBatch | None:
    """Returns the validation prompts whose data source has a reward function; None if there is no such prompt.

    The others cannot be scored, because neither a reward model nor a teacher is used in validation.
    """
    judged = scored_sources(config.reward, val_prompts.data_sources)
    if without := sorted(val_prompts.data_sources - judged):
        log.warning(
            "only reward functions validate, and data_source %s has none: its validation prompts are left out",
            ", ".join(without),
        )
    places = np.flatnonzero([row.data_source in judged for row in val_prompts.rows])
    return val_prompts.take(places) if len(places) else None


def check_models(config: Config) -> int | None:
    """Checks the models of the run, and returns the size of the vocabulary that actor and critic share, in tokens.

    Returns None if the size is not known: groups that somebody else starts may have their models elsewhere.

    Raises:
        ConfigError: a model is missing, or its weights are missing or torn; actor and critic have different
            vocabularies; rows may be longer than a model has positions, or rotates by the same factors; ranks that
            share an engine of vLLM, or the positions of rows, cannot share the attention heads of a model.
    """
    if config.services.launch == "external":
        return None
    if config.reward_model_host is not None:
        _check_weights(config.reward_model.model, "reward_model.model")
    for role in config.trained_roles:
        _check_adapter(config.trained_model_of(role), role)
        _check_sequence_groups(config, role)
    actor = _read_sizes(config, config.actor.model, "actor.model", config.actor.override_config)
    _check_rope(config)
    if config.rollout.backend == "vllm":
        _check_vllm(config, actor)
    vocab_size = actor.get("vocab_size")
    for folder in config.teacher.folders:
        key = config.teacher.key_of(folder)
        teacher_size = _read_sizes(config, folder, key, config.teacher.override_config).get("vocab_size")
        if vocab_size is not None and (teacher_size or vocab_size) < vocab_size:
            raise ConfigError(f"{key} has a vocabulary of {teacher_size} tokens, fewer than actor.model ({vocab_size})")
    if config.uses_critic:
        critic = _read_sizes(config, config.critic.model, "critic.model", config.critic.override_config)
        critic_size = critic.get("vocab_size", vocab_size)
        if vocab_size is not None and critic_size != vocab_size:
            raise ConfigError(f"actor.model has a vocabulary of {vocab_size} tokens, critic.model one of {critic_size}")
    return vocab_size


def _check_teachers(config: Config, tokenizer: Tokenizer, data_sources: Set[str]) -> None:
    """Checks that each row has a teacher, each teacher rows, and all the tokenizer of the policy, token by token.

    Teachers that groups started elsewhere have in folders of their own are not compared.

    Raises:
        ConfigError: a data source has no teacher or no rows, a tokenizer cannot be read, or a token has another id.
    """
    teacher = config.teacher
    if not teacher.folders:
        return
    if without := sorted(source for source in data_sources if teacher.number_of(source) is None):
        raise ConfigError(
            f"teacher.models: data_source {without[0]!r} has no teacher: add it, or set teacher.model, which teaches"
            " all others"
        )
    if unknown := sorted(teacher.models.keys() - data_sources):
        sources = ", ".join(sorted(data_sources))
        raise ConfigError(f"teacher.models: no training prompt has data_source {unknown[0]!r}; they have {sources}")
    if teacher.signal == "top_k" and teacher.top_k > tokenizer.vocab_size:
        raise ConfigError(f"teacher.top_k ({teacher.top_k}) must not exceed the {tokenizer.vocab_size} tokens")
    own = tokenizer.backend.get_vocab()
    for folder in teacher.folders:
        key = teacher.key_of(folder)
        if config.services.launch == "external" and not Path(folder).expanduser().is_dir():
            log.warning("%s: %s is not on this machine, its tokenizer is not compared", key, folder)
            continue
        if not (model_folder(folder, key) / "tokenizer.json").is_file():
            raise ConfigError(f"{key}: {folder} has no tokenizer.json: expected the tokenizer of the policy")
        theirs = load_tokenizer(folder, section="teacher", model_key=key).backend.get_vocab()
        if different := own.items() ^ theirs.items():
            token, _ = min(different, key=itemgetter(1))
            raise ConfigError(
                f"{key}: {folder} has another tokenizer than the policy (data.tokenizer): token {token!r} has"
                f" {_id(token, theirs)} there, and {_id(token, own)} here"
            )


def _id(token: str, vocabulary: Mapping[str, int]) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "no id"


def _check_adapter(model: TrainedModelConfig, role: str) -> None:
    """Checks that a list of target layers names layers of a local model, and the adapter that training begins with."""
    folder = Path(model.model).expanduser()
    targets = model.target_modules
    if model.lora_rank and not isinstance(targets, str) and folder.is_dir():
        shapes = read_tensor_shapes(folder, f"{role}.model").items()
        layers = [name.removesuffix(".weight") for name, shape in shapes if is_linear(name, shape)]
        known = dict.fromkeys(name.rpartition(".")[2] for name in layers if re.search(r"\.\d+\.", name))
        for part in targets:
            if not any(f".{name}".endswith(f".{part}") for name in layers):
                raise ConfigError(
                    f"{role}.target_modules: {part} is no linear layer of {folder}; it has {', '.join(known)}"
                )
    if model.lora_adapter_path is not None:
        folder = model_folder(model.lora_adapter_path, f"{role}.lora_adapter_path")
        with config_errors(ValueError):
            check_adapter(folder, role, model)


def _read_sizes(config: Config, model: str, key: str, override: Mapping[str, Any]) -> Mapping[str, int]:
    """Reads the integers of a text model's config.json by name; ConfigError if rows are too long for it."""
    entries = {**read_description(model, key), **override}
    kind = str(entries.get("model_type"))
    if "vision_config" in entries and "_vl" in kind:  # of others transformers may have a text model: a worker knows
        raise ConfigError(f"{key} is a vision-language model ({kind}); only text models can be trained")
    _check_weights(model, key)
    if key != "critic.model" and (folder := Path(model).expanduser()).is_dir():  # a value model has no output layer
        check_tied_weights(folder, entries, key)
    sizes = {name: value for name, value in entries.items() if isinstance(value, int)}
    longest = config.data.longest_row
    if longest > sizes.get("max_position_embeddings", longest):
        raise ConfigError(
            f"{key} has max_position_embeddings {sizes['max_position_embeddings']}, fewer than data.max_prompt_length +"
            f" data.max_response_length ({longest} tokens); lower one of them, or"
            f" raise it in {key.partition('.')[0]}.override_config"
        )
    return sizes


def _check_rope(config: Config) -> None:
    """Raises ConfigError if a response may become so long that the policy would rotate its first tokens otherwise."""
    switch = rope_switch({**read_description(config.actor.model, "actor.model"), **config.actor.override_config})
    longest = config.data.longest_row
    if switch is not None and longest > switch:
        raise ConfigError(
            f"actor.model has longrope, whose factors change for rows of over {switch} tokens: a token would be sampled"
            f" with other factors than those it is learned with; lower data.max_prompt_length or"
            f" data.max_response_length, which add up to {longest}"
        )


def _check_weights(model: str, key: str) -> None:
    """Checks the weights in a local model folder; ConfigError if missing or torn. Models of the hub are not checked."""
    folder = Path(model).expanduser()
    if folder.is_dir() and not read_tensor_shapes(folder, key):
        raise ConfigError(f"{key}: {folder} has no weights: expected {EXPECTED}")


def _check_vllm(config: Config, actor: Mapping[str, int]) -> None:
    """Raises ConfigError for settings that vLLM would refuse for this actor only after the whole group has started."""
    vllm = config.rollout.vllm
    positions = actor.get("max_position_embeddings")
    if positions is not None and vllm.max_model_len is not None and vllm.max_model_len > positions:
        raise ConfigError(
            f"rollout.vllm.max_model_len ({vllm.max_model_len}) must not exceed the max_position_embeddings of"
            f" actor.model ({positions}); lower rollout.vllm.max_model_len"
        )
    key = "rollout.vllm.tensor_model_parallel_size"
    _check_heads(actor, vllm.tensor_model_parallel_size, key, "actor.model")


def _check_heads(sizes: Mapping[str, Any], num_ranks: int, key: str, model: str) -> None:
    with config_errors(ValueError):
        check_heads(sizes.get("num_attention_heads"), sizes.get("num_key_value_heads"), num_ranks, key, model)


def _check_sequence_groups(config: Config, role: TrainedRoleName) -> None:
    """Checks that ranks which divide the positions of rows can do so with all models of their group."""
    num_ranks = config.trained_model_of(role).ulysses_sequence_parallel_size
    key = "ulysses_sequence_parallel_size"
    for name, model in _models_of(config, role) if num_ranks > 1 else ():
        if model.use_remove_padding is False:
            section = name.partition(".")[0]
            raise ConfigError(f"{role}.{key} ({num_ranks}) needs packed rows: set {section}.use_remove_padding to true")
        _check_heads(read_description(model.model, name), num_ranks, f"{role}.{key}", name)


def _models_of(config: Config, role: TrainedRoleName) -> Iterator[tuple[str, ComputedModelConfig]]:
    """Yields the models of a group, the frozen ones as well, by key."""
    yield f"{role}.model", config.trained_model_of(role)
    if config.reference_host == role != "actor":
        yield "actor.model", config.actor
    if config.reward_model_host == role:
        yield "reward_model.model", config.reward_model
    if config.teacher_host == role:
        yield from ((config.teacher.key_of(folder), config.teacher.of(folder)) for folder in config.teacher.folders)
