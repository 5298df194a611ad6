"""The table of advantage estimators by name, and the loading of a user's own estimator.

An entry has the estimator's function, the inputs of this function, and a step over the whole batch afterwards.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.ppo.advantages.arrays import AdvantagesAndReturns, Integers, float32, turns_of
from controller.ppo.advantages.decoupled_gae import configured_gae
from controller.ppo.advantages.gae import reinforce_plus_plus, remax
from controller.ppo.advantages.groups import gdpo, grpo, grpo_passk, less_group_mean, opo, rloo
from controller.ppo.masked_stats import Float32s, Float64s, Mask, masked_whiten
from splitppo.batch import Column
from splitppo.config import AlgorithmConfig, ConfigError
from splitppo.config.subsections.estimator import INPUTS
from splitppo.user_file import describe, load_from_file

# Arguments: the advantages of a batch, the mask of its N tokens that are learned from, and s of its B responses.
OverBatch = Callable[[Column, Mask, Float64s], NDArray[Any]]


def whiten_tokens(advantages: Column, learned_N: Mask, _: Float64s) -> NDArray[Any]:
    """Whitens advantages over all learned tokens of the batch, (A - mean) / sqrt(var + 1e-8); a single one gets 0."""
    return masked_whiten(advantages.values, learned_N)


def whiten_responses(advantages: Column, learned_N: Mask, _: Float64s) -> NDArray[Any]:
    """Whitens advantages over responses: each response counts once, whatever its length; a single response gets 0."""
    row_N = np.repeat(np.arange(advantages.num_rows), advantages.lengths)[learned_N]
    _, first_R, response_N = np.unique(row_N, return_index=True, return_inverse=True)
    values_R = advantages.values[learned_N][first_R]
    whitened = np.zeros_like(advantages.values)
    whitened[learned_N] = masked_whiten(values_R, np.ones(len(values_R), np.bool_))[response_N]
    return whitened


def scale_by_nonzero_scores(advantages: Column, _: Mask, scores_B: Float64s) -> NDArray[Any]:
    """Multiplies the advantages by GPG's alpha = B / max(1, number of responses whose score is not 0)."""
    alpha = len(scores_B) / max(1, int(np.count_nonzero(scores_B)))
    return (advantages.values * alpha).astype(np.float32)


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator: a function on [B, T] arrays, and a step over the whole batch afterwards.

    The function gets by name the inputs that it takes (INPUTS). The functions of this package do not combine rows of
    different prompts, so that a batch may come in pieces. A user's function gets the whole batch at once.
    """

    function: Callable[..., AdvantagesAndReturns]
    over_batch: OverBatch | None = None
    takes_pieces: bool = True

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs (of INPUTS) that the estimator's function takes."""
        return tuple(name for name in inspect.signature(self.function).parameters if name in INPUTS)


# The names are those of splitppo/config/subsections/estimator.py.
ESTIMATORS: Mapping[str, Estimator] = {
    "gae": Estimator(configured_gae, whiten_tokens),
    "grpo": Estimator(grpo),
    "grpo_passk": Estimator(grpo_passk),
    "gdpo": Estimator(gdpo, whiten_responses),
    "rloo": Estimator(rloo),
    "opo": Estimator(opo),
    "gpg": Estimator(less_group_mean, scale_by_nonzero_scores),
    "reinforce_plus_plus": Estimator(reinforce_plus_plus, whiten_tokens),
    "reinforce_plus_plus_baseline": Estimator(less_group_mean, whiten_tokens),
    "remax": Estimator(remax),
}


def estimator_of(algorithm: AlgorithmConfig) -> Estimator:
    """Returns the advantage estimator of the configuration; ConfigError if a user's file cannot be used or lacks it."""
    if algorithm.custom_path is None:
        return ESTIMATORS[algorithm.adv_estimator]
    return _custom(algorithm.custom_path, algorithm.adv_estimator)


@lru_cache
def _custom(path: Path, name: str) -> Estimator:
    """Loads the user's estimator from its file, once; it gets whole batches, because it may compare all responses."""
    keys = {"path_key": "algorithm.custom_path", "name_key": "algorithm.adv_estimator"}
    return Estimator(load_from_file(path, name, **keys), takes_pieces=False)


