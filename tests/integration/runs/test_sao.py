"""The recipe sao, by its command: a run that must learn from single rollouts by older weights."""

from __future__ import annotations

import pytest

from tests.support.recipes import trained
from tests.support.runs import RunFolder

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The recipe, which fails if too few numbers are found at its end."""
    return trained("sao", tmp_path_factory.mktemp("whole") / "run")


def test_the_critic_alone_learns_at_first_and_then_both_from_older_weights(run: RunFolder) -> None:
    first, *_ = steps = run.metrics[1:]
    num_alone = sum("actor/grad_norm" not in step for step in steps)
    assert ["actor/grad_norm" in step for step in steps] == [False] * num_alone + [True] * (len(steps) - num_alone)
    assert num_alone == 8
    assert all("critic/grad_norm" in step for step in steps)
    assert first["training/staleness"] == 0
    assert {step["training/staleness"] for step in steps[1:]} == {1}


def test_tokens_out_of_the_trust_region_are_few_and_there_are_some(run: RunFolder) -> None:
    shares = [step["actor/pg_clipfrac"] for step in run.metrics[1:] if "actor/pg_clipfrac" in step]
    assert 0 < max(shares) < 0.5
