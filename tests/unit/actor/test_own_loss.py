"""A policy loss from a user's file: its arguments, and every mistake in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from controller.preflight import check_config as check_on_controller
from services.actor.losses.policy_loss import PolicyTokens
from services.actor.losses.registry import find_policy_loss
from services.actor.role import check_config
from splitppo.config import Config, ConfigError
from tests.support.configs import load

GOOD = """
from math import sqrt

def mine(tokens, config):
    return -tokens.advantages * tokens.log_ratio.exp() * config.clip_ratio
"""


def config_with(tmp_path: Path, text: str | None) -> Config:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    return load(tmp_path, f"actor.policy_loss={{custom_path: {file}, loss_mode: mine}}")


def test_the_loss_is_that_of_the_file(tmp_path: Path) -> None:
    config = config_with(tmp_path, GOOD)
    zeros = torch.zeros(2)
    tokens = PolicyTokens(zeros, zeros, torch.tensor([1.0, -2.0]), zeros == 0, zeros.long())

    check_config(config)
    check_on_controller(config)
    loss, metrics = find_policy_loss(config.actor, "mine")(tokens, config.actor)

    torch.testing.assert_close(loss, torch.tensor([-0.2, 0.4]))
    assert metrics == {}


WITHOUT = "def other(tokens, config):\n    return tokens.advantages\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, r"^key 'actor\.policy_loss\.custom_path': there is no file .*mine\.py$"),
        ("def mine(:", r"^key 'actor\.policy_loss\.custom_path': .*mine\.py is not a Python file: SyntaxError: .*$"),
        (WITHOUT, r"^key 'actor\.policy_loss\.loss_mode': .*mine\.py has no function 'mine'; it has other$"),
        (
            "from os import system as mine\n",
            r"^key 'actor\.policy_loss\.loss_mode': .* no function 'mine'; it has none$",
        ),
    ],
)
def test_what_can_be_read_from_the_file_is_said_before_any_group_starts(
    tmp_path: Path, text: str | None, sentence: str
) -> None:
    config = config_with(tmp_path, text)
    with pytest.raises(ConfigError, match=sentence):
        check_on_controller(config)
    with pytest.raises(ValueError, match=sentence):
        check_config(config)


TRYING = r"^key 'actor\.policy_loss\.loss_mode': .*mine\.py: trying 'mine' failed: "


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "import torch\nraise OSError('no disk')\ndef mine(tokens, config): ...\n",
            r"^key 'actor\.policy_loss\.custom_path': importing .*mine\.py failed: OSError: no disk \(line \d+\)$",
        ),
        ("def mine(tokens):\n    return 0\n", TRYING + "TypeError: "),
        ("def mine(tokens, config):\n    return tokens.log_probs.mean()\n", TRYING + r"ValueError: .*\[3\], got \[\]$"),
        ("def mine(tokens, config):\n    return 1.0\n", TRYING + r"ValueError: expected one .*\[3\], got float$"),
        (
            "def mine(tokens, config):\n    return tokens.log_probs, {'kl': 1.0}\n",
            TRYING + r"ValueError: expected one number per token, \[3\], got float$",
        ),
        ("def mine(tokens, config):\n    return tokens.advantages\n", TRYING + "RuntimeError: "),
        ("def mine(tokens, config):\n    return tokens.no_such\n", TRYING + "AttributeError: .*no_such"),
    ],
)
def test_what_shows_when_the_file_is_used_is_said_when_the_actor_starts(
    tmp_path: Path, text: str, sentence: str
) -> None:
    config = config_with(tmp_path, text)
    check_on_controller(config)
    with pytest.raises(ValueError, match=sentence) as caught:
        check_config(config)
    assert "\n" not in str(caught.value)


def test_a_controller_whose_workers_are_elsewhere_does_not_look_for_the_file(tmp_path: Path) -> None:
    file = "/there/mine.py"
    own = f"actor.policy_loss={{custom_path: {file}, loss_mode: mine}}"
    addresses = ("services.actor.address=localhost:7001", "services.critic.address=localhost:7002")
    check_on_controller(load(tmp_path, own, "services.launch=external", *addresses))
