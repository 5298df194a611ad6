"""Fills in configuration keys that were left open: `auto`, and defaults that depend on other sections.

`load` resolves OPEN_KEYS. Every reader of a configuration therefore finds values, and config.yaml shows them. Two more
keys can be resolved only when a run starts: `services.*.threads` depends on the machine (`resolve_run`), and
`run.total_steps` on the number of prompts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from splitppo.config.schema import Config
from splitppo.config.section import RoleName
from splitppo.config.threads import threads_of_groups
from splitppo.machine.cores import PermittedCores

# Steps between comparisons if the rollout backend's log-probs are the old ones: few comparisons cost almost nothing.
HF_CHECK_FREQ = 100
# Nats between the log-probs of sampling and training. Of the mean ten times what is usual: 1e-5 in fp32, 0.03 in bf16.
MAX_LOG_PROB_DIFF = {"fp32": 1e-3, "bf16": 2.0}
MAX_MEAN_LOG_PROB_DIFF = {"fp32": 1e-4, "bf16": 0.3}
AUTO_PARTS = 6
REPLY_STEPS = 32
# Shorter responses end so close to each other that parts cost more calls than they hide (ADR 023).
MIN_STREAMED_LENGTH = 64


@dataclass(frozen=True)
class OpenKey:
    """A configuration key whose value is computed from other keys if the user gives null, an empty text or `auto`.

    Attributes:
        value: computes the value of the key from a configuration in which the keys before it in OPEN_KEYS are resolved.
        is_kept: a resumed run keeps the value of its first start, unless another one is given. All other open keys
            depend on keys that cannot change.
    """

    section: str
    name: str
    value: Callable[[Config], Any]
    is_kept: bool = False

    def of(self, config: Config) -> Any:
        """Returns the value of this key in `config`, resolved or not."""
        return getattr(attrgetter(self.section)(config), self.name)

    def is_given(self, config: Config) -> bool:
        """Returns True if the user has given a value of this key, and not left it to its default."""
        return self.name in attrgetter(self.section)(config).model_fields_set

    def resolved(self, config: Config, value: Any) -> Config:
        """Returns a copy of `config` in which this key has `value`; the value does not count as given by the user."""
        config = config.changed(self.section, {self.name: value})
        attrgetter(self.section)(config).model_fields_set.discard(self.name)
        return config


def _bypass_mode(config: Config) -> bool:
    """Chooses `bypass_mode` for `auto`: whether the rollout backend's log-probs are used as the old log-probs.

    True with the loss `reinforce`, or if trainer and backend compute the same log-probs (backend hf in fp32). In the
    second case it is False if rollout correction weights or rejects tokens, or if responses come from older weights.
    """
    correction = config.algorithm.rollout_correction
    if correction.loss_type == "reinforce" or config.rollout.has_older_weights:
        return correction.loss_type == "reinforce"
    corrects = correction.rollout_is is not None or correction.rollout_rs is not None
    return config.rollout.backend == "hf" and config.actor.dtype == "fp32" and not corrects


def _check_freq(config: Config) -> int:
    """Chooses every how many steps log-probs of the rollout backend are compared with the trainer's; 0: never."""
    if config.rollout.has_older_weights:  # their log-probs differ on purpose
        return 0
    if config.rollout.backend != "hf":
        return 1
    # Where a step computes no old log-probs, the backend hf is proved once, at the start of the actor.
    return HF_CHECK_FREQ if config.algorithm.rollout_correction.bypasses or config.always_needs_old_log_probs else 0


def _share(config: Config) -> float:
    """Chooses `rollout.share` for `auto`: a rollout group on the critic's devices samples beside the actor's group.

    It answers as many prompts per rank as the actor's group. An update of the critic that is longer than the actor's is
    hidden behind generation only if the critic's devices do not sample.
    """
    if not config.rollout_shares_devices:
        return 1.0
    ranks, actor_ranks = (config.services.of(role).num_processes for role in ("rollout", "actor"))
    return 0.0 if _is_critic_late(config) else ranks / (ranks + actor_ranks)


def _is_critic_late(config: Config) -> bool:
    """Returns True if the critic's update makes more passes per rank than the actor's."""
    actor_ranks = config.services.actor.num_processes
    critic_ranks = config.services.critic.num_processes
    return config.critic.ppo_epochs * actor_ranks > config.actor.ppo_epochs * critic_ranks


def _num_parts(config: Config) -> int:
    """Chooses `rollout.stream_groups` for `auto`: in how many parts the responses of a step go to the next roles.

    The number is over 1 if another worker group can compute with the first parts while the actor still generates.
    """
    if config.algorithm.filter_groups.enable:
        return 1  # sample groups are chosen only when all of them are scored
    if config.rollout.has_older_weights:
        return 1  # the responses of a step are all there before any of them is computed with
    groups_that_could_begin = set(config.roles) - {"actor", "rollout"}
    is_long_enough = config.data.max_response_length >= MIN_STREAMED_LENGTH
    if not groups_that_could_begin or not is_long_enough:
        return 1
    return min(AUTO_PARTS, config.data.train_batch_size * config.rollout.n)


def _reply_steps(config: Config) -> int:
    """Chooses `rollout.multi_turn.reply_steps` for `auto`: sampling on GPUs is not exact, so it need not wait there."""
    return 0 if any(config.services.of(role).devices for role in config.sampling_roles) else REPLY_STEPS


