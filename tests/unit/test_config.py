"""Configuration: one sentence per mistake, naming the key; derived defaults; the batch plan; the worker digests."""

import math
from pathlib import Path

import pytest

from splitppo.config import Config, ConfigError, dump_config, load_config
from splitppo.config.digest import worker_digest
from splitppo.config.plan import batch_plan

MINIMAL = """
run: {dir: runs/x, total_steps: 3}
data: {train_files: train.parquet, train_batch_size: 8}
actor: {model: models/tiny}
"""


def load(tmp_path: Path, *overrides: str, text: str = MINIMAL) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return load_config(file, overrides)


def mistake(tmp_path: Path, *overrides: str, text: str = MINIMAL) -> str:
    with pytest.raises(ConfigError) as caught:
        batch_plan(load(tmp_path, *overrides, text=text))
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence.removeprefix(f"{tmp_path / 'config.yaml'}: ")


# What is read.


def test_a_single_file_stands_for_a_list_of_one(tmp_path: Path) -> None:
    assert load(tmp_path).data.train_files == ("train.parquet",)


def test_defaults_that_come_from_another_section_are_filled_in(tmp_path: Path) -> None:
    config = load(tmp_path)

    assert config.critic.model == config.data.tokenizer == "models/tiny"
    assert config.actor.ppo_mini_batch_size == config.critic.ppo_mini_batch_size == 8


def test_the_critics_mini_batch_follows_the_actors(tmp_path: Path) -> None:
    assert load(tmp_path, "actor.ppo_mini_batch_size=4").critic.ppo_mini_batch_size == 4


def test_overrides_win_over_the_file_and_make_sections(tmp_path: Path) -> None:
    config = load(tmp_path, "actor.lr=1e-4", "services.critic.devices=[0, 1]", "services.critic.num_processes=2")

    assert config.actor.lr == 1e-4
    assert config.services.critic.devices == (0, 1)


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("1E3", 1000.0), ("2.e-3", 2e-3), ("3", 3.0)])
def test_numbers_are_read_as_people_write_them(tmp_path: Path, text: str, value: float) -> None:
    assert load(tmp_path, f"actor.lr={text}").actor.lr == value


def test_an_override_may_hold_equal_signs_and_addresses(tmp_path: Path) -> None:
    config = load(tmp_path, "run.name=a=b", "services.actor.address=10.0.0.1:5000")

    assert (config.run.name, config.services.actor.address) == ("a=b", "10.0.0.1:5000")


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    config = load(tmp_path, "actor.betas=[0.9, 0.99]", "data.chat_template=t.jinja", "actor.lr=1e-6")

    assert load(tmp_path, text=dump_config(config)) == config


def test_a_config_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path).run.seed = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("overrides", "critic", "reference"),
    [
        ([], True, False),
        (["algorithm.adv_estimator=grpo"], False, False),
        (["algorithm.use_kl_in_reward=true"], True, True),
        (["actor.use_kl_loss=true"], True, True),
    ],
)
def test_critic_and_reference_exist_where_they_are_used(
    tmp_path: Path, overrides: list[str], critic: bool, reference: bool
) -> None:
    config = load(tmp_path, *overrides)

    assert (config.uses_critic, config.uses_reference) == (critic, reference)


# Rollout correction.


def rejections(tmp_path: Path, *overrides: str) -> list[tuple[str, float | None, float]]:
    config = load(tmp_path, *(f"algorithm.rollout_correction.{override}" for override in overrides))
    return [(each.option, each.lower, each.upper) for each in config.algorithm.rollout_correction.rejections]


@pytest.mark.parametrize("threshold", ['"0.5_2.0"', "2.0", '"2"'])
def test_bounds_of_a_ratio_are_two_numbers_or_the_upper_one(tmp_path: Path, threshold: str) -> None:
    found = rejections(tmp_path, "rollout_rs=token_k1", f"rollout_rs_threshold={threshold}")

    assert found == [("token_k1", pytest.approx(-math.log(2.0)), pytest.approx(math.log(2.0)))]


def test_several_criteria_have_a_threshold_each_or_share_one(tmp_path: Path) -> None:
    both = "rollout_rs='seq_sum_k1, token_k3'"

    assert rejections(tmp_path, both, "rollout_rs_threshold='1.0_2.0, 0.1'") == [
        ("seq_sum_k1", 0.0, pytest.approx(math.log(2.0))),
        ("token_k3", None, 0.1),
    ]
    assert [upper for _, _, upper in rejections(tmp_path, both, "rollout_rs_threshold=1")] == [0.0, 1.0]


