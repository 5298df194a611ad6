"""Mistakes in a configuration: one sentence each, which names the key."""

from pathlib import Path

import pytest

from splitppo.config import ConfigError, load_config
from tests.support.configs import MINIMAL, load, mistake


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("actor.lrr=1", "unknown key 'actor.lrr', did you mean 'actor.lr'?"),
        ("actr.lr=1", "unknown key 'actr', did you mean 'actor'?"),
        ("services.actor.adress=x", "unknown key 'services.actor.adress', did you mean 'services.actor.address'?"),
        ("run.zzz=1", "unknown key 'run.zzz'; known here: dir, name, seed, total_steps"),
        ("rollout.stream_groups=0", "key 'rollout.stream_groups': expected auto, or a number of at least 1, got 0"),
        (
            "algorithm.rollout_correction.bypass_mode=maybe",
            "key 'algorithm.rollout_correction.bypass_mode': expected auto, true or false, got 'maybe'",
        ),
        ("actor.lr=fast", "key 'actor.lr': input should be a valid number"),
        ("actor.lr=-1", "key 'actor.lr': input should be greater than or equal to 0, got -1"),
        ("actor.lr=.nan", "key 'actor.lr': input should be a finite number, got nan"),
        ('run.dir="/a\\0b"', "key 'run.dir': expected text without NUL characters"),
        ('data.train_files=[a, "b\\0"]', "key 'data.train_files': expected text without NUL characters"),
        ("run.total_steps=0", "key 'run.total_steps': input should be greater than or equal to 1, got 0"),
        ("run.total_steps=2.5", "key 'run.total_steps': input should be a valid integer"),
        ("actor.fsdp_size=true", "key 'actor.fsdp_size': expected a number, got True"),
        (
            "actor.ppo_micro_batch_size_per_gpu=yes",
            "key 'actor.ppo_micro_batch_size_per_gpu': expected a number, got True",
        ),
        ("actor.lr=false", "key 'actor.lr': expected a number, got False"),
        (
            "actor.loss_agg_mode=token-meen",
            "key 'actor.loss_agg_mode': input should be 'token-mean', 'token-sum', 'seq-mean-token-sum',"
            " 'seq-mean-token-mean' or 'seq-mean-token-sum-norm', got 'token-meen' (did you mean token-mean?)",
        ),
        (
            "actor.kl_loss_type=k33",
            "key 'actor.kl_loss_type': input should be 'kl', 'k1', 'abs', 'mse', 'k2', 'low_var_kl', 'k3', 'kl+',"
            " 'k1+', 'abs+', 'mse+', 'k2+', 'low_var_kl+' or 'k3+', got 'k33' (did you mean k3?)",
        ),
        ("run.schedule=fast", "key 'run.schedule': input should be 'serial', 'gather' or 'overlap', got 'fast'"),
        ("rollout.n=", "key 'rollout.n': input should be a valid integer, got None"),
        ("run=3", "key 'run': expected a section of keys, got 3"),
        ("actor=[1]", "key 'actor': expected a section of keys, got [1]"),
        ("tracking.trackers=wandb", "key 'tracking.trackers': expected a list, got 'wandb'"),
        ("data.train_files=[]", "key 'data.train_files': tuple should have at least 1 item"),
        (
            "data.train_weights=[1, 2]",
            "key 'data': train_weights has 2 numbers for 1 train_files; expected one for each",
        ),
        ("data.train_weights=[0]", "key 'data.train_weights.0': input should be greater than 0, got 0"),
        (
            "data={train_files: a, train_batch_size: 8, train_weights: [1], sampler: {class_path: a, class_name: b}}",
            "key 'data': train_weights and sampler exclude each other: remove one of them",
        ),
        ("data.custom_cls.path=a.py", "key 'data.custom_cls': expected both path and name, or neither"),
        ("data.sampler.class_name=A", "key 'data.sampler': expected both class_path and class_name, or neither"),
        (
            "data.filters.extra_info.level={min: low}",
            "key 'data.filters.extra_info.level': expected a value, a list of values, or a number as min or max;"
            " found {'min': 'low'}",
        ),
        ("data.filters.ability=[]", "key 'data.filters.ability': expected a value, a list of values, or"),
        (
            "checkpoint.weights_save_freq=-1",
            "key 'checkpoint.weights_save_freq': input should be greater than or equal",
        ),
        ("checkpoint.max_writers=0", "key 'checkpoint.max_writers': input should be greater than or equal to 1, got 0"),
        ("checkpoint.best_metric=accuracy", "key 'checkpoint.best_metric': expected val/accuracy, or a name that"),
        (
            "checkpoint.best_metric=val/accuracy",
            "checkpoint.best_metric needs validation: expected data.val_files, got",
        ),
        ("evaluation.early_stop.metric=val/acc", "key 'evaluation.early_stop.metric': expected val/accuracy, or"),
        ("evaluation.early_stop={metric: val/accuracy}", "evaluation.early_stop.metric needs validation: expected"),
        ("evaluation.early_stop.patience=0", "key 'evaluation.early_stop.patience': input should be greater than"),
        ("evaluation.val_only=true", "evaluation.val_only needs validation: expected data.val_files, got none"),
        ("services.actor.devices=[0, 1]", "key 'services.actor': devices lists 2 GPUs for num_processes 1"),
        ("services.actor.devices=[-1]", "key 'services.actor.devices.0': input should be greater than or equal to 0"),
        (
            "actor={model: m, lr_warmup_steps: 2, lr_warmup_steps_ratio: 0.1}",
            "key 'actor': lr_warmup_steps and lr_warmup_steps_ratio: expected one of them, the other must be 0",
        ),
        ("actor.lora_rank=-1", "key 'actor.lora_rank': input should be greater than or equal to 0, got -1"),
        ("actor.lora_alpha=0", "key 'actor.lora_alpha': input should be greater than 0, got 0"),
        (
            "actor.lora_adapter_path=adapter",
            "key 'actor.lora_adapter_path': is of no use with lora_rank 0: set lora_rank to that of the adapter",
        ),
        (
            "actor.target_modules=[q_proj, lm_head]",
            "key 'actor.target_modules': lm_head cannot have an adapter (its logits are made in chunks)",
        ),
        ("critic.target_modules=[]", "key 'critic.target_modules': expected all-linear, names of layers, or a regular"),
        ("actor.target_modules='*_proj'", "key 'actor.target_modules': expected names or a regular expression ("),
        ("actor.exclude_modules='(up'", "key 'actor.exclude_modules': expected names or a regular expression ("),
        ("critic.warmup_epochs=2", "key 'critic.warmup_epochs': is of no use with warmup_steps 0: set warmup_steps"),
        ("critic.warmup_until={}", "key 'critic.warmup_until': is of no use with warmup_steps 0: set warmup_steps"),
        ("critic={warmup_steps: 2, warmup_epochs: 0}", "key 'critic.warmup_epochs': input should be greater than"),
        ("critic={warmup_steps: 2, warmup_until: {patience: 0}}", "key 'critic.warmup_until.patience': input should"),
        ("actor.lr_stable_steps=4", "key 'actor': lr_stable_steps is of no use with lr_schedule 'constant'"),
        (
            "algorithm.rollout_correction={rollout_is: tokens}",
            "key 'algorithm.rollout_correction.rollout_is': input should be 'token' or 'sequence', got 'tokens'",
        ),
        (
            "algorithm.rollout_correction={rollout_is_threshold: 0.5}",
            "key 'algorithm.rollout_correction.rollout_is_threshold': expected a number of at least 1, or"
            " 'lower_upper' (in quotes) with 0 < lower <= upper, got 0.5",
        ),
        (
            "algorithm.rollout_correction={rollout_is_threshold: 4.0_0.5}",
            "key 'algorithm.rollout_correction.rollout_is_threshold': expected a number of at least 1, or"
            " 'lower_upper' (in quotes) with 0 < lower <= upper, got '4.0_0.5'",
        ),
        (
            "algorithm.rollout_correction={rollout_is_batch_normalize: true}",
            "key 'algorithm.rollout_correction': rollout_is_batch_normalize is set, but rollout_is is not",
        ),
        (
            "algorithm.rollout_correction={rollout_rs: token_k1}",
            "key 'algorithm.rollout_correction': rollout_rs 'token_k1' needs rollout_rs_threshold",
        ),
        (
            "algorithm.rollout_correction={rollout_rs_threshold: 2.0}",
            "key 'algorithm.rollout_correction': rollout_rs_threshold is set, but rollout_rs is not",
        ),
        (
            "algorithm.rollout_correction={rollout_rs: token, rollout_rs_threshold: 2.0}",
            "key 'algorithm.rollout_correction.rollout_rs': expected names out of token_k1, token_k2",
        ),
        (
            'algorithm.rollout_correction={rollout_rs: "token_k1,token_k1", rollout_rs_threshold: 2.0}',
            "key 'algorithm.rollout_correction.rollout_rs': a name is given twice in 'token_k1,token_k1'",
        ),
        (
            'algorithm.rollout_correction={rollout_rs: token_k1, rollout_rs_threshold: "1,2"}',
            "key 'algorithm.rollout_correction.rollout_rs_threshold': expected one threshold for all or 1, as many",
        ),
        (
            # YAML reads 0.5_2 as 0.52: the bounds need quotes.
            "algorithm.rollout_correction={rollout_rs: token_k1, rollout_rs_threshold: 0.5_2}",
            "key 'algorithm.rollout_correction.rollout_rs_threshold': token_k1 takes 'lower_upper' (in quotes)",
        ),
        (
            'algorithm.rollout_correction={rollout_rs: token_k3, rollout_rs_threshold: "0.5_2.0"}',
            "key 'algorithm.rollout_correction.rollout_rs_threshold': token_k3 takes one positive upper bound in nats",
        ),
        (
            "algorithm.rollout_correction={loss_type: ppo}",
            "key 'algorithm.rollout_correction.loss_type': input should be 'ppo_clip' or 'reinforce', got 'ppo'",
        ),
        (
            "algorithm.rollout_correction={loss_type: reinforce, bypass_mode: false}",
            "key 'algorithm.rollout_correction': loss_type reinforce is the loss of bypass_mode",
        ),
        (
            "actor.policy_loss={loss_mode: gpso}",
            "key 'actor.policy_loss.loss_mode': expected one of vanilla, gspo, geo_mean, cispo, sapo, clip_cov,"
            " kl_cov, gpg, dppo_tv, dppo_kl, dro, reinforce, or with custom_path a function of that file, got 'gpso'"
            " (did you mean gspo?)",
        ),
        (
            "actor.policy_loss={clip_cov_lb: 5}",
            "key 'actor.policy_loss': clip_cov_lb must be less than clip_cov_ub, got 5.0 and 5.0",
        ),
        ("actor.policy_loss=gspo", "key 'actor.policy_loss': expected a section of keys, got 'gspo'"),
        (
            "actor.policy_loss={reinforce_is_threshold: 0.5}",
            "key 'actor.policy_loss.reinforce_is_threshold': expected a number of at least 1, or 'lower_upper'",
        ),
        ("actor.target_kl=0", "key 'actor.target_kl': input should be greater than 0, got 0"),
        (
            "algorithm.rollout_correction={bypass_mode: true, rollout_is: token}",
            "key 'algorithm.rollout_correction': rollout_is multiplies nothing with bypass_mode and ppo_clip",
        ),
        ("rollout.temperature=0.001", "key 'rollout.temperature': input should be greater than or equal to 0.01"),
        ("evaluation.temperature=1e-38", "key 'evaluation.temperature': expected 0 (greedy) or at least 0.01"),
        (
            "placement.reference=learner",
            "key 'placement.reference': input should be 'actor', 'critic' or 'auto', got 'learner'",
        ),
        (
            "placement.reward_model=actor",
            "key 'placement.reward_model': input should be 'critic', 'reward' or 'auto', got 'actor'",
        ),
        (
            "reward_model.coef={hh: 2}",
            "key 'reward_model.coef': expected an entry 'default' beside those of data sources, got hh",
        ),
        (
            "critic.privileged_prompt=answer",
            "key 'critic.privileged_prompt': expected a text with fields in braces, such as {ground_truth}",
        ),
        (
            "critic.privileged_prompt=Hidden: {x}",
            "key 'critic.privileged_prompt': expected a text, or null; in quotes of YAML if it begins with "
            "a brace or has a colon before a space",
        ),
        (
            "critic.privileged_prompt='{x.__class__}'",
            "key 'critic.privileged_prompt': the field 'x.__class__' is more than a name: expected one without any of",
        ),
        ("critic.privileged_prompt='{x'", "key 'critic.privileged_prompt': its braces do not match"),
        ("critic={privileged_prompt: '{x}', max_privileged_length: 0}", "key 'critic.max_privileged_length'"),
        ("evaluation.min_accuracy=2", "key 'evaluation.min_accuracy': input should be less than or equal to 1, got 2"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_key(tmp_path: Path, override: str, sentence: str) -> None:
    assert mistake(tmp_path, override).startswith(sentence)


def test_a_mistake_is_blamed_on_the_override_or_on_the_file_that_has_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "actor.lr=fast", "rollout.n=2", text=f"{MINIMAL}rollout: {{top_k: low}}\n")
    in_file, in_override = str(caught.value).split("; override ")
    assert in_file.startswith(f"{tmp_path / 'config.yaml'}: key 'rollout.top_k'")
    assert in_override.startswith("'actor.lr=fast': key 'actor.lr': input should be a valid number")


