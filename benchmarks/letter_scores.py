"""A score for each letter of a sorted word that stands in its place: on the letter itself, or summed at the end.

Scoring processes import it by its path (benchmarks/token_scores.py).
"""

from collections.abc import Mapping
from typing import Any


def compute_score(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,  # noqa: ARG001
    *,
    is_placed: bool,
) -> Mapping[str, Any]:
    """Returns the share of the letters behind "#### " that are where the ground truth has them."""
    _, marker, answer = solution_str.partition("#### ")
    begins = len(solution_str) - len(answer)
    share = 1.0 / len(ground_truth)
    right = [
        place for place, pair in enumerate(zip(answer, ground_truth, strict=False)) if marker and len(set(pair)) == 1
    ]
    if not is_placed:
        return {"score": share * len(right)}
    return {"score": 0.0, "step_scores": [[begins + place, begins + place + 1, share] for place in right]}
