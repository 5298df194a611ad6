"""Coefficients and phases that change in a run have the same values after a kill or a stop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from splitppo.config.sections.debug import Failpoint
from splitppo.failpoints import FOLDER, fired_mark
from tests.support.external import ExternalGroups, external_groups
from tests.support.runs import NUM_STEPS, RunFolder

pytestmark = pytest.mark.timeout(900)

# What every run here has beside `Inputs.config`: state of whatever kind that a step hands on to the next one.
CHANGING: Mapping[str, Mapping[str, Any]] = {
    "algorithm": {
        "kl_ctrl": "adaptive",
        "kl_target": 0.001,
        "adaptive_entropy": {"enable": True, "target_entropy": 9.0, "entropy_coeff_delta": 0.01},
        "mask_truncated_completions": True,
        "phases": [
            {
                "from_step": 2,
                "to_step": 2,
                "name": "near",
                "loss_mode": "gspo",
                "use_kl_loss": True,
                "kl_loss_coef": 0.5,
                "kl_coef": 0.01,
            },
            {"from_step": 4, "entropy_coeff": 0.02, "use_kl_in_reward": False},
        ],
    },
    # Tokens are drawn: which ones must not depend on what has happened on the way.
    "actor": {"policy_loss": {"loss_mode": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": 0.0}},
    "critic": {"warmup_steps": 0, "normalize_values": True},
    "reward": {"shaping": {"running_scale": True}},
    "checkpoint": {"save_freq": 1},
    "evaluation": {"test_freq": -1, "val_before_train": False},
}
# The actor dies in the third step, between two optimizer steps.
POINT, KILLED_STEP = "actor.update.mini_batch", 3
KILL = {"step": KILLED_STEP, "action": "kill"}
# Not what was learned: how long it took, what happened on the way, and that a process validates before it ends.
_OF_THE_DAY = ("timing_s/", "timing_per_token_ms/", "perf/", "overlap/", "rpc/", "recovery/", "val")


@pytest.fixture(scope="module")
def changing(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExternalGroups]:
    own = {**config, "debug": {"failpoints": {POINT: [KILL]}}}
    for section, values in CHANGING.items():
        own[section] = {**own.get(section, {}), **values}
    with external_groups(own, tmp_path_factory.mktemp("changing") / "run") as groups:
        yield groups


@pytest.fixture(scope="module")
def undisturbed(changing: ExternalGroups, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    changing.empty()
    with changing.started() as controller:
        controller.complete()
    return changing.keep(tmp_path_factory.mktemp("undisturbed") / "run")


def learning(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns the metrics of every step that do not depend on the time of day."""
    return [{k: v for k, v in line.items() if not k.startswith(_OF_THE_DAY)} for line in folder.metrics]


def assert_the_same(folder: RunFolder, undisturbed: RunFolder) -> None:
    assert folder.steps == list(range(1, NUM_STEPS + 1))
    assert learning(folder) == learning(undisturbed)
    assert folder.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    assert None not in folder.summary["weights_sha256"].values()


def test_each_step_has_the_coefficients_of_its_phase_and_of_the_step_before(undisturbed: RunFolder) -> None:
    def of_steps(name: str) -> list[float | None]:
        return [line.get(name) for line in undisturbed.metrics]

    assert of_steps("training/phase") == [0, 1, 0, 2]
    assert of_steps("actor/kl_coef") == [None, 0.5, None, None]
    # It rises in every step, since the entropy is below its target, but where a phase fixes it.
    assert of_steps("actor/entropy_coeff") == [0.0, 0.01, 0.02, 0.02]
    initial, fixed, moved, off = of_steps("actor/reward_kl_penalty_coeff")
    assert (initial, fixed, off) == (0.05, 0.01, None)
    assert moved not in (initial, fixed)
    assert (of_steps("actor/pg_clipfrac")[2] or 0.0) > 0.0  # tokens were drawn
    log = undisturbed.log("actor_0")
    assert "step 2: phase 'near', loss gspo, {'actor/entropy_coeff': 0.01, 'actor/kl_coef': 0.5}" in log
    assert "step 3: phase '', loss clip_cov, {'actor/entropy_coeff': 0.02}" in log


@pytest.mark.extended
def test_an_actor_that_dies_while_it_updates_costs_nothing_but_time(
    changing: ExternalGroups, undisturbed: RunFolder
) -> None:
    changing.empty(armed=[POINT])
    mark = changing.folder.path / FOLDER / fired_mark(POINT, Failpoint.model_validate(KILL))
    with changing.started() as controller:
        controller.wait_until(lambda _: mark.exists(), f"the death of the actor in step {KILLED_STEP}")
        changing.restart("actor")
        folder = controller.complete()
    assert folder.metrics[-1]["recovery/num_restarts"] == 1
    assert_the_same(folder, undisturbed)


@pytest.mark.extended
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(changing: ExternalGroups, undisturbed: RunFolder) -> None:
    changing.empty()
    with changing.started("run.stop_after_step=2") as controller:
        controller.complete()
    with changing.started() as controller:
        folder = controller.complete()
    assert "resumed after step 2" in controller.output
    assert_the_same(folder, undisturbed)
