"""Phases of a run: the values of a step, the needs of the run, and how phases are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from splitppo.config import Config, dump_config
from splitppo.config.load import validate
from splitppo.config.phase_plan import phase_plan
from splitppo.config.worker_digest import worker_digest
from tests.support.configs import mistake
from tests.support.fake_services import make_config


def of_phases(run_dir: Path, *phases: dict[str, Any], **changes: Any) -> Config:
    return make_config(run_dir, run__total_steps=9, algorithm__phases=list(phases), **changes)


def test_a_phase_holds_in_its_steps_and_the_sections_in_the_others(tmp_path: Path) -> None:
    config = of_phases(
        tmp_path,
        {"from_step": 3, "to_step": 4, "entropy_coeff": 0.5},
        {"from_step": 7, "use_kl_loss": True, "kl_loss_coef": 0.25},
        actor__entropy_coeff=0.125,
    )
    configs = [config.at_step(step) for step in range(1, 10)]
    assert [step_config.actor.entropy_coeff for step_config in configs] == [0.125] * 2 + [0.5] * 2 + [0.125] * 5
    assert [step_config.actor.kl_loss_coef for step_config in configs if step_config.actor.use_kl_loss] == [0.25] * 3
    assert [config.algorithm.phase_number(step) for step in range(1, 10)] == [0, 0, 1, 1, 0, 0, 2, 2, 2]
    assert [phase.steps for step_config in configs for phase in step_config.algorithm.phases] == [
        "steps 3 to 4"
    ] * 2 + ["steps 7 to the last"] * 3


def test_a_run_without_phases_is_the_same_in_every_step(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert config.at_step(2) is config
    assert phase_plan(config) == []


@pytest.mark.parametrize("switch", ["use_kl_loss", "use_kl_in_reward"])
def test_a_run_has_a_reference_if_any_phase_uses_it_and_a_step_only_in_that_phase(tmp_path: Path, switch: str) -> None:
    config = of_phases(tmp_path, {"from_step": 4, switch: True})
    assert config.uses_reference
    assert config.reference_host == "actor"
    assert [config.at_step(step).uses_reference for step in (3, 4, 9)] == [False, True, True]
    plain = make_config(tmp_path)
    assert worker_digest(config, "actor") != worker_digest(plain, "actor")  # its group loads another model


@pytest.mark.parametrize("change", [{"use_kl_in_reward": True}, {"loss_mode": "clip_cov"}])
def test_old_log_probs_are_needed_in_the_phases_that_need_them(tmp_path: Path, change: dict[str, Any]) -> None:
    config = of_phases(tmp_path, {"from_step": 4, "to_step": 5, **change})
    assert config.needs_old_log_probs
    assert [config.at_step(step).needs_old_log_probs for step in (3, 4, 5, 6)] == [False, True, True, False]


def test_other_coefficients_ask_for_no_other_worker(tmp_path: Path) -> None:
    config = of_phases(tmp_path, {"from_step": 4, "entropy_coeff": "adaptive"})
    assert worker_digest(config, "actor") == worker_digest(make_config(tmp_path), "actor")


def test_a_coefficient_is_a_number_or_its_controllers(tmp_path: Path) -> None:
    config = of_phases(
        tmp_path,
        {"from_step": 1, "to_step": 2, "kl_coef": 0.5, "entropy_coeff": 0.25},
        {"from_step": 3, "to_step": 4, "kl_coef": "adaptive", "entropy_coeff": "adaptive"},
        algorithm__use_kl_in_reward=True,
    )
    algorithms = [config.at_step(step).algorithm for step in (1, 3, 5)]
    assert [(algorithm.kl_ctrl, algorithm.kl_coef) for algorithm in algorithms] == [
        ("fixed", 0.5),
        ("adaptive", 0.001),
        ("fixed", 0.001),
    ]
    assert [algorithm.adaptive_entropy.enable for algorithm in algorithms] == [False, True, False]


def test_the_plan_has_a_line_for_every_stretch_of_steps_that_the_run_comes_to(tmp_path: Path) -> None:
    config = of_phases(
        tmp_path,
        {"from_step": 20, "entropy_coeff": 1},
        {"from_step": 7, "to_step": 8, "use_kl_loss": True, "entropy_coeff": "adaptive"},
        {"from_step": 2, "to_step": 4, "name": "warm", "use_kl_in_reward": True, "kl_coef": 0.5},
    )
    assert phase_plan(config) == [
        "steps 1 to 1: loss vanilla, entropy_coeff 0",
        "steps 2 to 4 (warm): loss vanilla, entropy_coeff 0, kl_coef 0.5",
        "steps 5 to 6: loss vanilla, entropy_coeff 0",
        "steps 7 to 8: loss vanilla, entropy_coeff adaptive, kl_loss_coef 0.001",
        "steps 9 to 9: loss vanilla, entropy_coeff 0",
    ]


def test_a_dumped_configuration_is_read_back_equal(tmp_path: Path) -> None:
    config = of_phases(
        tmp_path, {"from_step": 2, "entropy_coeff": "adaptive"}, {"from_step": 1, "to_step": 1, "entropy_coeff": 0.5}
    )
    assert validate(yaml.safe_load(dump_config(config)), "dump") == config


@pytest.mark.parametrize(
    ("phases", "sentence"),
    [
        ("{from_step: 3}", "key 'algorithm.phases.0': the phase of steps 3 to the last changes nothing: expected one"),
        (
            "[{from_step: 3, to_step: 2, entropy_coeff: 1}]",
            "key 'algorithm.phases.0': expected to_step (2) to be at least from_step (3)",
        ),
        ("[{from_step: 0, entropy_coeff: 1}]", "key 'algorithm.phases.0.from_step': input should be greater than"),
        (
            "[{from_step: 1, to_step: 4, entropy_coeff: 1}, {from_step: 4, entropy_coeff: 2}]",
            "key 'algorithm': phases must not overlap, but phases.0 has steps 1 to 4 and phases.1 steps 4 to the last",
        ),
        (
            "[{from_step: 4, entropy_coeff: 1}, {from_step: 2, to_step: 9, entropy_coeff: 2}]",
            "key 'algorithm': phases must not overlap, but phases.0 has steps 4 to the last and phases.1 steps 2 to 9",
        ),
        (
            "[{from_step: 1, loss_mode: vanila}]",
            "algorithm.phases.0: loss_mode: expected one of",
        ),
        (
            "[{from_step: 1, entropy_coef: 1}]",
            "unknown key 'algorithm.phases.0.entropy_coef', did you mean 'algorithm.phases.0.entropy_coeff'?",
        ),
        (
            "[{from_step: 1, entropy_coeff: auto}]",
            "key 'algorithm.phases.0.entropy_coeff': expected a finite number, or adaptive, got 'auto'",
        ),
        ("[{from_step: 1, entropy_coeff: .inf}]", "key 'algorithm.phases.0.entropy_coeff': expected a finite number"),
        (
            "[{from_step: 1, use_kl_in_reward: true, kl_coef: -1}]",
            "key 'algorithm.phases.0.kl_coef': expected at least 0",
        ),
        (
            "[{from_step: 1, kl_loss_coef: 1}]",
            "algorithm.phases.0: kl_loss_coef is of no use without use_kl_loss: set use_kl_loss, or drop kl_loss_coef",
        ),
        (
            "[{from_step: 1, kl_coef: adaptive}]",
            "algorithm.phases.0: kl_coef is of no use without use_kl_in_reward: set use_kl_in_reward, or drop kl_coef",
        ),
    ],
)
def test_a_phase_that_makes_no_sense_is_refused(tmp_path: Path, phases: str, sentence: str) -> None:
    assert mistake(tmp_path, f"algorithm.phases={phases}").startswith(sentence)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["algorithm.adaptive_entropy={enable: true, max_entropy_coeff: 0.01}", "actor.entropy_coeff=0.5"],
            "actor.entropy_coeff (0.5) must lie between algorithm.adaptive_entropy.min_entropy_coeff (0) and",
        ),
        (
            ["algorithm.phases={from_step: 2, entropy_coeff: adaptive}", "actor.entropy_coeff=-0.5"],
            "actor.entropy_coeff (-0.5) must lie between algorithm.adaptive_entropy.min_entropy_coeff (0) and",
        ),
        (
            ["algorithm.adaptive_entropy={min_entropy_coeff: 0.2, max_entropy_coeff: 0.1}"],
            "key 'algorithm.adaptive_entropy': expected min_entropy_coeff (0.2) to be at most max_entropy_coeff (0.1)",
        ),
    ],
)
def test_adaptive_entropy_begins_within_its_bounds(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    assert mistake(tmp_path, *overrides).startswith(sentence)
