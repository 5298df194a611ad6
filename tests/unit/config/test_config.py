"""The reading of a configuration file: overrides, numbers, derived defaults."""

from pathlib import Path

import pytest
import yaml

from splitppo.config import config_tree, dump_config
from splitppo.config.resolve import resolve_run
from splitppo.dotted_keys import leaves
from splitppo.machine.cores import permitted_cores
from tests.support.configs import load


def test_a_single_file_stands_for_a_list_of_one(tmp_path: Path) -> None:
    assert load(tmp_path).data.train_files == ("train.parquet",)


def test_defaults_that_come_from_another_section_are_filled_in(tmp_path: Path) -> None:
    config = load(tmp_path)

    assert config.critic.model == config.data.tokenizer == "models/tiny"
    assert config.actor.ppo_mini_batch_size == config.critic.ppo_mini_batch_size == 8


def test_changes_have_no_value_that_follows_from_other_keys(tmp_path: Path) -> None:
    given = ("actor.lr=1e-4", "rollout.stream_groups=auto", "algorithm.rollout_correction.loss_type=reinforce")
    config = resolve_run(load(tmp_path, *given), None, permitted_cores())
    changes = dict(leaves(yaml.safe_load(dump_config(config, with_defaults=False))))

    assert (changes["actor.lr"], changes["actor.model"]) == (1e-4, "models/tiny")
    derived = {"critic.model", "rollout.stream_groups", "services.actor.threads", "actor.policy_loss.loss_mode"}
    assert not derived & changes.keys()
    assert {} not in changes.values()


@pytest.mark.parametrize(("freq", "expected"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (7, [])])
def test_weights_are_kept_of_every_so_many_steps_but_never_the_initial_ones(
    tmp_path: Path, freq: int, expected: list[int]
) -> None:
    checkpoint = load(tmp_path, f"checkpoint.weights_save_freq={freq}").checkpoint
    assert [step for step in range(7) if checkpoint.saves_weights(step)] == expected


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


@pytest.mark.parametrize("with_defaults", [True, False])
def test_a_configuration_as_dicts_is_what_its_text_says(tmp_path: Path, with_defaults: bool) -> None:
    given = ("actor.betas=[0.9, 0.99]", "actor.lr=1e-6", "run.name='1: é\u2028'", "services.rollout={}")
    config = load(tmp_path, *given)
    tree = config_tree(config, with_defaults=with_defaults)

    assert tree == yaml.safe_load(dump_config(config, with_defaults=with_defaults))
    assert tree["actor"]["betas"] == [0.9, 0.99]


def test_a_config_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path).run.seed = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("overrides", "critic", "reference"),
    [
        ([], True, False),
        (["algorithm.adv_estimator=reinforce_plus_plus"], False, False),
        (["algorithm.use_kl_in_reward=true"], True, True),
        (["actor.use_kl_loss=true"], True, True),
    ],
)
def test_critic_and_reference_exist_where_they_are_used(
    tmp_path: Path, overrides: list[str], critic: bool, reference: bool
) -> None:
    config = load(tmp_path, *overrides)

    assert (config.uses_critic, config.uses_reference) == (critic, reference)


@pytest.mark.parametrize(
    ("overrides", "placed", "host"),
    [
        ([], "critic", None),
        (["actor.use_kl_loss=true"], "critic", "critic"),
        (["actor.use_kl_loss=true", "placement.reference=auto"], "critic", "critic"),
        (["actor.use_kl_loss=true", "rollout.stream_groups=1"], "actor", "actor"),
        (["actor.use_kl_loss=true", "placement.reference=actor"], "actor", "actor"),
        (["actor.use_kl_loss=true", "placement.reference=critic"], "critic", "critic"),
        (["placement.reference=critic"], "critic", None),
    ],
)
def test_the_reference_is_placed_once_and_written_as_resolved(
    tmp_path: Path, overrides: list[str], placed: str, host: str | None
) -> None:
    config = load(tmp_path, *overrides)

    assert (config.placement.reference, config.reference_host) == (placed, host)
    assert f"reference: {placed}\n" in dump_config(config)


@pytest.mark.parametrize(
    ("overrides", "host"),
    [
        ([], None),
        (["reward_model.model=rm"], "critic"),
        (["reward_model.model=rm", "placement.reward_model=auto"], "critic"),
        (["placement.reward_model=critic"], None),
    ],
)
def test_the_reward_model_is_on_the_critic_where_there_is_one(
    tmp_path: Path, overrides: list[str], host: str | None
) -> None:
    config = load(tmp_path, *overrides)

    assert (config.placement.reward_model, config.reward_model_host) == ("critic", host)
    assert "reward_model: critic\n" in dump_config(config)


def test_the_weight_of_the_reward_model_is_a_number_or_one_for_each_data_source(tmp_path: Path) -> None:
    single, several = load(tmp_path, "reward_model.coef=0.5"), load(tmp_path, "reward_model.coef={hh: 2, default: 0}")

    assert [single.reward_model.coef_of(source) for source in ("hh", "math")] == [0.5, 0.5]
    assert [several.reward_model.coef_of(source) for source in ("hh", "math")] == [2.0, 0.0]


@pytest.mark.parametrize(
    ("overrides", "bypasses", "check_freq"),
    [
        ([], True, 100),
        (["algorithm.rollout_correction.bypass_mode=auto"], True, 100),
        (["rollout.check_freq=7"], True, 7),
        (["algorithm.rollout_correction.bypass_mode=false"], False, 0),
        (["algorithm.rollout_correction.bypass_mode=false", "actor.ppo_epochs=2"], False, 100),
        (["algorithm.rollout_correction.rollout_is=token"], False, 100),
        (["actor.dtype=bf16"], False, 0),
        (["rollout.backend=vllm"], False, 1),
        (["rollout.backend=vllm", "algorithm.rollout_correction.bypass_mode=true"], True, 1),
    ],
)
def test_the_rollout_backends_log_probs_are_the_old_ones_where_both_compute_alike(
    tmp_path: Path, overrides: list[str], bypasses: bool, check_freq: int
) -> None:
    config = load(tmp_path, *overrides)
    assert config.algorithm.rollout_correction.bypass_mode is bypasses  # auto is resolved, and so stored with the run
    assert config.rollout.check_freq == check_freq
