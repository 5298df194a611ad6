"""The weight of the entropy bonus, which moves so that the policy's entropy does not fall below a target.

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
    """Returns c', the stored weight after a step with this entropy in nats per token; None: no entropy was measured.

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
    """Returns the weight in the loss for c' = `coeff` and the entropy of the step before; None: it was not measured."""
    return coeff if entropy is None or entropy <= config.target_entropy else 0.0
