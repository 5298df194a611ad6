"""verl's runs in our keys: what is computed, what is refused, and that the result is a configuration."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from controller.from_verl.command import read_settings, translated_yaml
from controller.from_verl.translation import Finding, Translation, translate
from splitppo.config import Config, ConfigError, load_config
from tests.verl_launch import BASE, NOW


def translated(
    tmp_path: Path, *overrides: str, gpus: tuple[int, int] | None = None, drop: tuple[str, ...] = ()
) -> Translation:
    script = tmp_path / "run.sh"
    script.write_text("python -m verl.trainer.main_ppo " + " ".join(f"'{one}'" for one in (*BASE, *overrides)))
    return translate(read_settings(script, (), {}, NOW), gpus=gpus, drop=drop)


def config_of(
    tmp_path: Path, *overrides: str, gpus: tuple[int, int] | None = None, drop: tuple[str, ...] = ()
) -> Config:
    """What a run would read: through the file that is written."""
    translation = translated(tmp_path, *overrides, gpus=gpus, drop=drop)
    assert translation.stopping == []
    file = tmp_path / "my.yaml"
    file.write_text(translated_yaml(translation, "run.sh"))
    return load_config(file)


def finding(translation: Translation, key: str) -> Finding:
    return next(one for one in translation.findings if one.key == key)


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("override", "ours", "expected"),
    [
        ("algorithm.kl_ctrl.target_kl=0.2", "algorithm.kl_target", 0.2),
        ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl", "adaptive"),
        (f"{ACTOR}.optim.lr=3e-7", "actor.lr", 3e-7),
        (f"{ACTOR}.ppo_mini_batch_size=128", "actor.ppo_mini_batch_size", 128),
        (f"{ACTOR}.ppo_mini_batch_size=128", "critic.ppo_mini_batch_size", 128),
        (f"{ACTOR}.ppo_epochs=3", "critic.ppo_epochs", 3),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio=0.05", "actor.lr_warmup_steps", 10),
        (f"{ACTOR}.optim.lr_warmup_steps=7", "actor.lr_warmup_steps", 7),
        ("critic.optim.lr_warmup_steps_ratio=0.015", "critic.lr_warmup_steps", 3),
        (f"{ACTOR}.optim.lr_scheduler_type=cosine", "actor.lr_decay_steps", 200),
        (f"{ACTOR}.optim.warmup_style=cosine", "actor.lr_schedule", "cosine"),
        (f"{ACTOR}.clip_ratio=0.3", "actor.clip_ratio_high", 0.2),
        (f"{ACTOR}.clip_ratio_high=0.28", "actor.clip_ratio_high", 0.28),
        (f"{ACTOR}.use_adaptive_entropy_adjustment=True", "algorithm.adaptive_entropy.enable", True),
        (f"{ACTOR}.max_entropy_coeff=0.005", "algorithm.adaptive_entropy.max_entropy_coeff", 0.005),
        (f"{ACTOR}.optim.clip_grad=0.5", "actor.grad_clip", 0.5),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", "actor.ppo_micro_batch_size_per_gpu", 4),
        (f"{ACTOR}.fsdp_config.dtype=fp32", "actor.dtype", "fp32"),
        (f"{ACTOR}.checkpoint.save_contents=[model,hf_model]", "checkpoint.save_hf_model", True),
        (f"{ROLLOUT}.top_k=50", "rollout.top_k", 50),
        (f"{ROLLOUT}.top_k=-1", "rollout.top_k", 0),
        (f"{ROLLOUT}.name=sglang", "rollout.backend", "vllm"),
        (f"{ROLLOUT}.name=hf", "rollout.vllm.tensor_model_parallel_size", 1),
        (f"{ROLLOUT}.free_cache_engine=False", "rollout.vllm.sleep_level", 0),
        (f"{ROLLOUT}.val_kwargs.temperature=0.6", "evaluation.temperature", 0.6),
        ("trainer.critic_warmup=0", "critic.warmup_steps", 0),
        ("trainer.critic_warmup=1", "critic.warmup_steps", 0),
        ("trainer.critic_warmup=20", "critic.warmup_steps", 19),
        ("trainer.test_freq=0", "evaluation.test_freq", -1),
        ("trainer.max_critic_ckpt_to_keep=5", "checkpoint.keep", 5),
        ("trainer.rollout_data_dir=/x", "tracking.dump_rollouts", True),
        ("trainer.total_epochs=3", "run.total_epochs", 3),
        ("trainer.val_only=True", "evaluation.val_only", True),
        ("data.custom_cls={path: d.py, name: D}", "data.custom_cls.name", "D"),
        ("trainer.logger=[console,tensorboard,clearml]", "tracking.trackers", ("tensorboard",)),
        ("trainer.logger=console", "tracking.trackers", ()),
        ("reward_model.overlong_buffer={enable: True, len: 100}", "reward.overlong_buffer.len", 100),
        ("+reward.reward_kwargs.overlong_buffer_cfg={enable: True, len: 9}", "reward.overlong_buffer.enable", True),
        (
            "+data.apply_chat_template_kwargs.enable_thinking=False",
            "data.apply_chat_template_kwargs",
            {"enable_thinking": False},
        ),
        ("custom_reward_function.path=r.py", "reward.custom_function_path", Path("r.py")),
        ("reward.custom_reward_function.path=r.py", "reward.custom_function_path", Path("r.py")),
        ("data.train_max_samples=-1", "data.max_samples", None),
        ("data.train_files=[a.parquet,b.parquet]", "data.train_files", ("a.parquet", "b.parquet")),
        (f"{ACTOR}.policy_loss.loss_mode=dppo_tv", "actor.policy_loss.loss_mode", "dppo_tv"),
        (f"{ACTOR}.policy_loss.loss_mode=gspo", "actor.loss_agg_mode", "seq-mean-token-mean"),
        (f"{ACTOR}.policy_loss.loss_mode=cispo", "actor.loss_agg_mode", "token-mean"),
        (f"{ACTOR}.policy_loss.kl_cov_ratio=0.01", "actor.policy_loss.kl_cov_ratio", 0.01),
        (f"{ACTOR}.tau_neg=1.1", "actor.policy_loss.tau_neg", 1.1),
        (f"{ACTOR}.loss_scale_factor=900", "actor.loss_scale_factor", 900),
        (f"{ACTOR}.kl_loss_type=k3+", "actor.kl_loss_type", "k3+"),
        ("algorithm.kl_penalty=k1+", "algorithm.kl_penalty", "k1+"),
        (
            "algorithm.rollout_correction={bypass_mode: True, loss_type: reinforce, rollout_is: token}",
            "actor.policy_loss.reinforce_is",
            "token",
        ),
        ("data.max_response_length=30000", "actor.ppo_max_token_len_per_gpu", 16384),
    ],
)
def test_a_key_becomes_what_it_means_here(tmp_path: Path, override: str, ours: str, expected: object) -> None:
    extra = (
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", "critic.ppo_micro_batch_size_per_gpu=1")
        if "30000" in override
        else ()
    )
    value: object = config_of(tmp_path, *extra, override)
    for part in ours.split("."):
        value = getattr(value, part)
    assert value == expected


def test_verl_defaults_hold_where_nothing_is_said(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert (config.actor.dtype, config.critic.dtype) == ("bf16", "bf16")
    assert config.actor.gradient_checkpointing
    assert config.critic.gradient_checkpointing
    assert not config.data.filter_overlong_prompts
    assert config.actor.ppo_mini_batch_size == 256
    assert str(config.run.dir) == "checkpoints/verl_examples/gsm8k"


def test_a_dynamic_micro_batch_holds_the_longest_row(tmp_path: Path) -> None:
    config = config_of(tmp_path, f"{ACTOR}.use_dynamic_bsz=True", "data.max_response_length=20000")
    assert config.actor.ppo_max_token_len_per_gpu == 20512
    assert config.critic.ppo_max_token_len_per_gpu == 32768


@pytest.mark.parametrize(
    ("overrides", "gpus", "actor", "critic", "tensor_parallel"),
    [
        pytest.param((), None, range(6), range(6, 8), 2, id="three to one"),
        pytest.param((f"{ROLLOUT}.tensor_model_parallel_size=4",), None, range(4), range(4, 8), 4, id="whole engines"),
        pytest.param((), (5, 3), range(5), range(5, 8), 1, id="as requested"),
        pytest.param(("trainer.n_gpus_per_node=2",), None, range(1), range(1, 2), 1, id="two"),
        pytest.param(("trainer.n_gpus_per_node=1",), None, range(1), range(1), 1, id="one for both"),
        pytest.param(("algorithm.adv_estimator=reinforce_plus_plus",), None, range(8), range(0), 2, id="no critic"),
    ],
)
def test_gpus_are_divided(
    tmp_path: Path,
    overrides: tuple[str, ...],
    gpus: tuple[int, int] | None,
    actor: range,
    critic: range,
    tensor_parallel: int,
) -> None:
    config = config_of(tmp_path, *overrides, gpus=gpus)
    assert config.services.actor.devices == tuple(actor)
    assert config.services.critic.devices == tuple(critic)
    assert config.rollout.vllm.tensor_model_parallel_size == tensor_parallel
    assert config.services.allow_shared_devices == (actor == critic)


def test_several_machines_are_left_to_who_starts_the_groups(tmp_path: Path) -> None:
    config = config_of(tmp_path, "trainer.nnodes=2")
    assert config.services.launch == "external"
    assert (config.services.actor.num_processes, config.services.critic.num_processes) == (12, 4)


def test_dynamic_sampling_is_taken_with_its_generations(tmp_path: Path) -> None:
    filters = {"enable": True, "metric": "acc", "max_num_gen_batches": -1}
    keys = [f"algorithm.filter_groups.{key}={value}" for key, value in filters.items()]
    config = config_of(tmp_path, *keys, "data.gen_batch_size=1536", f"{ROLLOUT}.n=4")
    assert config.algorithm.filter_groups.model_dump() == {**filters, "max_num_gen_batches": 0}
    assert (config.data.draw_size, config.data.train_batch_size) == (1536, 512)


def test_a_reward_model_of_a_pool_has_a_group(tmp_path: Path) -> None:
    pool = ("enable=True", "model_path=rm", "enable_resource_pool=True", "n_gpus_per_node=2", "nnodes=1")
    config = config_of(tmp_path, *(f"reward.reward_model.{one}" for one in pool))
    assert config.reward_model.model == "rm"
    assert config.reward_model_host == "reward"
    assert config.services.reward.devices == (8, 9)


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("algorithm.use_pf_ppo=True", "once per epoch"),
        ("data.gen_batch_size=1024", "without filter_groups.enable"),
        ("algorithm.adv_estimator=optimal_token_baseline", "grpo"),
        (f"{ACTOR}.policy_loss.loss_mode=cppo", "vanilla"),
        (f"{ACTOR}.optim.optimizer=AdamW8bit", "AdamW"),
        ("actor_rollout_ref.model.lora_rank=32", "full fine-tuning"),
        (f"{ROLLOUT}.multi_turn.enable=True", "one turn"),
        (f"{ROLLOUT}.do_sample=False", "sampled"),
        ("data.reward_fn_key=source", "data_source"),
        ("data.train_files=hdfs://a/b.parquet", "copy"),
        ("trainer.v1.trainer_mode=separate_async", "run.schedule"),
        ("algorithm.rollout_correction.rollout_is_threshold=0.5_2.0", "one number"),
        ("data.train_batch_sise=4", "did you mean data.train_batch_size?"),
    ],
)
def test_what_changes_results_and_is_not_supported_must_be_decided(tmp_path: Path, override: str, instead: str) -> None:
    correction = ("algorithm.rollout_correction.rollout_is=token",) if "threshold" in override else ()
    key = override.partition("=")[0]
    (stopping,) = translated(tmp_path, *correction, override).stopping
    assert stopping.key == key
    assert stopping.outcome == "not supported"
    assert instead in stopping.note
    assert translated(tmp_path, *correction, override, drop=(key,)).stopping == []


@pytest.mark.parametrize(
    "override",
    [
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        f"{ACTOR}.fsdp_config.param_offload=True",
        "trainer.default_hdfs_dir=hdfs://x",
        f"{ACTOR}.strategy=megatron",
    ],
)
def test_what_changes_no_result_is_only_said(tmp_path: Path, override: str) -> None:
    translation = translated(tmp_path, override)
    assert finding(translation, override.partition("=")[0]).outcome == "not supported"
    assert translation.stopping == []


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("algorithm.use_pf_ppo=False", "off"),
        ("algorithm.filter_groups.metric=acc", "only with filter_groups.enable"),
        (f"{ACTOR}.fsdp_config.optimizer_offload=False", "off"),
        ("data.gen_batch_size=512", "data.train_batch_size says it"),
        ("+reward_model.reward_kwargs.max_resp_len=512", "data.max_response_length says it"),
        ("ray_kwargs.ray_init.num_cpus=8", "no Ray"),
        (f"{ROLLOUT}.prompt_length=512", "data.max_prompt_length says it"),
    ],
)
def test_what_is_not_needed_says_why(tmp_path: Path, override: str, why: str) -> None:
    found = finding(translated(tmp_path, override), override.partition("=")[0].lstrip("+"))
    assert (found.outcome, found.note) == ("not needed", why)


def test_estimators_and_their_keys_are_taken(tmp_path: Path) -> None:
    samples = f"{ROLLOUT}.n=4"
    gdpo = ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[right,short]")
    algorithm = config_of(tmp_path, *gdpo, "algorithm.gdpo_reward_weights=[1.0,0.5]", samples).algorithm
    assert algorithm.adv_estimator == "gdpo"
    assert (algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights) == (("right", "short"), (1.0, 0.5))
    config = config_of(tmp_path, "algorithm.adv_estimator=grpo_vectorized", gdpo[1], samples)
    assert (config.algorithm.adv_estimator, config.algorithm.gdpo_reward_keys) == ("grpo", ())


def test_keys_of_a_critic_that_there_is_not_are_not_needed(tmp_path: Path) -> None:
    translation = translated(
        tmp_path, "algorithm.adv_estimator=grpo", "critic.optim.lr=1e-4", "trainer.critic_warmup=3"
    )
    assert finding(translation, "critic.optim.lr").outcome == "not needed"
    assert not any(key.startswith("critic") for key in translation.values)


def test_the_file_has_what_differs_and_says_what_was_changed(tmp_path: Path) -> None:
    text = translated_yaml(translated(tmp_path, "trainer.critic_warmup=20", f"{ACTOR}.optim.lr=1e-6"), "run.sh")
    assert "lr: " not in text
    assert "  warmup_steps: 19  # max(0, N - 1)" in text
    assert "  dtype: bf16  # verl's default" in text


def test_later_words_win_and_a_tilde_takes_a_key_away(tmp_path: Path) -> None:
    config = config_of(tmp_path, "algorithm.gamma=0.5", "algorithm.gamma=0.9", "algorithm.lam=0.5", "~algorithm.lam")
    assert (config.algorithm.gamma, config.algorithm.lam) == (0.9, 1.0)


HYDRA = """
defaults: [ppo_trainer, _self_]
data: {train_files: t.parquet, val_files: "${data.train_files}", train_batch_size: 512, max_response_length: 700}
actor_rollout_ref:
  model: {path: my/model}
  actor: {ppo_epochs: 2, optim: {lr: 2e-6}, ppo_mini_batch_size: "${oc.select:data.train_batch_size,1}"}
  rollout: {name: vllm, n: 4, response_length: "${oc.select:data.max_response_length,512}"}
