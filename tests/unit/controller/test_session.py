"""A run from start to exit while no service answers: exit codes, the summary, signals."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from controller.run.folder import RunFolder
from controller.run.state import RunState
from controller.session import run_session
from splitppo.config import Config, ConfigError, dump_config
from splitppo.run_folder.summary import Accuracy, Summary, ThisStart, Validation
from tests.support.fake_gpus import put_gpus
from tests.support.fake_services import make_config
from tests.support.groups import is_alive, wait_until
from tests.support.models import save_policy

pytestmark = pytest.mark.slow


@pytest.fixture
def closed() -> Iterator[dict[str, str]]:
    """An address for each role that refuses connections, and that nobody else takes meanwhile."""
    with socket.socket() as actor, socket.socket() as critic:
        taken = {"actor": actor, "critic": critic}
        for listener in taken.values():
            listener.bind(("127.0.0.1", 0))
        yield {role: f"127.0.0.1:{listener.getsockname()[1]}" for role, listener in taken.items()}


@pytest.fixture
def make(tmp_path: Path, closed: Mapping[str, str]) -> Callable[..., Config]:
    """A config with prompts, whose services do not answer."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.save(str(tokenizer / "tokenizer.json"))
    row = {"prompt": "ab", "data_source": "sort_letters", "reward_model": {"ground_truth": "ab"}}
    (tmp_path / "train.jsonl").write_text((json.dumps(row) + "\n") * 4)
    addresses = {role: {"address": address} for role, address in closed.items()}

    def config(**changes: Any) -> Config:
        services = {"launch": "external", "start_timeout_s": 0.3, **addresses}
        inputs = {"data__train_files": str(tmp_path / "train.jsonl"), "data__tokenizer": str(tokenizer)}
        return make_config(tmp_path / "run", **inputs | {"services": services} | changes)

    return config


def read_summary(config: Config) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((config.run.dir / "summary.json").read_text())
    return summary


def read_log(config: Config) -> str:
    return (config.run.dir / "logs" / "controller_0.log").read_text()


