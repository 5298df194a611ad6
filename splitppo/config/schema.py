"""The whole tree of configuration keys as pydantic models; every process of a run reads the same YAML file.

Every model is frozen and refuses unknown keys. A key has the name that verl gives it, if verl has such a key. `load`
reads the file, resolves the keys that are left open, and checks the rules between sections.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import quote

from splitppo.config.section import ROLES, Key, RoleName, Section, TrainedRoleName
from splitppo.config.sections.algorithm import AlgorithmConfig
from splitppo.config.sections.checkpoint import CheckpointConfig
from splitppo.config.sections.data import DataConfig
from splitppo.config.sections.debug import DebugConfig
from splitppo.config.sections.evaluation import EvaluationConfig
from splitppo.config.sections.models import ActorConfig, ComputedModelConfig, CriticConfig, TrainedModelConfig
from splitppo.config.sections.placement import PlacementConfig
from splitppo.config.sections.reward import RewardConfig
from splitppo.config.sections.reward_model import RewardModelConfig
from splitppo.config.sections.rollout import RolloutConfig
from splitppo.config.sections.run import RunConfig
from splitppo.config.sections.services import ServiceConfig, ServicesConfig
from splitppo.config.sections.teacher import TeacherConfig
from splitppo.config.sections.tracking import TrackingConfig
from splitppo.config.subsections.phases import Phase

# The keys of a section have the marks of the section, unless they have marks of their own.
_FREE = Key(may_change=True, shapes_worker=False, is_work=False)
_FIXED = Key(may_change=False, shapes_worker=False, is_work=False)
_WORK = Key(may_change=False, shapes_worker=False, is_work=True)
_MODEL = Key(may_change=False, shapes_worker=True, is_work=False)


class Config(Section):
    """The whole configuration of a run, with one attribute for each section of the YAML file."""

    run: Annotated[RunConfig, _FREE]
    data: Annotated[DataConfig, _WORK]
    rollout: Annotated[RolloutConfig, _MODEL] = RolloutConfig()
    algorithm: Annotated[AlgorithmConfig, _WORK] = AlgorithmConfig()
    actor: Annotated[ActorConfig, _MODEL]
    critic: Annotated[CriticConfig, _MODEL] = CriticConfig()
    placement: Annotated[PlacementConfig, _FREE] = PlacementConfig()
    reward: Annotated[RewardConfig, _FIXED] = RewardConfig()
    reward_model: Annotated[RewardModelConfig, _MODEL] = RewardModelConfig()
    teacher: Annotated[TeacherConfig, _MODEL] = TeacherConfig()
    evaluation: Annotated[EvaluationConfig, _FREE] = EvaluationConfig()
    checkpoint: Annotated[CheckpointConfig, _FREE] = CheckpointConfig()
    tracking: Annotated[TrackingConfig, _FREE] = TrackingConfig()
    services: Annotated[ServicesConfig, _FREE] = ServicesConfig()
    debug: Annotated[DebugConfig, _FREE] = DebugConfig()

    @property
    def last_step(self) -> int:
        """The number of the last step that this start of the run does; `run.total_steps` must be resolved."""
        assert self.run.total_steps is not None
        return min(self.run.total_steps, self.run.stop_after_step or self.run.total_steps)

    @property
    def longest_context(self) -> int:
        """The largest number of tokens that a model computes as one row: a context with all that follows in it.

        A response has one context, its prompt; a conversation may have several, which are rows of their own for models.
        """
        conversations = self.rollout.multi_turn
        most = conversations.max_context_length if conversations.environments else None
        return min(most or self.data.longest_row, self.data.longest_row)

    @property
    def longest_context_keys(self) -> str:
        """The dotted names of the configuration keys that decide `longest_context`."""
        if self.longest_context < self.data.longest_row:
            return "rollout.multi_turn.max_context_length"
        return "data.max_prompt_length + data.max_response_length"

    def longest_row_of(self, role: TrainedRoleName) -> int:
        """Returns the largest number of tokens that the trained model of a role computes as one row.

        A value model reads its privileged text before each context.
        """
        reads_more = role == "critic" and self.critic.privileged_prompt is not None
        return self.longest_context + (self.critic.max_privileged_length if reads_more else 0)

    def longest_row_keys_of(self, role: TrainedRoleName) -> str:
        """Returns the dotted names of the configuration keys that decide `longest_row_of`."""
        if self.longest_row_of(role) > self.longest_context:
            return f"{self.longest_context_keys} + critic.max_privileged_length"
        return self.longest_context_keys

    @property
    def uses_critic(self) -> bool:
        """True if the run has a worker group for a critic, because the estimator of advantages needs values."""
        return "values_BT" in self.algorithm.needs

    @property
    def num_warmup_steps(self) -> int:
        """The number of steps at the beginning that train the critic only, at most; 0 without a critic."""
        return self.critic.warmup_steps if self.uses_critic else 0

    def at_step(self, step: int, *, is_warm_up: bool | None = None) -> Self:
        """Returns the configuration that applies in one step: with the values of the phase that the step belongs to.

        Its `algorithm.phases` has only this phase. During the warm-up of the critic, `lam_critic` is
        `lam_critic_warmup` if that is set. Only the state of the run knows if the step `is_warm_up` with
        `critic.warmup_until`; None: the warm-up takes `critic.warmup_steps`.
        """
        number = self.algorithm.phase_number(step)
        config = self.in_phase(self.algorithm.phases[number - 1] if number else None)
        lam = self.algorithm.lam_critic_warmup
        if is_warm_up is None:
            is_warm_up = step <= self.critic.warmup_steps
        if lam is None or not is_warm_up:
            return config
        return config.changed("algorithm", {"lam_critic": lam})

    def in_phase(self, phase: Phase | None) -> Self:
        """Returns a copy of this configuration with the values of `phase`; None: with those outside of all phases."""
        if not self.algorithm.phases:
            return self
        config = self.changed("algorithm", {"phases": () if phase is None else (phase,)})
        for section, values in phase.changes.items() if phase is not None else ():
            config = config.changed(section, values)
        return config

    @property
    def in_every_phase(self) -> tuple[Self, ...]:
        """The configurations that occur in the run: first that outside of all phases, then that of each phase."""
        return (self.in_phase(None), *(self.in_phase(phase) for phase in self.algorithm.phases))

    @property
    def uses_reference(self) -> bool:
        """True if the run needs a reference model, because a KL is used in the reward or in the loss, in any phase."""
        return any(config.algorithm.use_kl_in_reward or config.actor.use_kl_loss for config in self.in_every_phase)

    @property
    def reference_host(self) -> RoleName | None:
        """The role whose worker group holds the frozen reference model; None if the run needs no reference model."""
        if not self.uses_reference:
            return None
        return "critic" if self.placement.reference == "critic" else "actor"

    @property
    def needs_old_log_probs(self) -> bool:
        """True if some step needs old log-probs (of the policy before the update) that the trainer has to compute.

        With one mini-batch and one epoch the update is on-policy: the log-probs of the update are the old ones. Then
        only the KL in the reward, a teacher's signal in rewards or advantages, rollout correction, responses of older
        weights and losses that select tokens need old log-probs. With `bypass_mode` the rollout backend's log-probs are
        the old ones, and the trainer computes none.
        """
        return any(_needs_old_log_probs(config) for config in self.in_every_phase)

    @property
    def always_needs_old_log_probs(self) -> bool:
        """True if every step needs old log-probs, see `needs_old_log_probs`."""
        return all(_needs_old_log_probs(config) for config in self.in_every_phase)

    @property
    def reward_model_host(self) -> RoleName | None:
        """The role whose worker group holds the reward model; None if the run has no reward model."""
        if not self.reward_model.model:
            return None
        return "reward" if self.placement.reward_model == "reward" else "critic"

    @property
    def teacher_host(self) -> RoleName | None:
        """The role whose worker group holds the teachers; None if the run has no teacher."""
        host = self.placement.teacher
        return host if self.teacher.folders and host != "auto" else None

    @property
    def trained_roles(self) -> tuple[TrainedRoleName, ...]:
        """The roles whose worker groups train a model and save it in checkpoints."""
        return ("actor", "critic") if self.uses_critic else ("actor",)

    @property
    def roles(self) -> tuple[RoleName, ...]:
        """The roles of this run that have a worker group: actor, and critic, reward and rollout if they have one."""
        has_reward = "reward" in (self.reward_model_host, self.teacher_host)
        has_group = {"reward": has_reward, "rollout": "rollout" in self.sampling_roles}
        return (*self.trained_roles, *(role for role in ROLES if has_group.get(role)))

    @property
    def sampling_roles(self) -> tuple[Literal["actor", "rollout"], ...]:
        """The roles whose worker groups sample the responses: actor, rollout, or both (`rollout.share`)."""
        if self.services.rollout is None or not self.rollout.share:
            return ("actor",)
        return ("rollout",) if self.rollout.share == 1.0 else ("actor", "rollout")

    @property
    def rollout_shares_devices(self) -> bool:
        """True if the rollout group samples on devices of the critic's group, so that the two groups take turns.

        The devices of a group are its GPUs, or without GPUs the cores that `cpus` names. The same indices on other
        machines are other devices. So in groups that the controller does not start, they are the same devices only with
        `services.allow_shared_devices`.
        """
        if "rollout" not in self.sampling_roles or not self.uses_critic:
            return False
        services = self.services
        rollout = self.services.of("rollout")
        are_here = services.launch == "local" or services.allow_shared_devices
        if rollout.devices or services.critic.devices:
            return are_here and not {*rollout.devices}.isdisjoint(services.critic.devices)
        return are_here and not {*rollout.cpus}.isdisjoint(services.critic.cpus)

    @property
    def roles_in_turns(self) -> tuple[RoleName, ...]:
        """The roles whose groups compute one at a time: critic and rollout if their groups share devices, else none."""
        return ("critic", "rollout") if self.rollout_shares_devices else ()

    @property
    def gpus_in_turns(self) -> frozenset[int]:
        """The GPUs on which the critic's group and the rollout group take turns."""
        if not self.rollout_shares_devices:
            return frozenset()
        return frozenset(self.services.critic.devices).intersection(self.services.of("rollout").devices)

    @property
    def roles_that_measure_shared_gpus(self) -> tuple[RoleName, ...]:
        """The roles whose groups build a vLLM engine on a GPU that another group of this machine uses, too.

        An engine measures at its start which memory of its GPU is free, and takes its share. Memory that another group
        takes or frees meanwhile makes its KV cache too small or too large, or fails its start.
        """
        if self.rollout.backend != "vllm" or self.services.launch == "external":
            return ()
        uses = Counter(device for group in self.groups.values() for device in set(group.devices))
        return tuple(
            role for role in self.sampling_roles if any(uses[device] > 1 for device in self.groups[role].devices)
        )

    @property
    def weights_folder(self) -> Path:
        """The folder in which actors publish the policy's weights, version by version."""
        return Path(self.rollout.sync_dir or self.run.dir / "weights")

    def weights_folder_of(self, run_id: str) -> Path:
        """Returns the folder of one run's versions: in `rollout.sync_dir`, which runs may share, one of its own."""
        return self.weights_folder / (f"splitppo-{quote(run_id, safe='')}" if self.rollout.sync_dir else "")

    @property
    def groups(self) -> Mapping[RoleName, ServiceConfig]:
        """The settings of each worker group (number of ranks, GPUs, cores, addresses), by role."""
        return {role: self.services.of(role) for role in self.roles}

    def trained_model_of(self, role: TrainedRoleName) -> TrainedModelConfig:
        """Returns the configuration section of the model that a role trains: `actor` or `critic`."""
        return self.critic if role == "critic" else self.actor

    def model_of(self, role: RoleName) -> ComputedModelConfig:
        """Returns the configuration section of a role's main model: `actor`, `critic`, `reward_model` or `teacher`."""
        if role == "reward":
            return self.reward_model if self.reward_model_host == role else self.teacher.of(self.teacher.folders[0])
        return self.trained_model_of("actor" if role == "rollout" else role)

    @property
    def shared_devices(self) -> tuple[int, ...]:
        """The indices of the GPUs that several worker groups use, and not in turns.

        Empty if the controller does not start the groups.
        """
        if self.services.launch == "external":
            return ()
        counts = Counter(device for group in self.groups.values() for device in set(group.devices))
        counts.subtract(self.gpus_in_turns)  # two groups count once
        return tuple(sorted(device for device, count in counts.items() if count > 1))


def _needs_old_log_probs(config: Config) -> bool:
    """Returns True if a step must compute the policy's log-probs before it updates the policy.

    With one update per step they are those of the update itself, unless something else reads them: a KL in the reward,
    the rollout correction, the loss, or the teacher. With bypass_mode those of the rollout backend take their place.
    """
    actor = config.actor
    algorithm = config.algorithm
    one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == config.data.train_batch_size
    needed = not one_update or algorithm.use_kl_in_reward or algorithm.rollout_correction.is_active
    needed = needed or actor.policy_loss.needs_old_log_probs or config.rollout.has_older_weights
    needed = needed or (bool(config.teacher.folders) and config.teacher.policy_column == "old_log_probs")
    return needed and not algorithm.rollout_correction.bypasses
