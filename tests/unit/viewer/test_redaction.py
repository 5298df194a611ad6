"""Secrets are hidden in all the ways that configs, logs and events say them; numbers of tokens are none."""

from __future__ import annotations

import pytest

from viewer.redaction import redacted

SECRET = "S3cr3tValue-9x"


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer {}",
        "Authorization: Basic {}",
        "authorization: token {}",
        "'Authorization': b'Token {}'",
        "Bearer: {}",
        "Bearer {}",
        "x-api-key: {}",
        "--token {}",
        "--hf-token {}",
        '["--hf_token", "{}"]',
        "('token', '{}')",
        "WANDB_API_KEY {}",
        "env: HF_TOKEN={}",
        "export HF_TOKEN={}",
        "token=12345678-{}",
        "password: {}",
        "passwd={}",
        "pwd={}",
        "private_key={}",
        "reward.custom_function_kwargs.openai_key: {}",
        "{{'anthropic_key': '{}'}}",
        "SERPER_KEY={}",
        "credential={}",
        "cookie: {}",
        "https://user:{}@host/path",
        "https://h/x?token={}",
        "https://h/x?a=1&api_key={}&b=2",
        "https://hooks.slack.com/services/{}",
        "tools.api_key: None in the folder, '{}' now",
        "tracking.wandb.api_key: old -> {}",
    ],
)
def test_a_secret_is_hidden(text: str) -> None:
    shown = redacted(text.format(SECRET))
    assert SECRET not in shown
    assert "(hidden)" in shown


@pytest.mark.parametrize(
    "secret", ["hf_abcdefghijklmnop", "sk-proj-abcdefghij1234", "ghp_abcdefghijklmnop", "AKIAIOSFODNN7EXAMPLE"]
)
def test_a_secret_of_a_known_form_is_hidden_wherever_it_stands(secret: str) -> None:
    assert redacted(f"it said {secret}, and left") == "it said (hidden), and left"


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 300",
        "eos_token: 2",
        "the token limit is reached after 300 tokens",
        "data.prompt_key: prompt",
        "algorithm.gdpo_reward_keys: [accuracy, format]",
        "num_key_value_heads: 8",
        "a key: 5",
        "rank 1 was killed by SIGKILL in Update",
        "tokenizer: Qwen/Qwen2.5-7B",
        "step 3: 20,032 tokens, basic checks passed",
        "https://github.com/org/project",
        "kl_coef: 0.001 in the folder, 0.002 now",
    ],
)
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize("word", ["x", "-", "x-", "A_", "'", "password ", "token token: ", "://a:"])
def test_a_long_line_is_read_in_a_time_that_grows_as_its_length_does(word: str) -> None:
    text = word * 40_000  # by the square of it: minutes
    assert len(redacted(text)) > 0