def test_a_check_of_a_whole_section_blames_the_override_of_the_key_that_is_wrong(tmp_path: Path) -> None:
    override = "actor.policy_loss.loss_mode=gpso"
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, override)
    assert str(caught.value).startswith(f"override {override!r}: key 'actor.policy_loss.loss_mode': expected one of")


def test_a_reference_on_a_group_that_is_not_started_is_refused_with_both_keys(tmp_path: Path) -> None:
    sentence = mistake(tmp_path, "placement.reference=critic", "algorithm.adv_estimator=grpo")

    assert sentence.startswith("placement.reference is critic, but algorithm.adv_estimator grpo needs no values")


def test_what_the_critic_alone_reads_needs_a_critic(tmp_path: Path) -> None:
    sentence = mistake(tmp_path, "critic.privileged_prompt='{ground_truth}'", "algorithm.adv_estimator=remax")
    assert "critic.privileged_prompt is for the critic alone, and algorithm.adv_estimator remax has none" in sentence


def test_a_reward_model_without_a_critic_is_refused_with_both_keys(tmp_path: Path) -> None:
    sentence = mistake(tmp_path, "reward_model.model=rm", "algorithm.adv_estimator=grpo")

    assert sentence.startswith("placement.reward_model is critic, but algorithm.adv_estimator grpo needs no values")
    assert "set placement.reward_model to reward" in sentence


