"""`docker compose up` as a user types it: the quickstart learns in containers, also after kills and restarts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitppo import __version__
from splitppo.v1 import worker_pb2, worker_pb2_grpc
from tests.deployment.stack import REWARD_GROUP, Stack, docker
from tests.support import hostile_code
from tests.support.groups import PROJECT, free_address
from tests.support.ports import is_loopback, read_tables
from tests.support.runs import RunFolder

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]
GROUPS = ("actor", "critic")
MORE_GROUPS = ("reward", "rollout")
NUM_STEPS = 25  # more than the quickstart has: room for one incident after the other
LONGER = f"run.total_steps={NUM_STEPS}"
PERIOD = 2  # steps between incidents
PREPARED = "sort_letters"  # model and prompts
# Of the run with all groups: the responses of its second step are sampled with weights that the first has published.
ALL_GROUPS = f"{REWARD_GROUP} run.total_steps=2 evaluation.val_before_train=false evaluation.min_accuracy=0"


@dataclass
class Story:
    """The observations of a quickstart that was disturbed."""

    stack: Stack
    run: RunFolder
    folder: Path
    health: dict[str, int] = field(default_factory=dict)
    status_without_token: dict[str, grpc.StatusCode] = field(default_factory=dict)
    listening: dict[str, set[str]] = field(default_factory=dict)
    restarts_after_kill: dict[str, int] = field(default_factory=dict)
    exit_codes_after_stop: dict[str, int] = field(default_factory=dict)
    viewed: list[dict[str, Any]] = field(default_factory=list)
    status_of_viewer_without_token: int = 0
    num_drained: dict[str, int] = field(default_factory=dict)
    step_when_stopped: int = 0
    saved_when_stopped: list[int] = field(default_factory=list)
    exit_code: int | None = None
    left_after_down: list[str] = field(default_factory=list)
    health_of_more_groups: dict[str, str] = field(default_factory=dict)
    of_all_groups: RunFolder | None = None
    exit_code_of_all_groups: int | None = None


@pytest.fixture(scope="module")
def story(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """One run: a rank is killed, a container stopped and started, all are stopped, started again and removed."""
    folder = tmp_path_factory.mktemp("deployment")
    stack = Stack(folder / "run", {"OVERRIDES": LONGER})
    try:
        yield tell(stack, folder)
    finally:
        stack.down()


def tell(stack: Stack, folder: Path) -> Story:
    stack.up()
    story = Story(stack, stack.folder, folder)
    ask_from_outside(story, folder)
    step = stack.wait_for_step(PERIOD)
    tables = "print(open('/proc/net/tcp').read(), open('/proc/net/tcp6').read())"
    story.listening = {role: {address for address, _ in read_tables(stack.run_python(role, tables))} for role in GROUPS}

    (pid,) = [process["pid"] for process in stack.fetch_run("processes.json").processes if process["role"] == "actor"]
    stack.run_python("actor", f"import os, signal; os.kill({pid}, signal.SIGKILL)")
    stack.wait_for(lambda: stack.state("actor", ".RestartCount"), "the actor's group starts again")
    stack.wait_for(lambda: recoveries(stack) >= 1, "the run recovers from the kill")
    step = stack.wait_for_step(step + PERIOD)
    story.restarts_after_kill = {role: stack.state(role, ".RestartCount") for role in GROUPS}

    stack.compose("stop", "critic")
    stack.compose("start", "critic")
    stack.wait_for(lambda: recoveries(stack) >= 2, "the run recovers from the critic's absence")
    stack.wait_for_step(step + PERIOD)

    stack.compose("stop")
    story.exit_codes_after_stop = {name: stack.state(name, ".State.ExitCode") for name in (*GROUPS, "controller")}
    story.num_drained = {role: stack.logs(role).count("services.runtime.launch: leaving") for role in GROUPS}
    stopped = stack.fetch_run()
    story.step_when_stopped, story.saved_when_stopped = stopped.steps[-1], stopped.committed_steps

    stack.up()
    story.exit_code = stack.wait_controller()
    stack.fetch_run()
    view(story)
    stack.copy("controller", "/models/sort_letters", folder / PREPARED)
    start_with_all_groups(stack, folder)
    story.exit_code_of_all_groups = stack.wait_controller()
    story.health_of_more_groups = {role: stack.state(role, ".State.Health.Status") for role in MORE_GROUPS}
    story.of_all_groups = stack.fetch_run()
    stack.down()
    story.left_after_down = stack.left()
    return story


def recoveries(stack: Stack) -> int:
    """Returns the number of recoveries of the run so far."""
    lines = stack.fetch_run("metrics.jsonl").metrics
    return max((int(line.get("recovery/num_restarts", 0)) for line in lines), default=0)


def ask_from_outside(story: Story, folder: Path) -> None:
    """Asks both groups through their ports on this machine, with nothing but grpcio and the pair `health`."""
    secrets = story.stack.copy("actor", "/secrets", folder / "secrets")
    ca, key, certificate = ((secrets / name).read_bytes() for name in ("ca.pem", "health.key", "health.pem"))
    for role in GROUPS:
        port = story.stack.addresses[role].rpartition(":")[2]
        with grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(ca, key, certificate)) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
            story.health[role] = reply.status
            with pytest.raises(grpc.RpcError) as refused:
                worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(worker_pb2.GetStatusRequest(), timeout=60)
            story.status_without_token[role] = refused.value.code()


def view(story: Story) -> None:
    """Asks the viewer's container from this machine, as a browser does with the address that the log has."""
    stack = story.stack
    stack.environment["VIEWER_PORT"] = free_address().rpartition(":")[2]
    stack.compose("--profile", "viewer", "up", "--detach", "--no-build", "viewer")
    said = stack.wait_for(
        lambda: re.search(r"(http://127\.0\.0\.1:\d+)/#token=(\S+)", stack.logs("viewer")), "the address"
    )
    with pytest.raises(HTTPError) as refused:
        urlopen(f"{said[1]}/api/runs", timeout=60)
    story.status_of_viewer_without_token = refused.value.code
    for path in ("runs", "runs/0", f"runs/0/train/{NUM_STEPS}"):
        asked = Request(f"{said[1]}/api/{path}", headers={"Authorization": f"Bearer {said[2]}"})
        with urlopen(asked, timeout=60) as answer:
            story.viewed.append(json.load(answer))
    stack.compose("rm", "--stop", "--force", "viewer")


