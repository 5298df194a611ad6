"""The record of a step: timings, spans, replies, and its line of metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.ppo.experience import assemble_experience
from controller.ppo.scores import objects
from controller.tracking.step_record import StepRecord, metrics_line
from controller.validation.result import ValidationResult
from controller.workers.clients import Traffic
from controller.workers.command import CommandReply
from rewards.samples import Failure
from splitppo.batch import Batch
from splitppo.clock import unix_s
from splitppo.config import Config
from splitppo.run_folder.metrics import check_declared
from splitppo.run_folder.spans import Span
from splitppo.run_folder.summary import Accuracy
from splitppo.v1.worker_pb2 import CommandResult
from tests.support.fake_services import make_config
from tests.support.scores import make_scores


def reply(started_s: float, finished_s: float, **metrics: float) -> CommandReply:
    return CommandReply(CommandResult(metrics=metrics), started_s, finished_s)


def closed_record(config: Config, **changes: Any) -> StepRecord:
    """Step 3, from second 100 to 110: two responses of 1 and 3 tokens, scores 1 and 2."""
    rollouts = Batch.from_rows(
        prompts=[[1, 2], [1, 2]],
        responses=[[5], [5, 6, 7]],
        values=[[0.5], [0.0, 0.0, 0.0]],
        old_log_probs=[[-1.0], [-1.0] * 3],
        ref_log_probs=[[-1.5], [-1.5] * 3],
    )
    extra = objects([{"acc": 1.0, "note": "x"}, {"acc": 0.0}])
    record = StepRecord(3, 100.0, 110.0, epoch=1)
    record.scores = make_scores(np.array([1.0, 2.0], np.float32), has_eos=np.array([True, False]), extra=extra)
    record.experience = assemble_experience(config.algorithm, rollouts, record.scores, num_samples=2)
    record.traffic = Traffic(bytes_sent=100, bytes_received=50, transfer_s=0.5)
    for name, value in changes.items():
        setattr(record, name, value)
    return record


# While the step runs.


def test_times_of_one_name_add_up() -> None:
    record = StepRecord(1, 0.0)
    for _ in range(2):
        with record.timed("gen"):
            pass
    first_two = record.timings_s["gen"]
    with record.timed("gen"):
        pass
    assert record.timings_s["gen"] > first_two > 0.0


def test_a_block_that_fails_is_timed_but_leaves_no_span() -> None:
    record = StepRecord(1, 0.0)
    with pytest.raises(OSError, match="gone"), record.timed("reward"), record.span("reward", "score"):
        raise OSError("gone")
    assert "reward" in record.timings_s
    assert record.spans == []


def test_a_reply_leaves_the_engines_span_and_its_metrics() -> None:
    record = StepRecord(7, 0.0)
    record.add_reply("actor", "gen", reply(1.0, 3.0))
    record.add_reply("critic", "update_critic", reply(4.0, 5.0, **{"critic/vf_loss": 0.5}))
    assert record.spans == [Span("actor", "gen", 7, 1.0, 3.0), Span("critic", "update_critic", 7, 4.0, 5.0)]
    assert record.metrics == {"critic/vf_loss": 0.5}


def test_a_weight_sync_is_a_span_in_the_call_that_it_began() -> None:
    record = StepRecord(7, 0.0)
    record.add_reply("actor", "gen", reply(1.0, 3.0, **{"timing_s/update_weights": 0.5}), parts=[[0], [1]])
    record.add_reply("actor", "gen", reply(4.0, 5.0, **{"timing_s/update_weights": 1e-6}))  # nothing was copied
    gen, sync, again = record.spans
    assert (sync, sync.parts) == (Span("actor", "update_weights", 7, 1.0, 1.5), ())
    assert ([gen, again], gen.parts) == (
        [Span("actor", "gen", 7, 1.0, 3.0), Span("actor", "gen", 7, 4.0, 5.0)],
        [[0], [1]],
    )
    assert not sync.is_call
    assert record.timings_s["update_weights"] == 0.5 + 1e-6


def test_the_turns_of_conversations_are_a_limited_number_of_spans_and_all_of_their_time_counts() -> None:
    record = StepRecord(7, 0.0)
    record.add_environments([Span("environments", "environment", 7, start, start + 0.25) for start in range(1000)])
    assert len(record.spans) == 200
    assert record.timings_s["environment"] == 250.0


def test_a_closed_step_lasts_from_its_start_to_its_end() -> None:
    assert StepRecord(1, 100.0, 104.5).step_s == 4.5


# The line.


def test_the_line_holds_what_was_learned_generated_and_moved(tmp_path: Path) -> None:
    config = make_config(tmp_path, algorithm__use_kl_in_reward=True, algorithm__kl_coef=0.25)
    record = closed_record(config, metrics={"actor/pg_loss": 0.125}, timings_s={"gen": 2.0})
    metrics = metrics_line(record, [], config)
    expected = {
        "actor/pg_loss": 0.125,
        "critic/score/mean": 1.5,
        "critic/values/max": 0.5,
        "response_length/max": 3.0,
        "prompt_length/mean": 2.0,
        "response/no_eos_ratio": 0.5,
        "reward_extra/acc/mean": 0.5,
        "reward/num_errors": 0.0,
        "actor/reward_kl_penalty": 0.5,
        "actor/reward_kl_penalty_coeff": 0.25,
        "timing_s/gen": 2.0,
        "timing_s/step": 10.0,
        "perf/total_num_tokens": 8.0,
        "perf/throughput": 8.0 / (10.0 * 2),
        "rpc/bytes_sent": 100.0,
        "rpc/bytes_received": 50.0,
        "rpc/time_fraction": 0.05,
        "training/global_step": 3.0,
        "training/epoch": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    check_declared(metrics)


@pytest.mark.parametrize(
    ("failure", "metric"),
    [
        (Failure.TIMEOUT, "num_timeouts"),
        (Failure.CRASH, "num_crashes"),
        (Failure.ERROR, "num_errors"),
        (Failure.UNAVAILABLE, "num_unavailable"),
        (Failure.UNPARSABLE, "num_unparsable"),
    ],
)
def test_failures_of_the_scorers_are_counted_by_reason(tmp_path: Path, failure: Failure, metric: str) -> None:
    config = make_config(tmp_path)
    failed = make_scores(np.zeros(2, np.float32), failures=objects([failure, failure]))
    record = closed_record(config, scores=failed)
    metrics = metrics_line(record, [], config)
    counts = {name: count for name, count in metrics.items() if name.startswith("reward/num_")}
    assert len(counts) == len(Failure)
    assert {name for name, count in counts.items() if count} == {f"reward/{metric}"}
    assert counts[f"reward/{metric}"] == 2.0


def test_validation_of_the_step_joins_its_line(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    scores = make_scores(np.empty(0, np.float32))
    validation = ValidationResult(Accuracy(overall=0.5), {"val/accuracy": 0.5}, scores, {"testing": 1.0})
    assert metrics_line(closed_record(config, validation=validation), [], config)["val/accuracy"] == 0.5
    assert "val/accuracy" not in metrics_line(closed_record(config), [], config)


def test_without_a_critic_there_are_no_values_and_one_pool(tmp_path: Path) -> None:
    config = make_config(tmp_path, algorithm__adv_estimator="grpo", services__actor={"num_processes": 2})
    record = closed_record(config)
    assert record.experience is not None
    batch = record.experience.batch
    without_values = Batch(batch.num_rows, {name: batch[name] for name in batch.columns if name != "values"})
    record.experience = assemble_experience(
        config.algorithm, without_values, make_scores(record.experience.scores), num_samples=2
    )
    metrics = metrics_line(record, [], config)
    assert not [name for name in metrics if name.startswith(("critic/values", "critic/vf"))]
    assert metrics["perf/throughput"] == pytest.approx(8.0 / (10.0 * 2))


@pytest.mark.parametrize(
    ("cpus", "num_ranks", "bubbles"),
    [([1, 2], 5, {"actor": 0.5, "critic": 0.3}), ([3, 4], 7, {"actor": 0.5, "critic": 0.7, "rollout": 0.6})],
)
def test_devices_of_critic_and_rollout_group_count_once(
    tmp_path: Path, cpus: list[int], num_ranks: int, bubbles: dict[str, float]
) -> None:
    groups = {
        "services__actor": {"num_processes": 2},
        "services__critic": {"num_processes": 3, "cpus": [0, 1, 2]},
        "services__rollout": {"num_processes": 2, "cpus": cpus},
    }
    config = make_config(tmp_path, rollout__share=0.5, **groups)
    spans = [
        Span("actor", "gen", 3, 100.0, 105.0),
        Span("rollout", "gen", 3, 100.0, 104.0),
        Span("critic", "values", 3, 104.0, 107.0),
    ]
    metrics = metrics_line(closed_record(config), spans, config)
    assert metrics["perf/throughput"] == pytest.approx(8.0 / (10.0 * num_ranks))
    assert {pool: metrics.get(f"overlap/bubble_{pool}") for pool in bubbles} == pytest.approx(bubbles)
    assert ("overlap/bubble_rollout" in metrics) == ("rollout" in bubbles)


def test_the_overlap_of_the_updates_comes_from_the_spans(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    spans = [Span("actor", "update_actor", 3, 104.0, 108.0), Span("critic", "update_critic", 3, 105.0, 107.0)]
    metrics = metrics_line(closed_record(config), spans, config)
    assert metrics["overlap/efficiency"] == 1.0
    assert metrics["overlap/bubble_actor"] == pytest.approx(0.6)
    assert metrics["overlap/idle_fraction"] == pytest.approx(0.6)


def test_a_metric_that_nobody_declared_is_an_error(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    record = closed_record(config, metrics={"actor/surprise": 1.0})
    with pytest.raises(ValueError, match="'actor/surprise' is not declared"):
        metrics_line(record, [], config)


def test_a_clock_that_is_set_while_a_step_runs_changes_none_of_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    record = StepRecord(1, unix_s())
    with record.span("controller", "work"):
        monkeypatch.setattr("time.time", lambda: 1e12)
        monkeypatch.setattr("time.time_ns", lambda: 10**21)
    assert 0.0 <= record.step_s < 60.0
    assert 0.0 <= record.spans[0].duration_s < 60.0
    assert record.started_s <= record.spans[0].started_s
