"""deploy/slurm on a Slurm cluster: kills, requeues and lost nodes cost time, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.slurm import cluster
from tests.slurm.cluster import TIMEOUT_S, Cluster
from tests.support.groups import PROJECT, wait_until
from tests.support.runs import Inputs, RunFolder, started

pytestmark = [pytest.mark.slurm, pytest.mark.extended, pytest.mark.timeout(900)]

JOB_FILE = "deploy/slurm/splitppo.sbatch"
NUM_STEPS = 24
THREADS = "services.actor.threads=1 services.critic.threads=1"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes: three for a run, one in reserve."""
    if reason := cluster.missing():
        pytest.skip(f"no Slurm here: {reason}")
    with cluster.started(tmp_path_factory.mktemp("slurm"), num_nodes=4, num_gpus=2) as started:
        yield started


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Long enough for one incident after the other."""
    config = Inputs.make(tmp_path_factory.mktemp("inputs")).config()
    return {**config, "run": {"total_steps": NUM_STEPS}, "checkpoint": {"save_freq": 1, "keep": 3}}


class Job:
    """A run submitted by sbatch, as somebody who has logged in on the first node types it."""

    def __init__(self, slurm: Cluster, config: dict[str, Any], folder: Path, *options: str, **settings: str) -> None:
        self._slurm = slurm
        self.folder = RunFolder(folder / "run")
        self.log = folder / "job.log"
        recipe = folder / "recipe.yaml"
        recipe.write_text(yaml.safe_dump({**config, "run": {**config["run"], "dir": "elsewhere"}}))
        own = {"RECIPE": recipe, "RUN_DIR": self.folder.path, "PYTHON": sys.executable, "GPUS_PER_NODE": "0"}
        variables = [f"{name}={value}" for name, value in {**own, "OVERRIDES": THREADS, **settings}.items()]
        submit = ["sbatch", "--parsable", f"--chdir={PROJECT}", f"--output={self.log}", *options, JOB_FILE]
        self.number = slurm.on("node1", "env", *variables, *submit)

    def wait_for(self, condition: Callable[[RunFolder], Any], what: str) -> Any:
        """Waits for something in the run folder."""

        def holds() -> Any:
            assert self.field("JobState") not in ("FAILED", "COMPLETED"), f"{what}:\n{self.output}"
            return condition(self.folder)

        return wait_until(holds, TIMEOUT_S, what)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda folder: folder.steps and folder.steps[-1] >= step, f"step {step}")

    def field(self, name: str) -> str:
        return self._slurm.job(self.number)[name]

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def last_step(self) -> int:
        return self.folder.steps[-1]


@pytest.fixture(scope="module")
def undisturbed(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The weights of the same run on one machine, without Slurm."""
    services = {**config["services"], "actor": {"num_processes": 2}}
    with started({**config, "services": services}, tmp_path_factory.mktemp("undisturbed") / "run") as controller:
        digests: dict[str, str] = controller.complete().summary["weights_sha256"]
    return digests


def test_what_is_killed_a_job_that_is_queued_again_and_a_lost_node_leave_the_weights_as_they_are(
    slurm: Cluster, config: dict[str, Any], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    job = Job(slurm, config, tmp_path, "--nodes=3")

    job.wait_for_step(2)
    rank = next(process for process in job.folder.processes if (process["role"], process["rank"]) == ("actor", 1))
    assert rank["host"] == "node2"
    slurm.on("node2", "kill", "-9", str(rank["pid"]))
    job.wait_for_step(job.last_step() + 3)
    assert "the actor group has ended with exit code" in job.output

    (controller,) = [process for process in job.folder.processes if process["role"] == "controller"]
    slurm.on("node1", "kill", "-9", str(controller["pid"]))
    job.wait_for(lambda _: "the controller was killed: starting it again" in job.output, "another controller")
    job.wait_for_step(job.last_step() + 2)
    assert job.field("Restarts") == "0"

    slurm.on("node1", "scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(lambda _: job.field("Restarts") == "1", "the job queued again")
    saved = job.folder.committed_steps[-1]
    assert saved == job.last_step(), "what was worked on has been finished and saved"
    job.wait_for_step(saved + 2)

    slurm.switch_off("node2")
    job.wait_for(lambda _: job.field("Restarts") == "2", "the job without its lost node queued again")
    fields = slurm.wait_for_end(job.number)

    assert fields["JobState"] == "COMPLETED", job.output
    assert fields["NodeList"] == "node[1,3-4]"
    assert job.folder.summary["weights_sha256"] == undisturbed
    assert job.folder.steps == list(range(NUM_STEPS + 1))


def test_a_job_whose_groups_do_not_fit_its_nodes_ends_with_one_sentence(
    slurm: Cluster, config: dict[str, Any], tmp_path: Path
) -> None:
    job = Job(slurm, config, tmp_path, "--nodes=2")
    fields = slurm.wait_for_end(job.number)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "2:0")
    names = "ACTOR_NODES + CRITIC_NODES + REWARD_NODES + ROLLOUT_NODES"
    assert f"error: the job has 2 nodes, but {names} is 2 + 1 + 0 + 0 = 3" in job.output
    assert not job.folder.path.exists()


def test_a_group_that_refuses_its_input_ends_the_job(slurm: Cluster, config: dict[str, Any], tmp_path: Path) -> None:
    # GPUs that Slurm has given away and nobody has plugged in.
    job = Job(slurm, config, tmp_path, "--nodes=3", "--gpus-per-node=2", GPUS_PER_NODE="2")
    fields = slurm.wait_for_end(job.number)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "2:0"), job.output
    assert "but this machine offers 0 GPUs" in job.output
    assert "starting it again" not in job.output.split("but this machine offers 0 GPUs")[0]
