"""Search-R1's questions (Jin et al., 2025): the last <answer>, compared with short texts as SQuAD does."""

# ruff: noqa: ARG001 - the signature is the one that all scorers share

import string
from collections.abc import Mapping
from typing import Any

_MAX_TAGS = 10  # of either kind, before a response counts as spam
_ARTICLES = frozenset({"a", "an", "the"})


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1 if the content of the last <answer> is one of the ground truth's "target", else 0; 1/4 with a spam of tags.

    Raises:
        ValueError: the ground truth is no {"target": text or list of texts}.
    """
    targets = ground_truth.get("target") if isinstance(ground_truth, Mapping) else None
    targets = [targets] if isinstance(targets, str) else targets
    if not targets or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"expected a ground_truth {{'target': text or list of texts}}, got {ground_truth!r:.80}")
    answer = normalise(last_answer(solution_str))
    if not answer or answer not in map(normalise, targets):
        return 0.0
    return 1.0 if max(solution_str.count("<answer>"), solution_str.count("</answer>")) <= _MAX_TAGS else 0.25


def last_answer(text: str) -> str:
    """The content of the last complete <answer>, or nothing."""
    for part in reversed(text.split("</answer>")[:-1]):
        _, tag, content = part.partition("<answer>")
        if tag:
            return content
    return ""


def normalise(answer: str) -> str:
    """Lower-case words without punctuation (Rajpurkar et al., 2016), and without articles if there are others."""
    words = "".join(letter for letter in answer.lower() if letter not in string.punctuation).split()
    return " ".join(word for word in words if word not in _ARTICLES) or " ".join(words)