def start_with_all_groups(stack: Stack, folder: Path) -> None:
    """Another run in the same project, with a reward model and a sampler in containers of their own."""
    stack.add_reward_model(folder)
    profiles = ",".join(MORE_GROUPS)
    stack.environment |= {"COMPOSE_PROFILES": profiles, "RUN": "all-groups", "OVERRIDES": ALL_GROUPS}
    stack.folder = RunFolder(folder / "all-groups")
    stack.up()


def run_locally(story: Story, name: str, *overrides: str) -> RunFolder:
    """The same recipe without containers and without incidents, on the model and the prompts that were prepared."""
    folder, prepared = story.folder / name, story.folder / PREPARED
    placed = [
        f"run.dir={folder}",
        f"actor.model={prepared / 'model'}",
        *(f"data.{name}_files={prepared / name}.parquet" for name in ("train", "val")),
    ]
    command = [sys.executable, "-m", "controller", "--config", "recipes/sort_letters/cpu.yaml", *placed, *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, cwd=PROJECT, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=600)
    return RunFolder(folder)


def test_the_images_say_their_version_run_without_rights_and_the_controllers_is_the_small_one(images: None) -> None:
    sizes = {}
    for kind in ("controller", "worker"):
        image = json.loads(docker("image", "inspect", f"splitppo-{kind}:{__version__}"))[0]
        assert image["Config"]["User"] == "10001:10001"
        assert image["Config"]["Labels"]["org.opencontainers.image.version"] == __version__
        sizes[kind] = image["Size"]
    assert sizes["controller"] <= sizes["worker"] / 2


@pytest.mark.parametrize("role", GROUPS)
def test_a_stock_client_outside_sees_healthy_groups_with_the_pair_for_health_alone(story: Story, role: str) -> None:
    assert story.health[role] == health_pb2.HealthCheckResponse.SERVING
    assert story.status_without_token[role] == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(("role", "port"), [("actor", 7001), ("critic", 7002)])
def test_no_other_container_hears_more_than_the_services_port(story: Story, role: str, port: int) -> None:
    reachable = {address for address in story.listening[role] if not is_loopback(address)}
    assert len(story.listening[role]) > len(reachable), "the group's own store is on loopback"
    assert {int(address.rpartition(":")[2]) for address in reachable} == {port}


def test_a_rank_that_is_killed_restarts_its_own_container_alone(story: Story) -> None:
    assert story.restarts_after_kill == {"actor": 1, "critic": 0}


def test_a_container_that_is_stopped_and_started_costs_the_run_a_recovery(story: Story) -> None:
    assert max(line.get("recovery/num_restarts", 0) for line in story.run.metrics) == 2