def auto_reference_host(config: Config) -> Literal["actor", "critic"]:
    """Chooses the worker group that hosts the reference model if `placement.reference` is `auto`: critic or actor.

    The critic is chosen if it computes while the actor generates, or has more ranks than the actor, and if its update
    is not longer than the actor's. Else the actor is chosen, and also if a rollout group samples on the critic's
    devices. The schedule has no influence: all three schedules must compute the same, bit for bit, and rows that come
    in parts are rounded differently on the critic.
    """
    if config.actor.lora_rank:
        return "actor"  # its frozen base, without a model of its own
    actor_ranks = config.services.actor.num_processes
    critic_ranks = config.services.critic.num_processes
    if not config.uses_critic or config.rollout_shares_devices or _is_critic_late(config):
        return "actor"
    computes_during_generation = config.rollout.stream_groups != 1
    return "critic" if computes_during_generation or critic_ranks > actor_ranks else "actor"


def _teacher_host(config: Config) -> Literal["actor", "critic", "reward"]:
    """Chooses the group that hosts the teachers for `auto`: one that computes while the actor generates, if any."""
    if config.uses_critic:
        return "critic"
    has_group = config.reward_model_host == "reward" or "reward" in config.services.model_fields_set
    return "reward" if has_group else "actor"


def _sleep_level(config: Config) -> Literal[1, 2]:
    """Chooses `rollout.vllm.sleep_level` for null: 1 if vLLM samples in a rollout group alone, else 2."""
    return 1 if config.rollout.backend == "vllm" and "actor" not in config.sampling_roles else 2


OPEN_KEYS = (
    OpenKey("actor", "ppo_mini_batch_size", attrgetter("data.train_batch_size")),
    OpenKey("critic", "ppo_mini_batch_size", attrgetter("actor.ppo_mini_batch_size")),
    OpenKey("critic", "model", attrgetter("actor.model")),
    OpenKey("data", "tokenizer", attrgetter("actor.model")),
    OpenKey("algorithm.rollout_correction", "bypass_mode", _bypass_mode),
    OpenKey("rollout", "check_freq", _check_freq),
    OpenKey("rollout", "max_log_prob_diff", lambda config: MAX_LOG_PROB_DIFF[config.actor.dtype]),
    OpenKey("rollout", "max_mean_log_prob_diff", lambda config: MAX_MEAN_LOG_PROB_DIFF[config.actor.dtype]),
    OpenKey("placement", "reward_model", lambda _: "critic"),
    OpenKey("placement", "teacher", _teacher_host, is_kept=True),
    OpenKey("rollout", "share", _share, is_kept=True),
    OpenKey("rollout.vllm", "sleep_level", _sleep_level),
    OpenKey("rollout", "stream_groups", _num_parts, is_kept=True),
    OpenKey("rollout.multi_turn", "reply_steps", _reply_steps, is_kept=True),
    OpenKey("placement", "reference", auto_reference_host, is_kept=True),
)


def resolve(config: Config) -> Config:
    """Returns a copy of `config` in which every key of OPEN_KEYS has a value, and `actor.policy_loss` is complete."""
    for key in OPEN_KEYS:
        if key.of(config) in (None, "", "auto"):
            config = key.resolved(config, key.value(config))
    return _with_loss_of_correction(config)


def resolve_run(config: Config, stored: Config | None, cores: PermittedCores) -> Config:
    """Returns a copy of `config` with the values that are known when a run starts, e.g. numbers of threads for `cores`.

    `stored` is the configuration of an earlier start of the same run; values that a resumed run keeps are taken from
    there.

    Results on a CPU may depend on the number of threads, so a run that resumes on another machine keeps its numbers
    of threads. With another placement (services.launch, num_processes, devices, cpus) they are chosen again. Worker
    groups that others start (`services.launch: external`) read no stored configuration: they resolve threads and
    reference themselves.
    """
    is_external = config.services.launch == "external"
    if stored is not None:
        config = _kept(config, stored, is_external=is_external)
    if is_external:
        return config
    return _with_threads(config, threads_of_groups(config.groups, cores, in_turns=config.roles_in_turns))


def _kept(config: Config, stored: Config, *, is_external: bool) -> Config:
    """Returns `config` with the open keys of an earlier start where they still hold.

    Keys that the user gives now win. Threads are kept while the placement is the same. Of groups that others start,
    reference, teacher and share are not kept, because they read no stored configuration.
    """
    for key in OPEN_KEYS:
        is_theirs = is_external and key.name in ("reference", "teacher", "share")
        if key.is_kept and not is_theirs and not key.is_given(config):
            config = key.resolved(config, key.of(stored))
    if _placement(config) != _placement(stored):
        return config
    return _with_threads(config, {role: group.threads for role, group in stored.groups.items()})


def _with_loss_of_correction(config: Config) -> Config:
    """Sets the keys of `actor.policy_loss` that are not given to the loss and rejections of `rollout_correction`."""
    correction = config.algorithm.rollout_correction
    of_loss = dict[str, Any]()
    if correction.loss_type == "reinforce":
        of_loss = {
            "loss_mode": "reinforce",
            "reinforce_is": correction.rollout_is,
            "reinforce_is_threshold": correction.rollout_is_threshold,
        }
    if correction.bypasses and correction.rollout_rs is not None:
        of_loss |= {"rollout_rs": correction.rollout_rs, "rollout_rs_threshold": correction.rollout_rs_threshold}
    given = config.actor.policy_loss.model_fields_set
    return config.changed("actor.policy_loss", {name: of_loss[name] for name in of_loss.keys() - given})


def _placement(config: Config) -> object:
    keys = {"num_processes", "devices", "cpus"}
    return config.services.launch, {role: group.model_dump(include=keys) for role, group in config.groups.items()}


def _with_threads(config: Config, threads: Mapping[RoleName, int | str]) -> Config:
    """Sets the threads of each group where the user has left them at auto."""
    for role, group in config.groups.items():
        if group.threads == "auto":
            config = config.changed(f"services.{role}", {"threads": threads[role]})
    return config