def test_rollout_correction_is_off_by_default_and_survives_a_dump(tmp_path: Path) -> None:
    assert not load(tmp_path).algorithm.rollout_correction.is_active
    config = load(
        tmp_path,
        "algorithm.rollout_correction={rollout_is: token, rollout_rs: token_k1, rollout_rs_threshold: 0.5_2.0}",
    )
    assert config.algorithm.rollout_correction.is_active
    assert load(tmp_path, text=dump_config(config)) == config


# Mistakes.


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("actor.lrr=1", "unknown key 'actor.lrr', did you mean 'actor.lr'?"),
        ("actr.lr=1", "unknown key 'actr', did you mean 'actor'?"),
        ("services.actor.adress=x", "unknown key 'services.actor.adress', did you mean 'services.actor.address'?"),
        ("run.zzz=1", "unknown key 'run.zzz'; known here: dir, name, seed, total_steps"),
        ("actor.lr=fast", "key 'actor.lr': input should be a valid number"),
        ("actor.lr=-1", "key 'actor.lr': input should be greater than or equal to 0, got -1"),
        ("actor.lr=.nan", "key 'actor.lr': input should be a finite number, got nan"),
        ("run.total_steps=0", "key 'run.total_steps': input should be greater than or equal to 1, got 0"),
        ("run.total_steps=2.5", "key 'run.total_steps': input should be a valid integer"),
        ("run.schedule=fast", "key 'run.schedule': input should be 'serial', 'gather' or 'overlap', got 'fast'"),
        ("rollout.n=", "key 'rollout.n': input should be a valid integer, got None"),
        ("run=3", "key 'run': input should be a valid dictionary"),
        ("actor=[1]", "key 'actor': input should be a valid dictionary"),
        ("data.train_files=[]", "key 'data.train_files': tuple should have at least 1 item"),
        ("services.actor.devices=[0, 1]", "key 'services.actor': devices lists 2 GPUs for num_processes 1"),
        ("services.actor.devices=[-1]", "key 'services.actor.devices.0': input should be greater than or equal to 0"),
        ("actor.lr_schedule=cosine", "key 'actor': lr_schedule 'cosine' needs lr_decay_steps"),
        (
            "algorithm.rollout_correction={rollout_is: tokens}",
            "key 'algorithm.rollout_correction.rollout_is': input should be 'token' or 'sequence', got 'tokens'",
        ),
        (
            "algorithm.rollout_correction={rollout_is_threshold: 0.5}",
            "key 'algorithm.rollout_correction.rollout_is_threshold': input should be greater than or equal to 1",
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
            "key 'algorithm.rollout_correction': rollout_rs: expected names out of token_k1, token_k2",
        ),
        (
            'algorithm.rollout_correction={rollout_rs: "token_k1,token_k1", rollout_rs_threshold: 2.0}',
            "key 'algorithm.rollout_correction': rollout_rs: a name is given twice in 'token_k1,token_k1'",
        ),
        (
            'algorithm.rollout_correction={rollout_rs: token_k1, rollout_rs_threshold: "1,2"}',
            "key 'algorithm.rollout_correction': rollout_rs_threshold: expected one threshold for all or 1, as many",
        ),
        (
            # YAML reads 0.5_2 as 0.52: the bounds need quotes.
            "algorithm.rollout_correction={rollout_rs: token_k1, rollout_rs_threshold: 0.5_2}",
            "key 'algorithm.rollout_correction': rollout_rs_threshold: token_k1 takes 'lower_upper' (in quotes)",
        ),
        (
            'algorithm.rollout_correction={rollout_rs: token_k3, rollout_rs_threshold: "0.5_2.0"}',
            "key 'algorithm.rollout_correction': rollout_rs_threshold: token_k3 takes one positive upper bound in nats",
        ),
        ("algorithm.rollout_correction={bypass_mode: true}", "unknown key 'algorithm.rollout_correction.bypass_mode'"),
        ("rollout.temperature=0.001", "key 'rollout.temperature': input should be greater than or equal to 0.01"),
        ("evaluation.temperature=1e-38", "key 'evaluation.temperature': expected 0 (greedy) or at least 0.01"),
        ("evaluation.min_accuracy=2", "key 'evaluation.min_accuracy': input should be less than or equal to 1, got 2"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_key(tmp_path: Path, override: str, sentence: str) -> None:
    assert mistake(tmp_path, override).startswith(sentence)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("actor.lr", "override 'actor.lr' must look like key.path=value"),
        ("=3", "override '=3' must look like key.path=value"),
        ("run.dir.x=3", "override 'run.dir.x=3': 'dir' is not a section"),
        ("actor.lr=[", "override 'actor.lr=[' is not valid YAML"),
    ],
)
def test_an_override_that_cannot_be_applied_is_quoted(tmp_path: Path, override: str, sentence: str) -> None:
    assert mistake(tmp_path, override).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "expected a mapping of sections, got NoneType"),
        ("- a", "expected a mapping of sections, got list"),
        ("run: {dir: x}", "key 'run.total_steps' is missing; key 'data' is missing; key 'actor' is missing"),
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