def test_a_reward_group_needs_no_critic(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "reward_model.model=rm",
        "placement.reward_model=reward",
        "algorithm.adv_estimator=reinforce_plus_plus",
    )

    assert config.roles == ("actor", "reward")
    assert config.trained_roles == ("actor",)


def test_groups_that_share_a_gpu_are_named(tmp_path: Path) -> None:
    devices = [f"services.{role}.devices=[{gpu}]" for role, gpu in (("actor", 0), ("critic", 1), ("reward", 1))]
    reward = ("reward_model.model=rm", "placement.reward_model=reward")
    sentence = mistake(tmp_path, *devices, *reward)

    assert sentence.startswith("services.critic.devices [1] and services.reward.devices [1] overlap")
    assert load(tmp_path, *devices).roles == ("actor", "critic")
    assert load(tmp_path, *devices, *reward, "services.allow_shared_devices=true").shared_devices == (1,)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("actor.lr", "override 'actor.lr' must look like key.path=value"),
        ("=3", "override '=3' must look like key.path=value"),
        ("run.dir.x=3", "override 'run.dir.x=3': 'run.dir' is not a section"),
        ("actor.lr=[", "override 'actor.lr=[' is not valid YAML"),
        (
            "critic.privileged_prompt=Hidden: {a}. Answer: {b}",
            "override 'critic.privileged_prompt=Hidden: {a}. Answer: {b}' is not valid YAML: while parsing",
        ),
        ("run.name=2024-13-45", "override 'run.name=2024-13-45' is not valid YAML: month must be in"),
    ],
)
def test_an_override_that_cannot_be_applied_is_quoted(tmp_path: Path, override: str, sentence: str) -> None:
    found = mistake(tmp_path, override)
    assert found.startswith(sentence)
    assert found.endswith("needs quotes inside those of the shell") == ("is not valid YAML" in found)