def test_services_that_cannot_be_reached_in_time_are_bad_input(
    make: Callable[..., Config], closed: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make()
    assert run_session(config) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert any(f"the {role} at {address} cannot be reached within 0.3 s" in said[0] for role, address in closed.items())
    assert read_summary(config)["exit_reason"] == "bad_input"


def test_groups_load_while_prompts_are_read_and_end_if_those_are_refused(
    make: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.jsonl").write_text("no row")
    (tmp_path / "run").mkdir()  # else it goes with the refused start
    config = make(
        services={"actor": {}, "critic": {}},
        data__train_files=str(tmp_path / "other.jsonl"),
        actor__model=str(save_policy(tmp_path / "policy", max_position_embeddings=1024)),
    )
    assert run_session(config) == 2
    assert "other.jsonl" in capsys.readouterr().err
    started = re.findall("started the template of the groups, pid (.*)", read_log(config))
    assert len(started) == 1
    assert not any(is_alive(int(pid)) for pid in started)


def test_a_token_of_a_variable_is_read_once_and_no_scorer_sees_it(
    make: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUR_TOKEN", "a-token-of-32-characters-in-all-")
    look = "import os\nassert 'OUR_TOKEN' not in os.environ, 'a scorer has the token'\n"
    reward = tmp_path / "reward.py"
    reward.write_text(f"{look}def compute_score(**_):\n    return 0.0\n")
    config = make(services__security={"token_env": "OUR_TOKEN"}, reward__custom_function_path=str(reward))
    assert run_session(config) == 2
    assert "cannot be reached within 0.3 s" in capsys.readouterr().err


def test_no_group_is_started_for_a_model_that_is_refused(make: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()  # else it goes with the refused start
    config = make(services={"actor": {}, "critic": {}}, actor__model=str(tmp_path))
    assert run_session(config) == 2
    assert "started the" not in read_log(config)


def test_a_run_whose_estimate_does_not_fit_on_a_gpu_is_warned_and_goes_on(
    make: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_gpus(monkeypatch, [1 << 40, 256 << 20])
    services = {"start_timeout_s": 0.3, "actor": {"devices": [0]}, "critic": {"devices": [1]}}
    config = make(services=services, actor__model=str(save_policy(tmp_path / "policy", max_position_embeddings=1024)))
    assert run_session(config) == 1
    assert "did not come up in 0.3 s" in capsys.readouterr().err
    misfit = "GPU 1 (services.critic.devices) has 0.2 GiB, but the critic (1.0 GiB per rank) would need about"
    assert misfit in read_log(config)


def test_a_start_that_fails_keeps_what_the_checkpoint_knows_in_the_summary(make: Callable[..., Config]) -> None:
    config = make()
    with RunFolder(config) as folder:
        before = Accuracy(overall=0.25)
        state = RunState(step=3, kl_coef=0.5, validation_before=before, train_s=7.0, tokens=42)
        folder.checkpoints.commit(3, state.model_dump(mode="json"), {"training/global_step": 3.0}, manifests={}, keep=1)
    assert run_session(config) == 2
    summary = read_summary(config)
    assert (summary["global_step"], summary["train_s"], summary["tokens"]) == (3, 7.0, 42)
    assert summary["validation"]["before"]["overall"] == 0.25


def leave_completed(config: Config, **summary: Any) -> None:
    """A folder as a completed run leaves it: its last checkpoint and its summary."""
    with RunFolder(config) as folder:
        after = Accuracy(overall=0.5)
        state = RunState(step=5, kl_coef=0.5, validation_after=after, validated_step=5)
        folder.checkpoints.commit(5, state.model_dump(mode="json"), {"training/global_step": 5.0}, manifests={}, keep=1)
    known = {"global_step": 5, "train_s": 7.0, "tokens": 42, "exit_reason": "completed", "finished": True}
    start = ThisStart(resumed_at_step=2, wall_s=3.0)
    Summary(**known | summary, validation=Validation(after=after), this_start=start).write(
        config.run.dir / "summary.json"
    )


def test_a_completed_run_says_so_and_keeps_its_summary(
    make: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make(run__total_steps=5)
    leave_completed(config)
    (config.run.dir / "metrics.jsonl").write_text('{"step": 5}\n')
    kept = [config.run.dir / name for name in ("summary.json", "config.yaml", "metrics.jsonl")]
    before = [file.read_bytes() for file in kept]
    assert run_session(config.model_copy(update={"actor": config.actor.model_copy(update={"lr": 0.5})})) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "completed with step 5, nothing is left to do: a larger run.total_steps continues it," in said
    assert "changed since" not in said
    assert [file.read_bytes() for file in kept] == before  # and no service answers: none was asked


def test_a_completed_run_under_its_minimum_fails_again(make: Callable[..., Config]) -> None:
    config = make(run__total_steps=5, evaluation__min_accuracy=0.6)
    leave_completed(config)
    assert run_session(config) == 1


@pytest.mark.parametrize(
    ("changes", "summary"),
    [
        ({"run__total_steps": 6}, {}),
        ({"run__total_steps": 5}, {"finished": False}),  # a validation alone completes, too
        ({"run__total_steps": 5}, {"global_step": 4}),
        ({"run__total_steps": 5, "evaluation__val_only": True}, {}),
    ],
)
def test_what_is_not_completed_is_trained_and_a_refusal_leaves_its_summary(
    make: Callable[..., Config], tmp_path: Path, changes: dict[str, Any], summary: dict[str, Any]
) -> None:
    config = make(**changes, data__val_files=str(tmp_path / "train.jsonl"))
    leave_completed(config, **summary)
    before = read_summary(config)
    assert run_session(config) == 2  # no service answers
    assert read_summary(config) == before


def test_external_services_need_addresses(make: Callable[..., Config], capsys: pytest.CaptureFixture[str]) -> None:
    config = make(services={"launch": "external"})
    assert run_session(config) == 2
    assert "error: services.actor.address: expected host:port" in capsys.readouterr().err


def test_a_mistake_in_the_data_ends_the_run_with_a_summary_in_a_folder_that_was_there(
    make: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    config = make(data__train_files="none.jsonl")
    assert run_session(config) == 2
    assert "error: data.train_files: no such file none.jsonl\n" in capsys.readouterr().err
    summary = read_summary(config)
    assert summary.pop("this_start")["resumed_at_step"] == 0
    assert summary == {
        "global_step": 0,
        "validation": {"before": None, "after": None},
        "train_s": 0.0,
        "tokens": 0,
        "overlap": None,
        "why": "data.train_files: no such file none.jsonl",
        "weights_sha256": {"actor": None, "critic": None},
        "exit_reason": "bad_input",
        "finished": False,
        "stopped_early": False,
        "best": None,
    }


def test_the_folder_is_free_again_after_a_run(make: Callable[..., Config]) -> None:
    config = make()
    run_session(config)
    with RunFolder(config) as folder:
        assert folder.lease.epoch == 2


def test_a_start_removes_the_weights_that_a_killed_one_has_published_also_where_it_publishes_no_more(
    make: Callable[..., Config], tmp_path: Path
) -> None:
    killed = make(rollout__sync_dir=str(tmp_path / "memory"))
    with RunFolder(killed) as folder:
        (folder.path / "metrics.jsonl").write_text('{"step": 1}\n')
        in_memory = killed.weights_folder_of(folder.lease.run_id)
    on_disk = tmp_path / "disk"
    (killed.run.dir / "weights").symlink_to(on_disk)
    for weights in (in_memory, on_disk):
        (weights / "version_1").mkdir(parents=True)
        (weights / "version_1" / "manifest.json").touch()
    other_run = in_memory.with_name("splitppo-other") / "version_1"
    other_run.mkdir(parents=True)
    assert run_session(make()) == 2  # no service answers
    assert not in_memory.exists()
    assert not any(on_disk.iterdir())
    assert other_run.exists()


def test_a_copy_of_a_run_leaves_the_weights_of_the_run_alone(make: Callable[..., Config], tmp_path: Path) -> None:
    config = make(rollout__sync_dir=str(tmp_path / "memory"))
    with RunFolder(config) as folder:
        (folder.path / "metrics.jsonl").write_text('{"step": 1}\n')
        version = config.weights_folder_of(folder.lease.run_id) / "version_1"
    version.mkdir(parents=True)
    copy = config.changed("rollout", {"sync_dir": ""}).changed("run", {"dir": tmp_path / "copy"})
    shutil.copytree(config.run.dir, copy.run.dir)
    assert run_session(copy) == 2  # no service answers
    assert version.exists()


def test_a_folder_that_may_not_be_used_gets_nothing_written(make: Callable[..., Config]) -> None:
    config = make()
    with RunFolder(config), pytest.raises(ConfigError, match="another controller is running"):
        run_session(config)
    assert not (config.run.dir / "summary.json").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_services_are_awaited_ends_the_run(
    make: Callable[..., Config], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    config = make()
    file = tmp_path / "config.yaml"
    tree = yaml.safe_load(dump_config(config))
    tree["services"]["start_timeout_s"] = 120.0
    file.write_text(yaml.safe_dump(tree))
    output = tmp_path / "output"
    with output.open("wb") as stream:
        command = [sys.executable, "-m", "controller", "--config", str(file)]
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        wait_until(lambda: "plan " in output.read_text() or process.poll() is not None)
        process.send_signal(number)
        assert process.wait(30) == status, output.read_text()
    finally:
        process.kill()
        process.wait()
    assert read_summary(config)["exit_reason"] == "interrupted"
    assert "Traceback" not in output.read_text()
    assert not list(config.run.dir.glob("nonce-*"))
