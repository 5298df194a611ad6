"""The job of deploy/slurm: the nodes of its groups, and mistakes that are refused before anything starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deploy.slurm.placement import main, place
from splitppo.config import Config, load_config
from tests.support.groups import PROJECT

JOB_FILE = PROJECT / "deploy/slurm/splitppo.sbatch"
NODES = ("gpu-3", "gpu-4", "gpu-7")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """Returns the variables that the job file exports."""
    return {
        "RECIPE": str(PROJECT / "recipes/gsm8k/qwen2.5-0.5b.yaml"),
        "RUN_DIR": str(tmp_path / "run"),
        "ACTOR_NODES": "2",
        "CRITIC_NODES": "1",
        "REWARD_NODES": "0",
        "ROLLOUT_NODES": "0",
        "GPUS_PER_NODE": "8",
        "OVERRIDES": "",
        "SECRETS": "",
    }


def placed(settings: dict[str, str]) -> Config:
    return load_config(Path(settings["RECIPE"]), place(NODES, settings))


def test_groups_follow_each_other_on_the_nodes_of_the_job(settings: dict[str, str], tmp_path: Path) -> None:
    services = placed(settings).services
    assert (services.launch, services.actor.address, services.critic.address) == (
        "external",
        "gpu-3:7001",
        "gpu-7:7002",
    )
    assert (services.actor.num_processes, services.critic.num_processes) == (16, 8)
    assert (services.actor.nnodes, services.actor.master_addr) == (2, "gpu-3")
    assert services.actor.devices == services.critic.devices == tuple(range(8))
    assert placed({**settings, "GPUS_PER_NODE": "0"}).services.actor.num_processes == 2
    assert services.rollout is None
    rollout = placed({**settings, "ACTOR_NODES": "1", "ROLLOUT_NODES": "1"}).services.of("rollout")
    assert (rollout.address, rollout.num_processes, rollout.devices) == ("gpu-7:7004", 8, tuple(range(8)))


def test_secrets_are_made_once_for_the_nodes_of_the_job_and_for_their_owner(
    settings: dict[str, str], tmp_path: Path
) -> None:
    place(NODES, settings)
    secrets = tmp_path / "run" / "secrets"
    before = {name: (secrets / name).read_bytes() for name in ("ca.pem", "actor.pem", "token")}
    assert (secrets / "actor.key").stat().st_mode & 0o777 == 0o600
    place(NODES, settings)
    assert {name: (secrets / name).read_bytes() for name in before} == before
    place(("gpu-8", "gpu-9", "gpu-10"), settings)
    changed = {name for name in before if (secrets / name).read_bytes() != before[name]}
    assert changed == {"actor.pem"}, "a job that is queued again may be on other nodes; the authority stays"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"ACTOR_NODES": "3"},
            "the job has 3 nodes, but ACTOR_NODES + CRITIC_NODES + REWARD_NODES + ROLLOUT_NODES is 3 + 1 + 0 + 0 = 4:"
            " sbatch --nodes 4",
        ),
        ({"CRITIC_NODES": "one"}, "CRITIC_NODES is 'one', expected a number"),
        (
            {"ACTOR_NODES": "1", "REWARD_NODES": "1"},
            "REWARD_NODES is 1, but this recipe has no group reward: expected 0",
        ),
        (
            {"ACTOR_NODES": "3", "CRITIC_NODES": "0"},
            "CRITIC_NODES is 0, but this recipe has a group critic: expected 1 or more",
        ),
        (
            {"OVERRIDES": "services.rollout.num_processes=8"},
            "ROLLOUT_NODES is 0, but this recipe has a group rollout: expected 1 or more",
        ),
        ({"OVERRIDES": "actor.ppo_mini_batch_size=70"}, "ppo_mini_batch_size"),
        ({"OVERRIDES": "actor.lrr=1"}, "unknown key 'actor.lrr'"),
    ],
)
def test_a_job_that_cannot_run_is_one_sentence(
    changed: dict[str, str], sentence: str, settings: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(NODES, {**settings, **changed}) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


def test_secrets_of_ones_own_are_used_and_none_are_made(settings: dict[str, str], tmp_path: Path) -> None:
    assert main(NODES, {**settings, "SECRETS": str(tmp_path / "own")}) == 0
    assert not (tmp_path / "run").exists()
    assert placed({**settings, "SECRETS": str(tmp_path / "own")}).services.security.ca_file == tmp_path / "own/ca.pem"


def test_a_recipe_that_names_another_number_of_nodes_is_refused(
    settings: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(Path(settings["RECIPE"]).read_text().replace("  actor:\n", "  actor:\n    nnodes: 3\n"))
    assert main(NODES, {**settings, "RECIPE": str(recipe)}) == 2
    assert "ACTOR_NODES is 2, but services.actor.nnodes of this recipe is 3" in capsys.readouterr().err


def test_the_job_file_is_a_script_that_bash_understands() -> None:
    assert subprocess.run(["bash", "-n", str(JOB_FILE)], capture_output=True, text=True).stderr == ""
