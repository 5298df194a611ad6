"""The configuration of a run as texts: values as they stand, secrets hidden, and files that mean harm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from splitppo.config import dump_config
from splitppo.run_folder.files import RunDir, Unreadable
from tests.support.configs import load
from tests.support.viewed_runs import Shape, make_run
from tests.support.viewer_client import ask
from viewer.comparison.config import HIDDEN, MAX_BYTES, MAX_KEYS, read_config


def read(folder: Path, content: str) -> dict[str, str]:
    (folder / "config.yaml").write_text(content)
    return read_config(RunDir(folder))


def test_every_key_has_its_value_as_it_stands(tmp_path: Path) -> None:
    content = "actor:\n  lr: 1.0e-06\n  betas: [0.9, 0.99]\n  model: ''\nphases:\n- {lr: 1}\n- {lr: 2}\nempty: {}\n"
    assert read(tmp_path, content) == {
        "actor.lr": "1.0e-06",
        "actor.betas": "[0.9, 0.99]",
        "actor.model": '""',
        "phases.0.lr": "1",
        "phases.1.lr": "2",
        "empty": "{}",
    }


@pytest.mark.parametrize(
    "content",
    [
        "hf_token: hf_abc",
        "wandb: {apiKey: abc}",
        "env: {OPENAI_API_KEY: abc}",
        "a: {secrets: {x: [abc]}}",
        "db: {password: 1234}",
        "headers: {Authorization: abc}",
        "api_key_value: abc",
        "apiKeyValue: abc",
        "db: {pass: abc}",
        "hf_tokens: {a: abc}",
        "credentials_json: abc",
        "authHeader: abc",
        "x: Bearer abc",
        "url: https://me:abc@host/x",
        "args: [run, --api-key, abc]",
        "args: [run, --token=abc]",
        "judge: sk-abcdefghijklmnopqrstuvwx",
    ],
)
def test_what_may_open_something_is_hidden(tmp_path: Path, content: str) -> None:
    [shown] = read(tmp_path, content).values()
    assert HIDDEN in shown
    assert not re.search("abc|1234", shown)


def test_of_a_real_configuration_nothing_is_hidden_and_nothing_is_missing(tmp_path: Path) -> None:
    text = dump_config(load(tmp_path))
    found = read(tmp_path, text)
    assert HIDDEN not in found.values()
    assert found["actor.ppo_max_token_len_per_gpu"] == str(yaml.safe_load(text)["actor"]["ppo_max_token_len_per_gpu"])
    assert found["reward.judge.max_tokens"].isdigit()
    assert len(found) > 300


def test_long_values_are_cut_and_still_differ(tmp_path: Path) -> None:
    found = read(tmp_path, f"a: {'x' * 5000}1\nb: {'x' * 5000}2\n")
    assert max(map(len, found.values())) < 600
    assert found["a"] != found["b"]


@pytest.mark.parametrize(
    "content",
    [
        "a: &a [1]\nb: *a\n",
        "a: &a {k: v}\nb: {<<: [*a, *a]}\n",
        "a: &a [*a]\n",
        "[" * 100_000,
        "{a: " * 100_000,
        "? " * 100_000,
        "? [a]\n: 1\n",
        "\n".join(f"k{number}: 1" for number in range(MAX_KEYS + 2)),
        f"a: [{'1, ' * 2 * MAX_KEYS}]",
        "a: 'b",
        "a: \x07",
        "",
        "x" * (MAX_BYTES + 1),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_what_no_run_writes_is_one_sentence(tmp_path: Path, content: str) -> None:
    with pytest.raises(Unreadable) as found:
        read(tmp_path, content)
    assert str(found.value).startswith("config.yaml ")
    assert len(str(found.value)) < 300


def test_nothing_is_constructed(tmp_path: Path) -> None:
    assert read(tmp_path, "a: !!python/object/apply:os.system [x]\n") == {"a": "[x]"}


async def test_the_answer_has_the_keys_or_a_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=1))
    keys = {"run.name": '"run"', "run.seed": "1", "algorithm.adv_estimator": "gae"}
    assert (await ask([run], "/api/runs/0/config")).json == {"keys": keys, "error": None}
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to("/etc/hostname")
    answer = (await ask([run], "/api/runs/0/config")).json
    assert (answer["keys"], "config.yaml cannot be read" in answer["error"]) == (None, True)
