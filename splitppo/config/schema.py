"""The configuration tree: one YAML per run, read by every process.

Every model is frozen and refuses unknown keys. Field names are verl's where verl has a name for the thing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Self, get_args

from pydantic import model_validator

from splitppo.config.algorithm import AlgorithmConfig
from splitppo.config.checkpoint import CheckpointConfig
from splitppo.config.data import DataConfig
from splitppo.config.debug import DebugConfig
from splitppo.config.evaluation import EvaluationConfig
from splitppo.config.machines import check_machines
from splitppo.config.models import ActorConfig, ComputedModelConfig, CriticConfig, TrainedModelConfig
from splitppo.config.placement import PlacementConfig
from splitppo.config.reference_placement import place_reference
from splitppo.config.reward import RewardConfig
from splitppo.config.reward_model import RewardModelConfig
from splitppo.config.rollout import RolloutConfig
from splitppo.config.run import RunConfig
from splitppo.config.section import RoleName, Section, TrainedRoleName
from splitppo.config.security import is_loopback
from splitppo.config.services import ServicesConfig
from splitppo.config.tracking import TrackingConfig

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

    def algorithm_at(self, step: int) -> AlgorithmConfig:
        """The section `algorithm` as it holds in a step: the critic's warm-up may have a lambda of its own."""
        lam = self.algorithm.lam_critic_warmup
        if lam is None or step > self.critic.warmup_steps:
            return self.algorithm
        return self.algorithm.model_copy(update={"lam_critic": lam})

    @property
    def uses_reference(self) -> bool:
        """A reference exists iff KL is used, in the reward or in the loss."""
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss

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
        """Whether log-probs under the policy are computed before the update in every step, checked or not.

        One mini-batch and one epoch are on-policy: the update's own log-probs are the old ones. Then only the KL in the
        reward and rollout correction ask for them. With bypass_mode the rollout backend's are taken.
        """
        actor, algorithm = self.actor, self.algorithm
        one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == self.data.train_batch_size
        needed = not one_update or algorithm.use_kl_in_reward or algorithm.rollout_correction.is_active
        return needed and not algorithm.rollout_correction.bypasses

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
        _fill(rollout, "check_freq", 1 if not samples_itself else BYPASS_CHECK_FREQ if bypasses else 0)
        _fill(rollout, "max_log_prob_diff", 1e-3 if is_fp32 else 2.0)
        if placement.get("reward_model", "auto") == "auto":
            placement["reward_model"] = "critic"
        return {**tree, **sections}

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
    def _groups_have_several_samples(self) -> "Config":
        if self.algorithm.needs_groups and self.rollout.n < 2:
            raise ValueError(
                f"algorithm.adv_estimator {self.algorithm.adv_estimator} compares the samples of a prompt: expected"
                f" rollout.n of at least 2, got {self.rollout.n}"
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


def _resolve_bypass(algorithm: dict[str, Any], *, computes_alike: bool) -> bool:
    """Fills rollout_correction.bypass_mode where it is auto; returns it."""
    correction = algorithm.get("rollout_correction") or {}
    if not isinstance(correction, dict):  # validation refuses it
        return False
    corrects = any(correction.get(key) is not None for key in ("rollout_is", "rollout_rs"))
    mode = correction.get("bypass_mode", "auto")
    mode = computes_alike and not corrects if mode == "auto" else mode
    algorithm["rollout_correction"] = {**correction, "bypass_mode": mode}
    return mode is True


def _fill(section: dict[str, Any], key: str, default: Any) -> None:
    if section.get(key) is None:
        section[key] = default