def test_sigterm_drains_the_groups_and_saves_the_step(story: Story) -> None:
    assert story.exit_codes_after_stop == {"actor": 143, "critic": 143, "controller": 143}
    assert story.num_drained == {"actor": 1, "critic": 2}  # the critic once before; a group that is killed does not
    assert story.saved_when_stopped[-1] == story.step_when_stopped
    assert 0 < story.step_when_stopped < NUM_STEPS


def test_the_next_up_goes_on_and_the_quickstart_learns(story: Story) -> None:
    assert story.exit_code == 0
    assert [step for step in story.run.steps if step] == list(range(1, NUM_STEPS + 1))
    summary = story.run.summary
    assert (summary["exit_reason"], summary["global_step"]) == ("completed", NUM_STEPS)
    assert summary["validation"]["after"]["overall"] >= 0.85


def test_the_viewers_container_shows_the_run_and_asks_for_the_token(story: Story) -> None:
    assert story.status_of_viewer_without_token == 401
    listed, run, step = story.viewed
    assert [(line["name"], line["step"], line["state"]) for line in listed["runs"]] == [
        ("quickstart", NUM_STEPS, "ended")
    ]
    assert run["train"] == [step for step in story.run.steps if step]  # that of step 0 is a validation
    losses = {event["role"] for event in run["events"] if event["kind"] == "group_lost"}
    assert losses == {"actor", "critic"}
    assert any(step["columns"]["why"])


@pytest.mark.extended
def test_the_weights_are_those_of_an_undisturbed_run_without_containers(story: Story) -> None:
    undisturbed = run_locally(story, "undisturbed", LONGER)
    assert story.run.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


def test_a_run_with_a_container_for_each_of_four_groups_is_completed(story: Story) -> None:
    assert story.exit_code_of_all_groups == 0
    assert story.health_of_more_groups == dict.fromkeys(MORE_GROUPS, "healthy")
    assert story.of_all_groups is not None
    assert {process["role"] for process in story.of_all_groups.processes} == {*GROUPS, *MORE_GROUPS, "controller"}


def test_a_reward_group_in_a_container_of_its_own_scores_the_responses(story: Story) -> None:
    assert story.of_all_groups is not None
    metrics = story.of_all_groups.metrics
    assert [line["step"] for line in metrics if line["reward/model/min"] < line["reward/model/max"]] == [1, 2]


def test_a_rollout_group_in_a_container_of_its_own_samples_the_responses(story: Story) -> None:
    assert story.of_all_groups is not None
    metrics = story.of_all_groups.metrics
    assert [line["step"] for line in metrics if line["timing_s/publish"] > 0 and line["timing_s/sync"] > 0] == [1, 2]


@pytest.mark.extended
def test_four_groups_in_containers_end_with_the_weights_of_the_same_groups_without_containers(story: Story) -> None:
    assert story.of_all_groups is not None
    model = f"reward_model.model={story.folder / 'reward_model'}"
    one_thread = [f"services.{role}.threads=1" for role in MORE_GROUPS]  # their containers have one core each
    locally = run_locally(story, "locally", *ALL_GROUPS.split(), model, *one_thread)
    of_containers, of_processes = (
        {(process["role"], process["rank"]) for process in run.processes} for run in (story.of_all_groups, locally)
    )
    assert of_containers == of_processes
    assert story.of_all_groups.summary["weights_sha256"] == locally.summary["weights_sha256"]


def test_code_answers_are_contained_in_the_controllers_container_and_refused_without_leave_for_sandboxes(
    images: None, tmp_path: Path
) -> None:
    source = Path(hostile_code.__file__).read_text(encoding="utf-8")
    asked = ["run", "--rm", "--no-deps", "-T", "-e", f"{hostile_code.SECRET}=of-the-run", "--entrypoint", "python"]
    asked += ["controller", "-c", source, "/app", "/runs", "/secrets", "/recipe.yaml"]
    stacks = [Stack(tmp_path, files=files) for files in ((), ("compose.code.yaml",))]
    try:
        refused, done = [stack.compose(*asked, check=False) for stack in stacks]
    finally:
        for stack in stacks:
            stack.down()
    assert refused.returncode != 0
    assert "code answers cannot be run here: the sandbox ended: bwrap: " in refused.stderr
    assert done.returncode == 0, done.stderr
    results = {name: tuple(result) for name, result in json.loads(done.stdout).items()}
    assert results == hostile_code.expected()


def test_down_with_volumes_leaves_nothing(story: Story) -> None:
    assert story.left_after_down == []
