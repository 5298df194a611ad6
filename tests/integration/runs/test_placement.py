"""Runs have the same weights, wherever the frozen reference computes and wherever weights lie while they wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitppo.config import load_config
from tests.integration.runs.conftest import UNSTREAMED
from tests.kill_matrix.cells import Cell
from tests.kill_matrix.harness import run_cells, undisturbed_digests, with_incidents
from tests.support.runs import RunFolder, started

ON_THE_CRITIC = "placement.reference=critic"
SCHEDULES = ("serial", "gather", "overlap")

pytestmark = pytest.mark.timeout(600)


@pytest.mark.extended
def test_a_reference_on_the_critic_gives_the_weights_of_one_on_the_actor(
    config: dict[str, Any], unstreamed: RunFolder, tmp_path: Path
) -> None:
    with started(config, tmp_path / "run", *UNSTREAMED, ON_THE_CRITIC) as controller:
        folder = controller.complete()

    assert folder.summary["weights_sha256"] == unstreamed.summary["weights_sha256"]
    for run, host in ((unstreamed, "actor"), (folder, "critic")):
        assert {span["pool"] for span in run.spans() if span["name"] == "ref"} == {host}
    assert load_config(folder.path / "config.yaml").placement.reference == "critic"
    kl = [[line["actor/reward_kl_penalty"] for line in run.metrics[1:]] for run in (unstreamed, folder)]
    assert len(kl[0]) == 2
    assert kl[0] == kl[1]


@pytest.mark.extended
def test_weights_that_rest_give_the_weights_of_those_that_stay(
    config: dict[str, Any], unstreamed: RunFolder, tmp_path: Path
) -> None:
    keys = [f"{role}.param_offload=true" for role in ("actor", "critic")]
    with started(config, tmp_path / "run", *UNSTREAMED, *keys, "placement.reference_param_offload=true") as controller:
        folder = controller.complete()

    assert folder.summary["weights_sha256"] == unstreamed.summary["weights_sha256"]
    for role in ("actor", "critic"):
        assert (folder.path / "logs" / f"{role}_0.log").read_text().count("saves nothing on a CPU") == 1


@pytest.fixture(scope="module")
def kl_everywhere(config: dict[str, Any]) -> dict[str, Any]:
    """KL in the reward and in the loss, without streaming; a checkpoint of every step."""
    sections = {"rollout": {"stream_groups": 1}, "actor": {"use_kl_loss": True, "kl_loss_coef": 0.1}}
    changed = {name: {**config[name], **section} for name, section in sections.items()}
    return with_incidents({**config, **changed, "run": {"total_steps": 3}})


@pytest.fixture(scope="module")
def on_the_actor(kl_everywhere: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return undisturbed_digests(kl_everywhere, tmp_path_factory.mktemp("on_the_actor") / "run")


@pytest.mark.extended
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_kl_in_reward_and_loss_give_the_same_weights_under_every_schedule(
    kl_everywhere: dict[str, Any], on_the_actor: dict[str, str], tmp_path: Path, schedule: str
) -> None:
    with started(kl_everywhere, tmp_path / "run", ON_THE_CRITIC, f"run.schedule={schedule}") as controller:
        folder = controller.complete()
    assert folder.summary["weights_sha256"] == on_the_actor
    assert all(line["actor/kl_loss"] > 0.0 for line in folder.metrics[1:])


@pytest.mark.extended
def test_a_critic_that_dies_while_it_computes_the_reference_costs_no_more_than_time(
    kl_everywhere: dict[str, Any], on_the_actor: dict[str, str], tmp_path: Path
) -> None:
    cell = Cell("critic_0", "computing_ref_log_probs", "critic.compute_ref_log_probs", step=2)
    verdict = run_cells([cell], {**kl_everywhere, "placement": {"reference": "critic"}}, tmp_path / "run")
    assert verdict.failures(on_the_actor) == []
