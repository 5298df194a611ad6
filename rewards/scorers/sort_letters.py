"""Scores the quickstart's task of sorting letters: the right response to "sort cadb" is "#### abcd"."""

# ruff: noqa: ARG001 - the signature is the one that all scorers share

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Scores a response 1 if the stripped text behind its last "####" is the ground truth, else 0."""
    _, marker, answer = solution_str.rpartition("####")
    return 1.0 if marker and ground_truth is not None and answer.strip() == str(ground_truth) else 0.0
