"""Prompts: reading, tokenising, and batches as a pure function of (seed, step)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from controller.data import prompts
from controller.data.prompts import PromptBatch, PromptDataset, load_prompts, response_seeds
from controller.data.tokenizer import Tokenizer
from splitppo.batch import Batch
from splitppo.config import ConfigError, DataConfig

LETTERS = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz ?")}


@pytest.fixture
def tokenizer() -> Tokenizer:
    """One token per letter; no chat template."""
    backend = Backend(models.WordLevel(LETTERS, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return Tokenizer(backend)


def row(prompt: Any, **columns: Any) -> dict[str, Any]:
    return {"data_source": "letters", "prompt": prompt, "reward_model": {"ground_truth": "z"}} | columns


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def write_jsonl(file: Path, rows: list[Any]) -> str:
    file.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return str(file)


def load(file: str | list[str], tokenizer: Tokenizer, **settings: Any) -> PromptBatch:
    files = (file,) if isinstance(file, str) else tuple(file)
    config = DataConfig(train_files=files, train_batch_size=1, **{"max_prompt_length": 8} | settings)
    return load_prompts(config, tokenizer, "train")


def numbered(tmp_path: Path, tokenizer: Tokenizer, num_prompts: int) -> PromptBatch:
    return load(write_jsonl(tmp_path / "n.jsonl", [row(chat("a" * 3))] * num_prompts), tokenizer)


# Files and rows.


def test_parquet_and_jsonl_rows_follow_each_other_with_all_their_fields(tmp_path: Path, tokenizer: Tokenizer) -> None:
    nested = row(
        chat("cab"),
        ability="sort",
        extra_info={"index": 7, "tags": ["x", "y"]},
        reward_model={"style": "rule", "ground_truth": ["abc", "a b c"]},
    )
    pq.write_table(pa.Table.from_pylist([nested]), tmp_path / "one.parquet")
    second = write_jsonl(tmp_path / "two.jsonl", [row("fed", data_source="other")])
    batch = load([str(tmp_path / "one.parquet"), second], tokenizer).take(np.array([0, 1]))
    assert batch.texts == ("cab", "fed")
    assert [ids.tolist() for ids in batch.prompts.rows()] == [[2, 0, 1], [5, 4, 3]]
    assert [row.data_source for row in batch.rows] == ["letters", "other"]
    assert [row.ground_truth for row in batch.rows] == [["abc", "a b c"], "z"]
    assert [row.extra_info for row in batch.rows] == [{"index": 7, "tags": ["x", "y"]}, {}]


def test_max_samples_takes_the_first_rows_before_filtering(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [row("a" * 9), row("b")])
    second = write_jsonl(tmp_path / "b.jsonl", [row("c"), row("d"), row("e")])
    table = load([first, second], tokenizer, max_samples=3)
    assert table.take(np.arange(table.num_prompts)).texts == ("b", "c")


def test_the_configured_prompt_column_is_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [row(None, question="abc")])
    assert load(file, tokenizer, prompt_key="question").take(np.array([0])).texts == ("abc",)


@pytest.mark.parametrize(
    ("truncation", "expected"), [("left", "defghijk"), ("right", "abcdefgh"), ("middle", "abcdhijk")]
)
def test_overlong_prompts_lose_the_named_side(
    tmp_path: Path, tokenizer: Tokenizer, truncation: Any, expected: str
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [row("abcdefghijk"), row("abc")])
    table = load(file, tokenizer, filter_overlong_prompts=False, truncation=truncation)
    ids = [[LETTERS[letter] for letter in text] for text in (expected, "abc")]
    assert [prompt.tolist() for prompt in table.take(np.arange(2)).prompts.rows()] == ids


def test_overlong_prompts_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [row("a" * 8), row("b" * 9), row("c")])
    assert load(file, tokenizer).take(np.arange(2)).texts == ("a" * 8, "c")
    assert "1 of 3 prompts are overlong" in caplog.text


def test_a_prompt_that_is_longer_than_any_is_refused_before_it_is_encoded(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MAX_CHARACTERS", 100)
    file = write_jsonl(tmp_path / "a.jsonl", [row("a"), row("b" * 101)])
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: the prompt has 101 characters, more than 100"):
        load(file, tokenizer)


def test_a_reward_model_row_needs_no_ground_truth(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [row("a", reward_model={"style": "model"})])
    assert load(file, tokenizer).rows[0].ground_truth is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("a"), {"data_source": "x", "reward_model": {"ground_truth": 1}}], "line 2: column 'prompt' is missing"),
        ([row(3)], "line 1: column 'prompt' must be chat messages or text, got 3"),
        ([row([])], "line 1: column 'prompt': expected at least one message, got none"),
        ([row([{"role": "user"}])], "line 1: column 'prompt': expected messages with 'role' and 'content'"),
        ([row("")], "line 1: column 'prompt' has no tokens"),
        ([row("a", data_source=None)], "line 1: column 'data_source' must be text, got None"),
        ([{"prompt": "a", "reward_model": {"ground_truth": 1}}], "line 1: column 'data_source' is missing"),
        (
            [row("a", reward_model="72")],
            "line 1: column 'reward_model' must be a mapping with 'ground_truth', got '72'",
        ),
        ([row("a", reward_model={"style": "rule"})], "line 1: column 'reward_model' has no 'ground_truth'"),
        ([row("a", extra_info=[1])], r"line 1: column 'extra_info' must be a mapping, got \[1\]"),
        (["text"], "line 1: expected a JSON object, got str"),
        ([], "data.train_files: .*a.jsonl has no rows"),
        (
            [row("a" * 9), row("a" * 12)],
            r"all 2 prompts are longer than data.max_prompt_length \(8 tokens; .* has 9\): raise it",
        ),
    ],
)
def test_a_wrong_row_is_named_by_file_row_and_column(
    tmp_path: Path, tokenizer: Tokenizer, rows: list[Any], message: str
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError, match=rf"a\.jsonl, {message}" if message.startswith("line") else message):
        load(file, tokenizer)


def test_a_wrong_parquet_row_is_named_too(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [row(chat("a")), row(chat("a"), data_source=None)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=1)
    with pytest.raises(ConfigError, match=r"a\.parquet, row 2: column 'data_source' must be text, got None"):
        load(str(tmp_path / "a.parquet"), tokenizer)


def test_an_overlong_prompt_is_an_error_if_it_is_to_be_neither_filtered_nor_cut(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [row("a"), row("b" * 9)])
    with pytest.raises(ConfigError, match=r"line 2: the prompt has 9 tokens, more than data.max_prompt_length \(8\)"):
        load(file, tokenizer, filter_overlong_prompts=False)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_files: no such file .*absent\.jsonl"):
        load(str(tmp_path / "absent.jsonl"), tokenizer)
    for name, content, message in (
        ("a.parquet", b"", "a.parquet is not a readable parquet file"),
        ("a.csv", b"x", "a.csv: expected a .parquet or .jsonl file"),
        ("a.jsonl", b"{\n", "a.jsonl, line 1: not valid JSON"),
        ("b.jsonl", b"\xff\n", "b.jsonl, line 1: not UTF-8 text"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            load(str(tmp_path / name), tokenizer)


# Batches.


def rows_at(dataset: PromptDataset, step: int) -> list[int]:
    return dataset.batch_at(step).row_indices.tolist()


def dataset_of(table: PromptBatch, seed: int = 1, batch_size: int = 3, *, shuffle: bool = True) -> PromptDataset:
    return PromptDataset(table, batch_size=batch_size, seed=seed, shuffle=shuffle)


def test_a_batch_depends_on_seed_and_step_only(tmp_path: Path, tokenizer: Tokenizer) -> None:
    table = numbered(tmp_path, tokenizer, 10)
    straight = [rows_at(dataset_of(table), step) for step in range(1, 13)]
    in_order, backwards = dataset_of(table), dataset_of(table)
    assert [rows_at(in_order, step) for step in range(1, 13)] == straight
    assert [rows_at(backwards, step) for step in range(12, 0, -1)] == straight[::-1]
    assert [rows_at(dataset_of(table, seed=2), step) for step in range(1, 13)] != straight


def test_an_epoch_takes_no_prompt_twice_and_the_next_has_another_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = dataset_of(numbered(tmp_path, tokenizer, 10))
    assert dataset.steps_per_epoch == 3
    epochs = [[index for step in range(1, 4) for index in rows_at(dataset, 3 * epoch + step)] for epoch in range(3)]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert set().union(*epochs) == set(range(10))
    assert [dataset.epoch_of(step) for step in (1, 3, 4, 6, 7)] == [0, 0, 1, 1, 2]


def test_the_order_is_fixed_for_all_time(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Guards resumed runs against a new order in another numpy: these numbers must never change."""
    dataset = dataset_of(numbered(tmp_path, tokenizer, 8), batch_size=8)
    assert rows_at(dataset, 1) == [2, 4, 7, 5, 0, 6, 3, 1]
    assert response_seeds(1, 2, [3, 4], 5).tolist() == [1827987155160483628, 4484303001501506391]


