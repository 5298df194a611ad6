"""Streamed generation in real runs: values and scores begin while the actor generates, the result is the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.runs import RunFolder, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS, NUM_GROUPS = 2, 2
SCHEDULES = ("serial", "gather", "overlap")
Streamed = Callable[..., RunFolder]
Span = dict[str, Any]


@pytest.fixture(scope="module")
def streamed(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Streamed:
    """Makes runs of few steps by (schedule, num_groups, num_actor_ranks), in which a group takes many batches."""
    runs: dict[tuple[str, int, int], RunFolder] = {}

    def run(schedule: str, num_groups: int = NUM_GROUPS, num_actor_ranks: int = 1) -> RunFolder:
        key = (schedule, num_groups, num_actor_ranks)
        if key not in runs:
            overrides = [
                f"run.schedule={schedule}",
                f"run.total_steps={NUM_STEPS}",
                f"rollout.stream_groups={num_groups}",
                "rollout.max_batch_size=2",
                "data.max_response_length=48",
                "evaluation.test_freq=0",
                f"services.actor.num_processes={num_actor_ranks}",
                "actor.ppo_epochs=1",
                "critic.ppo_epochs=1",
                f"checkpoint.save_freq={NUM_STEPS}",
                "checkpoint.save_hf_model=true",
            ]
            folder = tmp_path_factory.mktemp("streamed") / f"{schedule}_{num_groups}_{num_actor_ranks}"
            with started(config, folder, *overrides) as controller:
                runs[key] = controller.complete()
        return runs[key]

    return run


def spans(folder: RunFolder, name: str, step: int) -> list[Span]:
    """In the order in which they began."""
    found = [span for span in folder.spans() if (span["name"], span["step"]) == (name, step)]
    return sorted(found, key=lambda span: span["start"])


def weights(folder: RunFolder, role: str) -> dict[str, np.ndarray]:
    (file,) = folder.checkpoint(NUM_STEPS).glob(f"{role}/**/model.safetensors")
    return load_file(file)


@pytest.mark.parametrize(("schedule", "num_actor_ranks"), [("gather", 1), ("overlap", 1), ("gather", 2)])
def test_values_and_scores_of_the_first_group_begin_while_the_actor_generates(
    streamed: Streamed, schedule: str, num_actor_ranks: int
) -> None:
    folder = streamed(schedule, num_actor_ranks=num_actor_ranks)
    for step in range(1, NUM_STEPS + 1):
        (generation,) = spans(folder, "gen", step)
        for name in ("values", "score"):
            first, _ = spans(folder, name, step)
            assert generation["start"] < first["start"] < generation["end"], (name, step)


def test_nothing_intersects_in_serial(streamed: Streamed) -> None:
    worked = [span for span in streamed("serial").spans() if span["pool"] != "controller"]
    assert len([span for span in worked if span["name"] == "values"]) == NUM_STEPS * NUM_GROUPS
    crossing = [
        (one, other)
        for one, other in combinations(worked, 2)
        if max(one["start"], other["start"]) < min(one["end"], other["end"])
    ]
    assert crossing == []


def test_weights_are_bit_identical_under_every_schedule(streamed: Streamed) -> None:
    digests = [streamed(schedule).summary["weights_sha256"] for schedule in SCHEDULES]
    assert None not in digests[0].values()
    assert digests == digests[:1] * 3


@pytest.mark.parametrize("num_actor_ranks", [1, 2])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_weights_are_those_of_a_run_that_does_not_stream(streamed: Streamed, role: str, num_actor_ranks: int) -> None:
    ours = weights(streamed("gather", num_actor_ranks=num_actor_ranks), role)
    plain = weights(streamed("gather", 1, num_actor_ranks), role)
    assert ours.keys() == plain.keys()
    for name, values in ours.items():
        np.testing.assert_allclose(values, plain[name], atol=1e-5, rtol=1e-4, err_msg=name)


def test_every_response_is_scored_and_reported_once(streamed: Streamed) -> None:
    ours, plain = streamed("gather").metrics, streamed("gather", 1).metrics
    for name in ("critic/score/mean", "response_length/mean", "prompt_length/mean"):
        assert [line[name] for line in ours[1:]] == pytest.approx([line[name] for line in plain[1:]])


def test_more_groups_than_prompts_are_refused_before_anything_starts(config: dict[str, Any], tmp_path: Path) -> None:
    with started(config, tmp_path / "run", "rollout.stream_groups=9") as controller:
        assert controller.wait() == 2
        assert "rollout.stream_groups (9) must not exceed data.train_batch_size (8)" in controller.output
