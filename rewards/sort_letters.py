"""The quickstart's task: the prompt "sort cadb" wants "#### abcd"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compute_score(
    data_source: str,  # noqa: ARG001 - the signature that all scorers share
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,  # noqa: ARG001
) -> float:
    """1 if the text behind the last "####", stripped, is the ground truth, else 0."""
    _, marker, answer = solution_str.rpartition("####")
    return 1.0 if marker and answer.strip() == str(ground_truth) else 0.0
