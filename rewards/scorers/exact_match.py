"""Scores answers to Search-R1's questions (Jin et al., 2025): the last <answer>, compared with texts as in SQuAD."""

# ruff: noqa: ARG001 - the signature is the one that all scorers share

import string
from collections.abc import Mapping
from typing import Any

_MAX_TAGS = 10  # opening or closing tags; a response with more is spam
_ARTICLES = frozenset({"a", "an", "the"})


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Scores a response 1 if its last <answer> is one of the right texts, 1/4 if it also has too many tags, else 0.

    Raises:
        ValueError: the ground truth is not {"target": text or list of texts}.
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
    """Returns the content of the last complete <answer>...</answer> in a text; "" if there is none."""
    for part in reversed(text.split("</answer>")[:-1]):
        _, tag, content = part.partition("<answer>")
        if tag:
            return content
    return ""


def normalise(answer: str) -> str:
    """Normalises an answer as in SQuAD (Rajpurkar et al., 2016): lower case, without punctuation and articles.

    The articles stay if there are no other words.
    """
    words = "".join(letter for letter in answer.lower() if letter not in string.punctuation).split()
    return " ".join(word for word in words if word not in _ARTICLES) or " ".join(words)
