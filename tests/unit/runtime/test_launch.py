"""The command line of a service, up to the point at which it joins its group."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from services.critic import rank as critic_rank
from services.reward import rank as reward_rank
from services.rollout import rank as rollout_rank
from services.runtime.group.closed_group import culprit, report
from services.runtime.group.command_line import start_group_unless_rank
from services.runtime.group.process_group import Launch, cpus_of_rank, gpu_of_rank, place_process
from services.runtime.launch import run
from services.runtime.role import Program
from splitppo.config import Config, ConfigError, ServiceConfig


def build_nothing(_: Any) -> Any:
    raise AssertionError("no role is built here")


ACTOR = Program("actor", build_nothing)
CRITIC = replace(critic_rank.PROGRAM, build=build_nothing)
REWARD = replace(reward_rank.PROGRAM, build=build_nothing)
# Without its proof of a model, which is not there.
ROLLOUT = Program("rollout", build_nothing, rollout_rank.PROGRAM.check_config)


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    tree = {
        "run": {"dir": str(tmp_path / "run"), "total_steps": 3},
        "data": {"train_files": "unused", "train_batch_size": 4},
        "actor": {"model": "some/model"},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--check", "critic.lrr=1"], "unknown key 'critic.lrr', did you mean"),
        (["--check", "critic.ppo_mini_batch_size=3"], "must be a multiple of critic.ppo_mini_batch_size (3)"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--check", "algorithm.adv_estimator=reinforce_plus_plus"], "uses no critic"),
        ([], "start this with python -m services.ROLE"),
    ],
)
def test_bad_input_is_one_sentence(
    config_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert run(CRITIC, ["--config", str(config_file), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert sentence in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (("placement.reward_model=reward",), "reward_model.model is '', and placement.reward_model is reward"),
        (("reward_model.model=rm",), "reward_model.model is 'rm', and placement.reward_model is critic"),
    ],
)
def test_a_reward_group_that_the_run_has_not_is_bad_input(
    config_file: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], found: str
) -> None:
    assert run(REWARD, ["--config", str(config_file), "--check", *overrides]) == 2
    sentence = f"{found}; expected a model, and reward, or placement.teacher reward instead of critic"
    assert capsys.readouterr().err == f"error: this run has no reward group: {sentence}\n"


def test_a_rollout_group_that_the_run_has_not_is_bad_input(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(ROLLOUT, ["--config", str(config_file), "--check"]) == 2
    sentence = "this run has no rollout group: services.rollout is null, expected its keys"
    assert capsys.readouterr().err == f"error: {sentence}\n"
    group = ["--config", str(config_file), "--check", "services.rollout.threads=1"]
    assert run(ROLLOUT, [*group, "rollout.share=0"]) == 2
    sentence = (
        "this run has no rollout group: rollout.share is 0, expected more (auto is 0 on the critic's devices if the"
        " critic's update takes longer than the actor's)"
    )
    assert capsys.readouterr().err == f"error: {sentence}\n"
    for share in ("auto", "0.5", "1"):
        assert run(ROLLOUT, [*group, f"rollout.share={share}"]) == 0


def test_check_writes_nothing(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ACTOR, ["--config", str(config_file), "--check"]) == 0
    assert "actor: some/model, 1 processes on the CPU" in capsys.readouterr().out
    assert not (config_file.parent / "run").exists()


def test_overrides_and_options_come_in_any_order(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["rollout.n=2", "--check", "data.train_batch_size=8", "--config", str(config_file)]
    assert run(ACTOR, arguments) == 0
    assert "step: 8 prompts x 2 samples" in capsys.readouterr().out


def test_check_prints_what_is_proved_of_the_models_and_refuses_those_that_are_not(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prove(role_name: str, config: Config) -> Iterator[str]:
        yield f"{role_name}.model: {config.actor.model} is right"
        raise ValueError("another model is wrong")

    assert run(Program("actor", build_nothing, check_models=prove), ["--config", str(config_file), "--check"]) == 2
    printed = capsys.readouterr()
    assert printed.out.endswith("actor.model: some/model is right\n")
    assert printed.err == "error: another model is wrong\n"


@pytest.mark.parametrize("options", [["--check"], []])
def test_a_roles_own_check_comes_before_the_group_is_joined(
    config_file: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    def refuse(config: Config) -> None:
        raise ConfigError(f"{config.actor.model} cannot be had")

    assert run(Program("actor", build_nothing, refuse), ["--config", str(config_file), *options]) == 2
    assert capsys.readouterr().err == "error: some/model cannot be had\n"


def test_outside_of_torchrun_a_service_becomes_the_torchrun_of_its_group(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *call: become.append(call))
    arguments = ["--config", str(config_file), "services.critic.num_processes=3", "services.critic.threads=2"]
    monkeypatch.setattr(sys, "argv", ["services.critic", *arguments])

    start_group_unless_rank("critic")

    [(program, command, environment)] = become
    torchrun = ["-m", "services.runtime.group.torchrun", "--nproc-per-node", "3", "-m", "services.critic"]
    assert (program, command) == (sys.executable, [sys.executable, *torchrun, *arguments])
    assert environment["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(("rank", "option"), [("0", []), (None, ["--check"])])
def test_a_rank_and_a_check_stay_what_they_are(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, rank: str | None, option: list[str]
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["services.critic", "--config", str(config_file), *option])
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("became another program"))
    start_group_unless_rank("critic")


def test_a_group_that_cannot_be_described_is_one_sentence(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["services.critic", "--config", str(config_file), "critic.lrr=1"])
    with pytest.raises(SystemExit) as ended:
        start_group_unless_rank("critic")
    assert ended.value.code == 2
    assert "unknown key 'critic.lrr', did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("exit_codes", "rank"),
    [
        ({0: 1, 1: -9}, 1),
        ({0: 1, 1: 2, 2: 1}, 1),
        ({1: 3, 2: 1}, 1),
        ({0: 2, 3: -6}, 3),
        ({0: -15, 1: 2}, 1),
        ({0: 1, 1: -15}, 1),
    ],
)
def test_of_ranks_that_ended_together_the_one_that_did_so_by_itself_is_named(
    exit_codes: dict[int, int], rank: int
) -> None:
    assert culprit(exit_codes) == rank


@pytest.mark.parametrize(
    ("exit_code", "of_the_group", "said"),
    [(2, 2, ""), (5, 5, "error: rank 1 has ended\n"), (-9, 137, "error: rank 1 has ended\n")],
)
def test_a_group_ends_as_the_rank_that_failed_first(
    capsys: pytest.CaptureFixture[str], exit_code: int, of_the_group: int, said: str
) -> None:
    assert report(1, exit_code, "has ended") == of_the_group
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("cpus", "local_rank", "local_world_size", "expected"),
    [((), 0, 2, set()), ((4, 5, 6, 7), 1, 2, {6, 7}), ((4, 5, 6), 1, 2, {4, 5, 6}), ((3,), 0, 1, {3})],
)
def test_cores_are_sliced_where_they_divide(
    cpus: tuple[int, ...], local_rank: int, local_world_size: int, expected: set[int]
) -> None:
    assert cpus_of_rank(cpus, local_rank, local_world_size) == expected


def second_of_two_ranks() -> Launch:
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    return Launch.from_environment({**environment, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})


@pytest.mark.parametrize(
    ("num_visible", "index"),
    [pytest.param(8, 7, id="all GPUs of the machine"), pytest.param(2, 1, id="those of the group, counted from 0")],
)
def test_a_rank_takes_its_own_gpu_whichever_its_process_sees(num_visible: int, index: int) -> None:
    assert gpu_of_rank("services.actor.devices", [6, 7], second_of_two_ranks(), num_visible) == index


@pytest.mark.parametrize(
    ("devices", "num_visible", "sentence"),
    [([6], 8, "lists 1 GPUs for 2 ranks"), ([6, 7], 0, "offers 0 GPUs"), ([6, 7], 4, "offers 4 GPUs")],
)
def test_a_rank_without_a_gpu_is_the_users_mistake(devices: list[int], num_visible: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        gpu_of_rank("services.actor.devices", devices, second_of_two_ranks(), num_visible)


@pytest.mark.parametrize(("given", "order"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")])
def test_a_rank_numbers_gpus_as_nvidia_smi_does_unless_it_is_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, order: str
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", given or "")
    if given is None:
        monkeypatch.delenv("CUDA_DEVICE_ORDER")
    nowhere = ServiceConfig(num_processes=2, devices=(98, 99))
    with pytest.raises(ConfigError, match=r"services\.critic\.devices is .*this machine offers"):
        place_process(second_of_two_ranks(), "critic", nowhere, torch.get_num_threads())
    assert os.environ["CUDA_DEVICE_ORDER"] == order
