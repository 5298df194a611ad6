"""Runs in which a teacher's signal is added to advantages or rewards have the same weights wherever it computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.external import ExternalGroups, external_groups
from tests.support.runs import Inputs, RunFolder, started

SHORT = "run.stop_after_step=3"  # the first step trains the critic alone
CONTROL = {"coef": 0.5, "kl_ctrl": "adaptive", "kl_target": 0.001, "kl_horizon": 200}
UNSCORED = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def taught(config: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
    """A run with rewards, a reference, and a teacher on the critic's group whose weight changes from step to step."""
    teacher = {"model": str(inputs.folder / "teacher"), **CONTROL}
    placement = {**config["placement"], "teacher": "critic"}
    without_validation = {"evaluation": {"test_freq": -1, "val_before_train": False}}
    return {**config, **without_validation, "teacher": teacher, "placement": placement}


@pytest.fixture(scope="module")
def groups(taught: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExternalGroups]:
    with external_groups(taught, tmp_path_factory.mktemp("taught") / "run") as groups:
        yield groups


@pytest.fixture(scope="module")
def streamed(groups: ExternalGroups, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run under `overlap`, with the teacher's work behind generation. Only to be read."""
    return groups.completed(tmp_path_factory.mktemp("streamed") / "run", SHORT, "run.schedule=overlap")


def test_one_call_after_the_other_gives_the_weights_of_calls_at_the_same_time(
    groups: ExternalGroups, streamed: RunFolder
) -> None:
    groups.empty()
    with groups.started(SHORT, "run.schedule=serial") as controller:
        folder = controller.complete()
    assert folder.summary["weights_sha256"] == streamed.summary["weights_sha256"]
    for run in (folder, streamed):
        spans = [span for span in run.spans() if span["name"] == "teacher"]
        assert [span["pool"] for span in spans] == ["critic"] * 3 * 2  # parts
    names = ("distillation/kl", "distillation/letters/agreement", "distillation/coef", "critic/score/mean")
    lines = [[[line[name] for name in names] for line in run.metrics] for run in (folder, streamed)]
    assert lines[0] == lines[1]
    coefs = [line[2] for line in lines[0]]
    assert coefs == sorted(coefs)
    assert len(set(coefs)) == 3


@pytest.mark.extended
def test_a_teacher_on_a_group_of_its_own_gives_the_weights_of_one_on_the_critics(
    taught: dict[str, Any], streamed: RunFolder, tmp_path: Path
) -> None:
    with started(taught, tmp_path / "run", SHORT, "run.schedule=gather", "placement.teacher=reward") as controller:
        folder = controller.complete()
    assert folder.summary["weights_sha256"] == streamed.summary["weights_sha256"]
    assert {span["pool"] for span in folder.spans() if span["name"] == "teacher"} == {"reward"}


@pytest.mark.extended
@pytest.mark.parametrize("signal", ["reward", "loss", "top_k"])
@pytest.mark.parametrize("schedule", ["serial", "gather"])
def test_neither_host_nor_schedule_changes_a_weight(
    taught: dict[str, Any], tmp_path: Path, signal: str, schedule: str
) -> None:
    digests = []
    for host in ("actor", "critic", "reward"):
        overrides = (f"teacher.signal={signal}", "teacher.top_k=4", f"placement.teacher={host}")
        parts, calls = "rollout.stream_groups=1", f"run.schedule={schedule}"
        with started(taught, tmp_path / host, SHORT, *overrides, parts, calls) as controller:
            digests.append(controller.complete().summary["weights_sha256"])
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.extended
def test_the_start_of_the_policy_as_a_teacher_gives_the_weights_of_its_kl_in_the_reward(
    taught: dict[str, Any], inputs: Inputs, tmp_path: Path
) -> None:
    (tmp_path / "nothing.py").write_text(UNSCORED)
    fixed = {**taught["algorithm"], "kl_ctrl": "fixed", "use_kl_in_reward": True}
    by_kl = {**taught, "teacher": {}, "algorithm": fixed, "placement": {"reference": "critic"}}
    own = {"model": str(inputs.folder / "policy"), "coef": fixed["kl_coef"], "signal": "reward", "only": True}
    by_teacher = {**taught, "teacher": own, "algorithm": {**fixed, "use_kl_in_reward": False}}
    folders = []
    for name, config in (("kl", by_kl), ("teacher", by_teacher)):
        config = {**config, "reward": {"custom_function_path": str(tmp_path / "nothing.py")}}
        with started(config, tmp_path / name, SHORT, "rollout.stream_groups=1") as controller:
            folders.append(controller.complete())
    assert folders[0].summary["weights_sha256"] == folders[1].summary["weights_sha256"]
    rewards = [[line["critic/rewards/mean"] for line in folder.metrics] for folder in folders]
    assert rewards[0] == rewards[1]
    assert rewards[0][2] != 0.0
    assert [line["critic/score/mean"] for folder in folders for line in folder.metrics] == [0.0] * 6
