"""The weight of the entropy bonus, moved so that the policy's entropy does not fall below a target.

Adaptive entropy control of Skywork Open Reasoner 1 (He et al., 2025, arXiv 2505.22312): with the entropy e of a step,
in nats per token, and a target T,

    c' = c + delta where e <= T, c - delta where e > T, within [min, max]
    weight = c' where e <= T, 0 where e > T

e is what the actor's update has measured in the step before, the mean over its tokens, so that the weight of a step is
known when the step begins. (In the paper e is of the step itself.)
"""

import math

from splitppo.config.subsections.phases import AdaptiveEntropy


def next_entropy_coeff(config: AdaptiveEntropy, coeff: float, entropy: float | None) -> float:
    """Returns c', the stored weight after a step with this entropy in nats per token (None: it had none).

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
    """Returns the weight in the loss, if c' is `coeff` and the step before had this entropy (None: it had none)."""
    return coeff if entropy is None or entropy <= config.target_entropy else 0.0
