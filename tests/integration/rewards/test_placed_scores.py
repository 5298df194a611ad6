"""Scores inside a response, from functions of a user's file in real scoring processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewards.manager import RewardManager
from rewards.samples import Failure, Sample
from splitppo.config import RewardConfig

# Two forms of one function, which scores capitals where they stand; `bad` in a response breaks its scores.
PLACED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, token_spans=None):
    return judge(solution_str, token_spans)

async def compute_together(data_sources, solution_strs, ground_truths, extra_infos, token_spans):
    return [judge(*one) for one in zip(solution_strs, token_spans, strict=True)]

async def compute_alone(token_spans, data_source, solution_str, ground_truth, extra_info):
    return judge(solution_str, token_spans)

def without_tokens(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "step_scores": [[0, len(solution_str), 1.0]]}

def judge(text, spans):
    tokens = [sum(map(str.isupper, text[start:end])) for start, end in spans]
    end = 99 if "bad" in text else len(text)
    return {"score": 0.5, "token_scores": tokens, "step_scores": [[0, end, -0.25]], "num_spans": len(spans)}
"""


def config(folder: Path, name: str) -> RewardConfig:
    file = folder / "my_reward.py"
    file.write_text(PLACED, encoding="utf-8")
    keys = {"custom_function_path": file, "custom_function_name": name, "timeout_s": 60.0}
    return RewardConfig.model_validate(keys)


@pytest.mark.parametrize("name", ["compute_score", "compute_together", "compute_alone"])
async def test_a_function_that_asks_for_the_tokens_scores_them_where_they_stand(tmp_path: Path, name: str) -> None:
    spans = ((0, 1), (1, 1), (1, 4))
    asked = [Sample("mine", response, "good", {}, token_spans=spans) for response in ("AbCD", "bad.", "abCD")]
    async with RewardManager(config(tmp_path, name), ["mine"]) as manager:
        first, bad, last = await manager.score(asked)
    assert (first.score, first.token_scores, first.extra) == (0.5, (1.0, 0.0, 1.75), {"num_spans": 3})
    assert (last.score, last.token_scores) == (0.5, (0.0, 0.0, 1.75))
    assert (bad.total, bad.failure) == (0.0, Failure.ERROR)
    assert "the step [0, 99), expected 0 <= start < end <= 4" in bad.message


async def test_steps_are_placed_for_a_function_that_knows_no_tokens(tmp_path: Path) -> None:
    sample = Sample("mine", "abcd", "good", {}, token_spans=((0, 3), (3, 4), (4, 4)))
    async with RewardManager(config(tmp_path, "without_tokens"), ["mine"]) as manager:
        [scored] = await manager.score([sample])
    assert (scored.score, scored.token_scores) == (0.5, (0.0, 1.0, 0.0))