critic: {ppo_epochs: "${actor_rollout_ref.actor.ppo_epochs}", optim: {lr: 1.0e-05}}
trainer:
  total_training_steps: 9
  project_name: p
  default_local_dir: "out/${trainer.project_name}/${trainer.experiment_name}"
"""


def yaml_settings(tmp_path: Path, text: str, *overrides: str) -> Translation:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return translate(read_settings(file, overrides, {}, NOW), gpus=None, drop=())


def test_interpolations_are_resolved_with_verls_defaults_behind_them(tmp_path: Path) -> None:
    translation = yaml_settings(tmp_path, HYDRA, "trainer.experiment_name=e")
    assert translation.values["data.val_files"] == "t.parquet"
    assert translation.values["actor.ppo_mini_batch_size"] == 512
    assert translation.values["critic.ppo_epochs"] == 2
    assert translation.values["run.dir"] == "out/p/e"


def test_what_a_yaml_leaves_at_verls_default_is_not_listed(tmp_path: Path) -> None:
    given = {one.key for one in yaml_settings(tmp_path, HYDRA).findings if not one.is_default}
    assert "critic.optim.lr" not in given
    assert "actor_rollout_ref.actor.optim.lr" in given


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("data: {train_files: '${no.such}'}", "data.train_files is ${no.such}, which cannot be resolved"),
        ("data: {train_batch_size: '${env:X}'}", "data.train_batch_size is ${env:X}, which cannot be resolved"),
        ("data: [1", "config.yaml is not valid YAML"),
        ("- 1", "expected a mapping of verl's sections"),
        ("defaults: [my_base]\ndata: {shuffle: false}", "its defaults list names 'my_base'"),
        ("trainer: {n_gpus_per_node: many}", "trainer.n_gpus_per_node: expected a number, got 'many'"),
    ],
)
def test_a_yaml_that_cannot_be_used_is_one_sentence(tmp_path: Path, text: str, fact: str) -> None:
    with pytest.raises(ConfigError) as caught:
        yaml_settings(tmp_path, text)
    assert fact in str(caught.value)


def test_arguments_of_a_reward_function_are_taken_as_a_whole(tmp_path: Path) -> None:
    function = ("custom_reward_function.path=r.py", "+custom_reward_function.reward_kwargs={a: 1, b: {c: x}}")
    assert config_of(tmp_path, *function).reward.custom_function_kwargs == {"a": 1, "b": {"c": "x"}}


def test_steps_are_counted_where_the_files_are_here(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"] * 25}), tmp_path / "t.parquet")
    given = (
        "~trainer.total_training_steps",
        f"data.train_files={tmp_path}/t.parquet",
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=8",
        "trainer.total_epochs=4",
    )
    config = config_of(tmp_path, *given, f"{ACTOR}.optim.lr_warmup_steps_ratio=0.5")
    assert (config.run.total_steps, config.run.total_epochs) == (None, 4)
    assert config.actor.lr_warmup_steps == 6
