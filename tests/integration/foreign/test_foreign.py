"""Programs that have only proto/ and docs/protocol.md: a client that trains, buf, and a critic in a real run."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.foreign.conftest import FOREIGN, Foreigners
from tests.support.buf import BUF, needs_buf
from tests.support.certificates import TOKEN
from tests.support.groups import PROJECT, free_address
from tests.support.runs import Inputs, started

ROLES = ("actor", "critic")
SERVICES = {"actor": "splitppo.v1.ActorService", "critic": "splitppo.v1.CriticService"}
STATUS = "splitppo.v1.WorkerService/GetStatus"
CHECK, WATCH = "grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"
BEARER = f"authorization: Bearer {TOKEN}"
# Without a token the worker does not describe itself: buf is given what it needs.
HEALTH = ("--schema", "docs/health.proto")
# buf's exit code is the status code, shifted to the left by three.
CANCELED, UNAUTHENTICATED, UNAVAILABLE = 1 << 3, 16 << 3, 14 << 3

CLIENT, CRITIC = (Path(__file__).with_name(name) for name in ("ppo_step.py", "critic.py"))

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def found(
    workers: Foreigners, foreign_python: Path, stubs: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Returns the output of the client."""
    folder = tmp_path_factory.mktemp("elsewhere")
    script = shutil.copy(CLIENT, folder)
    settings = {role: workers.settings(role) for role in ("actor", "critic")}
    file = folder / "settings.json"
    file.write_text(json.dumps({**settings, "stubs": str(stubs), "run_dir": str(workers.actor.run_dir)}))
    command = [str(foreign_python), "-I", str(script), str(file)]
    done = subprocess.run(command, cwd=folder, env={}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def test_the_client_has_nothing_but_grpc_protobuf_numpy_and_a_hash(found: dict[str, Any]) -> None:
    assert found["installed"] == sorted(FOREIGN)


def test_it_is_refused_until_it_has_introduced_itself(found: dict[str, Any]) -> None:
    assert found["too_early"]["code"] == "FAILED_PRECONDITION"
    assert "NOT_INTRODUCED" in found["too_early"]["trailer"]
    assert found["roles"] == ["ROLE_ACTOR", "ROLE_CRITIC"]


def test_bytes_that_are_not_their_checksums_are_refused(found: dict[str, Any]) -> None:
    assert found["corrupt"]["code"] == "DATA_LOSS"
    assert "CORRUPT_BATCH" in found["corrupt"]["trailer"]


def test_one_step_is_committed_in_both_workers(found: dict[str, Any]) -> None:
    assert found["step"]["committed_steps"] == [1, 1]
    assert found["status"] == [[1, "WORKER_STATE_IDLE", 0]] * 2
    assert all(before != after for before, after in zip(found["before"], found["after"], strict=True))


def test_its_batches_arrive_and_leave_value_by_value(found: dict[str, Any]) -> None:
    rows = found["step"]["rows"]
    flat = {name: np.concatenate(column) for name, column in rows.items()}
    assert found["step"]["bytes_sent"] == 13 * 4 + 8 * 8
    assert len(rows["responses"]) == len(rows["prompts"]) == 8
    assert [len(prompt) for prompt in rows["prompts"]] == [4, 4, 2, 2, 6, 6, 1, 1]
    np.testing.assert_allclose(flat["rollout_log_probs"], flat["old_log_probs"], atol=2e-5)
    np.testing.assert_allclose(flat["ref_log_probs"], flat["old_log_probs"], atol=1e-5)
    assert found["step"]["metrics"][0]["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)


def test_an_update_that_is_sent_again_is_answered_and_not_applied_again(found: dict[str, Any]) -> None:
    assert found["step"]["replayed"] == [False, False]
    assert found["step"]["replayed_again"] == [True, True]
    assert found["step"]["metrics_again"] == found["step"]["metrics"]


def test_both_parts_of_the_checkpoint_are_what_the_manifests_say(found: dict[str, Any]) -> None:
    assert found["manifest_sha256"] == found["manifest_files"]
    assert found["manifest_weights"] == found["after"]


def curl(workers: Foreigners, role: str, method: str, *options: str, with_certificate: bool = True) -> list[str]:
    """The command line for a call of the actor, in plaintext, or the critic, over TLS."""
    if role == "actor":
        return [BUF, "curl", "--protocol", "grpc", *options, f"http://{workers.actor.address}/{method}"]
    files = {name: str(workers.certificates / name) for name in ("ca.pem", "controller.pem", "controller.key")}
    pair = ("--cert", files["controller.pem"], "--key", files["controller.key"]) if with_certificate else ()
    url = f"https://{workers.critic.address}/{method}"
    return [BUF, "curl", "--protocol", "grpc", "--cacert", files["ca.pem"], *pair, *options, url]


def call(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    command = curl(*arguments, **options)
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)


@needs_buf
@pytest.mark.parametrize("role", ROLES)
def test_buf_lists_services_and_methods_to_whoever_has_the_token(workers: Foreigners, role: str) -> None:
    listed = call(workers, role, "", "--list-services", "--reflect-header", BEARER)
    methods = call(workers, role, "", "--list-methods", "--reflect-header", BEARER)
    assert {"grpc.health.v1.Health", "splitppo.v1.WorkerService", SERVICES[role]} <= set(listed.stdout.split())
    assert {STATUS, CHECK, f"{SERVICES[role]}/Update"} <= set(methods.stdout.split())
    assert call(workers, role, "", "--list-services").returncode != 0


@needs_buf
@pytest.mark.parametrize("role", ROLES)
def test_buf_asks_for_the_status_with_the_token_alone(workers: Foreigners, role: str) -> None:
    answer = call(workers, role, STATUS, "-H", BEARER, "--reflect-header", "*")
    assert json.loads(answer.stdout)["role"] == f"ROLE_{role.upper()}"

    refused = call(workers, role, STATUS, "--schema", "proto")
    assert refused.returncode == UNAUTHENTICATED
    assert "no token" in json.loads(refused.stderr)["message"]


@needs_buf
@pytest.mark.parametrize("role", ROLES)
def test_buf_checks_health_without_a_token(workers: Foreigners, role: str) -> None:
    for service in ("", SERVICES[role]):
        answer = call(workers, role, CHECK, *HEALTH, "-d", json.dumps({"service": service}))
        assert json.loads(answer.stdout) == {"status": "SERVING"}


@needs_buf
@pytest.mark.parametrize("role", ROLES)
def test_buf_watches_health(workers: Foreigners, role: str) -> None:
    command = curl(workers, role, WATCH, *HEALTH)
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as watching:
        try:
            assert watching.stdout is not None
            lines = []
            for line in watching.stdout:  # as they come: the stream goes on
                lines.append(line)
                if line == "}\n":
                    break
            assert json.loads("".join(lines)) == {"status": "SERVING"}
        finally:
            watching.terminate()


@needs_buf
def test_without_a_certificate_not_even_health_is_told_over_tls(workers: Foreigners) -> None:
    refused = call(workers, "critic", CHECK, *HEALTH, with_certificate=False)
    # buf is still writing when the worker hangs up, or not.
    assert (refused.stdout, refused.returncode in (CANCELED, UNAVAILABLE)) == ("", True), refused.stderr


@contextmanager
def foreign_critic(folder: Path, python: Path, **settings: str) -> Iterator[None]:
    """A critic that is gone afterwards."""
    script = shutil.copy(CRITIC, folder)
    file = folder / "critic.json"
    file.write_text(json.dumps({**settings, "token": TOKEN}))
    command = [str(python), "-I", str(script), str(file)]
    with subprocess.Popen(command, cwd=folder, env={}, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == settings["bind"]
            yield
        finally:
            process.kill()


def test_a_run_of_ours_trains_a_critic_that_has_nothing_of_ours_and_resumes_with_it(
    workers: Foreigners, foreign_python: Path, stubs: Path, tmp_path: Path
) -> None:
    bind, run_dir = free_address(), workers.actor.run_dir
    inputs = Inputs.make(tmp_path / "inputs").config()
    data = {name: inputs["data"][name] for name in ("train_files", "max_prompt_length")}
    addresses = {"actor": {"address": workers.actor.address}, "critic": {"address": bind}}
    config = {
        **workers.config,
        "data": {**workers.config["data"], **data},
        "reward": inputs["reward"],
        "checkpoint": {"save_freq": 1},
        "services": {**workers.config["services"], **addresses},
    }
    serving = {"stubs": str(stubs), "run_dir": str(run_dir), "bind": bind}

    with foreign_critic(tmp_path, foreign_python, **serving), started(config, run_dir, "run.total_steps=2") as first:
        folder = first.complete()
    with foreign_critic(tmp_path, foreign_python, **serving), started(config, run_dir, "run.total_steps=3") as second:
        second.complete()

    assert folder.steps == [1, 2, 3]
    assert folder.committed_steps == [1, 2, 3]
    assert all(line["critic/vf_loss"] > 0.0 for line in folder.metrics)
    values = (folder.checkpoint(3) / "critic" / "values").read_bytes()
    assert folder.summary["weights_sha256"]["critic"] == hashlib.sha256(values).hexdigest()
