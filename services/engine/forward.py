"""What the engine runs a model for: log-probabilities of responses, or values of the states before their tokens."""

from __future__ import annotations

from services.engine.train_engine import Forward


def policy_forward(temperature: float) -> Forward:
    """Outputs "log_probs" and "entropy" of each response token, [N] float32; temperature divides the logits."""
    raise NotImplementedError


def value_forward() -> Forward:
    """Output "values", [N] float32: the value of the state before each response token."""
    raise NotImplementedError
