"""Lists the checks that a run passes before any worker group starts, in the order in which mistakes are said.

Each check lives with what it checks: models, data, scoring, conversations, validation, memory, trackers. What a check
needs is loaded here: tokenizers and prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil

from controller.conversations.checks import check_conversations, load_tools
from controller.conversations.trial import try_environments
from controller.data.image_checks import check_images, image_report
from controller.data.privileged_prompts import check_privileged
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch, PromptSource, load_prompts, warn_of_no_template
from controller.data.reward_rows import RewardTokenizer, load_reward_tokenizer
from controller.data.same_tokens import check_critic_tokens
from controller.data.sampled_prompts import open_prompt_source
from controller.data.teachers import check_teachers
from controller.data.tokenizer import Tokenizer, load_tokenizer
from controller.memory.gpus import check_optimizer_offload
from controller.models.checks import check_models
from controller.models.vision import read_vision_input
from controller.ppo.advantages.registry import try_estimator
from controller.run.folder import check_weights_folder
from controller.run.training_rows import TrainingRows
from controller.scoring.checks import check_scoring, try_reward_functions
from controller.tracking.trackers.process import check_trackers
from controller.validation.checks import check_validation_metrics, with_functions
from controller.workers.worker_groups import configured_addresses
from rewards.terms import needs_ground_truth, scored_sources
from splitppo.config import Config
from splitppo.config.batch_plan import batch_plan
from splitppo.config.compiled import check_compiler
from splitppo.config.rollout_packages import check_adapter_packages, check_rollout_packages
from splitppo.rpc.credentials import load_credentials
from splitppo.run_folder.images import ImagesOf


@dataclass(frozen=True)
class Inputs:
    """The loaded inputs of a run: tokenizers of policy and reward model, prompts for training and maybe validation."""

    tokenizer: Tokenizer
    prompts: PromptSource
    val_prompts: PromptBatch | None
    reward_tokenizer: RewardTokenizer | None = None

    @property
    def tables(self) -> tuple[PromptBatch, ...]:
        """All prompts: those for training, and those for validation if there are any."""
        return (self.prompts.table,) if self.val_prompts is None else (self.prompts.table, self.val_prompts)

    @property
    def rows(self) -> tuple[PromptRow, ...]:
        """The rows of the data files that all prompts are made of."""
        return tuple(row for table in self.tables for row in table.rows)

    def training_rows(self, config: Config) -> TrainingRows:
        """Describes the rows of the training data, for a resume."""
        return TrainingRows.of(config.data, self.prompts.table.rows)

    @property
    def data_sources(self) -> frozenset[str]:
        """The data sources of all prompts for training and validation."""
        return frozenset[str]().union(*(table.data_sources for table in self.tables))

    @property
    def images_of(self) -> Mapping[str, ImagesOf]:
        """The functions that return the images of a prompt: of training ("train") and, if there is any, validation."""
        of_training = {"train": self.prompts.table.images_of}
        return of_training if self.val_prompts is None else of_training | {"val": self.val_prompts.images_of}

    @property
    def image_report(self) -> str:
        """Lines that say how many images the prompts have, and how many tokens these; "" without images."""
        of_validation = "" if self.val_prompts is None else image_report("validation", self.val_prompts)
        return image_report("training", self.prompts.table) + of_validation

    @property
    def image_bytes(self) -> int:
        """The bytes of the files of a prompt's images, on average in the split where they are larger; 0 without any."""
        means = [table.images["images"].lengths.mean() for table in self.tables if table.images is not None]
        return ceil(max(means, default=0))

    def with_last_step(self, config: Config) -> Config:
        """Sets `run.total_steps` in a copy of `config` to the run's last step, also if `run.total_epochs` limits it."""
        run = config.run
        if run.total_epochs is None:
            return config
        steps = self.prompts.num_steps(run.total_epochs)
        return config.changed("run", {"total_steps": min(run.total_steps or steps, steps)})

    def scored_sources(self, config: Config) -> frozenset[str]:
        """Returns the data sources scored by a reward function: all, or those with a function if others give scores.

        An environment gives scores; tools alone, and a program without `reward`, do not. A teacher alone needs none.
        """
        if self.reward_tokenizer is not None or config.teacher.only:
            return scored_sources(config.reward, self.data_sources)
        environments = {source: config.rollout.multi_turn.environment_of(source) for source in self.data_sources}
        unscored = frozenset(source for source, own in environments.items() if own is None or not own.gives_rewards)
        return unscored | scored_sources(config.reward, self.data_sources)


def load_inputs(config: Config) -> Inputs:
    """Checks a configuration, and loads all that it names; see `check_config`, `check_setup` and `read_inputs`."""
    load_credentials(config.services.security, "controller")
    return read_inputs(config, check_setup(config))


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
    check_optimizer_offload(config)
    if config.services.launch == "external":
        configured_addresses(config)
        return
    check_adapter_packages(config)
    for role in config.roles:
        check_compiler(config, role)
    for role in config.sampling_roles:
        check_rollout_packages(config, role)
    for phase in config.in_every_phase:
        phase.actor.policy_loss.check_file()
    check_weights_folder(config)


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
    check_critic_tokens(config, tokenizer)
    multi_turn = config.rollout.multi_turn
    tools_of = load_tools(config, tokenizer)
    needs_truth = partial(needs_ground_truth, config.reward)
    vision = read_vision_input(config)
    table = load_prompts(data, tokenizer, "train", tools_of, needs_truth, vision)
    check_images(config, table.rows)
    prompts = open_prompt_source(data, table, seed=config.run.seed)
    val_prompts = load_prompts(data, tokenizer, "val", tools_of, needs_truth, vision) if data.val_files else None
    if val_prompts is not None:
        check_images(config, val_prompts.rows)
    reward_tokenizer = None
    if config.reward_model_host is not None:
        is_model_here = config.services.launch == "local"
        roles = {"tool" if tools_of(source) else "user" for source in table.data_sources if multi_turn.environments}
        reward_tokenizer = load_reward_tokenizer(config.reward_model, table, roles, is_model_here=is_model_here)
    if (reward_tokenizer or config.teacher.only) and val_prompts and not multi_turn.environments:
        val_prompts = with_functions(val_prompts, config.reward)
    inputs = Inputs(tokenizer, prompts, val_prompts, reward_tokenizer)
    _check_inputs(config, inputs)
    return inputs


def _check_inputs(config: Config, inputs: Inputs) -> None:
    trained = inputs.prompts.table.data_sources
    check_validation_metrics(config, inputs.val_prompts.data_sources if inputs.val_prompts else frozenset())
    check_teachers(config, inputs.tokenizer, trained)
    warn_of_no_template(inputs.tokenizer, inputs.rows)
    check_conversations(config, inputs.tokenizer, inputs.rows)
    check_privileged(config, inputs.tokenizer, inputs.prompts.table.rows)
    check_scoring(config, inputs.rows, trained=trained, scored=inputs.scored_sources(config))


async def try_inputs(config: Config, inputs: Inputs) -> str:
    """Has reward functions and environments work once, as a trial; returns a line of what each of them gives.

    Raises:
        ConfigError: one of them cannot be used.
    """
    everything = PromptBatch.join([table.of_texts() for table in inputs.tables])
    scores = await try_reward_functions(config, inputs.tokenizer, everything, inputs.scored_sources(config))
    return scores + await try_environments(config, inputs.tokenizer, inputs.tables)
