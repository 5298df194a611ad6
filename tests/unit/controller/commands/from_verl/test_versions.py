"""What depends on verl's version: the checkout that a script lies in tells it, and old meanings are translated."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from controller.commands.from_verl.command import read_settings
from controller.commands.from_verl.translation import Translation, translate
from tests.support.verl_launch import ACTOR, BASE, finding, translated

NOW = datetime(2026, 8, 9, tzinfo=UTC)
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")


def of_version(version: str, *overrides: str) -> Translation:
    return translate(read_settings(Path("-"), (*BASE, *overrides), {}, NOW, version), gpus=None, drop=())


def checkout(folder: Path, release: str) -> Path:
    """Returns a configuration in a checkout of verl."""
    (folder / "verl" / "version").mkdir(parents=True)
    (folder / "verl" / "version" / "version").write_text(f"{release}\n")
    file = folder / "examples" / "run.yaml"
    file.parent.mkdir()
    file.write_text("data: {train_files: a.parquet, val_files: b.parquet}\nactor_rollout_ref: {model: {path: m}}\n")
    return file


@pytest.mark.parametrize(
    ("release", "version", "entropy"), [("0.3.0.post1", (0, 3), 0.001), ("0.7.0.dev", (0, 7), 0), ("0.9.0", (0, 9), 0)]
)
def test_a_checkout_of_verl_tells_the_version(
    tmp_path: Path, release: str, version: tuple[int, ...], entropy: float
) -> None:
    settings = read_settings(checkout(tmp_path, release), (), {}, NOW)
    assert settings.version == version
    assert settings.value(f"{ACTOR}.entropy_coeff") == entropy
    assert not settings.asks_age


def test_the_option_overrides_the_checkout_and_a_later_release_tells_nothing(tmp_path: Path) -> None:
    file = checkout(tmp_path, "0.3.0")
    assert read_settings(file, (), {}, NOW, "0.8").version == (0, 8)
    (tmp_path / "verl" / "version" / "version").write_text("0.12.0")
    assert read_settings(file, ("algorithm.use_kl_in_reward=False",), {}, NOW).version == (0, 9)


@pytest.mark.parametrize("version", ["0.4", "0.7"])
def test_the_older_sum_norm_has_another_scale_and_the_report_says_so(version: str) -> None:
    override = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"
    found = finding(of_version(version, override), f"{ACTOR}.loss_agg_mode")
    assert (found.outcome, found.new) == ("changed", "seq-mean-token-sum-norm")
    assert "divided by the number of sequences" in found.note
    assert finding(of_version("0.7.1", override), f"{ACTOR}.loss_agg_mode").outcome == "taken"


def test_up_to_0_8_a_step_without_filters_has_the_prompts_of_a_generation() -> None:
    old = of_version("0.7", "data.gen_batch_size=1536", f"{ACTOR}.ppo_mini_batch_size=512", *GRPO)
    assert old.stopping == []
    assert old.values["data.train_batch_size"] == 1536
    new = of_version("0.9", "data.gen_batch_size=64", *GRPO)
    assert new.values["data.train_batch_size"] == 512


def test_after_0_9_the_last_box_is_an_answer_of_dapos_data_sources() -> None:
    scorers = of_version("0.10").values["reward.scorers"]
    assert scorers["math_dapo"] == scorers["aime*"] == [{"name": "math_dapo_boxed"}]
    assert "reward.scorers" not in of_version("0.9").values
    own = ("custom_reward_function.path=mine.py",)
    assert "reward.scorers" not in of_version("0.10", *own).values


def test_a_teacher_alone_leaves_out_entropy_and_kl() -> None:
    teacher = "distillation.teacher_models={one: {key: a, model_path: t}}"
    alone = ("distillation.enabled=True", teacher, "distillation.distillation_loss.use_task_rewards=False")
    terms = (f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True")
    translation = of_version("0.9", *alone, *terms)
    for key in (f"{ACTOR}.entropy_coeff", f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"):
        assert finding(translation, key).note == "verl uses it with use_task_rewards only"
    assert not {"actor.entropy_coeff", "actor.use_kl_loss", "algorithm.use_kl_in_reward"} & translation.values.keys()


def test_a_value_that_is_not_known_stops_nothing_if_the_key_is_not_needed(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    path = f"{ACTOR}.megatron.dist_checkpointing_path"
    script.write_text(f"python3 -m verl.trainer.main_ppo {' '.join(BASE)} {path}=$DIST_CKPT_PATH trainer.nnodes=1\n")
    settings = read_settings(script, (), {}, NOW, "0.9")
    assert finding(translate(settings, gpus=None, drop=()), path).outcome == "not needed"


def test_grpo_with_one_sample_is_taken(tmp_path: Path) -> None:
    assert translated(tmp_path, "algorithm.adv_estimator=grpo").stopping == []


@pytest.mark.parametrize(("version", "steps"), [("0.5", 0), ("0.7", 0), ("0.8", 20), ("0.9", 20)])
def test_no_steps_of_warm_up_beside_a_share_are_none_up_to_0_7_and_the_share_later(version: str, steps: int) -> None:
    warm_up = (f"{ACTOR}.optim.lr_warmup_steps=0", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1")
    values = of_version(version, *warm_up).values
    assert values.get("actor.lr_warmup_steps", 0) == steps
    assert values.get("actor.lr_warmup_steps_ratio", 0) == 0
