"""A configuration is shown to others without the secrets that a user has put into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.run.folder import RunFolder
from controller.tracking.trackers.process import run_of
from splitppo.config.shown import secret_keys, shown_config, shown_tree
from tests.support.fake_services import make_config

SECRET = "S3cr3tValue-9x"
KEYS = ["openai_key", "API_KEY", "hf_token", "password", "my-secret"]


def with_kwargs(folder: Path, **kwargs: Any) -> Any:
    return make_config(folder, reward__custom_function_path="own.py", reward__custom_function_kwargs=kwargs)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("deep", [False, True])
def test_a_secret_in_a_mapping_of_the_users_is_neither_printed_nor_sent(tmp_path: Path, name: str, deep: bool) -> None:
    kwargs = {"judges": {"first": {name: SECRET}}} if deep else {name: SECRET}
    config = with_kwargs(tmp_path, **kwargs, weight=0.5, num_tokens=3)
    for text in (shown_config(config), shown_config(config, with_defaults=False), run_of(config, tmp_path, "r").line()):
        assert SECRET not in text
        assert "(hidden)" in text
    assert shown_tree(config)["reward"]["custom_function_kwargs"]["weight"] == 0.5
    assert len(secret_keys(config)) == 1


def test_keys_of_the_package_are_shown_as_they_are(tmp_path: Path) -> None:
    config = make_config(tmp_path, services__security={"token_env": "OUR_TOKEN"}, data__prompt_key="question")
    tree = shown_tree(config)
    assert tree["services"]["security"]["token_env"] == "OUR_TOKEN"
    assert tree["data"]["prompt_key"] == "question"
    assert secret_keys(config) == []


def test_a_stored_configuration_with_a_secret_is_its_owners_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, kwargs, mode in (("a", {"openai_key": SECRET}, 0o600), ("b", {"weight": 1}, 0o644)):
        config = with_kwargs(tmp_path / name, **kwargs)
        with RunFolder(config):
            stored = tmp_path / name / "config.yaml"
            assert stored.stat().st_mode & 0o777 & ~0o022 == mode
            assert yaml.safe_load(stored.read_text())["reward"]["custom_function_kwargs"] == kwargs
    assert "reward.custom_function_kwargs.openai_key, which looks like a secret" in caplog.text
    assert SECRET not in caplog.text
