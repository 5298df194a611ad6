"""The configuration tree: one YAML per run, read by every process.

Every model is frozen and refuses unknown keys. Field names are verl's where verl has a name for the thing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar, get_args

from pydantic import ValidationError, model_validator

from splitppo.config.algorithm import AlgorithmConfig
from splitppo.config.checkpoint import CheckpointConfig
from splitppo.config.data import DataConfig
from splitppo.config.debug import DebugConfig
from splitppo.config.evaluation import EvaluationConfig
from splitppo.config.filter_groups import check_filter_groups
from splitppo.config.machines import check_machines
from splitppo.config.models import ActorConfig, ComputedModelConfig, CriticConfig, TrainedModelConfig
from splitppo.config.phases import Phase
from splitppo.config.placement import PlacementConfig
from splitppo.config.policy_loss import COVARIANCE_LOSSES
from splitppo.config.reference_placement import place_reference
from splitppo.config.reward import RewardConfig
from splitppo.config.reward_model import RewardModelConfig
from splitppo.config.rollout import RolloutConfig
from splitppo.config.run import RunConfig
from splitppo.config.section import RoleName, Section, TrainedRoleName
from splitppo.config.security import is_loopback
from splitppo.config.services import ServicesConfig
from splitppo.config.tracking import TrackingConfig

S = TypeVar("S", bound=Section)

# Steps between comparisons where the rollout backend's log-probs are the old ones: they cost next to nothing.
BYPASS_CHECK_FREQ = 100


class Config(Section):
    """The whole configuration of a run, and the rules between its sections."""

    run: RunConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig
    critic: CriticConfig = CriticConfig()
    placement: PlacementConfig = PlacementConfig()
    reward: RewardConfig = RewardConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    services: ServicesConfig = ServicesConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def last_step(self) -> int:
        """Where this process stops, once `run.total_steps` is known; `run.stop_after_step` changes no schedule."""
        assert self.run.total_steps is not None
        return min(self.run.total_steps, self.run.stop_after_step or self.run.total_steps)

    @property
    def uses_critic(self) -> bool:
        """A critic group exists iff the estimator needs values."""
        return self.algorithm.needs_values

    def at_step(self, step: int) -> Self:
        """This configuration as it holds in one step.

        Its phase, which is the only one left, is in the sections; the critic's warm-up may have a lambda of its own.
        """
        number = self.algorithm.phase_number(step)
        held = self._in_phase(self.algorithm.phases[number - 1] if number else None)
        lam = self.algorithm.lam_critic_warmup
        if lam is None or step > self.critic.warmup_steps:
            return held
        return _changed(held, "algorithm", {"lam_critic": lam})

    def _in_phase(self, phase: Phase | None) -> Self:
        """As it holds in a phase, or (None) outside of all."""
        if not self.algorithm.phases:
            return self
        held = _changed(self, "algorithm", {"phases": () if phase is None else (phase,)})
        for section, values in phase.changes.items() if phase is not None else ():
            held = _changed(held, section, values)
        return held

    @property
    def in_every_phase(self) -> tuple[Self, ...]:
        """As it holds outside of all phases, and in each of them."""
        return (self._in_phase(None), *(self._in_phase(phase) for phase in self.algorithm.phases))

    @property
    def uses_reference(self) -> bool:
        """A reference exists iff KL is used, in the reward or in the loss, in any phase."""
        return any(one.algorithm.use_kl_in_reward or one.actor.use_kl_loss for one in self.in_every_phase)

    @property
    def reference_host(self) -> RoleName | None:
        """The role whose group holds the reference; None where there is no reference."""
        if not self.uses_reference:
            return None
        return "critic" if self.placement.reference == "critic" else "actor"

    def with_reference_on(self, host: RoleName) -> Self:
        """This configuration with another host of the reference, which counts as chosen, not as given."""
        placement = self.placement.model_copy(update={"reference": host})
        placement.model_fields_set.discard("reference")
        return self.model_copy(update={"placement": placement})

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether log-probs under the policy are computed before the update in every step (of a phase), checked or not.

        One mini-batch and one epoch are on-policy: the update's own log-probs are the old ones. Then only the KL in the
        reward, rollout correction and losses that select tokens ask for them. With bypass_mode the rollout backend's
        are taken.
        """
        return any(_needs_old_log_probs(one) for one in self.in_every_phase)

    @property
    def reward_model_host(self) -> RoleName | None:
        """The role whose group holds the reward model; None where there is no reward model."""
        if not self.reward_model.model:
            return None
        return "reward" if self.placement.reward_model == "reward" else "critic"

    @property
    def trained_roles(self) -> tuple[TrainedRoleName, ...]:
        """Those whose group trains a model, and saves it."""
        return ("actor", "critic") if self.uses_critic else ("actor",)

    @property
    def roles(self) -> tuple[RoleName, ...]:
        """Those that have a group."""
        return (*self.trained_roles, "reward") if self.reward_model_host == "reward" else self.trained_roles

    def trained_model_of(self, role: TrainedRoleName) -> TrainedModelConfig:
        """The section of the model that a role's group trains."""
        return self.critic if role == "critic" else self.actor

    def model_of(self, role: RoleName) -> ComputedModelConfig:
        """The section of the model that a role's group is there for."""
        return self.reward_model if role == "reward" else self.trained_model_of(role)

    @property
    def shared_devices(self) -> tuple[int, ...]:
        """GPUs of this machine that several groups would use."""
        if self.services.launch == "external":
            return ()
        groups = Counter(device for role in self.roles for device in set(self.services.of(role).devices))
        return tuple(sorted(device for device, count in groups.items() if count > 1))

    @model_validator(mode="before")
    @classmethod
    def _derived_defaults(cls, tree: Any) -> Any:
        """Fills the defaults that come from another section, so that the resolved config shows them."""
        if not isinstance(tree, dict):
            return tree
        given = {"critic": {}, "rollout": {}, "algorithm": {}, "placement": {}} | {
            name: section for name, section in tree.items() if section
        }
        names = ("actor", "critic", "data", "rollout", "algorithm", "placement")
        sections = {name: dict(given[name]) for name in names if isinstance(given.get(name), dict)}
        actor, critic, data, rollout, algorithm, placement = (sections.get(name, {}) for name in names)
        _fill(actor, "ppo_mini_batch_size", data.get("train_batch_size"))
        _fill(critic, "ppo_mini_batch_size", actor["ppo_mini_batch_size"])
        critic["model"] = critic.get("model") or actor.get("model", "")
        _fill(data, "tokenizer", actor.get("model"))
        is_fp32, samples_itself = actor.get("dtype", "fp32") == "fp32", rollout.get("backend", "hf") == "hf"
        bypasses = _resolve_bypass(algorithm, computes_alike=samples_itself and is_fp32)
        _take_loss_type(actor, algorithm["rollout_correction"])
        _fill(rollout, "check_freq", 1 if not samples_itself else BYPASS_CHECK_FREQ if bypasses else 0)
        _fill(rollout, "max_log_prob_diff", 1e-3 if is_fp32 else 2.0)
        if placement.get("reward_model", "auto") == "auto":
            placement["reward_model"] = "critic"
        return {**tree, **sections}

    @model_validator(mode="after")
    def _what_a_phase_changes_counts(self) -> "Config":
        for number, phase in enumerate(self.algorithm.phases):
            key = f"algorithm.phases.{number}"
            held = self._in_phase(phase)
            try:
                for section in (held.actor, held.algorithm):
                    type(section)(**section.model_dump())
            except ValidationError as error:
                raise ValueError(f"{key}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
            for coef, switch, is_on in (
                ("kl_coef", "use_kl_in_reward", held.algorithm.use_kl_in_reward),
                ("kl_loss_coef", "use_kl_loss", held.actor.use_kl_loss),
            ):
                if getattr(phase, coef) is not None and not is_on:
                    raise ValueError(f"{key}: {coef} is of no use without {switch}: set {switch}, or drop {coef}")
        return self

    @model_validator(mode="after")
    def _adaptive_entropy_begins_within_its_bounds(self) -> "Config":
        adaptive, coeff = self.algorithm.adaptive_entropy, self.actor.entropy_coeff
        low, high = adaptive.min_entropy_coeff, adaptive.max_entropy_coeff
        if any(one.algorithm.adaptive_entropy.enable for one in self.in_every_phase) and not low <= coeff <= high:
            raise ValueError(
                f"actor.entropy_coeff ({coeff:g}) must lie between algorithm.adaptive_entropy.min_entropy_coeff"
                f" ({low:g}) and max_entropy_coeff ({high:g})"
            )
        return self

    @model_validator(mode="after")
    def _the_reference_is_placed(self) -> "Config":
        """In place of `auto`; what the rule has chosen is not among the fields that were set."""
        if self.placement.reference != "auto":
            return self
        return self.with_reference_on(place_reference(self).host)

    @model_validator(mode="after")
    def _the_reference_has_a_group(self) -> "Config":
        if self.placement.reference == "critic" and not self.uses_critic:
            raise ValueError(
                f"placement.reference is critic, but algorithm.adv_estimator {self.algorithm.adv_estimator} needs no"
                " values and starts no critic: set placement.reference to actor, or take an estimator with a critic"
            )
        return self

    @model_validator(mode="after")
    def _the_reward_model_has_a_group(self) -> "Config":
        if self.reward_model_host == "critic" and not self.uses_critic:
            raise ValueError(
                f"placement.reward_model is critic, but algorithm.adv_estimator {self.algorithm.adv_estimator} needs no"
                " values and starts no critic: set placement.reward_model to reward, or take an estimator with a critic"
            )
        return self

    @model_validator(mode="after")
    def _the_loss_type_is_the_actors_loss(self) -> "Config":
        correction, policy_loss = self.algorithm.rollout_correction, self.actor.policy_loss
        if correction.loss_type == "reinforce" and (
            (policy_loss.loss_mode, policy_loss.reinforce_is) != ("reinforce", correction.rollout_is)
        ):
            raise ValueError(
                "algorithm.rollout_correction.loss_type is reinforce, which sets actor.policy_loss.loss_mode and"
                f" reinforce_is: leave both out, got {policy_loss.loss_mode!r} and {policy_loss.reinforce_is!r}"
            )
        for number, phase in enumerate(self.algorithm.phases):
            if correction.loss_type == "reinforce" and phase.loss_mode not in (None, "reinforce"):
                raise ValueError(
                    f"algorithm.phases.{number}: loss_mode is {phase.loss_mode!r}, but"
                    " algorithm.rollout_correction.loss_type is reinforce, whose weights no other loss has: leave"
                    " loss_type out, and set bypass_mode and actor.policy_loss"
                )
        return self

    @model_validator(mode="after")
    def _groups_have_several_samples(self) -> "Config":
        if self.algorithm.needs_groups and self.rollout.n < 2:
            raise ValueError(
                f"algorithm.adv_estimator {self.algorithm.adv_estimator} compares the samples of a prompt: expected"
                f" rollout.n of at least 2, got {self.rollout.n}"
            )
        return self

    @model_validator(mode="after")
    def _greedy_scores_compare_with_rewards(self) -> "Config":
        if self.algorithm.needs_greedy_scores and self.reward.shaping.whiten_rewards:
            raise ValueError(
                f"algorithm.adv_estimator {self.algorithm.adv_estimator} subtracts the score of a greedy response from"
                " rewards, which reward.shaping.whiten_rewards would put on another scale: set it to false"
            )
        return self

    @model_validator(mode="after")
    def _what_needs_validation_has_prompts(self) -> "Config":
        needs = {
            "evaluation.val_only": self.evaluation.val_only,
            "evaluation.early_stop.metric": self.evaluation.early_stop.metric,
            "checkpoint.best_metric": self.checkpoint.best_metric,
        }
        for key in [key for key, is_set in needs.items() if is_set and not self.data.val_files]:
            raise ValueError(f"{key} needs validation: expected data.val_files, got none")
        return self

    @model_validator(mode="after")
    def _dynamic_sampling_fits(self) -> "Config":
        check_filter_groups(self)
        return self

    @model_validator(mode="after")
    def _the_overlong_buffer_fits(self) -> "Config":
        buffer, limit = self.reward.overlong_buffer, self.data.max_response_length
        if buffer.enable and buffer.len is not None and buffer.len > limit:
            raise ValueError(
                f"reward.overlong_buffer.len ({buffer.len}) must not exceed data.max_response_length ({limit})"
            )
        return self

    @model_validator(mode="after")
    def _groups_share_no_gpu(self) -> "Config":
        if self.services.allow_shared_devices:
            return self
        for shared in self.shared_devices[:1]:
            devices = {role: list(self.services.of(role).devices) for role in self.roles}
            both = " and ".join(f"services.{role}.devices {of}" for role, of in devices.items() if shared in of)
            raise ValueError(f"{both} overlap; give each group its own GPUs, or set services.allow_shared_devices")
        return self

    @model_validator(mode="after")
    def _groups_of_several_machines_meet(self) -> "Config":
        check_machines(self.services, self.roles)
        return self

    @model_validator(mode="after")
    def _failpoints_stay_here(self) -> "Config":
        for key, address in self._reachable_from_elsewhere(get_args(RoleName)) if self.debug.failpoints else ():
            raise ValueError(
                f"debug.failpoints is for tests on one machine: expected a loopback address in {key}, got {address!r};"
                " remove debug.failpoints"
            )
        return self

    @model_validator(mode="after")
    def _plaintext_stays_on_this_machine(self) -> "Config":
        if self.services.security.tls:
            return self
        for key, address in self._reachable_from_elsewhere(self.roles):
            if key.endswith("bind") or self.services.launch == "external":
                raise ValueError(
                    f"{key} is {address!r}, which is not a loopback address, and the wire would be neither encrypted"
                    " nor authenticated there: set services.security.tls, with ca_file, cert_file and key_file, or"
                    " use 127.0.0.1"
                )
        return self

    def _reachable_from_elsewhere(self, roles: Iterable[RoleName]) -> Iterator[tuple[str, str]]:
        """(key, address) of what these roles' services listen on or are called at, unless only this machine can."""
        for role in roles:
            service = self.services.of(role)
            for key, address in {"bind": service.bind, "address": service.address or "localhost:0"}.items():
                if not is_loopback(address):
                    yield f"services.{role}.{key}", address


def _changed(section: S, path: str, values: Mapping[str, Any]) -> S:
    """A section with other values in the one at `path` inside of it ("" is itself), which are not checked."""
    if not path:
        return section.model_copy(update=values)
    name, _, rest = path.partition(".")
    return section.model_copy(update={name: _changed(getattr(section, name), rest, values)})


def _needs_old_log_probs(config: Config) -> bool:
    actor, algorithm = config.actor, config.algorithm
    one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == config.data.train_batch_size
    needed = not one_update or algorithm.use_kl_in_reward or algorithm.rollout_correction.is_active
    needed = needed or actor.policy_loss.loss_mode in COVARIANCE_LOSSES
    return needed and not algorithm.rollout_correction.bypasses


def _resolve_bypass(algorithm: dict[str, Any], *, computes_alike: bool) -> bool:
    """Fills rollout_correction.bypass_mode where it is auto; returns it."""
    correction = algorithm.get("rollout_correction") or {}
    if not isinstance(correction, dict):  # validation refuses it
        return False
    corrects = any(correction.get(key) is not None for key in ("rollout_is", "rollout_rs"))
    mode, reinforces = correction.get("bypass_mode", "auto"), correction.get("loss_type") == "reinforce"
    mode = reinforces or (computes_alike and not corrects) if mode == "auto" else mode
    algorithm["rollout_correction"] = {**correction, "bypass_mode": mode}
    return mode is True


def _take_loss_type(actor: dict[str, Any], correction: Any) -> None:
    """Fills actor.policy_loss with what rollout_correction says of it: its loss_type is a loss of the actor's."""
    policy_loss = actor.get("policy_loss") or {}
    if isinstance(correction, dict) and correction.get("loss_type") == "reinforce" and isinstance(policy_loss, dict):
        says = {
            "loss_mode": "reinforce",
            "reinforce_is": correction.get("rollout_is"),
            "reinforce_is_threshold": correction.get("rollout_is_threshold", 2.0),
        }
        actor["policy_loss"] = {**says, **policy_loss}


def _fill(section: dict[str, Any], key: str, default: Any) -> None:
    if section.get(key) is None:
        section[key] = default
