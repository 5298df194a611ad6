"""`python -m controller from-verl`: its files and output, exit codes, and one sentence for each mistake."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from controller.__main__ import main
from controller.commands.from_verl.command import read_settings, translated_yaml
from controller.commands.from_verl.translation import translate
from splitppo.config import ConfigError, load_config
from tests.support.fake_gpus import put_gpus
from tests.support.groups import PROJECT
from tests.support.models import save_policy
from tests.support.verl_launch import BASE, NOW

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "run.sh"
    file.write_text(
        "LR=${LR:-1e-6}\npython -m verl.trainer.main_ppo "
        + " ".join(BASE)
        + " actor_rollout_ref.actor.optim.lr=$LR trainer.val_before_train=True $@\n"
    )
    return file


def run(*arguments: object) -> int:
    return main(["from-verl", *map(str, arguments)])


@pytest.mark.promise("from verl")
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
        (("--gpus", "99999999999:1"), "--gpus 99999999999:1: expected at most 65536 GPUs of a group"),
        (("--gpus", "8:0"), "--gpus 8:0: expected at least one GPU for each of actor and critic"),
        (("--gpus", "6:2", "algorithm.adv_estimator=grpo"), "has no critic; expected 8:0"),
        (("--verl-version", "1.0"), "--verl-version: expected 0.1 to 0.10, got '1.0'"),
        (("no-override",), "'no-override' is no override of Hydra's"),
        (("trainer.critic_warmup=soon",), "trainer.critic_warmup: expected a number, got 'soon'"),
        (("data.max_prompt_length=-1",), "data.max_prompt_length"),
        (
            ("actor_rollout_ref.hybrid_engine=False", "rollout.n_gpus_per_node=0"),
            "rollout.n_gpus_per_node times rollout.nnodes is 0; expected at least one GPU",
        ),
    ],
)
def test_input_that_cannot_be_used_is_exit_2_and_one_sentence(
    script: Path, arguments: tuple[str, ...], fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(script, *arguments) == 2
    printed = capsys.readouterr().err
    assert fact in printed
    assert printed.rstrip().splitlines()[-1].startswith("error: ")


# verl's grpo_0.6b_gsm8k_fsdp2_2_6.sh, without keys of speed.
ONE_STEP_OFF = r"""set -x
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
n_gpus_rollout=2
n_gpus_training=$((NGPUS_PER_NODE - n_gpus_rollout))
python3 -m verl.experimental.one_step_off_policy.main_ppo \
    --config-path=config --config-name='one_step_off_ppo_trainer.yaml' \
    algorithm.adv_estimator=grpo \
    data.train_files="${TRAIN_FILE}" \
    data.val_files="${TRAIN_FILE}" \
    data.train_batch_size=4 \
    data.max_prompt_length=8 \
    data.max_response_length=8 \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.hybrid_engine=False \
    actor_rollout_ref.actor.ppo_mini_batch_size=2 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=hf \
    actor_rollout_ref.rollout.n=6 \
    actor_rollout_ref.rollout.load_format=safetensors \
    actor_rollout_ref.rollout.layered_summon=True \
    actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded \
    algorithm.use_kl_in_reward=False \
    trainer.val_before_train=False \
    trainer.total_epochs=2 \
    trainer.nnodes="${NNODES}" \
    trainer.n_gpus_per_node="${n_gpus_training}" \
    rollout.nnodes="${NNODES}" \
    rollout.n_gpus_per_node="${n_gpus_rollout}" $@
