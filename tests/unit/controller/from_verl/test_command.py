"""`python -m controller from-verl`: what it writes and prints, exit codes, and one sentence for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.__main__ import main
from controller.from_verl.command import read_settings
from controller.from_verl.translation import translate
from splitppo.config import ConfigError, load_config
from tests.verl_launch import BASE, NOW


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "run.sh"
    file.write_text(
        "LR=${LR:-1e-6}\npython -m verl.trainer.main_ppo "
        + " ".join(BASE)
        + " actor_rollout_ref.actor.optim.lr=$LR $@\n"
    )
    return file


def run(*arguments: object) -> int:
    return main(["from-verl", *map(str, arguments)])


def test_the_command_writes_the_file_and_prints_what_became_of_each_key(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LR", "5e-6")
    assert run(script, "--gpus", "3:1", "-o", tmp_path / "my.yaml", "trainer.critic_warmup=4") == 0
    config = load_config(tmp_path / "my.yaml")
    assert config.actor.lr == 5e-6
    assert config.services.actor.devices == (0, 1, 2)
    printed = capsys.readouterr().out
    assert "variables of your environment that it reads: LR" in printed
    assert "trainer.critic_warmup 4 -> critic.warmup_steps 3: max(0, N - 1)" in printed


def test_without_a_file_the_yaml_alone_is_on_standard_output(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(script) == 0
    printed = capsys.readouterr()
    (tmp_path / "my.yaml").write_text(printed.out)
    assert load_config(tmp_path / "my.yaml").run.total_steps == 200
    assert printed.err.startswith("run.sh: ")


def test_nothing_is_written_until_what_changes_results_is_decided(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (script, "-o", tmp_path / "my.yaml", "algorithm.use_pf_ppo=True")
    assert run(*arguments) == 1
    assert "error: without algorithm.use_pf_ppo the run would learn something else" in capsys.readouterr().err
    assert not (tmp_path / "my.yaml").exists()
    assert run(*arguments, "--drop", "algorithm.use_pf_ppo") == 0
    assert "dropped: algorithm.use_pf_ppo" in (tmp_path / "my.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (("data.train_batch_size=1000",), "must be a multiple of actor.ppo_mini_batch_size (256)"),
        (("--drop", "data.gen_batch_size"), "--drop data.gen_batch_size: run.sh sets no such key"),
        (("--gpus", "8:0"), "--gpus 8:0: expected at least one GPU for each of actor and critic"),
        (("--gpus", "6:2", "algorithm.adv_estimator=grpo"), "has no critic; expected 8:0"),
        (("no-override",), "'no-override' is no override of Hydra's"),
        (("trainer.critic_warmup=soon",), "trainer.critic_warmup: expected a number, got 'soon'"),
        (("data.max_prompt_length=-1",), "data.max_prompt_length"),
    ],
)
def test_input_that_cannot_be_used_is_exit_2_and_one_sentence(
    script: Path, arguments: tuple[str, ...], fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(script, *arguments) == 2
    printed = capsys.readouterr().err
    assert fact in printed
    assert printed.rstrip().splitlines()[-1].startswith("error: ")


def test_a_value_that_only_a_command_knows_is_asked_for_and_can_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        f'N=$(nvidia-smi -L | wc -l)\npython -m verl.trainer.main_ppo {" ".join(BASE)} trainer.n_gpus_per_node=$N "$@"'
    )
    assert run(file) == 2
    sentence = capsys.readouterr().err
    assert "run.sh, line 2: trainer.n_gpus_per_node is not known" in sentence
    assert "in line 1 would have to be run; give trainer.n_gpus_per_node=... here" in sentence
    assert run(file, "trainer.n_gpus_per_node=4") == 0


def test_a_configuration_that_the_script_names_is_read_first(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("algorithm: {gamma: 0.5, lam: 0.5}\ntrainer: {nnodes: 1}")
    file = tmp_path / "run.sh"
    file.write_text(
        f"python -m verl.trainer.main_ppo --config-path conf --config-name=mine {' '.join(BASE)} algorithm.lam=0.9"
    )
    values = translate(read_settings(file, (), {}, NOW), gpus=None, drop=()).values
    assert (values["algorithm.gamma"], values["algorithm.lam"]) == (0.5, 0.9)
    file.write_text("python -m verl.trainer.main_ppo --config-name other a.b=1")
    with pytest.raises(ConfigError, match=r"run.sh starts from other.yaml, which is not here"):
        read_settings(file, (), {}, NOW)
