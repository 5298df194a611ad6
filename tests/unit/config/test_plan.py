"""The batch plan: the parts of a step, and numbers that do not divide or fit."""

from pathlib import Path

import pytest

from splitppo.config import ConfigError
from splitppo.config.batch_plan import batch_plan
from tests.support.configs import load, mistake


def test_the_plan_counts_rows_mini_batches_and_optimizer_steps(tmp_path: Path) -> None:
    actor = ("actor.ppo_mini_batch_size=2", "actor.ppo_epochs=3", "actor.ppo_micro_batch_size_per_gpu=4")
    plan = batch_plan(load(tmp_path, "rollout.n=4", *actor, "critic.ppo_mini_batch_size=8"))

    assert plan.splitlines() == [
        "step: 8 prompts x 4 samples = 32 responses",
        "actor: 4 mini-batches of 2 prompts (8 responses, about 8 on each of 1 ranks) x 3 epochs = 12 optimizer steps;"
        " micro-batches of 4 rows",
        "critic: 1 mini-batches of 8 prompts (32 responses, about 32 on each of 1 ranks) x 1 epochs = 1 optimizer"
        " steps; micro-batches of at most 16384 tokens",
    ]


def test_the_plan_is_printed_with_every_number(tmp_path: Path) -> None:
    plan = batch_plan(load(tmp_path, "rollout.n=2", "services.actor.num_processes=2"))

    assert plan.splitlines()[:2] == [
        "step: 8 prompts x 2 samples = 16 responses",
        "actor: 1 mini-batches of 8 prompts (16 responses, about 8 on each of 2 ranks) x 1 epochs"
        " = 1 optimizer steps; micro-batches of at most 16384 tokens",
    ]


def test_ranks_that_divide_positions_have_rows_and_tokens_together(tmp_path: Path) -> None:
    together = ("services.actor.num_processes=4", "actor.ulysses_sequence_parallel_size=2")
    [_, actor, _] = batch_plan(load(tmp_path, *together, "actor.ppo_max_token_len_per_gpu=512")).splitlines()
    assert "(8 responses, about 4 on each of 2 x 2 ranks that divide rows)" in actor
    assert actor.endswith("micro-batches of at most 1024 tokens")
    sentence = mistake(tmp_path, *together, "actor.ppo_max_token_len_per_gpu=511")
    assert sentence.startswith(
        "actor.ppo_max_token_len_per_gpu (511) x ulysses_sequence_parallel_size (2) must hold one row"
    )


def test_the_plan_says_which_steps_train_the_critic_alone_and_what_it_alone_reads(tmp_path: Path) -> None:
    warm_up = ("critic.warmup_steps=5", "critic.warmup_epochs=2", "critic.warmup_until={patience: 4}")
    text = ('critic.privileged_prompt="{ground_truth}"', "critic.max_privileged_length=9")
    plan = batch_plan(load(tmp_path, *warm_up, *text, "critic.ppo_mini_batch_size=4"))
    assert plan.splitlines()[1:3] == [
        "critic: the first 5 steps train it alone, fewer once 4 steps in a row explain no more of the returns, in 2"
        " epochs = 4 optimizer steps each",
        "critic: it alone reads '{ground_truth}', filled in, before a prompt: at most 9 tokens",
    ]


def test_without_a_critic_the_plan_has_the_actor_only(tmp_path: Path) -> None:
    plan = batch_plan(load(tmp_path, "algorithm.adv_estimator=reinforce_plus_plus"))
    assert [line.partition(":")[0] for line in plan.splitlines()] == ["step", "actor"]


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
            "rollout.stream_groups (9) must not exceed data.train_batch_size (8) times rollout.n (1), since a part"
            " holds at least one response; lower rollout.stream_groups",
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


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("data.train_batch_size=2048", "rollout.stream_groups=1024"),
            "rollout.stream_groups (1024) must not exceed 1023; lower rollout.stream_groups",
        ),
        (
            ("services.rollout.num_processes=1", "rollout.share=0.1"),
            "rollout.share (0.1) of data.train_batch_size (8) is not one prompt, so the rollout group would have"
            " nothing to sample; set rollout.share to 0, or to 1/8 or more",
        ),
    ],
)
def test_parts_without_room_and_a_share_without_a_prompt_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    assert mistake(tmp_path, *overrides).startswith(sentence)


def test_what_concerns_vllm_alone_is_checked_only_where_vllm_samples(tmp_path: Path) -> None:
    batch_plan(load(tmp_path, "rollout.vllm={tensor_model_parallel_size: 2, max_model_len: 9}"))
    batch_plan(load(tmp_path, "rollout={backend: vllm, stream_groups: 8, vllm: {max_model_len: 1024}}"))


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


def test_a_row_of_the_critic_has_its_privileged_text_before_it(tmp_path: Path) -> None:
    keys = ("critic.privileged_prompt='{ground_truth}'", "critic.max_privileged_length=10")
    budget = "critic.ppo_max_token_len_per_gpu"
    config = load(tmp_path, *keys)
    assert config.longest_row_of("critic") == config.longest_row_of("actor") + 10 == config.longest_context + 10
    batch_plan(load(tmp_path, *keys, f"{budget}={config.longest_context + 10}"))
    longest = config.longest_context + 10
    with pytest.raises(ConfigError, match=rf"{budget} .* \+ critic\.max_privileged_length \({longest}\)"):
        batch_plan(load(tmp_path, *keys, f"{budget}={longest - 1}"))
