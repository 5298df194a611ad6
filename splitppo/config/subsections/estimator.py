"""The estimator of advantages and its settings: keys of the section `algorithm`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, PrivateAttr

from splitppo.config.section import Section, Share, did_you_mean
from splitppo.user_file import Parameters, read_functions

# What an estimator may ask for that not every run has: values start a critic group, groups need several samples of a
# prompt, greedy scores a greedy rollout of each prompt, components other fields of the scorers. The functions of the
# same names, in controller/ppo/advantages, take them as arguments.
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

# All that a function of a user's may take, by name; controller/ppo/advantages/registry.py says what they are.
INPUTS = (
    *("rewards_BT", "mask_BT", "values_BT", "groups_B", "scored_BT", "greedy_scores_B", "components_KB"),
    *("component_weights_K", "gamma", "lam", "lam_critic", "adaptive_lam_alpha", "norm_adv_by_std"),
)


class EstimatorConfig(Section):
    """Advantages and returns."""

    custom_path: Path | None = None
    """Python file with an estimator of your own: its function of the name adv_estimator"""

    adv_estimator: str = Field("gae", description=" | ".join(NEEDS))
    gamma: Share = 1.0
    """discount"""

    lam: Share = 1.0
    """GAE lambda"""

    lam_critic: Share | None = None
    """GAE lambda of the returns that the critic learns; default lam"""

    lam_critic_warmup: Share | None = None
    """the same in the critic's warm-up; 1: Monte-Carlo returns; default lam_critic"""

    adaptive_lam_alpha: Annotated[float, Field(gt=0.0)] | None = None
    """gae: the policy's lambda is 1 - 1 / (this x tokens of the response), not lam; VAPO: 0.05"""

    norm_adv_by_std_in_grpo: bool = True
    """grpo, grpo_passk, gdpo; off: Dr. GRPO"""

    gdpo_reward_keys: tuple[str, ...] = ()
    """gdpo: the components of a score, which are numeric fields of the scorers' dicts, or score"""

    gdpo_reward_weights: tuple[float, ...] | None = None
    """gdpo: of the components; default 1 each"""

    _custom_inputs: tuple[str, ...] = PrivateAttr(())

    def _check_keys(self) -> None:
        name = self.adv_estimator
        if self.custom_path is not None:
            self._custom_inputs = _custom_parameters(self.custom_path, name).known
        elif name not in NEEDS:
            raise ValueError(
                f"adv_estimator: expected one of {', '.join(NEEDS)}, got {name!r}{did_you_mean(name, NEEDS)}"
            )
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        needs_components = "components_KB" in self.needs
        if needs_components != bool(keys):
            found = f"gdpo_reward_keys {', '.join(keys)}" if keys else "no gdpo_reward_keys"
            what = "learns from the components of the scores" if needs_components else "reads no components"
            raise ValueError(f"adv_estimator {name} {what}, but there are {found}")
        if weights is not None and len(weights) != len(keys):
            raise ValueError(
                f"gdpo_reward_weights: expected one for each of the {len(keys)} gdpo_reward_keys, got {len(weights)}"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of what the estimator takes: of NEEDS, or the parameters of the user's function."""
        return NEEDS[self.adv_estimator] if self.custom_path is None else self._custom_inputs

    @property
    def needs_greedy_scores(self) -> bool:
        """True if the estimator needs the score of a greedy rollout of each prompt."""
        return "greedy_scores_B" in self.needs


def _custom_parameters(path: Path, name: str) -> Parameters:
    """Reads the parameters of a user's estimator, which is not run: every process reads the configuration.

    Raises:
        ValueError: the file has no such function, or it must be given what no estimator is given.
    """
    try:
        functions = read_functions(path)
    except ValueError as error:
        raise ValueError(f"custom_path: {error}") from error
    if name not in functions:
        raise ValueError(f"adv_estimator: {path} has no function {name!r}{did_you_mean(name, functions)}")
    if unknown := [parameter for parameter in functions[name].required if parameter not in INPUTS]:
        raise ValueError(
            f"adv_estimator: {name} of {path} takes {', '.join(unknown)}, which no estimator is given; expected some of"
            f" {', '.join(INPUTS)}"
        )
    return functions[name]
