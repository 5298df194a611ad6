"""The entry point of the pods: the commands that it runs or refuses, and the end of a group."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from deploy.checks import Refused
from deploy.k8s import entrypoint
from deploy.k8s.entrypoint import RunsEnd, command_of, main, run_group
from deploy.processes import Child
from splitppo.config import load_config
from tests.support.groups import PROJECT

SETTINGS = {
    "RECIPE": entrypoint.QUICKSTART,
    "RUN": "one",
    **{f"{role}_{what}": "1" if what == "NODES" else "0" for role in ("ACTOR", "CRITIC") for what in ("NODES", "GPUS")},
    **{f"{role}_{what}": "0" for role in ("REWARD", "ROLLOUT") for what in ("NODES", "GPUS")},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folders that a pod mounts, each as it should be."""
    (tmp_path / entrypoint.PREPARED).mkdir(parents=True)
    (tmp_path / "secrets").mkdir()
    for name in ("ca.pem", "token", *(f"{role}.{kind}" for role in entrypoint.ROLES for kind in ("pem", "key"))):
        (tmp_path / "secrets" / name).touch()
    recipe = tmp_path / entrypoint.QUICKSTART.lstrip("/")
    recipe.parent.mkdir(parents=True)
    recipe.write_text((PROJECT / "recipes/sort_letters/cpu.yaml").read_text())
    return tmp_path


@pytest.mark.parametrize("role", ["actor", "critic", "controller"])
def test_the_quickstart_is_placed_behind_services_and_in_the_claim(role: str, root: Path) -> None:
    command = command_of(role, [], {**SETTINGS, "OVERRIDES": "run.seed=7"}, root)
    assert command is not None
    start = command.index("--config")
    assert command[1:start] == ["-m", "controller" if role == "controller" else f"services.{role}"]
    config = load_config(root / command[start + 1].lstrip("/"), command[start + 2 :])
    assert (str(config.run.dir), config.run.seed) == ("/storage/runs/one", 7)
    assert config.actor.model == "/storage/prepared/sort_letters/model"
    assert (config.services.launch, config.services.security.tls) == ("external", True)
    assert (config.services.critic.bind, config.services.critic.address) == ("0.0.0.0:7002", "critic:7002")
    assert (config.services.actor.num_processes, config.services.actor.devices) == (1, ())
    assert config.services.rollout is None


def test_pods_of_a_rollout_group_give_the_run_one(root: Path) -> None:
    config = load_config(
        root / entrypoint.QUICKSTART.lstrip("/"),
        entrypoint.common_overrides({**SETTINGS, "ROLLOUT_NODES": "1", "ROLLOUT_GPUS": "2"}),
    )
    assert config.services.rollout is not None
    assert (config.services.rollout.address, config.services.rollout.devices) == ("rollout:7004", (0, 1))


