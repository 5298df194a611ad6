"""The recipe take_notes, by its command: a run whose episodes have six contexts, and that must learn what to note."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from recipes.take_notes import task
from tests.support.recipes import trained
from tests.support.runs import RunFolder

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The recipe, which fails if too few questions are answered at its end."""
    return trained("take_notes", tmp_path_factory.mktemp("whole") / "run")


def test_the_answer_is_noted_more_often_than_before(run: RunFolder) -> None:
    noted = [step["reward_extra/has_noted/mean"] for step in run.metrics[1:]]
    assert sum(noted[-4:]) > 1.5 * sum(noted[:4])


def test_each_episode_has_a_context_for_each_page_and_one_for_the_question(run: RunFolder) -> None:
    for step in run.metrics[1:]:
        assert step["num_contexts/min"] == step["num_contexts/max"] == step["num_turns/max"] == task.NUM_PAGES + 1
        assert step["environment/num_lost"] == step["environment/num_truncated"] == 0


def test_what_was_sampled_and_nothing_else_is_learned_from(run: RunFolder) -> None:
    """Each turn has been said after its context, which the record says the place of; none of them goes back."""
    rows = pq.read_table(run.path / "rollouts/train/24.parquet").to_pylist()
    for row in [row for row in rows if row["why"]]:
        contexts = zip(row["segments"][::2], row["segments"][1::2], strict=True)
        said_to_it = {at for start, length in contexts for at in range(start, start + length)}
        assert {at for at, flag in enumerate(row["flags"]) if not flag} == said_to_it
        assert row["followed_turns"] == [0] * task.NUM_PAGES
