"""The controller's own state: how a step moves it, and that a checkpoint gives it back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from controller.ppo.experience import Experience, assemble_experience
from controller.rollout.results import Accuracy
from controller.run.state import RunState
from splitppo.batch import Batch, Column
from tests.fake_services import make_config


def experience(kl: float | None) -> Experience:
    """Two responses, five tokens in all."""
    batch = Batch.from_rows(prompts=[[1], [1]], responses=[[2], [2, 3]])
    lengths = batch["responses"].lengths
    rewards, learned = Column(np.zeros(3, np.float32), lengths), Column(np.ones(3, bool), lengths)
    return Experience(batch, np.zeros(2, np.float32), rewards, learned, kl)


def test_a_run_starts_with_the_configured_coefficient(tmp_path: Path) -> None:
    state = RunState.initial(make_config(tmp_path, algorithm__kl_coef=0.25))
    assert (state.step, state.kl_coef, state.train_s, state.tokens) == (0, 0.25, 0.0, 0)


def test_totals_grow_with_every_step(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    state = RunState.initial(config).at_step(1).after(experience(None), config, 2.5)
    state = state.at_step(2).after(experience(None), config, 0.5)
    assert (state.step, state.train_s, state.tokens) == (2, 3.0, 10)


def test_the_adaptive_coefficient_moves_by_the_number_of_responses(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        algorithm__kl_ctrl="adaptive",
        algorithm__kl_target=0.1,
        algorithm__kl_horizon=100,
        algorithm__kl_coef=1.0,
    )
    state = RunState.initial(config).after(experience(kl=1.0), config, 1.0)
    assert state.kl_coef == pytest.approx(1.0 + 0.2 * 2 / 100)


def test_an_adaptive_coefficient_goes_on_bit_for_bit_from_a_stored_state(tmp_path: Path) -> None:
    config = make_config(tmp_path, algorithm__kl_ctrl="adaptive", algorithm__kl_target=0.1, algorithm__kl_horizon=1000)
    kls = [0.3, 0.05, 0.2, 0.12, 0.01]
    straight = restored = RunState.initial(config)
    for kl in kls:
        straight = straight.after(experience(kl), config, 1.0)
        restored = RunState.model_validate(json.loads(json.dumps(restored.model_dump(mode="json"))))
        restored = restored.after(experience(kl), config, 1.0)
    assert restored.kl_coef == straight.kl_coef != config.algorithm.kl_coef


def test_validation_of_step_0_is_what_later_ones_are_compared_with(tmp_path: Path) -> None:
    state = RunState.initial(make_config(tmp_path)).validated(0, Accuracy(overall=0.25))
    state = state.validated(4, Accuracy(overall=0.75))
    assert state.validation_before == Accuracy(overall=0.25)
    assert (state.validation_after, state.validated_step) == (Accuracy(overall=0.75), 4)


def test_a_stored_state_is_read_back_equal(tmp_path: Path) -> None:
    state = RunState.initial(make_config(tmp_path)).at_step(3).validated(3, Accuracy(overall=0.1, by_source={"a": 0.1}))
    assert RunState.model_validate(json.loads(json.dumps(state.model_dump(mode="json")))) == state


def test_a_stored_state_with_unknown_fields_is_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        RunState.model_validate({"step": 1, "kl_coef": 0.1, "beta": 0.2})


def test_running_statistics_go_on_bit_for_bit_from_a_stored_state(tmp_path: Path) -> None:
    config = make_config(tmp_path, critic__normalize_values=True, reward__shaping={"running_scale": True})
    random = np.random.default_rng(3)
    straight = restored = RunState.initial(config)
    for _ in range(4):
        rows = {"values": [random.normal(size=2), random.normal(size=1)]}
        rollouts = Batch.from_rows(prompts=[[1], [1]], responses=[[2, 3], [2]], **rows)
        scores = random.normal(3.0, 2.0, size=2).astype(np.float32)
        restored = RunState.model_validate(json.loads(json.dumps(restored.model_dump(mode="json"))))
        straight, restored = (
            state.after(
                assemble_experience(
                    config.algorithm,
                    rollouts,
                    scores,
                    num_samples=2,
                    kl_coef=0.0,
                    normalization=state.normalization(config),
                ),
                config,
                1.0,
            )
            for state in (straight, restored)
        )
    assert restored.running == straight.running
    assert (straight.running.scores.count, straight.running.returns.count) == (8, 12)


def test_without_a_critic_no_values_are_normalised(tmp_path: Path) -> None:
    config = make_config(tmp_path, critic__normalize_values=True, algorithm__adv_estimator="grpo")
    assert not RunState.initial(config).normalization(config).normalize_values
