"""The section actor.policy_loss: its reading, and its changes by other sections."""

import re
from pathlib import Path

import pytest
import yaml

from splitppo.config import ActorConfig, dump_config
from splitppo.config.subsections.policy_loss import COVARIANCE_LOSSES, LOSS_MODES, SEQUENCE_LOSSES, PolicyLossConfig
from tests.support.configs import load, mistake
from tools.docs import descriptions

CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_a_loss_over_sequences_is_aggregated_as_its_paper_does_unless_the_file_says_otherwise(
    tmp_path: Path, loss_mode: str
) -> None:
    of_paper = "seq-mean-token-mean" if loss_mode in SEQUENCE_LOSSES else "token-mean"
    named = f"actor.policy_loss.loss_mode={loss_mode}"

    assert load(tmp_path, named).actor.loss_agg_mode == of_paper
    assert load(tmp_path, named, "actor.loss_agg_mode=seq-mean-token-sum").actor.loss_agg_mode == "seq-mean-token-sum"
    assert load(tmp_path, named).critic.loss_agg_mode == "token-mean"


def test_the_description_of_the_aggregation_names_the_losses_with_a_default_of_their_own() -> None:
    description = descriptions(ActorConfig)["loss_agg_mode"]

    assert {*re.findall(r"\w+", description)} & {*LOSS_MODES} == {*SEQUENCE_LOSSES}


@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_losses_that_select_tokens_need_old_log_probs_even_on_policy(tmp_path: Path, loss_mode: str) -> None:
    named, own = f"actor.policy_loss.loss_mode={loss_mode}", f"{CORRECTION}.bypass_mode=false"

    assert load(tmp_path, named, own).needs_old_log_probs is (loss_mode in COVARIANCE_LOSSES)
    assert not load(tmp_path, named).needs_old_log_probs  # the rollout backend's are the old ones


@pytest.mark.parametrize(
    ("section", "looks"),
    [
        ("{}", False),
        ("{loss_mode: clip_cov}", False),
        ("{loss_mode: gspo}", True),
        ("{loss_mode: geo_mean}", True),
        ("{loss_mode: mine, custom_path: mine.py}", True),
        ("{loss_mode: reinforce, reinforce_is: token}", False),
        ("{loss_mode: reinforce, reinforce_is: sequence}", True),
        ("{rollout_rs: token_k1, rollout_rs_threshold: 2}", False),
        ("{rollout_rs: 'token_k1,seq_sum_k1', rollout_rs_threshold: 2}", True),
    ],
)
def test_losses_with_sums_over_a_response_keep_it_in_one_micro_batch(section: str, looks: bool) -> None:
    assert PolicyLossConfig.model_validate(yaml.safe_load(section)).looks_at_rows is looks


@pytest.mark.parametrize("level", ["token", "sequence", "null"])
def test_the_loss_type_of_rollout_correction_is_a_loss_of_the_actors(tmp_path: Path, level: str) -> None:
    section = f"{CORRECTION}={{loss_type: reinforce, rollout_is: {level}, rollout_is_threshold: 3}}"
    config = load(tmp_path, section, "rollout.backend=vllm")

    loss = config.actor.policy_loss
    wanted = None if level == "null" else level
    assert (loss.loss_mode, loss.reinforce_is, loss.reinforce_is_threshold) == ("reinforce", wanted, 3.0)
    assert config.algorithm.rollout_correction.bypass_mode is True
    assert not config.algorithm.rollout_correction.is_active  # the actor weighs, the controller does not
    assert load(tmp_path, text=dump_config(config)) == config


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_with_bypass_the_actor_rejects_and_the_controller_does_not(tmp_path: Path, loss_type: str) -> None:
    rejects = "bypass_mode: true, rollout_rs: seq_mean_k1, rollout_rs_threshold: 0.99_1.01"
    config = load(tmp_path, f"{CORRECTION}={{loss_type: {loss_type}, {rejects}}}", "rollout.backend=vllm")

    assert [rejection.option for rejection in config.actor.policy_loss.rejections] == ["seq_mean_k1"]
    assert not config.algorithm.rollout_correction.is_active
    assert load(tmp_path, text=dump_config(config)) == config
    decoupled = load(tmp_path, f"{CORRECTION}={{{rejects.replace('true', 'false')}}}")
    assert decoupled.algorithm.rollout_correction.is_active
    assert decoupled.actor.policy_loss.rejections == ()


def test_rejection_is_said_where_the_log_probs_are_chosen(tmp_path: Path) -> None:
    own = ("actor.policy_loss.rollout_rs=token_k2", "actor.policy_loss.rollout_rs_threshold=1")
    assert "leave rollout_rs out of actor.policy_loss" in mistake(tmp_path, *own)
    weights = mistake(tmp_path, f"{CORRECTION}={{bypass_mode: true, rollout_is: token}}")
    assert "rollout_is multiplies nothing with bypass_mode and ppo_clip" in weights


def test_two_losses_at_once_are_refused(tmp_path: Path) -> None:
    sentence = mistake(tmp_path, f"{CORRECTION}.loss_type=reinforce", "actor.policy_loss.loss_mode=gspo")

    assert sentence.startswith("algorithm.rollout_correction.loss_type is reinforce, which sets actor.policy_loss")
    assert sentence.endswith("leave both out, got 'gspo' and None")


def test_a_phase_with_another_loss_than_the_loss_type_is_refused(tmp_path: Path) -> None:
    reinforces = f"{CORRECTION}={{loss_type: reinforce, rollout_is: token}}"
    sentence = mistake(tmp_path, reinforces, "algorithm.phases={from_step: 2, loss_mode: vanilla}")

    assert sentence.startswith("algorithm.phases.0: loss_mode is 'vanilla', but algorithm.rollout_correction.loss_type")
    assert load(tmp_path, reinforces, "algorithm.phases={from_step: 2, entropy_coeff: 1}").algorithm.phases


def test_any_name_may_be_that_of_a_users_loss_where_there_is_a_file(tmp_path: Path) -> None:
    own = ("actor.policy_loss.custom_path=mine.py", "actor.policy_loss.loss_mode=mine")

    assert load(tmp_path, *own).actor.policy_loss.loss_mode == "mine"
    assert "expected one of vanilla, gspo" in mistake(tmp_path, own[1])
    assert "got 'a-b'" in mistake(tmp_path, own[0], "actor.policy_loss.loss_mode=a-b")
