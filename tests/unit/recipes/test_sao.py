"""The recipe sao: what its two configurations learn from is what the paper's formulas say, and both are accepted."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from controller.__main__ import main
from controller.memory.plan import memory_plan
from controller.ppo.advantages.arrays import turns_of
from controller.ppo.advantages.decoupled_gae import configured_gae
from recipes.competition_math.prepare import main as prepare_math
from recipes.guess_number import task
from recipes.guess_number.prepare import RECIPE
from recipes.sao.train import SAO
from services.actor.losses.policy_loss import PolicyTokens
from services.actor.losses.registry import find_policy_loss
from splitppo.config import Config, load_config
from tests.support.fake_gpus import put_gpus
from tests.support.groups import PROJECT
from tests.support.models import save_shapes
from tests.support.recipes import names_its_files

ON_GPUS = SAO.config_file.with_name("qwen3-4b.yaml")
CONFIGS = (SAO.config_file, ON_GPUS)
# The paper's section 4.1, for reasoning with tools.
EPS_LOW, EPS_HIGH = 0.3, 5.0
ALPHA = 1.5


@pytest.fixture(params=CONFIGS, ids=lambda file: file.name)
def config(request: pytest.FixtureRequest) -> Config:
    return load_config(request.param)


def test_each_prompt_has_one_rollout_by_older_weights_and_the_critic_learns_it_twice(config: Config) -> None:
    assert (config.rollout.n, config.rollout.staleness, config.critic.ppo_epochs) == (1, 1, 2)
    assert not config.algorithm.use_kl_in_reward
    assert config.critic.lr > config.actor.lr
    assert config.critic.warmup_steps > 0


def test_the_policys_gradient_is_that_of_equations_1_to_3(config: Config) -> None:
    """f(r) A grad log pi, with f(r) = r in (1 - eps_low, 1 + eps_high) and 0 elsewhere, in float64 by hand."""
    ratios = (0.1, 0.69, 0.71, 1.0, 1.4, 5.9, 6.1, 40.0)
    signs = (1.0, -1.0)
    log_ratio_N = torch.tensor([math.log(ratio) for ratio in ratios for _ in signs])
    advantages_N = torch.tensor([0.5 * sign for _ in ratios for sign in signs])
    old_N = torch.full_like(log_ratio_N, -4.0)
    log_probs_N = (old_N + log_ratio_N).requires_grad_()
    tokens = PolicyTokens(
        log_probs_N,
        old_N,
        advantages_N,
        mask=torch.ones_like(old_N, dtype=torch.bool),
        row_index=torch.zeros(len(old_N), dtype=torch.int64),
    )
    loss_N, metrics = find_policy_loss(config.actor, config.actor.policy_loss.loss_mode)(tokens, config.actor)
    [gradient_N] = torch.autograd.grad(loss_N.sum(), log_probs_N)
    wanted = [
        -(ratio if 1 - EPS_LOW < ratio < 1 + EPS_HIGH else 0.0) * 0.5 * sign for ratio in ratios for sign in signs
    ]
    np.testing.assert_allclose(gradient_N.numpy(), wanted, rtol=1e-5)
    assert metrics["pg_clipfrac"].tolist() == [float(weight == 0.0) for weight in wanted]


def advantages_of_the_paper(
    actions: Sequence[Sequence[tuple[float, float]]], *, gamma: float, alpha: float | None
) -> list[list[float]]:
    """Computes equations 4 and 5: for each action its tokens' (reward, value); observations are not there at all.

    alpha: of lambda = 1 - 1 / (alpha l), where l is the number of the model's tokens; None: lambda is 1.
    """
    lam = 1.0 if alpha is None else 1.0 - 1.0 / (alpha * sum(map(len, actions)))
    following_value = following_advantage = 0.0
    found: list[list[float]] = []
    for action in reversed(actions):
        of_tokens: list[float] = []
        for reward, value in reversed(action):
            delta = reward + gamma * following_value - value
            following_advantage = delta + gamma * lam * following_advantage
            following_value = value
            of_tokens.insert(0, following_advantage)
        found.insert(0, of_tokens)
    return found


def test_advantages_go_from_an_action_to_the_next_one_as_equations_4_and_5_say(config: Config) -> None:
    """Three actions with observations of other lengths between them; the critic's returns have a lambda of 1."""
    actions = [[(0.0, 0.2), (0.0, 0.5), (0.1, 0.3)], [(0.0, 0.7)], [(0.0, 0.4), (1.0, 0.9)]]
    observations = (2, 4, 0)
    mask: list[bool] = []
    rewards: list[float] = []
    values: list[float] = []
    for action, num_observed in zip(actions, observations, strict=True):
        mask += [True] * len(action) + [False] * num_observed
        rewards += [reward for reward, _ in action] + [9.0] * num_observed
        values += [value for _, value in action] + [-9.0] * num_observed
    mask_BT = np.array([mask])
    algorithm = config.algorithm
    advantages_BT, returns_BT = configured_gae(
        np.array([rewards], np.float32),
        np.array([values], np.float32),
        mask_BT,
        turns_of(mask_BT),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        lam_critic=algorithm.lam_critic,
        adaptive_lam_alpha=algorithm.adaptive_lam_alpha,
        turn_gamma=algorithm.turn_gamma,
        turn_lam=algorithm.turn_lam,
    )
    wanted = np.concatenate(advantages_of_the_paper(actions, gamma=1.0, alpha=ALPHA))
    np.testing.assert_allclose(advantages_BT[mask_BT], wanted, rtol=1e-6)
    of_returns = np.concatenate(advantages_of_the_paper(actions, gamma=1.0, alpha=None)) + [
        value for action in actions for _, value in action
    ]
    np.testing.assert_allclose(returns_BT[mask_BT], of_returns, rtol=1e-6)
    assert not advantages_BT[~mask_BT].any()