def try_estimator(algorithm: AlgorithmConfig, *, num_samples: int) -> None:
    """Tries a user's advantage estimator on two prompts with responses of three tokens, before anything is started.

    Raises:
        ConfigError: the file cannot be imported or lacks the function; the function fails, or its result does not fit.
    """
    if algorithm.custom_path is None:
        return
    groups_B = np.repeat(np.arange(2), num_samples)
    zeros_BT = np.zeros((len(groups_B), 3), np.float32)
    rewards_BT = zeros_BT.copy()
    mask_BT = np.ones_like(zeros_BT, np.bool_)
    rewards_BT[::2, -1] = 1.0
    components_KB = np.tile(rewards_BT[:, -1], (len(algorithm.gdpo_reward_keys), 1))
    compute_advantages(
        algorithm,
        rewards_BT,
        mask_BT,
        groups_B=groups_B,
        values_BT=zeros_BT,
        response_mask_BT=mask_BT,
        greedy_scores_B=zeros_BT[:, 0],
        components_KB=components_KB,
    )


def compute_advantages(
    algorithm: AlgorithmConfig,
    rewards_BT: Float32s,
    learned_BT: Mask,
    *,
    groups_B: Integers,
    values_BT: Float32s | None = None,
    response_mask_BT: Mask | None = None,
    greedy_scores_B: Float32s | None = None,
    components_KB: Float32s | None = None,
) -> AdvantagesAndReturns:
    """Calls the configured estimator and returns (advantages, returns), [B, T], before the step over the batch.

    The KL penalty is already subtracted from the rewards. The estimators' arguments `mask_BT` and `scored_BT` are
    `learned_BT` and `response_mask_BT`.

    Raises:
        ValueError: an argument does not fit or is missing.
        ConfigError: a user's estimator has failed, or its result does not fit.
    """
    weights = algorithm.gdpo_reward_weights or (1.0,) * len(algorithm.gdpo_reward_keys)
    given = {
        "rewards_BT": rewards_BT,
        "mask_BT": learned_BT,
        "values_BT": values_BT,
        "groups_B": groups_B,
        "scored_BT": response_mask_BT,
        "turns_BT": turns_of(learned_BT if response_mask_BT is None else response_mask_BT),
        "greedy_scores_B": greedy_scores_B,
        "components_KB": components_KB,
        "component_weights_K": np.array(weights, np.float64),
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
        "lam_critic": algorithm.lam_critic,
        "adaptive_lam_alpha": algorithm.adaptive_lam_alpha,
        "turn_gamma": algorithm.turn_gamma,
        "turn_lam": algorithm.turn_lam,
        "norm_adv_by_std": algorithm.norm_adv_by_std_in_grpo,
    }
    estimator = estimator_of(algorithm)
    for name, key in (("values_BT", "values"), ("greedy_scores_B", "greedy scores"), ("components_KB", "components")):
        if name in estimator.inputs and given[name] is None:
            raise ValueError(f"estimator {algorithm.adv_estimator!r} needs {key}")
    inputs = {name: given[name] for name in estimator.inputs}
    if algorithm.custom_path is None:
        return estimator.function(**inputs)
    try:
        advantages_BT, returns_BT = (_checked(result, learned_BT) for result in estimator.function(**inputs))
    except Exception as error:
        name = f"{algorithm.adv_estimator} of {algorithm.custom_path}"
        raise ConfigError(f"key 'algorithm.custom_path': {name} failed: {describe(error)}") from error
    return advantages_BT, returns_BT


def over_batch(algorithm: AlgorithmConfig, advantages: Column, learned_N: Mask, scores_B: Float64s) -> NDArray[Any]:
    """Applies the estimator's last step (e.g. whitening) to the advantages of a whole batch; returns [N] for the loss.

    `advantages` has one entry per response token, 0 for tokens that are not learned from. `learned_N` marks the
    tokens that are learned from. `scores_B` are the sums of the responses' rewards.
    """
    finish = estimator_of(algorithm).over_batch
    return advantages.values if finish is None else finish(advantages, learned_N, scores_B)


def _checked(result: Any, mask_BT: Mask) -> Float32s:
    """Checks that a user's result is [B, T] and finite in the mask, else ValueError; sets it to 0 outside the mask."""
    values_BT = np.asarray(result)
    if values_BT.shape != mask_BT.shape:
        raise ValueError(f"expected advantages and returns of shape {mask_BT.shape}, got {values_BT.shape}")
    if not np.isfinite(values_BT[mask_BT]).all():
        raise ValueError("expected finite advantages and returns, got others")
    return float32(values_BT, mask_BT)