def test_without_shuffling_the_files_order_is_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = dataset_of(numbered(tmp_path, tokenizer, 7), shuffle=False)
    assert [rows_at(dataset, step) for step in (1, 2, 3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_a_batch_larger_than_the_data_is_refused_with_both_numbers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_batch_size \(8\) is larger than .* prompts \(7\)"):
        dataset_of(numbered(tmp_path, tokenizer, 7), batch_size=8)


def test_steps_count_from_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="steps count from 1, got 0"):
        dataset_of(numbered(tmp_path, tokenizer, 7)).batch_at(0)


def test_validation_parts_hold_every_prompt_once_in_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    parts = list(numbered(tmp_path, tokenizer, 7).parts(3))
    assert [part.row_indices.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6]]


def test_the_batch_for_generation_has_one_seed_per_response(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompts = dataset_of(numbered(tmp_path, tokenizer, 7)).batch_at(2)
    batch = prompts.to_batch(5, 2, 4)
    assert isinstance(batch, Batch)
    seeds = np.stack(batch["seeds"].rows())
    assert np.array_equal(seeds, response_seeds(5, 2, prompts.row_indices[:, None], [0, 1, 2, 3]))
    repeated = prompts.repeated(4)
    assert repeated.num_prompts == 12
    assert [ids.tolist() for ids in repeated.prompts.rows()[4:8]] == [prompts.prompts.rows()[1].tolist()] * 4


def test_response_seeds_are_distinct_repeatable_and_not_negative() -> None:
    steps, prompts, samples = np.arange(1, 9), np.arange(100), np.arange(8)
    seeds = np.stack([response_seeds(3, step, prompts[:, None], samples) for step in steps])
    assert seeds.shape == (8, 100, 8)
    assert seeds.dtype == np.int64
    assert (seeds >= 0).all()
    assert len(np.unique(seeds)) == seeds.size
    assert seeds[4, 7, 2] == response_seeds(3, 5, 7, 2)
    assert not np.isin(response_seeds(4, 1, prompts[:, None], samples), seeds).any()


def test_the_splits_have_their_own_files_and_numbers_of_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", [row("a"), row("b")])
    val = write_jsonl(tmp_path / "val.jsonl", [row("c", data_source="held out"), row("d"), row("e")])
    config = DataConfig(
        train_files=(train,),
        val_files=(val,),
        train_batch_size=1,
        max_samples=1,
        val_max_samples=2,
        prompt_key="prompt",
    )
    assert load_prompts(config, tokenizer, "train").texts == ("a",)
    held_out = load_prompts(config, tokenizer, "val")
    assert held_out.texts == ("c", "d")
    assert held_out.data_sources == {"held out", "letters"}


# Files with weights.


def test_files_have_their_shares_of_an_epoch(tmp_path: Path, tokenizer: Tokenizer) -> None:
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [row(letter) for letter in name]) for name in ("ab", "cdefghij")]
    table = load(files, tokenizer)
    dataset = PromptDataset(table, batch_size=5, seed=1, shuffle=True, weights=(1, 1))
    assert dataset.steps_per_epoch == 2
    for epoch in range(4):
        letters = "".join("".join(dataset.batch_at(2 * epoch + step).texts) for step in (1, 2))
        assert sum(letter in "ab" for letter in letters) == 5


def test_a_file_without_a_share_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [row(letter) for letter in name]) for name in ("ab", "c")]
    for weights, max_samples, reason in (
        ((1, 1), 2, "none of its rows is left"),
        ((1000, 1), None, "that is less than one of 3 prompts"),
    ):
        table = load(files, tokenizer, max_samples=max_samples)
        with pytest.raises(ConfigError, match=f"gives file 2 of data.train_files a share, but {reason}"):
            PromptDataset(table, batch_size=1, seed=1, shuffle=True, weights=weights)


def test_a_prompt_that_comes_twice_in_a_batch_gets_seeds_of_its_own_each_time(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    table = numbered(tmp_path, tokenizer, 4)
    once = table.take(np.array([2, 1])).to_batch(5, 3, 2)["seeds"].rows()
    again = table.take(np.array([2, 1, 2, 2])).to_batch(5, 3, 2)["seeds"].rows()
    assert [seeds.tolist() for seeds in again[:2]] == [seeds.tolist() for seeds in once]
    assert len({int(seed) for seeds in again for seed in seeds}) == 8
