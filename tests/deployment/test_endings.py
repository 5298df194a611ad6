"""Deployments that do not train to their end: refused, failed, or with a controller that is killed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployment.stack import ALL_PROFILES, ENGINE_TIMEOUT_S, FOLDER, REWARD_GROUP, Stack

pytestmark = [pytest.mark.docker, pytest.mark.extended, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def stack(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A project whose model and certificates are made once."""
    stack = Stack(tmp_path_factory.mktemp("endings") / "run")
    try:
        yield stack
    finally:
        stack.down()


def configure(stack: Stack, run: str, overrides: str, *, profile: str = "") -> None:
    stack.compose(*ALL_PROFILES, "down")  # the volumes stay
    stack.environment |= {"RUN": run, "OVERRIDES": overrides, "COMPOSE_PROFILES": profile}


def test_a_group_that_refuses_its_input_is_not_started_again_and_says_why(stack: Stack) -> None:
    configure(stack, "refused", "actor.lr=-1")
    ended = stack.compose("up", "--detach", "--no-build", check=False)
    assert ended.returncode != 0
    for role in ("actor", "critic"):
        stack.wait_for(lambda role=role: not stack.state(role, ".State.Running"), f"the end of the {role}")
        assert (stack.state(role, ".State.ExitCode"), stack.state(role, ".RestartCount")) == (0, 0)
    assert re.search("key 'actor.lr': .*, got -1", stack.logs("actor"))
    assert not stack.state("controller", ".State.Running")


def test_a_reward_group_that_the_recipe_does_not_have_says_so_and_is_not_started_again(stack: Stack) -> None:
    configure(stack, "no-reward-group", "", profile="reward")
    stack.compose("up", "--detach", "--no-build", "reward")
    stack.wait_for(lambda: not stack.state("reward", ".State.Running"), "the end of the reward group")
    assert (stack.state("reward", ".State.ExitCode"), stack.state("reward", ".RestartCount")) == (0, 0)
    assert "this run has no reward group: reward_model.model is ''" in stack.logs("reward")


def test_a_rollout_group_that_nobody_was_told_of_says_so_and_is_not_started_again(stack: Stack) -> None:
    configure(stack, "no-rollout-group", "")
    stack.compose("up", "--detach", "--no-build", "rollout")  # Compose starts it, since it is named
    stack.environment["COMPOSE_PROFILES"] = "rollout"  # else Compose says that there is no such service
    stack.wait_for(lambda: not stack.state("rollout", ".State.Running"), "the end of the rollout group")
    assert (stack.state("rollout", ".State.ExitCode"), stack.state("rollout", ".RestartCount")) == (0, 0)
    assert "error: COMPOSE_PROFILES is '', expected rollout in it" in stack.logs("rollout")


def test_a_controller_whose_reward_group_is_not_there_says_so(stack: Stack, tmp_path: Path) -> None:
    stack.add_reward_model(tmp_path)
    configure(stack, "reward-group-missing", f"{REWARD_GROUP} run.total_steps=1 services.start_timeout_s=60")
    stack.up()
    assert stack.wait_controller() == 2
    assert "the reward at reward:7003 cannot be reached within 60 s" in stack.logs("controller")


def test_a_reward_group_whose_rank_is_killed_is_started_again_and_the_run_goes_on(stack: Stack, tmp_path: Path) -> None:
    overrides = f"{REWARD_GROUP} run.total_steps=4 evaluation.min_accuracy=0"
    configure(stack, "reward-group-killed", overrides, profile="reward")
    stack.add_reward_model(tmp_path)
    stack.up()
    stack.wait_for_step(1)
    (pid,) = [process["pid"] for process in stack.fetch_run("processes.json").processes if process["role"] == "reward"]
    stack.run_python("reward", f"import os, signal; os.kill({pid}, signal.SIGKILL)")
    assert stack.wait_controller() == 0
    restarts = {role: stack.state(role, ".RestartCount") for role in ("actor", "critic", "reward")}
    assert restarts == {"actor": 0, "critic": 0, "reward": 1}
    assert stack.fetch_run().summary["global_step"] == 4


def test_a_rollout_group_with_weights_in_memory_is_killed_and_no_other_group_goes_back(
    images: None, tmp_path: Path
) -> None:
    overrides = "run.total_steps=4 checkpoint.save_freq=100 evaluation.min_accuracy=0"
    settings = {"COMPOSE_PROFILES": "rollout", "OVERRIDES": overrides}
    stack = Stack(tmp_path / "run", settings, files=("compose.memory.yaml",))
    try:
        stack.up()
        stack.wait_for_step(1)
        (pid,) = [entry["pid"] for entry in stack.fetch_run("processes.json").processes if entry["role"] == "rollout"]
        stack.run_python("rollout", f"import os, signal; os.kill({pid}, signal.SIGKILL)")
        assert stack.wait_controller() == 0
        restarts = {role: stack.state(role, ".RestartCount") for role in ("actor", "critic", "rollout")}
        assert restarts == {"actor": 0, "critic": 0, "rollout": 1}
        versions = stack.run_python("actor", "import os; print(sorted(os.listdir('/weights')))")
        said, summary = stack.logs("controller"), stack.fetch_run().summary
    finally:
        stack.down()
    assert "version_" in versions
    assert "starting the rollout group again in" in said
    assert "recovering in" not in said
    assert summary["global_step"] == 4


def test_the_exit_code_of_a_run_that_fails_is_the_scripts_and_the_containers_are_gone(stack: Stack) -> None:
    configure(stack, "failed", "run.total_steps=1 evaluation.min_accuracy=0.99")
    script = [str(FOLDER / "run.sh")]
    done = subprocess.run(script, env=stack.environment, capture_output=True, text=True, timeout=ENGINE_TIMEOUT_S)
    assert done.returncode == 1, done.stderr
    assert "expected evaluation.min_accuracy (0.99) or more" in done.stdout + done.stderr
    assert all("_" in name for name in stack.left())  # volumes alone


def test_a_controller_that_is_killed_resumes_inside_its_container(stack: Stack, tmp_path: Path) -> None:
    configure(stack, "killed", "run.total_steps=6 checkpoint.save_freq=1 evaluation.min_accuracy=0")
    stack.up()
    stack.wait_for_step(2)
    (pid,) = [
        process["pid"] for process in stack.fetch_run("processes.json").processes if process["role"] == "controller"
    ]
    stack.run_python("controller", f"import os, signal; os.kill({pid}, signal.SIGKILL)")
    assert stack.wait_controller() == 0
    assert "the controller was killed: starting it again (1 of 5), to resume the run" in stack.logs("controller")
    assert stack.fetch_run().summary["global_step"] == 6
