"""The keys of the configuration section `algorithm` that choose the estimator of advantages, and its settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, PrivateAttr

from splitppo.config.section import Section, Share
from splitppo.config_error import did_you_mean
from splitppo.user_file import read_parameters

# The inputs of each estimator that not every run has: values need a critic group, groups several samples of a prompt,
# greedy scores a greedy rollout of each prompt, components further fields of the scorers. The functions of the same
# names, in controller/ppo/advantages, take the inputs as arguments.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "gae": ("values_BT",),
    "grpo": ("groups_B",),
    "grpo_passk": ("groups_B",),
    "gdpo": ("groups_B", "components_KB"),
    "rloo": ("groups_B",),
    "opo": ("groups_B",),
    "gpg": ("groups_B",),
    "reinforce_plus_plus": (),
    "reinforce_plus_plus_baseline": ("groups_B",),
    "remax": ("greedy_scores_B",),
}

# All arguments that a user's function may take, by name; controller/ppo/advantages/registry.py describes them.
INPUTS = (
    *("rewards_BT", "mask_BT", "values_BT", "groups_B", "scored_BT", "greedy_scores_B", "components_KB"),
    *("component_weights_K", "gamma", "lam", "lam_critic", "adaptive_lam_alpha", "norm_adv_by_std"),
    *("turns_BT", "turn_gamma", "turn_lam"),
)
_TURN_RATES = ("turn_gamma", "turn_lam")


class EstimatorConfig(Section):
    """The estimator of advantages and returns, and its settings."""

    custom_path: Path | None = None
    """A Python file with an estimator of your own: the function that adv_estimator names. null: a built-in
    estimator."""

    adv_estimator: str = Field("gae", description=f"The estimator: {', '.join(NEEDS)}, or a function of custom_path.")
    gamma: Share = 1.0
    """The discount factor of rewards, from one token to the next."""

    lam: Share = 1.0
    """The lambda of generalised advantage estimation, for the advantages of the policy."""

    lam_critic: Share | None = None
    """The lambda of generalised advantage estimation for the returns that the critic learns. null: lam."""

    lam_critic_warmup: Share | None = None
    """The value of lam_critic during critic.warmup_steps. 1: the critic learns Monte-Carlo returns. null:
    lam_critic."""

    adaptive_lam_alpha: Annotated[float, Field(gt=0.0)] | None = None
    """For gae: if it is set, the lambda of the policy is 1 - 1 / (adaptive_lam_alpha x tokens of the response), and lam
    is not used. VAPO: 0.05. null: lam."""

    turn_gamma: Share | None = None
    """For gae, in conversations: the discount factor from the last token of a turn to the first one of the next turn.
    null: gamma."""

    turn_lam: Share | None = None
    """For gae, in conversations: the lambda from the last token of a turn to the first one of the next turn, for the
    policy, and for the critic without lam_critic. null: as inside a turn."""

    norm_adv_by_std_in_grpo: bool = True
    """For grpo, grpo_passk and gdpo: if true, advantages are divided by the standard deviation of the prompt's samples.
    false: Dr. GRPO."""

    gdpo_reward_keys: tuple[str, ...] = ()
    """For gdpo: the parts of a score that are compared. Each is a numeric field of the scorers' dicts, or score."""

    gdpo_reward_weights: tuple[float, ...] | None = None
    """For gdpo: the weight of each of gdpo_reward_keys. null: 1 for each."""

    _custom_inputs: tuple[str, ...] = PrivateAttr(())

    def _check_keys(self) -> None:
        """Reads what a user's own estimator takes; raises ValueError unless the given keys are those that it reads."""
        name = self.adv_estimator
        if self.custom_path is not None:
            self._custom_inputs = _custom_inputs(self.custom_path, name)
        elif name not in NEEDS:
            raise ValueError(
                f"adv_estimator: expected one of {', '.join(NEEDS)}, got {name!r}{did_you_mean(name, NEEDS)}"
            )
        takes = self._custom_inputs if self.custom_path is not None else _TURN_RATES if name == "gae" else ()
        for key in _TURN_RATES:
            if getattr(self, key) is not None and key not in takes:
                way = "use gae" if self.custom_path is None else "let the function take it"
                raise ValueError(f"{key}: adv_estimator {name} does not read it: set it to null, or {way}")
        keys = self.gdpo_reward_keys
        weights = self.gdpo_reward_weights
        needs_components = "components_KB" in self.needs
        if needs_components != bool(keys):
            given = f"gdpo_reward_keys {', '.join(keys)}" if keys else "no gdpo_reward_keys"
            what = "learns from the components of the scores" if needs_components else "reads no components"
            raise ValueError(f"adv_estimator {name} {what}, but there are {given}")
        if weights is not None and len(weights) != len(keys):
            raise ValueError(
                f"gdpo_reward_weights: expected one for each of the {len(keys)} gdpo_reward_keys, got {len(weights)}"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of the inputs that the estimator of advantages takes, e.g. "values_BT"; see NEEDS and INPUTS."""
        return NEEDS[self.adv_estimator] if self.custom_path is None else self._custom_inputs

    @property
    def needs_greedy_scores(self) -> bool:
        """True if the estimator of advantages needs the score of a greedy response to each prompt (ReMax)."""
        return "greedy_scores_B" in self.needs


def _custom_inputs(path: Path, name: str) -> tuple[str, ...]:
    """Reads the names of the parameters of a user's estimator function from its Python file.

    The file is read and not run, because every process reads the configuration.

    Raises:
        ValueError: the file cannot be read or has no such function, or the function needs an input not in INPUTS.
    """
    parameters = read_parameters(path, name, path_key="custom_path", name_key="adv_estimator")
    if unknown := [key for key, must_be_given in parameters.items() if must_be_given and key not in INPUTS]:
        raise ValueError(
            f"adv_estimator: {name} of {path} takes {', '.join(unknown)}, which no estimator is given; expected some of"
            f" {', '.join(INPUTS)}"
        )
    return tuple(parameters)
