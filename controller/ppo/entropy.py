"""Adapts the weight of the entropy bonus after each step, so that the policy's entropy stays above a target.

Adaptive entropy control of Skywork Open Reasoner 1 (He et al., 2025, arXiv 2505.22312): with the entropy e of a step,
in nats per token, and a target T,

    c' = c + delta if e <= T, c - delta if e > T, within [min, max]
    weight = c' if e <= T, 0 if e > T

e is the mean over the tokens of the actor's update in the step before, so that the weight of a step is fixed when the
step begins. (In the paper, e is the entropy of the step itself.)
"""

import math

from splitppo.config.subsections.phases import AdaptiveEntropy


def next_entropy_coeff(config: AdaptiveEntropy, coeff: float, entropy: float | None) -> float:
    """Computes c', the stored weight of the entropy bonus after a step whose policy entropy was `entropy`.

    `entropy` is in nats per token; with None (no entropy was measured) the weight stays as it is.

    Raises:
        ValueError: the entropy is not finite.
    """
    if entropy is None:
        return coeff
    if not math.isfinite(entropy):
        raise ValueError(f"adaptive entropy control needs a finite entropy, got {entropy}")
    delta = config.entropy_coeff_delta if entropy <= config.target_entropy else -config.entropy_coeff_delta
    return min(max(coeff + delta, config.min_entropy_coeff), config.max_entropy_coeff)


def entropy_coeff_in_force(config: AdaptiveEntropy, coeff: float, entropy: float | None) -> float:
    """Returns the weight of the entropy bonus in the loss: `coeff`, or 0 if the policy's entropy is above its target.

    `entropy` is that of the step before, in nats per token; None: no entropy was measured, and `coeff` is returned.
    """
    return coeff if entropy is None or entropy <= config.target_entropy else 0.0