def test_everybody_waits_as_long_for_pods_that_have_no_node_yet_unless_told_otherwise() -> None:
    """A controller that gave up earlier would end with 2, and its Job for good."""
    base = yaml.safe_load((PROJECT / "deploy/k8s/base/group.yaml").read_text())
    (container,) = base["spec"]["template"]["spec"]["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == entrypoint.START_TIMEOUT_S
    recipe = PROJECT / "recipes/sort_letters/cpu.yaml"

    def start_timeout_s(given: str) -> float:
        said = entrypoint.common_overrides({**SETTINGS, "OVERRIDES": given})
        return load_config(recipe, said).services.start_timeout_s

    assert start_timeout_s("") == entrypoint.START_TIMEOUT_S
    assert start_timeout_s("services.start_timeout_s=60") == 60.0


def test_pods_of_one_group_meet_at_the_first_once_its_name_is_its_own(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    answers = [OSError("not known yet"), "10.0.0.9", "10.0.0.1"]  # an earlier pod's address comes first

    def look_up(name: str, _: object) -> list[tuple[object, ...]]:
        asked.append(name)
        answer = answers[len(asked) - 1]
        if isinstance(answer, OSError):
            raise answer
        return [(2, 1, 6, "", (answer, 0))]

    monkeypatch.setattr(entrypoint.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(entrypoint, "POLL_INTERVAL_S", 0.0)
    pods = {**SETTINGS, "ACTOR_NODES": "2", "ACTOR_GPUS": "4", "JOB_COMPLETION_INDEX": "0", "POD_IP": "10.0.0.1"}
    command = command_of("actor", [], pods, root)
    assert asked == ["actor-0.actor-nodes"] * 3
    assert command is not None
    actor = load_config(
        root / entrypoint.QUICKSTART.lstrip("/"), command[command.index("--config") + 2 :]
    ).services.actor
    assert (actor.num_processes, actor.nnodes, actor.devices) == (8, 2, (0, 1, 2, 3))
    assert (actor.master_addr, actor.address) == ("actor-0.actor-nodes", "actor:7001")


def test_a_name_that_stays_unknown_is_refused(root: Path) -> None:
    pods = {**SETTINGS, "JOB_COMPLETION_INDEX": "1", "POD_IP": "10.0.0.1"}
    place = entrypoint.GroupPlace("actor", 2, None, "actor-0.invalid")
    with pytest.raises(Refused, match=r"^actor-0\.invalid is unknown after 0 s, expected an address: the Service"):
        entrypoint.wait_for_name(place, pods, timeout_s=0.0)


@pytest.mark.parametrize(
    ("role", "settings", "sentence"),
    [
        ("trainer", {}, "expected one of actor, critic, reward, rollout, controller, prepare, got 'trainer'"),
        ("actor", {"ACTOR_NODES": "x"}, "ACTOR_NODES is 'x', expected a number"),
        ("critic", {"RECIPE": "mine.yaml"}, "RECIPE is 'mine.yaml', expected a file in the pod"),
        ("critic", {"RECIPE": "/recipe/mine.yaml"}, "RECIPE is '/recipe/mine.yaml', expected a file in the pod"),
        ("reward", {}, "REWARD_NODES is 0, but this pod belongs to the reward group"),
        ("rollout", {}, "ROLLOUT_NODES is 0, but this pod belongs to the rollout group"),
        ("actor", {"RUN": "../x"}, "RUN is '../x', expected the name of a folder"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    role: str, settings: dict[str, str], sentence: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([role], {**SETTINGS, **settings}, root) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {sentence}")
    assert error.count("\n") == 1


def test_secrets_that_are_missing_are_named(root: Path) -> None:
    (root / "secrets" / "critic.key").unlink()
    with pytest.raises(
        Refused, match=r"/secrets/critic\.key is missing: the Secrets are critic-tls, health-tls and token"
    ):
        command_of("critic", [], SETTINGS, root)


def test_what_is_not_prepared_in_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="kubectl logs job/prepare"):
        entrypoint.wait_until_prepared(tmp_path / "absent", timeout_s=0.0)


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunsEnd:
    """The end of a run in `tmp_path`; an earlier run of the folder was completed."""
    monkeypatch.setattr(entrypoint, "POLL_INTERVAL_S", 0.01)
    (tmp_path / "summary.json").write_text(json.dumps({"exit_reason": "completed", "wall_s": 1.0}))
    return RunsEnd(tmp_path)


@pytest.mark.parametrize(
    ("reason", "is_over"), [("completed", True), ("failed", True), ("interrupted", False), ("bad_input", False)]
)
def test_a_run_is_over_when_nobody_resumes_it(reason: str, is_over: bool, tmp_path: Path, ended: RunsEnd) -> None:
    assert not ended()
    (tmp_path / "summary.json").write_text(json.dumps({"exit_reason": reason, "wall_s": 2.0}))
    assert ended() == is_over


def script(tmp_path: Path, code: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        f"import os, sys, time; from pathlib import Path; here = Path({str(tmp_path)!r}); {code}",
    ]


def test_a_group_is_started_again_until_the_run_is_over_and_then_leaves(tmp_path: Path, ended: RunsEnd) -> None:
    # Ends by itself twice; the third time it says that the run is over, and waits to be ended.
    start = "count = len(list(here.glob('start*'))); (here / f'start{count}').touch(); count < 2 and sys.exit(1); "
    end = """(here / 'summary.json').write_text('{"exit_reason": "completed", "wall_s": 2}'); time.sleep(60)"""
    assert run_group("actor", Child(), script(tmp_path, start + end), ended, pause_s=0.0) == 0
    assert len(list(tmp_path.glob("start*"))) == 3


def test_a_group_that_refuses_its_input_at_first_is_not_started_again(tmp_path: Path, ended: RunsEnd) -> None:
    assert run_group("actor", Child(), script(tmp_path, "sys.exit(2)"), ended, pause_s=0.0) == 2


def test_a_group_whose_pod_is_stopped_is_not_started_again(tmp_path: Path, ended: RunsEnd) -> None:
    stop = "os.kill(os.getppid(), 15); time.sleep(60)"
    assert run_group("actor", Child(), script(tmp_path, stop), ended, pause_s=0.0) == 143
