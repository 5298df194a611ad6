"""Translated runs of verl: computed values, refused values, and a configuration that loads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from controller.commands.from_verl.command import read_settings, translated_yaml
from controller.commands.from_verl.report import report_text
from controller.commands.from_verl.translation import translate
from tests.support.verl_launch import ACTOR, BASE, NOW, ROLLOUT, config_of, finding, translated

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("override", "ours", "expected"),
    [
        ("algorithm.kl_ctrl.target_kl=0.2", "algorithm.kl_target", 0.2),
        ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl", "adaptive"),
        ("data.image_key=pictures", "data.image_key", "pictures"),
        ("data.shuffle=True", "actor.freeze_vision_tower", False),  # as verl's default
        (f"{ACTOR}.freeze_vision_tower=True", "actor.freeze_vision_tower", True),
        ("+data.mm_processor_kwargs={min_pixels: 3136, max_pixels: 50176}", "data.min_pixels", 3136),
        ("+data.mm_processor_kwargs={min_pixels: 3136, max_pixels: 50176}", "data.max_pixels", 50176),
        (f"{ACTOR}.optim.lr=3e-7", "actor.lr", 3e-7),
        (f"{ACTOR}.ppo_mini_batch_size=128", "actor.ppo_mini_batch_size", 128),
        (f"{ACTOR}.ppo_mini_batch_size=128", "critic.ppo_mini_batch_size", 128),
        (f"{ACTOR}.ppo_epochs=3", "critic.ppo_epochs", 3),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio=0.05", "actor.lr_warmup_steps", 10),
        (f"{ACTOR}.optim.lr_warmup_steps=7", "actor.lr_warmup_steps", 7),
        ("critic.optim.lr_warmup_steps_ratio=0.015", "critic.lr_warmup_steps", 3),
        (f"{ACTOR}.optim.lr_scheduler_type=cosine", "actor.lr_decay_steps", 200),
        (f"{ACTOR}.optim.warmup_style=cosine", "actor.lr_schedule", "cosine"),
        ("model_engine=veomni", "actor.lr_schedule", "cosine"),
        ("model_engine=torchtitan", "critic.lr_schedule", "linear"),
        ("model_engine=megatron", "critic.lr_schedule", "constant"),
        (f"{ACTOR}.optim={{decay_type: cosine, min_lr_factor: 0.5}}", "actor.lr_min_ratio", 0.5),
        (f"{ACTOR}.mindspeed.mcore_kwargs.spec=mindspeed_llm", "actor.lr_schedule", "constant"),
        (f"{ROLLOUT}.engine_kwargs.vllm.max_model_len=4096", "rollout.vllm.max_model_len", 4096),
        (f"{ACTOR}.optim={{lr: 2e-6, lr_decay_style: cosine, min_lr: 5e-7}}", "actor.lr_min_ratio", 0.25),
        (f"{ACTOR}.optim={{lr_decay_style: linear, lr_decay_steps: 50}}", "actor.lr_decay_steps", 50),
        (
            f"{ACTOR}.optim={{lr_decay_style: WSD, lr_wsd_decay_style: cosine, lr_warmup_steps: 20,"
            " lr_wsd_decay_steps: 30}",
            "actor.lr_stable_steps",
            150,
        ),
        (f"{ACTOR}.clip_ratio=0.3", "actor.clip_ratio_high", 0.2),
        (f"{ACTOR}.clip_ratio_high=0.28", "actor.clip_ratio_high", 0.28),
        (f"{ACTOR}.use_adaptive_entropy_adjustment=True", "algorithm.adaptive_entropy.enable", True),
        (f"{ACTOR}.max_entropy_coeff=0.005", "algorithm.adaptive_entropy.max_entropy_coeff", 0.005),
        (f"{ACTOR}.optim.clip_grad=0.5", "actor.grad_clip", 0.5),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", "actor.ppo_micro_batch_size_per_gpu", 4),
        (f"{ACTOR}.fsdp_config.dtype=fp32", "actor.dtype", "fp32"),
        (f"{ACTOR}.fsdp_config.param_offload=True", "actor.param_offload", True),
        (f"{ACTOR}.megatron.optimizer_offload=True", "actor.optimizer_offload", True),
        ("critic.fsdp.optimizer_offload=True", "critic.optimizer_offload", True),
        ("critic.model.fsdp_config.param_offload=True", "critic.param_offload", True),
        ("actor_rollout_ref.ref.fsdp_config.param_offload=True", "placement.reference_param_offload", True),
        (f"{ACTOR}.fsdp_config.fsdp_size=3", "actor.fsdp_size", 3),
        (f"{ACTOR}.fsdp_config.fsdp_size=8", "actor.fsdp_size", -1),  # of 8 GPUs the actor has 6
        (f"{ACTOR}.ulysses_sequence_parallel_size=0", "actor.ulysses_sequence_parallel_size", 1),
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", "actor.ulysses_sequence_parallel_size", 2),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4", "actor.ulysses_sequence_parallel_size", 2),
        ("critic.ulysses_sequence_parallel_size=2", "critic.ulysses_sequence_parallel_size", 2),
        (f"{ACTOR}.strategy=fsdp", "actor.strategy", "fsdp2"),
        ("actor_rollout_ref.model.lora_rank=32", "actor.lora_rank", 32),
        ("actor_rollout_ref.model={lora_rank: 32, lora_alpha: 64}", "actor.lora_alpha", 64.0),
        ("actor_rollout_ref.model={lora_rank: 8, exclude_modules: .*visual.*}", "actor.exclude_modules", ".*visual.*"),
        ("critic.model={lora_rank: 8, target_modules: [q_proj,v_proj]}", "critic.target_modules", ("q_proj", "v_proj")),
        ("actor_rollout_ref.model={lora_rank: 8, lora_adapter_path: /x}", "actor.lora_adapter_path", "/x"),
        ("actor_rollout_ref.model.lora.rank=8", "actor.lora_rank", 8),
        ("actor_rollout_ref.model.lora.rank=8", "actor.target_modules", "all-linear"),
        ("actor_rollout_ref.model.lora.rank=8", "actor.lora_alpha", 32.0),  # Megatron's default
        (
            "actor_rollout_ref.model.lora={rank: 8, target_modules: [linear_qkv,linear_fc2]}",
            "actor.target_modules",
            ("q_proj", "k_proj", "v_proj", "down_proj"),
        ),
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
        ("data.val_files=[]", "data.val_files", ()),
        ("data.train_files=[a.parquet,b.parquet]", "data.train_files", ("a.parquet", "b.parquet")),
        (f"{ACTOR}.policy_loss.loss_mode=dppo_tv", "actor.policy_loss.loss_mode", "dppo_tv"),
        (f"{ACTOR}.policy_loss.loss_mode=gspo", "actor.loss_agg_mode", "seq-mean-token-mean"),
        (f"{ACTOR}.policy_loss.loss_mode=cispo", "actor.loss_agg_mode", "token-mean"),
        (f"{ACTOR}.policy_loss.kl_cov_ratio=0.01", "actor.policy_loss.kl_cov_ratio", 0.01),
        (
            "+actor_rollout_ref.model.override_config={max_position_embeddings: 32768, attn_implementation: sdpa}",
            "actor.override_config",
            {"max_position_embeddings": 32768},
        ),
        (
            "+critic.model.override_config.model_config.max_position_embeddings=99",
            "critic.override_config",
            {"max_position_embeddings": 99},
        ),
        ("+actor_rollout_ref.model.override_config.attention_dropout=0.", "actor.override_config", {}),
        (f"{ACTOR}.tau_neg=1.1", "actor.policy_loss.tau_neg", 1.1),
        (f"{ACTOR}.policy_loss.tau_pos=0.9", "actor.policy_loss.tau_pos", 0.9),
        (f"{ACTOR}.clip_ratio_low=10", "actor.clip_ratio_low", 10.0),
        (f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=float32", "actor.dtype", "fp32"),
        (f"+{ACTOR}.optim.eps=1e-6", "actor.eps", 1e-6),
        (f"{ACTOR}.loss_scale_factor=900", "actor.loss_scale_factor", 900),
        (f"{ACTOR}.kl_loss_type=k3+", "actor.kl_loss_type", "k3+"),
        ("algorithm.kl_penalty=k1+", "algorithm.kl_penalty", "k1+"),
        (
            "algorithm.rollout_correction={bypass_mode: True, loss_type: reinforce, rollout_is: token}",
            "actor.policy_loss.reinforce_is",
            "token",
        ),
        (
            "algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: 0.5_4.0}",
            "algorithm.rollout_correction.rollout_is_threshold",
            "0.5_4.0",
        ),
        (
            "algorithm.rollout_correction={bypass_mode: True, rollout_rs: seq_mean_k3, rollout_rs_threshold: 0.01}",
            "actor.policy_loss.rollout_rs",
            "seq_mean_k3",
        ),
        (
            "algorithm.rollout_correction={bypass_mode: True, rollout_is: token}",
            "algorithm.rollout_correction.rollout_is",
            None,
        ),
        (
            "+algorithm.rollout_correction={bypass_mode: True, use_policy_gradient: True}",
            "actor.policy_loss.loss_mode",
            "reinforce",
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
    actor, critic = config.services.actor, config.services.critic
    assert (actor.num_processes, critic.num_processes, actor.nnodes, critic.nnodes) == (12, 4, 2, 2)
    assert (actor.devices, critic.devices) == (tuple(range(6)), (6, 7))


def test_dynamic_sampling_is_taken_with_its_generations(tmp_path: Path) -> None:
    filters = {"enable": True, "metric": "acc", "max_num_gen_batches": -1}
    keys = [f"algorithm.filter_groups.{key}={value}" for key, value in filters.items()]
    config = config_of(tmp_path, *keys, "data.gen_batch_size=1536", f"{ROLLOUT}.n=4")
    assert config.algorithm.filter_groups.model_dump() == {**filters, "max_num_gen_batches": 0}
    rewards = config_of(tmp_path, *keys, "algorithm.filter_groups.metric=reward", f"{ROLLOUT}.n=4")
    assert rewards.algorithm.filter_groups.metric == "score"
    assert (config.data.draw_size, config.data.train_batch_size) == (1536, 512)


@pytest.mark.parametrize(
    ("level", "option"), [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")]
)
def test_rejection_of_older_verl_bounds_the_inverse_ratio(tmp_path: Path, level: str, option: str) -> None:
    section = f"rollout_rs: {level}, rollout_rs_threshold: 1.25, rollout_rs_threshold_lower: 0.5"
    [rejection] = config_of(
        tmp_path, f"algorithm.rollout_correction={{{section}}}"
    ).algorithm.rollout_correction.rejections
    assert rejection.option == option
    assert (rejection.lower, rejection.upper) == pytest.approx((math.log(0.8), math.log(2.0)))


def test_with_bypass_verl_ignores_the_loss_mode(tmp_path: Path) -> None:
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    (stopping,) = translated(tmp_path, bypass, f"{ACTOR}.policy_loss.loss_mode=gspo").stopping
    assert "loss_mode=vanilla" in stopping.note
    assert translated(tmp_path, bypass, f"{ACTOR}.policy_loss.loss_mode=vanilla").stopping == []


def test_a_reward_model_of_a_pool_has_a_group(tmp_path: Path) -> None:
    pool = ("enable=True", "model_path=rm", "enable_resource_pool=True", "n_gpus_per_node=2", "nnodes=1")
    config = config_of(tmp_path, *(f"reward.reward_model.{argument}" for argument in pool))
    assert config.reward_model.model == "rm"
    assert config.reward_model_host == "reward"
    assert config.services.reward.devices == (8, 9)


def test_a_reward_model_scores_alone_and_the_report_says_so(tmp_path: Path) -> None:
    model = ("reward_model.enable=True", "reward_model.model.path=rm")
    assert config_of(tmp_path, *model).reward_model.rule_coef == 0.0
    settings = read_settings(Path("-"), (*BASE, *model), {}, NOW)
    text = report_text(translate(settings, gpus=None, drop=()), settings)
    assert "reward_model.model.path rm -> reward_model.model: its score alone" in text


def test_all_checkpoints_are_kept_unless_a_number_is_given(tmp_path: Path) -> None:
    def keep(*numbers: str) -> int | None:
        return config_of(tmp_path, *(f"trainer.max_{number}" for number in numbers)).checkpoint.keep

    assert keep() is None
    assert keep("actor_ckpt_to_keep=null") is None
    assert keep("actor_ckpt_to_keep=1") == 1
    assert keep("actor_ckpt_to_keep=1", "critic_ckpt_to_keep=5") == 5
    assert keep("actor_ckpt_to_keep=1", "critic_ckpt_to_keep=null") is None


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


def test_an_equal_value_is_taken_with_its_remark_and_has_no_comment_in_the_file(tmp_path: Path) -> None:
    words = (*BASE, "trainer.critic_warmup=0", f"{ACTOR}.optim.lr_warmup_steps=7", f"{ROLLOUT}.free_cache_engine=True")
    settings = read_settings(Path("-"), words, {}, NOW)
    translation = translate(settings, gpus=None, drop=())
    outcomes = [finding(translation, word.partition("=")[0]).outcome for word in words[-3:]]
    assert outcomes == ["taken", "taken", "changed"]
    assert "lr_warmup_steps 7 -> actor.lr_warmup_steps: the first step has lr / steps here" in (
        report_text(translation, settings)
    )
    assert "  lr_warmup_steps: 7\n" in translated_yaml(translation, "run.sh")


def test_later_words_win_and_a_tilde_takes_a_key_away(tmp_path: Path) -> None:
    config = config_of(tmp_path, "algorithm.gamma=0.5", "algorithm.gamma=0.9", "algorithm.lam=0.5", "~algorithm.lam")
    assert (config.algorithm.gamma, config.algorithm.lam) == (0.9, 1.0)


def test_arguments_of_a_reward_function_are_taken_as_a_whole(tmp_path: Path) -> None:
    function = ("custom_reward_function.path=r.py", "+custom_reward_function.reward_kwargs={a: 1, b: {c: x}}")
    assert config_of(tmp_path, *function).reward.custom_function_kwargs == {"a": 1, "b": {"c": "x"}}


def test_shares_of_a_run_of_epochs_stay_shares_whatever_its_files_come_to(tmp_path: Path) -> None:
    rate = ("lr_warmup_steps_ratio=0.05", "lr_scheduler_type=cosine", "min_lr_ratio=0.1")
    words = [f"{of}.optim.{word}" for of in (ACTOR, "critic") for word in rate]
    config = config_of(tmp_path, *words, "~trainer.total_training_steps", "trainer.total_epochs=4")
    assert (config.run.total_steps, config.run.total_epochs) == (None, 4)
    for section in (config.actor, config.critic):
        assert (section.lr_warmup_steps, section.lr_warmup_steps_ratio) == (0, 0.05)
        assert (section.lr_schedule, section.lr_decay_steps, section.lr_min_ratio) == ("cosine", None, 0.1)


def test_a_share_of_a_decay_with_an_end_of_its_own_is_of_those_steps(tmp_path: Path) -> None:
    megatron = f"{ACTOR}.optim={{lr_warmup_steps_ratio: 0.1, lr_decay_style: linear, lr_decay_steps: 50}}"
    actor = config_of(tmp_path, megatron, "~trainer.total_training_steps").actor
    assert (actor.lr_warmup_steps, actor.lr_warmup_steps_ratio, actor.lr_decay_steps) == (5, 0.0, 50)


@pytest.mark.parametrize(
    ("rule", "names", "thresholds"),
    [
        ("", "seq_max_k1", "10000.0"),
        (", rollout_rs: token, rollout_rs_threshold: 2.0", "token_k1,seq_max_k1", "0.5_2.0,10000.0"),
    ],
)
def test_a_veto_of_tokens_is_one_more_rule_of_rejection(tmp_path: Path, rule: str, names: str, thresholds: str) -> None:
    words = f"algorithm.rollout_correction={{rollout_is: token, rollout_token_veto_threshold: 1e-4{rule}}}"
    correction = config_of(tmp_path, words).algorithm.rollout_correction
    assert (correction.rollout_rs, correction.rollout_rs_threshold) == (names, thresholds)


def test_an_actor_has_no_more_ranks_than_a_mini_batch_has_rows(tmp_path: Path) -> None:
    few = ("trainer.nnodes=4", "data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", f"{ROLLOUT}.n=2")
    few = (*few, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.tensor_model_parallel_size=4")
    config = config_of(tmp_path, *few)
    assert (config.services.actor.num_processes, config.rollout.vllm.tensor_model_parallel_size) == (8, 4)
    assert "24 are left over: a mini-batch has no more rows" in (tmp_path / "my.yaml").read_text()
    divided = config_of(tmp_path, *few, f"{ACTOR}.ulysses_sequence_parallel_size=2")
    assert (divided.services.actor.num_processes, divided.actor.ulysses_sequence_parallel_size) == (16, 2)


@pytest.mark.parametrize(("word", "dtype"), [("", "bf16"), ("reward.reward_model.rollout.dtype=float32", "fp32")])
def test_a_reward_model_computes_in_bf16_as_in_verl_unless_it_is_told(tmp_path: Path, word: str, dtype: str) -> None:
    model = ("reward.reward_model.enable=True", "reward.reward_model.model_path=my/rm")
    assert config_of(tmp_path, *model, *([word] if word else [])).reward_model.dtype == dtype


def test_stable_steps_leave_room_for_a_warm_up_that_is_a_share(tmp_path: Path) -> None:
    decay = "lr_decay_style: WSD, lr_wsd_decay_style: cosine, lr_wsd_decay_steps: 30"
    wsd = f"{ACTOR}.optim={{{decay}, lr_warmup_steps_ratio: 0.1}}"
    assert config_of(tmp_path, wsd).actor.lr_stable_steps == 200 - 20 - 30
    (stopping,) = translated(tmp_path, "~trainer.total_training_steps", wsd).stopping
    assert "add trainer.total_training_steps=N" in stopping.note
