"""Both pools sample: the actor's group, and a rollout group on the critic's core, in turns with the critic's group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from splitppo.run_folder.trace import read_trace
from tests.kill_matrix.harness import run_cells, with_incidents
from tests.kill_matrix.rollout_cells import CORE, share_cells
from tests.support.external import ExternalGroups, external_groups
from tests.support.meetings import wait
from tests.support.runs import NUM_STEPS, RunFolder, started

pytestmark = pytest.mark.timeout(900)

# Two of the parts of a step come from each group.
NUM_PARTS = 4
SHARED = {
    "rollout": {"share": 0.5, "stream_groups": NUM_PARTS},
    "services": {"critic": {"cpus": [CORE]}, "rollout": {"cpus": [CORE], "threads": 1}},
}
STEPS = range(1, NUM_STEPS + 1)
# After the other steps there is a validation, for which the rollout group waits until the critic's update has ended.
UNVALIDATED = STEPS[::2]
# Both groups sample at the same time; under `overlap` the actor's group begins while the critic still learns.
MEETINGS = {
    "actor.generate": [wait(step, "rollout.generate", step) for step in STEPS],
    "rollout.generate": [wait(step, "actor.generate", step) for step in STEPS],
    "critic.update": [wait(step, "actor.generate", step + 1) for step in UNVALIDATED],
}
ARMED = {
    "serial": (),
    "gather": ("actor.generate", "rollout.generate"),
    "overlap": ("actor.generate", "critic.update"),
}
# The step of each. The critic waits for its turn when the rollout group dies; with the actor, the other groups go back;
# the rollout group waits for its turn when the critic dies.
KILLED = {"rollout_0-critic_waits_shared": 2, "actor_0-generating_shared": 3, "critic_0-turn_awaited_shared": 4}
DYNAMIC = (
    "run.total_steps=2",
    "rollout.stream_groups=1",
    "algorithm.filter_groups={enable: true, metric: acc}",
    "data.gen_batch_size=12",
)
# Whatever is answered, about half of the prompts have one score.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(letter in ground_truth for letter in solution_str) / 16 if ground_truth[0] < "f" else 0.0
"""