def test_the_config_for_a_cpu_reads_what_guess_number_makes() -> None:
    names_its_files(load_config(SAO.config_file), RECIPE, task.DATA_SOURCE)


def test_the_gpu_sets_are_disjoint_and_fill_the_node() -> None:
    services = yaml.safe_load(ON_GPUS.read_text())["services"]
    devices = [device for role in ("actor", "critic", "rollout") for device in services[role]["devices"]]
    assert sorted(devices) == list(range(8))


@pytest.mark.slow
def test_check_passes_with_prepared_rows_and_local_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_gpus(monkeypatch, [80 << 30] * 8)
    row = {"problem": "What is 6 * 7?", "solution": "\\boxed{42}"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 129)
    source = ["--input", str(tmp_path / "rows.jsonl"), "--test-rows", "1", "--output", str(tmp_path)]
    assert prepare_math([*source, "--no-tiny-model"]) == 0
    RECIPE.prepare(tmp_path / "guess_number", warm_start_steps=1)  # a model whose chat template takes tools
    environment = f"{{path: {PROJECT}/recipes/guess_number/environment.py, name: GuessNumber}}"
    local = [
        f"run.dir={tmp_path / 'run'}",
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"data.val_files={tmp_path / 'test.parquet'}",
        f"actor.model={tmp_path / 'guess_number' / 'model'}",
        *(f"{role}.override_config={{max_position_embeddings: 65536}}" for role in ("actor", "critic")),
        "rollout.backend=hf",  # the tests' environment has vLLM for CPUs, or none
        f"rollout.sync_dir={tmp_path}",
        f"rollout.multi_turn.environments={{default: {environment}}}",  # the Python tool needs a sandbox
    ]
    capsys.readouterr()
    assert main(["--config", str(ON_GPUS), "--check", *local]) == 0, capsys.readouterr().err
    assert "step: 128 prompts x 1 samples" in capsys.readouterr().out


def test_it_fits_gpus_of_80_gb_and_its_readme_has_the_estimate(tmp_path: Path) -> None:
    """The shapes of Qwen3-4B."""
    folder = save_shapes(
        tmp_path / "model",
        family="Qwen3",
        num_hidden_layers=36,
        hidden_size=2560,
        intermediate_size=9728,
        vocab_size=151_936,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    config = load_config(ON_GPUS, [f"actor.model={folder}"])
    plan = memory_plan(config, dict.fromkeys(range(8), 80 << 30), 256 << 30)
    assert plan.misfit is None
    assert all(group.peak.total < 72 << 30 for group in plan.groups), "of 79.6 GiB, a tenth is for the allocator"
    peaks = ", ".join(f"{group.peak.total / 2**30:.1f}" for group in plan.groups)
    assert f"| {peaks} |" in SAO.config_file.with_name("README.md").read_text()