"""


@pytest.mark.promise("from verl")
def test_a_script_of_one_step_off_policy_becomes_a_run_that_passes_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "ab", "data_source": "sort_letters", "reward_model": {"ground_truth": "ab"}}
    (tmp_path / "train.jsonl").write_text((json.dumps(row) + "\n") * 8)
    (tmp_path / "run.sh").write_text(ONE_STEP_OFF)
    monkeypatch.setenv("MODEL_PATH", str(save_policy(tmp_path / "model")))
    monkeypatch.setenv("TRAIN_FILE", str(tmp_path / "train.jsonl"))
    put_gpus(monkeypatch, [1 << 40] * 8)
    monkeypatch.chdir(tmp_path)
    assert run("run.sh", "-o", "my.yaml") == 0
    printed = capsys.readouterr().out
    assert "actor_rollout_ref.hybrid_engine false -> rollout.staleness 1: " in printed
    assert "rollout.n_gpus_per_node 2 -> services.rollout.* 2 rollout: GPUs behind those of the other" in printed
    assert main(["--config", "my.yaml", "--check"]) == 0
    assert main(["--config", "my.yaml", "--check", "services.actor.devices=[0,1,2,3,4,6]"]) == 2


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
    assert "nvidia-smi in line 1 would have to be run; give trainer.n_gpus_per_node=... here" in sentence
    assert run(file, "trainer.n_gpus_per_node=4", "--verl-version=0.9") == 0
    file.write_text(f"python -m verl.trainer.main_ppo {' '.join(BASE)} trainer.experiment_name=x-$D/y $MORE")
    assert run(file, "trainer.experiment_name=x") == 2
    assert "run.sh, line 1: a word is not known, as MORE is set nowhere; set it in the environment" in (
        capsys.readouterr().err
    )


def test_an_unknown_value_that_overrides_a_known_one_is_asked_for_and_not_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, key = tmp_path / "run.sh", "actor_rollout_ref.actor.use_kl_loss"
    command = f"python -m verl.trainer.main_ppo {' '.join(BASE)} trainer.nnodes=1"
    file.write_text(f"{command} {key}=True {key}=$USE_KL")
    assert run(file, "--verl-version=0.9") == 2
    assert f"{key} is not known, as USE_KL is set nowhere; give {key}=... here" in capsys.readouterr().err
    assert run(file, f"{key}=False", "--verl-version=0.9") == 0
    file.write_text(f"{command} {key}=$USE_KL {key}=True")
    assert run(file, "--verl-version=0.9") == 0


def test_the_version_is_asked_for_where_no_key_tells_it_and_defaults_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.yaml"
    assert run("-", *BASE, "-o", file) == 1
    [sentence] = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: no key tells verl's version, and the defaults of algorithm.use_kl_in_reward, ")
    assert sentence.endswith("were others up to 0.3: give --verl-version 0.3 or --verl-version 0.9")
    assert not file.exists()


def test_the_question_for_the_version_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-", *BASE, "-o", tmp_path / "my.yaml") == 1
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("no key tells verl's version") == 1


def test_the_first_example_of_the_page_translates_a_script_that_tells_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (PROJECT / "docs" / "from-verl.md").read_text()
    example = next(line for line in page.splitlines() if line.startswith("    python -m controller from-verl"))
    monkeypatch.chdir(tmp_path)
    _, _, _, _, script, *options = shlex.split(example, comments=True)
    Path(script).write_text(f"python -m verl.trainer.main_ppo {' '.join(BASE)}\n")
    assert run(script, *options) == 0


def test_a_mistyped_key_is_listed_as_unknown_and_not_as_one_that_changes_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistyped = ("data.train_batch_sise=4", "--verl-version=0.9", "-o", tmp_path / "my.yaml")
    assert run("-", *BASE, *mistyped) == 1
    printed = capsys.readouterr()
    assert (
        "unknown to every version of verl's PPO trainer; correct it, or drop it by name:\n"
        "  data.train_batch_sise 4: did you mean data.train_batch_size?\n"
    ) in printed.out
    assert "something else" not in printed.out + printed.err
    assert printed.err.startswith("error: no version of verl's PPO trainer has data.train_batch_sise, and nothing is")
    assert run("-", *BASE, *mistyped, "--drop", "data.train_batch_sise") == 0


@pytest.mark.parametrize(
    ("overrides", "options", "expected", "sentence"),
    [
        pytest.param(("algorithm.use_kl_in_reward=False",), (), (False, 0.0), "", id="a key of today"),
        pytest.param(
            ("+trainer.val_before_train=False",),
            (),
            (True, 0.001),
            "those of verl 0.3: it sets +trainer.val_before_train",
            id="a key that was not there",
        ),
        pytest.param(
            ("actor_rollout_ref.actor.fsdp_config.grad_offload=False", "actor_rollout_ref.actor.use_kl_loss=True"),
            (),
            (False, 0.001),
            "those of verl 0.2: it sets actor_rollout_ref.actor.fsdp_config.grad_offload",
            id="a key that is no more",
        ),
        pytest.param(
            (), ("--verl-version", "v0.3.0"), (True, 0.001), "those of verl 0.3: as --verl-version", id="said"
        ),
        pytest.param(("trainer.val_only=False",), ("--verl-version=0.6",), (False, 0.0), "", id="said to be newer"),
    ],
)
def test_defaults_are_those_of_the_version_of_verl(
    overrides: tuple[str, ...],
    options: tuple[str, ...],
    expected: tuple[bool, float],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("-", *options, "-o", tmp_path / "my.yaml", *BASE, *overrides) == 0
    config = load_config(tmp_path / "my.yaml")
    assert (config.algorithm.use_kl_in_reward, config.actor.entropy_coeff) == expected
    printed = capsys.readouterr().out
    assert sentence in printed
    assert ("defaults are those of" in printed) == bool(sentence)


def test_all_older_defaults_are_taken(tmp_path: Path) -> None:
    clip = "actor_rollout_ref.actor.clip_ratio=0.3"
    settings = read_settings(Path("-"), (*BASE, clip, "--config-name=ppo_megatron_trainer"), {}, NOW, "0.2")
    (tmp_path / "my.yaml").write_text(translated_yaml(translate(settings, gpus=None, drop=()), "old"))
    config = load_config(tmp_path / "my.yaml")
    assert (config.actor.clip_ratio, config.actor.clip_ratio_low, config.actor.clip_ratio_c) == (0.3, None, None)
    assert config.actor.shuffle
    assert config.critic.shuffle
    assert config.data.filter_overlong_prompts


@pytest.mark.parametrize(
    ("version", "actor", "critic"),
    [
        ("0.3", ("constant", 1e-6), ("constant", 1e-5)),
        ("0.3.1", ("constant", 1e-6), ("constant", 1e-5)),
        ("0.4.0", ("constant", 1e-6), ("constant", 1e-5)),
        ("v0.4.1", ("linear", 1e-6), ("linear", 1e-6)),
        ("0.5.0", ("constant", 1e-6), ("linear", 1e-6)),
        ("0.6", ("constant", 1e-6), ("constant", 1e-5)),
    ],
)
def test_learning_rates_of_megatron_decayed_by_default_in_two_versions(
    version: str, actor: tuple[str, float], critic: tuple[str, float], tmp_path: Path
) -> None:
    words = (*BASE, "--config-name=ppo_megatron_trainer", "trainer.total_training_steps=50")
    settings = read_settings(Path("-"), words, {}, NOW, version)
    assert "lr_decay_style" not in settings.age
    (tmp_path / "my.yaml").write_text(translated_yaml(translate(settings, gpus=None, drop=()), "megatron"))
    config = load_config(tmp_path / "my.yaml")
    assert (config.actor.lr_schedule, config.actor.lr) == actor
    assert (config.critic.lr_schedule, config.critic.lr) == critic
    assert (config.critic.lr_decay_steps == 50) == (critic[0] == "linear")


def test_a_file_that_begins_with_megatrons_defaults_has_its_learning_rates(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - ppo_megatron_trainer\n  - _self_\ndata: {max_prompt_length: 9}\n"
    )
    command = f"python -m verl.trainer.main_ppo --config-path={tmp_path} --config-name=mine {' '.join(BASE)}"
    (tmp_path / "run.sh").write_text(command)
    for source in ("run.sh", "mine.yaml"):
        settings = read_settings(tmp_path / source, (), {}, NOW, "0.4.1")
        assert translate(settings, gpus=None, drop=()).values["actor.lr_schedule"] == "linear"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((), "of actor_rollout_ref.actor.optim.lr_decay_style, critic.optim.lr_decay_style, critic.optim.lr were"),
        (
            ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"),
            "of actor_rollout_ref.actor.optim.lr_decay_style were",
        ),
    ],
)
def test_it_says_which_defaults_of_megatron_hang_on_a_version_that_is_not_given(
    overrides: tuple[str, ...], named: str
) -> None:
    words = (*BASE, *overrides, "trainer.val_before_train=False")
    settings = read_settings(Path("-"), (*words, "--config-name=ppo_megatron_trainer"), {}, NOW)
    assert named in settings.age
    assert not settings.asks_age
    assert not read_settings(Path("-"), words, {}, NOW).age


def test_the_age_of_a_whole_configuration_is_told_by_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("actor_rollout_ref: {hybrid_engine: true, actor: {entropy_coeff: 0}}")
    settings = read_settings(file, BASE, {}, NOW)
    assert "those of verl 0.3: it has no algorithm.use_kl_in_reward" in settings.age
    values = translate(settings, gpus=None, drop=()).values
    assert values["algorithm.use_kl_in_reward"] is True
    assert "actor.entropy_coeff" not in values


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