@pytest.fixture(scope="module")
def shared(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of every run in this file."""
    return {**config, **{section: {**config[section], **keys} for section, keys in SHARED.items()}}


@pytest.fixture(scope="module")
def both_pools(shared: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExternalGroups]:
    """One rank each of the three groups."""
    folder = tmp_path_factory.mktemp("both_pools")
    tree = {**shared, "debug": {"failpoints": MEETINGS}}
    with external_groups(tree, folder / "run", allow_shared_devices=True) as groups:
        yield groups


@pytest.fixture(scope="module")
def serial(both_pools: ExternalGroups, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run without any overlap. Only to be read."""
    both_pools.empty()
    with both_pools.started("run.schedule=serial") as controller:
        controller.complete()
    return both_pools.keep(tmp_path_factory.mktemp("serial") / "run")


def spans_of(folder: RunFolder, pool: str, name: str = "") -> list[dict[str, Any]]:
    """The spans of a pool, of one name or all but loading and saving, in the order in which they began."""
    spans = [span for span in folder.spans() if span["pool"] == pool and not span["name"].endswith("_checkpoint")]
    return sorted((span for span in spans if name in ("", span["name"])), key=lambda span: span["start"])


def intersect(span: dict[str, Any], other: dict[str, Any]) -> bool:
    return max(span["start"], other["start"]) < min(span["end"], other["end"])


def assert_takes_turns(folder: RunFolder) -> None:
    rollout, critic = spans_of(folder, "rollout"), spans_of(folder, "critic")
    assert {"sync", "gen", "testing"} == {span["name"] for span in rollout}
    assert {"values", "update_critic"} == {span["name"] for span in critic}
    assert [(span, other) for span in rollout for other in critic if intersect(span, other)] == []


def assert_same_lines(folder: RunFolder, other: RunFolder) -> None:
    names = ("val/accuracy", "critic/score/mean", "actor/loss", "critic/loss")
    lines, others = ([[line.get(name) for name in names] for line in each.metrics] for each in (folder, other))
    assert lines == others


def test_schedules_and_a_resume_end_with_the_same_weights_and_the_critics_core_has_one_user_at_a_time(
    both_pools: ExternalGroups, serial: RunFolder
) -> None:
    both_pools.empty(armed=ARMED["gather"])
    with both_pools.started("run.schedule=gather", "run.stop_after_step=2") as controller:
        controller.complete()
    with both_pools.started("run.schedule=gather") as controller:
        gather = controller.complete()
    digests = [folder.summary["weights_sha256"] for folder in (serial, gather)]
    assert_takes_turns(gather)
    for actor, rollout in zip(spans_of(gather, "actor", "gen"), spans_of(gather, "rollout", "gen"), strict=True):
        assert intersect(actor, rollout), actor["step"]
    assert_same_lines(gather, serial)

    both_pools.empty(armed=ARMED["overlap"])
    with both_pools.started("run.schedule=overlap") as controller:
        overlap = controller.complete()
    digests.append(overlap.summary["weights_sha256"])
    assert_takes_turns(overlap)
    updates, generations = (spans_of(overlap, *of) for of in (("critic", "update_critic"), ("actor", "gen")))
    for step in UNVALIDATED:
        assert intersect(updates[step - 1], generations[step]), step
    assert_same_lines(overlap, serial)
    assert digests == digests[:1] * 3


def test_each_group_samples_its_half_in_parts_and_what_the_actor_would_sample_alone(
    serial: RunFolder, completed: Callable[[str, int], RunFolder]
) -> None:
    cuts: dict[int, list[list[int]]] = {}
    for span in read_trace(serial.path / "trace.json"):
        if span.name == "gen":
            assert len(span.parts) == NUM_PARTS / 2
            cuts.setdefault(span.step, []).append([place for part in span.parts for place in part])
    assert cuts.keys() == {*STEPS}
    for actors, groups in cuts.values():
        assert len(actors) == len(groups)
        assert sorted(actors + groups) == list(range(len(actors) * 2))
    # Both are sampled by the initial weights: the actor learns from step 2 on.
    for ours, alone in zip(serial.metrics[1:3], completed("gather", 1).metrics[1:3], strict=True):
        for name in ("critic/score/mean", "critic/score/min", "response_length/mean", "prompt_length/mean"):
            assert ours[name] == pytest.approx(alone[name]), name


@pytest.mark.extended
def test_the_loss_of_each_group_while_rollouts_are_sampled_changes_no_weight(
    shared: dict[str, Any], serial: RunFolder, tmp_path: Path
) -> None:
    cells = [{cell.name: cell for cell in share_cells(step)}[name] for name, step in KILLED.items()]
    verdict = run_cells(cells, with_incidents(shared), tmp_path / "run")
    assert verdict.failures(serial.summary["weights_sha256"]) == []
    log = verdict.folder.log("controller_0")
    assert log.count("starting the rollout group again in ") == 1
    assert log.count("recovering in ") == 2


@pytest.mark.extended
def test_dynamic_sampling_is_dealt_to_both_groups(both_pools: ExternalGroups, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    overrides = (*DYNAMIC, f"reward.custom_function_path={tmp_path / 'reward.py'}")
    digests = []
    for schedule in ("serial", "overlap"):
        both_pools.empty(armed=ARMED[schedule])
        with both_pools.started(*overrides, f"run.schedule={schedule}") as controller:
            folder = controller.complete()
        digests.append(folder.summary["weights_sha256"])
        num_rounds = sum(line["train/num_gen_batches"] for line in folder.metrics[1:])
        assert num_rounds > 2
        assert all(len(spans_of(folder, pool, "gen")) == num_rounds for pool in ("actor", "rollout"))
    assert digests == digests[:1] * 2


@pytest.mark.extended
def test_greedy_rollouts_are_dealt_to_both_groups_which_share_no_device_without_a_critic(
    shared: dict[str, Any], tmp_path: Path
) -> None:
    remax = ("algorithm.adv_estimator=remax", "run.total_steps=2")
    digests = []
    for schedule in ("serial", "gather"):
        with started(shared, tmp_path / schedule, *remax, f"run.schedule={schedule}") as controller:
            folder = controller.complete()
        digests.append(folder.summary["weights_sha256"])
        spans = [span for span in read_trace(folder.path / "trace.json") if span.name == "gen"]
        assert sorted(span.pool for span in spans) == ["actor"] * 4 + ["rollout"] * 4  # responses, greedy ones
    assert digests == digests[:1] * 2