# The plan.


def test_the_plan_counts_rows_mini_batches_and_optimizer_steps(tmp_path: Path) -> None:
    plan = batch_plan(
        load(
            tmp_path, "rollout.n=4", "actor.ppo_mini_batch_size=2", "actor.ppo_epochs=3", "critic.ppo_mini_batch_size=8"
        )
    )
    actor, critic = plan.roles

    assert (plan.prompts, plan.rows) == (8, 32)
    assert (actor.mini_batch_rows, actor.num_mini_batches, actor.optimizer_steps) == (8, 4, 12)
    assert (critic.mini_batch_rows, critic.num_mini_batches, critic.optimizer_steps) == (32, 1, 1)


def test_the_plan_is_printed_with_every_number(tmp_path: Path) -> None:
    plan = batch_plan(load(tmp_path, "rollout.n=2", "services.actor.num_processes=2"))

    assert str(plan).splitlines()[:2] == [
        "step: 8 prompts x 2 samples = 16 responses",
        "actor: 1 mini-batches of 8 prompts (16 responses, about 8 on each of 2 ranks) x 1 epochs"
        " = 1 optimizer steps; micro-batches of at most 16384 tokens",
    ]


def test_without_a_critic_the_plan_has_the_actor_only(tmp_path: Path) -> None:
    assert [role.role for role in batch_plan(load(tmp_path, "algorithm.adv_estimator=grpo")).roles] == ["actor"]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "actor.ppo_mini_batch_size=3",
            "data.train_batch_size (8) must be a multiple of actor.ppo_mini_batch_size (3);"
            " change actor.ppo_mini_batch_size",
        ),
        ("critic.ppo_mini_batch_size=16", "data.train_batch_size (8) must be a multiple of critic.ppo_mini_batch_size"),
        (
            "actor.ppo_max_token_len_per_gpu=1023",
            "actor.ppo_max_token_len_per_gpu (1023) must hold one row of data.max_prompt_length +"
            " data.max_response_length (1024) tokens",
        ),
        (
            "services.critic.num_processes=9",
            "critic.ppo_mini_batch_size (8) x rollout.n (1) gives fewer rows than services.critic.num_processes (9)",
        ),
        (
            "rollout.stream_groups=9",
            "rollout.stream_groups (9) must not exceed data.train_batch_size (8), since a group holds at least one"
            " prompt; lower rollout.stream_groups",
        ),
        (
            "rollout={backend: vllm, vllm: {tensor_model_parallel_size: 2}}",
            "services.actor.num_processes (1) must be a multiple of rollout.vllm.tensor_model_parallel_size (2);"
            " change rollout.vllm.tensor_model_parallel_size",
        ),
        (
            "rollout={backend: vllm, vllm: {max_model_len: 1023}}",
            "rollout.vllm.max_model_len (1023) must hold data.max_prompt_length + data.max_response_length (1024)"
            " tokens; raise rollout.vllm.max_model_len",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_both_numbers_and_the_key(
    tmp_path: Path, override: str, sentence: str
) -> None:
    assert mistake(tmp_path, override).startswith(sentence)


def test_what_concerns_vllm_alone_is_checked_only_where_vllm_samples(tmp_path: Path) -> None:
    batch_plan(load(tmp_path, "rollout.vllm={tensor_model_parallel_size: 2, max_model_len: 9}"))
    batch_plan(load(tmp_path, "rollout={backend: vllm, stream_groups: 8, vllm: {max_model_len: 1024}}"))


# The digests.


@pytest.mark.parametrize(
    "override",
    [
        "run.total_steps=9",
        "run.schedule=overlap",
        "run.dir=elsewhere",
        "services.actor.address=a:1",
        "services.critic.threads=2",
        "checkpoint.save_freq=1",
        "evaluation.test_freq=1",
    ],
)
def test_a_longer_run_or_another_address_needs_no_restart(tmp_path: Path, override: str) -> None:
    before, after = load(tmp_path), load(tmp_path, override)

    assert worker_digest(before, "actor") == worker_digest(after, "actor")
    assert worker_digest(before, "critic") == worker_digest(after, "critic")


@pytest.mark.parametrize(
    ("override", "actor_changes", "critic_changes"),
    [
        ("actor.lr=1", True, False),
        ("critic.lr=1", False, True),
        ("critic.model=other", False, True),
        ("rollout.temperature=0.5", True, False),
        ("rollout.n=2", True, True),
        ("run.seed=2", True, True),
        ("actor.use_kl_loss=true", True, False),
        ("algorithm.use_kl_in_reward=true", True, False),
    ],
)
def test_what_shapes_a_worker_changes_its_digest_and_no_others(
    tmp_path: Path, override: str, actor_changes: bool, critic_changes: bool
) -> None:
    before, after = load(tmp_path), load(tmp_path, override)

    assert (worker_digest(before, "actor") != worker_digest(after, "actor")) is actor_changes
    assert (worker_digest(before, "critic") != worker_digest(after, "critic")) is critic_changes


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.train_batch_size=4096", "rollout.n=64"], "data.train_batch_size (4096) times rollout.n (64)"),
        (["evaluation.batch_size=1024", "evaluation.n=129"], "evaluation.batch_size (1024) times evaluation.n (129)"),
    ],
)
def test_more_responses_than_one_batch_holds_are_refused(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        batch_plan(load(tmp_path, *overrides))
    assert str(refused.value).startswith(f"{sentence} must not exceed 131072 responses")


# Who may call.


@pytest.mark.parametrize(
    "bind", ["0.0.0.0:1", "10.0.0.1:1", "[::]:1", "some.host:1", "127.0.0.1.some.host:1", ":1", "host", "::1:7001"]
)
def test_plaintext_beyond_this_machine_is_refused(tmp_path: Path, bind: str) -> None:
    sentence = mistake(tmp_path, f"services.actor.bind='{bind}'")
    assert sentence.startswith(f"services.actor.bind is '{bind}', which is not a loopback address")
    external = ("services.launch=external", f"services.critic.address='{bind}'")
    assert "services.critic.address is" in mistake(tmp_path, *external)


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "127.1.2.3:7001", "localhost:7001", "[::1]:7001"])
def test_plaintext_on_this_machine_is_not(tmp_path: Path, bind: str) -> None:
    assert load(tmp_path, f"services.actor.bind='{bind}'").services.actor.bind == bind


