"""Validation: every prompt once, in parts, with the validation's own sampling and slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.sampling.stream import SamplingGroups
from controller.validation.evaluation import Evaluator
from controller.workers.worker_groups import Workers
from splitppo.config import Schedule
from splitppo.v1.batch_pb2 import SLOT_KIND_EVALUATION
from tests.support.call_log import CallLog
from tests.support.fake_rollout import FakeRollout
from tests.support.fake_services import FakeActor, FakeScorer, make_config, make_table


def make_evaluator(tmp_path: Path, *, num_prompts: int = 5, **changes: Any) -> tuple[Evaluator, FakeActor]:
    """The actor has committed step 4."""
    log = CallLog()
    actor = FakeActor(log)
    actor.committed_step = 4
    config = make_config(tmp_path, **changes)
    sampling = SamplingGroups.of(config, Workers.of(config, actor, None))
    return Evaluator(config, sampling, make_table(num_prompts), FakeScorer(log)), actor


async def test_every_prompt_is_answered_n_times_in_parts(tmp_path: Path) -> None:
    evaluator, actor = make_evaluator(tmp_path, evaluation__batch_size=2, evaluation__n=3)
    result = await evaluator.evaluate(4)
    assert result.scores.prompt_indices.tolist() == [row // 3 for row in range(15)]
    slots = [slot for slot, _ in actor.sampling]
    assert [(slot.kind, slot.step, slot.part) for slot in slots] == [
        (SLOT_KIND_EVALUATION, 4, part) for part in range(3)
    ]


async def test_sampling_is_the_validations_own(tmp_path: Path) -> None:
    evaluator, actor = make_evaluator(tmp_path, rollout__temperature=0.7, evaluation__top_k=5)
    await evaluator.evaluate(4)
    (_, sampling) = actor.sampling[0]
    assert (sampling.temperature, sampling.top_k, sampling.max_response_length) == (0.0, 5, 4)


async def test_the_timeline_shows_the_actors_and_the_scorers_part(tmp_path: Path) -> None:
    evaluator, _ = make_evaluator(tmp_path, evaluation__batch_size=3)
    spans = (await evaluator.evaluate(4)).spans
    assert [(span.pool, span.name, span.step) for span in spans] == [
        ("actor", "testing", 4),
        ("scoring", "testing", 4),
        ("actor", "testing", 4),
        ("scoring", "testing", 4),
    ]


async def test_accuracy_is_the_mean_of_the_scores_overall_and_by_source(tmp_path: Path) -> None:
    evaluator, _ = make_evaluator(tmp_path, evaluation__batch_size=2)
    result = await evaluator.evaluate(4)
    scored = list(zip(result.scores.data_sources, result.scores.scores, strict=True))
    assert len(scored) == 5
    assert result.accuracy.overall == pytest.approx(sum(score for _, score in scored) / 5)
    of_a = [score for source, score in scored if source == "a"]
    assert result.accuracy.by_source["a"] == pytest.approx(sum(of_a) / len(of_a))
    assert result.metrics["val/accuracy"] == pytest.approx(result.accuracy.overall)
    assert {"val-core/a/reward/mean@1", "val-core/b/reward/mean@1"} <= result.metrics.keys()


async def test_the_same_step_gives_the_same_answers(tmp_path: Path) -> None:
    first, _ = make_evaluator(tmp_path, evaluation__n=2)
    again, _ = make_evaluator(tmp_path, evaluation__n=2, evaluation__batch_size=1)
    scores = [(await evaluator.evaluate(4)).scores.scores.tolist() for evaluator in (first, again)]
    assert scores[0] == scores[1]


async def test_a_policy_of_another_step_is_refused(tmp_path: Path) -> None:
    evaluator, _ = make_evaluator(tmp_path)
    with pytest.raises(AssertionError, match="base_step=3"):
        await evaluator.evaluate(3)


def test_without_validation_prompts_there_is_nothing_to_evaluate(tmp_path: Path) -> None:
    log = CallLog()
    config = make_config(tmp_path, evaluation__val_before_train=True)
    sampling = SamplingGroups.of(config, Workers.of(config, FakeActor(log), None))
    evaluator = Evaluator(config, sampling, None, FakeScorer(log))
    assert not any(evaluator.is_due(step, is_last=step == 3) for step in (0, 1, 3))


@pytest.mark.parametrize("schedule", ["serial", "gather", "overlap"])
async def test_two_groups_that_sample_have_a_share_of_the_prompts_each(tmp_path: Path, schedule: Schedule) -> None:
    changes: dict[str, Any] = {"evaluation__batch_size": 3, "evaluation__n": 2, "run__schedule": schedule}
    alone, _ = make_evaluator(tmp_path, **changes)
    evaluator, actor = make_evaluator(tmp_path, **changes, services__rollout={}, rollout__share=0.5)
    rollout = FakeRollout(actor.log)
    workers = Workers.of(evaluator.config, actor, None, rollout=rollout)
    evaluator.sampling = SamplingGroups.of(evaluator.config, workers)
    result, expected = await evaluator.evaluate(4), await alone.evaluate(4)
    assert result.scores.scores.tolist() == expected.scores.scores.tolist()
    assert result.scores.prompt_indices.tolist() == expected.scores.prompt_indices.tolist()
    assert [slot.part for slot, _ in rollout.sampling] == [0, 1]
    assert [slot.part for slot, _ in actor.sampling] == [0, 1]
    assert actor.log.order(("end", "actor.publish_weights", 4), ("begin", "actor.validate", 4))
    assert actor.log.most_at_once() == (1 if schedule == "serial" else 2)
    pools = [span.pool for span in result.spans if span.name == "testing"]
    assert sorted(pools) == ["actor"] * 2 + ["rollout"] * 2 + ["scoring"] * 2