@pytest.mark.parametrize(
    "override",
    [
        "actr.lr=1",
        "actor.optim.lr=1",
        "actor.lr=fast",
        "actor.lr_stable_steps=2",
        "services.actor.devices=[0, 1]",
        "evaluation.val_only=true",
        "algorithm.filter_groups.enable=true",
    ],
)
def test_a_mistake_on_the_command_line_names_the_override(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, override, "actor.weight_decay=0.5", "rollout.temperature=0.5")
    assert str(caught.value).startswith(f"override {override!r}: ")


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["actor.fsdp_size=3", "services.actor.num_processes=8"], 0),
        (["services.actor.num_processes=8", "actor.fsdp_size=3"], 1),
        (["actor.fsdp_size=2", "actor.fsdp_size=3", "services.actor.num_processes=8"], 1),
        (["actor.lr_stable_steps=2", "actor.lr_schedule=constant"], 0),
        (["actor.lr_schedule=linear", "actor={lr_stable_steps: 2, model: m}"], 1),
    ],
)
def test_of_several_overrides_the_one_is_named_whose_key_is_wrong(
    tmp_path: Path, overrides: list[str], blamed: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *overrides)
    assert str(caught.value).startswith(f"override {overrides[blamed]!r}: ")


@pytest.mark.parametrize("mistaken", ["lr_stable_steps: 2", "lr: fast", "lrr: 1"])
def test_a_mistake_in_the_file_names_the_file_whatever_the_overrides_are(tmp_path: Path, mistaken: str) -> None:
    text = MINIMAL.replace("actor: {", f"actor: {{{mistaken}, ")
    assert text != MINIMAL
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "actor.weight_decay=0.5", "rollout.n=2", text=text)
    assert str(caught.value).startswith(f"{tmp_path / 'config.yaml'}: ")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "expected a mapping of sections, got nothing"),
        ("- a", "expected a mapping of sections, got list"),
        (
            "run: {dir: x}",
            "key 'run': expected total_steps, total_epochs, or both; key 'data' is missing; key 'actor' is missing",
        ),
        (MINIMAL + "run: {}", "key 'run' is given twice, again in line 5"),
    ],
)
def test_a_file_that_is_no_configuration_says_what_is_missing(tmp_path: Path, text: str, sentence: str) -> None:
    assert mistake(tmp_path, text=text).startswith(sentence)


def test_a_file_that_is_not_yaml_is_named_with_the_place(tmp_path: Path) -> None:
    sentence = mistake(tmp_path, text="run: [1")

    assert "config.yaml is not valid YAML" in sentence
    assert "line 1" in sentence


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file .*nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")
