"""Scores the recipe read_digits: the right response to an image of a digit is the digit."""

# ruff: noqa: ARG001 - the signature is the one that all scorers share

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Scores a response 1 if it is the ground truth, without regard to spaces around it, else 0."""
    return float(ground_truth is not None and solution_str.strip() == str(ground_truth))