def test_with_mutual_tls_a_service_may_be_reached_from_elsewhere(tmp_path: Path) -> None:
    files = ("ca_file=ca.pem", "cert_file='{role}.pem'", "key_file='{role}.key'")
    tls = [f"services.security.{key}" for key in ("tls=true", *files)]
    config = load(tmp_path, "services.actor.bind=0.0.0.0:7001", *tls)
    assert config.services.security.tls_files("critic") == (Path("ca.pem"), Path("critic.pem"), Path("critic.key"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["tls=true"], "tls needs ca_file, cert_file and key_file; ca_file and cert_file and key_file not given"),
        (["tls=true", "ca_file=a", "cert_file=b"], "tls needs ca_file, cert_file and key_file; key_file not given"),
        (["cert_file=b"], "cert_file is given, but tls is false: set tls to true, or leave cert_file out"),
        (["token_file=a", "token_env=B"], "token_file and token_env are both given, expected one of them"),
    ],
)
def test_half_of_a_security_setting_is_refused(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    said = mistake(tmp_path, *(f"services.security.{override}" for override in overrides))
    assert said == f"key 'services.security': {sentence}"


def test_a_token_does_not_belong_into_the_configuration(tmp_path: Path) -> None:
    assert "unknown key 'services.security.token'" in mistake(tmp_path, "services.security.token=abc")
    said = mistake(tmp_path, "services.security.token_env='no variable'")
    assert "services.security.token_env" in said
    assert "no variable" not in said, "it may be the token"


def test_credentials_change_no_digest(tmp_path: Path) -> None:
    digests = [worker_digest(load(tmp_path, *change), "actor") for change in ([], ["services.security.token_env=T"])]
    assert digests[0] == digests[1]
