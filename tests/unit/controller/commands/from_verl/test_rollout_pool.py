"""Translated runs of verl with GPUs for rollouts alone: one_step_off_policy and fully_async_policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.commands.from_verl.command import read_settings, translated_yaml
from controller.commands.from_verl.translation import translate
from splitppo.config import ConfigError
from tests.support.verl_launch import BASE, NOW, ROLLOUT, config_of, translated

SEPARATE = (
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.n_gpus_per_node=6",
    "rollout.n_gpus_per_node=2",
    f"{ROLLOUT}.n=4",
)
GRPO = "algorithm.adv_estimator=grpo"


def test_one_step_off_policy_samples_one_step_ahead_with_its_own_log_probs(tmp_path: Path) -> None:
    config = config_of(tmp_path, *SEPARATE, GRPO)
    assert config.services.rollout is not None
    assert (config.services.rollout.num_processes, config.services.rollout.devices) == (2, (6, 7))
    assert (config.sampling_roles, config.rollout.staleness) == (("rollout",), 1)
    assert config.algorithm.rollout_correction.bypass_mode is True
    assert config.rollout.vllm.sleep_level == 0
    assert config.services.launch == "local"


def test_a_run_with_a_hybrid_engine_has_no_rollout_group(tmp_path: Path) -> None:
    config = config_of(tmp_path, "actor_rollout_ref.hybrid_engine=True")
    assert (config.services.rollout, config.rollout.staleness, config.rollout.vllm.sleep_level) == (None, 0, 2)
    assert config.algorithm.rollout_correction.bypass_mode is not True


@pytest.mark.parametrize(
    ("overrides", "gpus", "actor", "critic", "rollout", "tensor_parallel"),
    [
        pytest.param((GRPO,), None, range(6), range(0), range(6, 8), 2, id="no critic"),
        pytest.param((), None, range(4), range(4, 6), range(6, 8), 2, id="a critic"),
        pytest.param((), (3, 3), range(3), range(3, 6), range(6, 8), 2, id="as requested"),
        pytest.param(
            (f"{ROLLOUT}.tensor_model_parallel_size=4",), None, range(4), range(4, 6), range(6, 8), 2, id="TP"
        ),
        pytest.param(("trainer.n_gpus_per_node=1",), None, range(1), range(1), range(1, 3), 2, id="one for both"),
    ],
)
def test_rollouts_have_the_gpus_behind_those_of_the_trainer(
    tmp_path: Path,
    overrides: tuple[str, ...],
    gpus: tuple[int, int] | None,
    actor: range,
    critic: range,
    rollout: range,
    tensor_parallel: int,
) -> None:
    config = config_of(tmp_path, *SEPARATE, *overrides, gpus=gpus)
    assert config.services.actor.devices == tuple(actor)
    assert config.services.critic.devices == tuple(critic)
    assert config.services.of("rollout").devices == tuple(rollout)
    assert config.rollout.vllm.tensor_model_parallel_size == tensor_parallel


def test_a_reward_pool_and_a_rollout_pool_are_apart(tmp_path: Path) -> None:
    pool = ("enable=True", "model_path=rm", "enable_resource_pool=True", "n_gpus_per_node=1", "nnodes=1")
    config = config_of(tmp_path, *SEPARATE, GRPO, *(f"reward.reward_model.{argument}" for argument in pool))
    assert (config.services.reward.devices, config.services.of("rollout").devices) == ((6,), (7, 8))


def test_one_rank_that_samples_on_a_cpu_has_a_group(tmp_path: Path) -> None:
    on_cpu = ("trainer.device=cpu", f"{ROLLOUT}.name=hf", "rollout.n_gpus_per_node=1")
    config = config_of(tmp_path, *SEPARATE, *on_cpu)
    assert (config.services.of("rollout").num_processes, config.services.of("rollout").devices) == (1, ())


@pytest.mark.parametrize("machines", ["rollout.nnodes=2", "trainer.nnodes=2"])
def test_rollouts_on_several_machines_are_left_to_who_starts_the_groups(tmp_path: Path, machines: str) -> None:
    config = config_of(tmp_path, *SEPARATE, GRPO, machines)
    groups = (config.services.actor, config.services.of("rollout"))
    assert config.services.launch == "external"
    ahead_on_two = machines.startswith("rollout")
    assert [group.num_processes for group in groups] == ([6, 4] if ahead_on_two else [12, 2])
    assert [group.nnodes for group in groups] == ([1, 2] if ahead_on_two else [2, 1])
    assert all(len(group.devices) == group.num_processes // group.nnodes for group in groups)


def test_decoupled_weights_replace_the_bypass(tmp_path: Path) -> None:
    decoupled = "algorithm.rollout_correction={bypass_mode: False, rollout_is: token}"
    config = config_of(tmp_path, *SEPARATE, GRPO, decoupled)
    assert config.algorithm.rollout_correction.rollout_is == "token"
    assert not config.algorithm.rollout_correction.bypasses
    assert config.needs_old_log_probs


def test_older_weights_that_nothing_corrects_are_refused_as_in_verl_up_to_0_6(tmp_path: Path) -> None:
    settings = read_settings(Path("-"), (*BASE, *SEPARATE, GRPO), {}, NOW, "0.6")
    with pytest.raises(ConfigError, match=r"expected algorithm.rollout_correction.rollout_is \(token or sequence\)"):
        translated_yaml(translate(settings, gpus=None, drop=()), "run.sh")


def test_the_default_that_older_versions_lack_is_named_if_the_version_is_not_given(tmp_path: Path) -> None:
    newer = "trainer.val_before_train=False"
    age = read_settings(Path("-"), (*BASE, *SEPARATE, GRPO, newer), {}, NOW).age
    assert "those of algorithm.rollout_correction.bypass_mode were others in some versions from 0.4.1 to 0.6" in age
    assert read_settings(Path("-"), (*BASE, GRPO, newer), {}, NOW).age == ""


def test_a_fully_asynchronous_run_becomes_one_step_off_if_its_keys_are_dropped(tmp_path: Path) -> None:
    asynchronous = (
        "async_training={staleness_threshold: 0.5, partial_rollout: True, trigger_parameter_sync_step: 4}",
        "rollout.total_rollout_steps=51200",
        "data.train_batch_size=0",
    )
    stopping = translated(tmp_path, *SEPARATE, *asynchronous).stopping
    assert {finding.key.partition(".")[0] for finding in stopping} == {"async_training", "rollout"}
    dropped = ("async_training", "rollout.total_rollout_steps")
    config = config_of(tmp_path, *SEPARATE, *asynchronous, "data.train_batch_size=512", drop=dropped)
    assert config.rollout.staleness == 1
