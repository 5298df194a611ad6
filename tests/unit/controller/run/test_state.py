"""The controller's own state: a step changes it, and a checkpoint restores it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from controller.ppo.experience import Experience, assemble_experience
from controller.run.state import RunState
from controller.run.warm_up import WarmUp
from controller.tracking.step_record import StepRecord
from controller.validation.result import ValidationResult
from splitppo.batch import Batch, Column
from splitppo.config.sections.models import WarmUpUntilConfig
from splitppo.run_folder.metrics import MC_EXPLAINED_VARIANCE
from splitppo.run_folder.summary import Accuracy
from tests.support.fake_services import make_config
from tests.support.scores import make_scores
from tests.support.seeds import shifted


def experience(kl: float | None) -> Experience:
    """Two responses, five tokens in all."""
    batch = Batch.from_rows(prompts=[[1], [1]], responses=[[2], [2, 3]])
    lengths = batch["responses"].lengths
    rewards, learned = Column(np.zeros(3, np.float32), lengths), Column(np.ones(3, bool), lengths)
    return Experience(batch, np.zeros(2, np.float32), rewards, learned, learned, kl)


def record(done: Experience, step_s: float = 1.0, entropy: float | None = None) -> StepRecord:
    """A step that took `step_s` seconds."""
    metrics = {} if entropy is None else {"actor/entropy": entropy}
    step = StepRecord(1, 0.0, step_s, metrics=metrics)
    step.experience = done
    return step


def validation(accuracy: float, **by_source: float) -> ValidationResult:
    return ValidationResult(
        Accuracy(overall=accuracy, by_source=by_source), {}, make_scores(np.zeros(0, np.float32)), {}
    )


def test_a_run_starts_with_the_configured_coefficient(tmp_path: Path) -> None:
    state = RunState.initial(make_config(tmp_path, algorithm__kl_coef=0.25))
    assert (state.step, state.kl_coef, state.train_s, state.tokens) == (0, 0.25, 0.0, 0)


def test_totals_grow_with_every_step(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    state = RunState.initial(config).at_step(1).after(record(experience(None), 2.5), config, 1, None)
    state = state.at_step(2).after(record(experience(None), 0.5), config, 1, None)
    assert (state.step, state.train_s, state.tokens) == (2, 3.0, 10)


def test_the_adaptive_coefficient_moves_by_the_number_of_responses(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        algorithm__kl_ctrl="adaptive",
        algorithm__kl_target=0.1,
        algorithm__kl_horizon=100,
        algorithm__kl_coef=1.0,
    )
    state = RunState.initial(config).after(record(experience(kl=1.0)), config, 1, None)
    assert state.kl_coef == pytest.approx(1.0 + 0.2 * 2 / 100)


def test_an_adaptive_coefficient_goes_on_bit_for_bit_from_a_stored_state(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        algorithm__adaptive_entropy={"enable": True, "target_entropy": 0.11, "entropy_coeff_delta": 0.1},
        algorithm__kl_ctrl="adaptive",
        algorithm__kl_target=0.1,
        algorithm__kl_horizon=1000,
    )
    kls = [0.3, 0.05, 0.2, 0.12, 0.01]
    straight = restored = RunState.initial(config)
    for kl in kls:
        straight = straight.after(record(experience(kl), entropy=kl), config, 1, None)
        restored = RunState.model_validate(json.loads(json.dumps(restored.model_dump(mode="json"))))
        restored = restored.after(record(experience(kl), entropy=kl), config, 1, None)
    assert restored == straight
    assert restored.kl_coef != config.algorithm.kl_coef
    assert restored.entropy_coeff not in (None, 0.0)


ADAPTIVE_ENTROPY = {
    "algorithm__adaptive_entropy": {"enable": True, "target_entropy": 0.5, "entropy_coeff_delta": 0.25},
    "actor__entropy_coeff": 0.125,
}


def test_the_entropy_coefficient_of_a_step_is_of_the_entropy_of_the_step_before(tmp_path: Path) -> None:
    config = make_config(tmp_path, **ADAPTIVE_ENTROPY)
    state, in_force = RunState.initial(config), []
    for step, entropy in enumerate((0.4, 0.75, None, 0.5, 0.25), start=1):
        state = state.at_step(step)
        in_force.append(state.config_at_step(config).actor.entropy_coeff)
        state = state.after(record(experience(None), entropy=entropy), config, 1, None)
    # Below the target: up. Above: down, and nothing in the loss, until an update finds it at the target again.
    assert in_force == [0.125, 0.375, 0.0, 0.0, 0.375]
    assert (state.entropy_coeff, state.entropy) == (0.625, 0.25)


def test_a_phase_that_fixes_coefficients_lets_their_controllers_rest(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        **ADAPTIVE_ENTROPY,
        algorithm__kl_ctrl="adaptive",
        algorithm__use_kl_in_reward=True,
        algorithm__kl_coef=1.0,
        algorithm__kl_horizon=10,
        algorithm__phases=[{"from_step": 2, "to_step": 3, "kl_coef": 0.5, "entropy_coeff": 0.0625}],
    )
    state, seen = RunState.initial(config), []
    for step in range(1, 5):
        state = state.at_step(step)
        at_step = state.config_at_step(config)
        seen.append((at_step.algorithm.kl_coef, at_step.actor.entropy_coeff))
        state = state.after(record(experience(kl=9.0), entropy=0.25), config, 1, None)
    moved = 1.0 + 0.2 * 2 / 10
    assert seen == [(1.0, 0.125), (0.5, 0.0625), (0.5, 0.0625), (pytest.approx(moved), 0.375)]


def distilled(kl: float | None) -> Experience:
    """As `experience`, with the KL from a teacher."""
    return replace(experience(None), metrics={} if kl is None else {"distillation/kl": kl})


ADAPTIVE_TEACHER = {
    "teacher__model": "teacher",
    "teacher__coef": 0.5,
    "teacher__kl_ctrl": "adaptive",
    "teacher__kl_target": 0.1,
    "teacher__kl_horizon": 10,
}


def test_the_weight_of_a_teacher_rises_above_its_target_and_falls_below_it(tmp_path: Path) -> None:
    config = make_config(tmp_path, **ADAPTIVE_TEACHER)
    state, in_force = RunState.initial(config), []
    for step, kl in enumerate((9.0, 0.11, None, 0.0), start=1):
        state = state.at_step(step)
        in_force.append(state.config_at_step(config).teacher.coef)
        state = state.after(record(distilled(kl)), config, 1, None)
    # Two responses of a horizon of ten: at most a fifth of a fifth; a step without tokens moves nothing.
    rises, further = 0.5 * 1.04, 0.5 * 1.04 * 1.02
    assert in_force == [0.5, pytest.approx(rises), pytest.approx(further), pytest.approx(further)]
    assert state.teacher_coef == pytest.approx(further * 0.96)


def test_an_adaptive_weight_of_a_teacher_goes_on_bit_for_bit_from_a_stored_state(tmp_path: Path) -> None:
    config = make_config(tmp_path, **ADAPTIVE_TEACHER)
    straight = restored = RunState.initial(config)
    for kl in (0.3, 0.05, 0.2, 0.12, 0.01):
        straight = straight.after(record(distilled(kl)), config, 1, None)
        restored = RunState.model_validate(json.loads(json.dumps(restored.model_dump(mode="json"))))
        restored = restored.after(record(distilled(kl)), config, 1, None)
    assert restored == straight
    assert restored.teacher_coef not in (None, 0.5)


def test_a_phase_that_fixes_the_weight_of_a_teacher_lets_its_controller_rest(tmp_path: Path) -> None:
    phases = [{"from_step": 2, "to_step": 3, "teacher_coef": 0.125}]
    config = make_config(tmp_path, **ADAPTIVE_TEACHER, algorithm__phases=phases)
    state, seen = RunState.initial(config), []
    for step in range(1, 5):
        state = state.at_step(step)
        seen.append(state.config_at_step(config).teacher.coef)
        state = state.after(record(distilled(9.0)), config, 1, None)
    assert seen == [0.5, 0.125, 0.125, pytest.approx(0.52)]


def test_a_state_of_a_run_without_a_teacher_is_still_read(tmp_path: Path) -> None:
    state = RunState.model_validate({"step": 2, "kl_coef": 0.5})
    assert state.config_at_step(make_config(tmp_path, **ADAPTIVE_TEACHER)).teacher.coef == 0.5
    fixed = make_config(tmp_path, teacher__model="teacher", teacher__coef=0.25)
    assert RunState(kl_coef=0.0, teacher_coef=7.0).config_at_step(fixed).teacher.coef == 0.25


def test_a_fixed_coefficient_is_the_configurations_also_where_a_checkpoint_remembers_another(tmp_path: Path) -> None:
    state = RunState(step=3, kl_coef=0.25)
    assert state.config_at_step(make_config(tmp_path, algorithm__kl_coef=0.5)).algorithm.kl_coef == 0.5


def test_a_state_of_a_run_without_entropy_control_is_still_read(tmp_path: Path) -> None:
    state = RunState.model_validate({"step": 2, "kl_coef": 0.5})
    assert state.config_at_step(make_config(tmp_path, **ADAPTIVE_ENTROPY)).actor.entropy_coeff == 0.125


def test_validation_of_step_0_is_what_later_ones_are_compared_with(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    state = RunState.initial(config).validated(0, validation(0.25), config)
    state = state.validated(4, validation(0.75), config)
    assert state.validation_before == Accuracy(overall=0.25)
    assert (state.validation_after, state.validated_step) == (Accuracy(overall=0.75), 4)


@pytest.mark.parametrize(("key", "value"), [("n", 2), ("temperature", 0.5), ("top_p", 0.5), ("top_k", 5)])
def test_validations_whose_responses_are_drawn_differently_are_not_compared(
    tmp_path: Path, key: str, value: float
) -> None:
    config, other = make_config(tmp_path), make_config(tmp_path, **{f"evaluation__{key}": value})
    state = RunState.initial(config).validated(0, validation(0.75), config)
    assert state.validated(4, validation(0.25), other).validation_before is None
    assert state.validated(4, validation(0.25), config).validation_before == Accuracy(overall=0.75)


def test_a_state_of_a_version_that_did_not_note_the_sampling_is_compared(tmp_path: Path) -> None:
    state = RunState.model_validate({"step": 2, "kl_coef": 0.5, "validation_before": {"overall": 0.25}})
    assert state.validated(2, validation(0.5), make_config(tmp_path)).validation_before == Accuracy(overall=0.25)


def test_a_stored_state_is_read_back_equal(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    state = RunState.initial(config).at_step(3).validated(3, validation(0.1, a=0.1), config)
    assert RunState.model_validate(json.loads(json.dumps(state.model_dump(mode="json")))) == state


def test_a_stored_state_with_unknown_fields_is_refused() -> None:
    with pytest.raises(ValidationError) as caught:
        RunState.model_validate({"step": 1, "kl_coef": 0.1, "beta": 0.2})
    assert [(error["type"], error["loc"]) for error in caught.value.errors()] == [("extra_forbidden", ("beta",))]


def test_running_statistics_go_on_bit_for_bit_from_a_stored_state(tmp_path: Path) -> None:
    config = make_config(tmp_path, critic__normalize_values=True, reward__shaping={"running_scale": True})
    random = np.random.default_rng(shifted(3))
    straight = restored = RunState.initial(config)
    for _ in range(4):
        rows = {"values": [random.normal(size=2), random.normal(size=1)]}
        rollouts = Batch.from_rows(prompts=[[1], [1]], responses=[[2, 3], [2]], **rows)
        scores = random.normal(3.0, 2.0, size=2).astype(np.float32)
        restored = RunState.model_validate(json.loads(json.dumps(restored.model_dump(mode="json"))))
        experiences = [
            assemble_experience(
                config.algorithm,
                rollouts,
                make_scores(scores),
                num_samples=2,
                normalization=state.normalization(config),
            )
            for state in (straight, restored)
        ]
        straight, restored = (
            state.after(record(done), config, 1, None)
            for state, done in zip((straight, restored), experiences, strict=True)
        )
    assert restored.running == straight.running
    assert (straight.running.scores.count, straight.running.returns.count) == (8, 12)


def test_without_a_critic_no_values_are_normalised(tmp_path: Path) -> None:
    config = make_config(tmp_path, critic__normalize_values=True, algorithm__adv_estimator="grpo")
    assert not RunState.initial(config).normalization(config).normalize_values


def test_the_warm_up_counts_steps_without_a_rise_and_stays_ended() -> None:
    until = WarmUpUntilConfig(min_delta=0.1, patience=2)
    warm_up = WarmUp()
    counted = []
    for explained in (-5.0, 0.0, 0.05, None, 0.2, 0.3, 0.25):  # 0.3 is no rise: it must exceed 0.2 by more than 0.1
        warm_up = warm_up.after(until, explained)
        counted.append((warm_up.best, warm_up.num_steps))
    assert counted == [(-5.0, 0), (0.0, 0), (0.0, 1), (0.0, 1), (0.2, 0), (0.2, 1), (0.2, 2)]
    assert warm_up.has_ended


def test_the_log_says_once_with_which_step_the_warm_up_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = make_config(tmp_path, critic__warmup_steps=9, critic__warmup_until={"patience": 1})
    state = RunState.initial(config)
    for step in range(1, 5):
        done = record(experience(None))
        vars(done)["learning"] = {MC_EXPLAINED_VARIANCE: 0.25}  # in place of what the step would compute
        state = state.at_step(step).after(done, config, 1, None)
    [line] = [line for line in caplog.messages if "warm-up" in line]
    assert line == "the critic's warm-up ends with step 2: no rise over the critic/mc_explained_var of 0.250 in 1 steps"


def test_outside_of_the_warm_up_lam_critic_is_that_of_the_run(tmp_path: Path) -> None:
    rates = {"algorithm__lam_critic": 0.5, "algorithm__lam_critic_warmup": 1.0}
    config = make_config(tmp_path, **rates, critic__warmup_steps=3, critic__warmup_until={})
    state = RunState.initial(config).at_step(2)
    ended = state.model_copy(update={"warm_up": WarmUp(has_ended=True)})
    assert [one.config_at_step(config).algorithm.lam_critic for one in (state, ended)] == [1.0, 0.5]
    assert [one.is_warm_up(config) for one in (state, ended, state.at_step(4))] == [True, False, False]
