"""The parquet files of a step and of a validation: columns, types, footer, and what is null."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from controller.conversations.conversation import Conversation
from controller.ppo.experience import Experience
from controller.ppo.scores import Scores, Text, objects
from controller.tracking.record.rollout_file import (
    shown_file,
    train_file,
    val_file,
)
from controller.validation.result import ValidationResult
from rewards.samples import Failure
from splitppo.batch import Batch, Column
from splitppo.config import Config
from splitppo.run_folder.columns import NAMES, NUMBERS, OF_VALIDATIONS, SHOWN, TEXTS, TOKEN_LISTS, TURN_LISTS
from splitppo.run_folder.rollout_writer import FOOTER_KEY, without_tokens
from splitppo.run_folder.samples import read_samples, rollouts_file
from splitppo.run_folder.summary import Accuracy
from tests.support.recorded import byte_tokenizer, random_experience, record_config, record_of
from tests.support.scores import make_scores
from tests.support.seeds import shifted

BACKEND = byte_tokenizer()
LENGTHS = [5, 0, 9, 3]


def read(content: Any) -> tuple[pa.Table, dict[str, Any]]:
    table = pq.read_table(pa.BufferReader(content))
    return table, json.loads(table.schema.metadata[FOOTER_KEY])


def train(experience: Experience, scores: Scores, config: Config, step: int = 3) -> tuple[list[dict[str, Any]], Any]:
    table, footer = read(train_file(record_of(experience, scores, step), config, BACKEND))
    return table.to_pylist(), footer


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return record_config(tmp_path, num_samples=2)


def test_lists_of_tokens_are_those_of_the_experience(config: Config) -> None:
    experience, scores = random_experience(config, LENGTHS)
    rows, footer = train(experience, scores, config)
    assert footer["num_sampled"] == footer["num_rows"] == len(rows) == 4
    assert [(row["row"], row["sample"]) for row in rows] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    sources = {"old": "old_log_probs", "ref": "ref_log_probs", "rollout": "rollout_log_probs", "value": "values"}
    columns = {name: experience.batch[column] for name, column in sources.items()}
    columns |= {"ret": experience.batch["returns"], "advantage": experience.batch["advantages"]}
    for name, column in {**columns, "rewards": experience.rewards}.items():
        for row, expected in zip(rows, column.rows(), strict=True):
            assert row[name] == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-6), name
    for row, ids in zip(rows, experience.batch["responses"].rows(), strict=True):
        assert row["ids"] == ids.tolist()
        assert row["response"] == BACKEND.decode(row["ids"])
        assert row["flags"] == [3] * row["length"]
        assert [row[name] for name in ("new", "entropy_tokens", "clip", "turn", "messages")] == [None] * 5
    assert rows[0]["prompt"] == "prompt 0"
    assert rows[3]["ground_truth"] == '{"answer": 3}'


def test_the_numbers_of_the_update_are_recorded_with_its_clipped_tokens(tmp_path: Path) -> None:
    """Row 2 was not used in the update; row 3 is half an environment's."""
    changes = {"actor__clip_ratio_low": 0.2, "actor__clip_ratio_high": 0.3, "actor__clip_ratio_c": 3.0}
    config = record_config(tmp_path, num_samples=2, **changes)
    experience, scores = random_experience(config, LENGTHS)
    counts = Column(np.array([True] * 15 + [False, True]), np.array(LENGTHS, np.int32))
    experience, random = replace(experience, learned=counts, counted=counts), np.random.default_rng(shifted(4))
    lengths = np.array([5, 0, 0, 3], np.int32)
    new, entropy = (random.standard_normal(8).astype(np.float32) for _ in range(2))
    computed = Batch(4, {"update_log_probs": Column(new, lengths), "update_entropy": Column(entropy, lengths)})
    rows = read(train_file(record_of(experience, scores, update_columns=computed), config, BACKEND))[0].to_pylist()
    old, advantages = (experience.batch[name].rows() for name in ("old_log_probs", "advantages"))
    seen = set()
    for row in (0, 3):
        part = slice(0, 5) if row == 0 else slice(5, 8)
        assert rows[row]["new"] == new[part].tolist()
        assert rows[row]["entropy_tokens"] == entropy[part].tolist()
        flags = []
        for place, (one, other, advantage) in enumerate(zip(new[part], old[row], advantages[row], strict=True)):
            ratio, flag = math.exp(float(one) - float(other)), 0
            if advantage > 0 and ratio > 1.3:
                flag = 1
            if advantage < 0 and ratio < 0.8:
                flag = 2
            if advantage < 0 and ratio > 3.0:
                flag = 4
            flags.append(flag if counts.rows()[row][place] else 0)
        assert rows[row]["clip"] == flags
        seen |= set(flags)
    assert {0, 1, 2} <= seen
    assert rows[0]["entropy"] == pytest.approx(entropy[:5].mean())
    assert rows[3]["entropy"] == pytest.approx(entropy[[5, 7]].mean())
    for row in (1, 2):
        assert [rows[row][name] for name in ("new", "entropy_tokens", "clip", "entropy")] == [None] * 4


def test_the_weights_that_sampled_a_token_are_recorded_if_a_response_may_have_several(config: Config) -> None:
    experience, scores = random_experience(config, LENGTHS)
    record = record_of(experience, scores)
    assert {*read(train_file(record, config, BACKEND))[0]["version"].to_pylist()} == {None}
    versions = Column(np.arange(sum(LENGTHS)), np.array(LENGTHS, np.int32))
    record.versions = versions
    assert read(train_file(record, config, BACKEND))[0]["version"].to_pylist() == [
        row.tolist() for row in versions.rows()
    ]


def test_a_loss_without_clip_has_no_clipped_tokens(tmp_path: Path) -> None:
    config = record_config(tmp_path, num_samples=2, actor__policy_loss={"loss_mode": "gspo"})
    experience, scores = random_experience(config, [2, 2])
    column = Column(np.zeros(4, np.float32), np.array([2, 2], np.int32))
    computed = Batch(2, {"update_log_probs": column, "update_entropy": column})
    rows = read(train_file(record_of(experience, scores, update_columns=computed), config, BACKEND))[0].to_pylist()
    assert [(row["new"], row["clip"]) for row in rows] == [([0.0, 0.0], None)] * 2


def test_numbers_that_a_half_cannot_hold_are_stored_as_floats(config: Config) -> None:
    experience, scores = random_experience(config, LENGTHS)
    experience.batch["values"].values[0] = 7e4
    table, _ = read(train_file(record_of(experience, scores), config, BACKEND))
    kinds = {name: table.schema.field(name).type.value_type for name in ("value", "ret", "old")}
    assert kinds == {"value": pa.float32(), "ret": pa.float16(), "old": pa.float32()}
    assert table["value"].to_pylist()[0][0] == 7e4


def test_responses_beyond_the_budget_have_numbers_and_no_tokens(tmp_path: Path) -> None:
    config = record_config(tmp_path, num_samples=2, tracking__rollouts__tokens_per_step=40)
    experience, scores = random_experience(config, [4] * 100)
    rows, footer = train(experience, scores, config)
    recorded = [row for row in rows if row["why"]]
    assert 5 <= len(recorded) == footer["num_sampled"] <= 10
    for row in rows:
        texts = [row[name] for name in ("ids", "ends", "old", "prompt", "response", "ground_truth")]
        assert all(text is None for text in texts) != bool(row["why"])
        assert row["kl"] is not None
        assert row["text_hash"]


def test_a_run_without_critic_and_reference_has_nulls_in_their_columns(tmp_path: Path) -> None:
    config = record_config(tmp_path, num_samples=2, algorithm__adv_estimator="grpo")
    experience, scores = random_experience(config, LENGTHS, columns=("old_log_probs",))
    rows, footer = train(experience, scores, config)
    for name in ("ref", "rollout", "value", "kl", "mismatch", "value_first", "value_error", "entropy"):
        assert [row[name] for row in rows] == [None] * 4, name
    assert "explained_variance" not in footer
    assert footer["adv_estimator"] == "grpo"


def test_a_conversation_has_its_turns_their_rewards_and_its_messages(config: Config) -> None:
    experience, _ = random_experience(config, [6, 2])
    talk = Conversation(turn_rewards=(0.5, -1.0), turn_ends=(1, 5), messages=({"role": "assistant", "content": "é"},))
    scores = make_scores(np.zeros(2, np.float32), conversations=objects([talk, None]))
    counted = Column(np.array([1, 1, 0, 0, 1, 1, 1, 1], np.bool_), np.array([6, 2], np.int32))
    rows, _ = train(replace(experience, learned=counted, counted=counted), scores, config)
    assert rows[0]["turn"] == [1, 1, 0, 0, 2, 2]
    assert rows[0]["flags"] == [3, 3, 0, 0, 3, 3]
    assert (rows[0]["turn_rewards"], rows[0]["turn_ends"]) == ([0.5, -1.0], [1, 5])
    assert json.loads(rows[0]["messages"]) == [{"role": "assistant", "content": "é"}]
    assert [row["turns"] for row in rows] == [2, 1]
    assert rows[1]["turn_rewards"] is None


def test_a_response_of_several_contexts_says_where_they_begin_and_which_turn_each_follows(config: Config) -> None:
    """The first context is the prompt, [1, 1]; turns end at 1, 5 and 11. The third context goes on from the first turn.

    Row 1 has one context, and so has every row of a run whose conversations have no others.
    """
    response = [10, 11, 20, 21, 12, 13, 1, 1, 10, 11, 22, 14]
    lengths = np.array([12, 2], np.int32)
    ids = Column(np.array([*response, 15, 16], np.int32), lengths)
    experience, _ = random_experience(config, [12, 2])
    talk = Conversation(turn_rewards=(0.0, 0.0, 1.0), turn_ends=(1, 5, 11))
    scores = make_scores(np.zeros(2, np.float32), conversations=objects([talk, None]))
    alone, _ = train(experience, scores, config)
    assert [(row["contexts"], row["segments"], row["followed_turns"]) for row in alone] == [(1, None, None)] * 2
    counted = Column(np.array([1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1], np.bool_), lengths)
    segments = Column.from_rows([[2, 2, 6, 5], []], np.dtype(np.int32))
    batch = experience.batch.merge(Batch(2, {"responses": ids, "segments": segments}))
    rows, _ = train(replace(experience, batch=batch, learned=counted, counted=counted), scores, config)
    assert [(row["contexts"], row["segments"], row["followed_turns"]) for row in rows] == [
        (3, [2, 2, 6, 5], [0, 1]),
        (1, None, None),
    ]
    assert rows[0]["turn"] == [1, 1, 0, 0, 2, 2, 0, 0, 0, 0, 0, 3]


def test_what_scorers_say_is_kept_for_every_response(config: Config) -> None:
    experience, _ = random_experience(config, [2, 2])
    extra = objects([{"format": 1.0, "why": "\udc80", "bad": float("nan")}, {}])
    failures = objects([None, Failure.TIMEOUT])
    scores = make_scores(
        np.zeros(2, np.float32), extra=extra, failures=failures, places=objects(["a, row 1", "\ud800"])
    )
    rows, _ = train(experience, scores, config)
    assert json.loads(rows[0]["extra"]) == {"format": 1.0, "why": "\udc80", "bad": None}
    assert [row["extra"] for row in rows[1:]] == [""]
    assert [row["failure"] for row in rows] == ["", "timeouts"]
    assert [row["place"] for row in rows] == ["a, row 1", "?"]


def test_floats_are_split_by_bytes_and_compressed(config: Config, tmp_path: Path) -> None:
    experience, scores = random_experience(config, LENGTHS)
    (tmp_path / "3.parquet").write_bytes(train_file(record_of(experience, scores), config, BACKEND))
    facts = pq.read_metadata(tmp_path / "3.parquet").row_group(0)
    columns = {facts.column(index).path_in_schema: facts.column(index) for index in range(facts.num_columns)}
    assert "BYTE_STREAM_SPLIT" in columns["old.list.element"].encodings
    assert {column.compression for column in columns.values()} == {"ZSTD"}


def test_an_older_step_keeps_everything_but_its_lists_of_tokens(config: Config) -> None:
    experience, scores = random_experience(config, LENGTHS)
    content = train_file(record_of(experience, scores), config, BACKEND)
    (before, footer), (after, kept) = read(content), read(without_tokens(content))
    assert set(before.column_names) - set(after.column_names) == set(TOKEN_LISTS)
    assert after.to_pylist() == before.drop_columns(list(TOKEN_LISTS)).to_pylist()
    assert kept == footer


def validated(num_prompts: int) -> ValidationResult:
    texts = objects(Text(f"p {row}", f"r {row}", "t") for row in range(num_prompts))
    scores = make_scores(np.ones(num_prompts, np.float32), texts=texts, prompt_indices=np.arange(num_prompts)[::-1])
    lengths = np.arange(num_prompts, dtype=np.int32)
    return ValidationResult(Accuracy(overall=1.0), {}, scores, {}, lengths=lengths)


def test_a_validation_has_the_texts_of_the_same_64_prompts_each_time(config: Config) -> None:
    (first, footer), (second, _) = (read(val_file(validated(200), config, step)) for step in (2, 4))
    rows = first.to_pylist()
    assert [row["fixed"] for row in rows] == second["fixed"].to_pylist()
    assert sum(row["fixed"] for row in rows) == 64
    assert [row["fixed"] for row in rows[::-1][:64]] != [True] * 64
    for row in rows:
        assert (row["response"] == f"r {row['row']}") == row["fixed"]
        assert row["fixed"] or row["prompt"] is None
        assert row["length"] == row["row"]
    assert footer["num_rows"] == 200
    assert sum(row["fixed"] for row in read(val_file(validated(3), config, 2))[0].to_pylist()) == 3


def test_the_first_responses_of_a_step_are_stored_as_trackers_show_them(tmp_path: Path) -> None:
    """Nothing else of them is recorded here; the others have no text."""
    none = {"tracking__rollouts__tokens_per_step": 0}
    config = record_config(tmp_path, num_samples=2, tracking__sample_freq=3, tracking__num_samples=1, **none)
    experience, scores = random_experience(config, [5, 4, 9, 3])
    for step, expected in ((2, []), (3, [["train", "letters", "prompt 0", "unused", '{"answer": 0}', 0.25]])):
        scored = replace(scores, scores=np.array([0.25, 0.5, 0.75, 1.0]))
        rows, _ = train(experience, scored, config, step)
        assert [row["why"] for row in rows] == [0] * 4
        assert [row["prompt"] for row in rows] == (["prompt 0"] if expected else [None]) + [None] * 3
        file = rollouts_file(tmp_path, "train", step)
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), file)
        found = read_samples(tmp_path, step)
        assert [row[:1] + row[2:] for row in found] == [row[:1] + row[2:] for row in expected]


def test_what_trackers_show_is_there_although_nothing_is_recorded(config: Config) -> None:
    _, scores = random_experience(config, LENGTHS)
    table, footer = read(shown_file(scores.first(3), 7, 2))
    assert footer["step"] == 7
    assert [(row["row"], row["sample"], row["prompt"], row["shown"]) for row in table.to_pylist()] == [
        (row, row % 2, f"prompt {row}", "unused") for row in range(3)
    ]


def test_responses_whose_texts_are_recorded_have_the_names_of_their_images(config: Config) -> None:
    experience, scores = random_experience(config, LENGTHS)

    def keep_images(prompt: int) -> tuple[str, ...]:
        return tuple(f"{prompt:032x}" for _ in range(prompt % 3))

    record = record_of(experience, scores)
    result = ValidationResult(Accuracy(overall=0.5), {}, scores, {}, lengths=np.array(LENGTHS, np.int32))
    for content in (
        train_file(record, config, BACKEND, keep_images),
        val_file(result, config, 3, keep_images),
        shown_file(scores, 7, 2, keep_images),
    ):
        rows = read(content)[0].to_pylist()
        recorded = [row for row in rows if row["prompt"] is not None]
        assert recorded
        for row in recorded:
            expected = " ".join([f"{row['prompt_index']:032x}"] * (row["prompt_index"] % 3))
            assert row["images"] == (expected or None)
        assert {row["images"] for row in rows if row["prompt"] is None} <= {None}


def test_the_table_of_columns_has_every_column_that_is_written(config: Config) -> None:
    """`messages` and `shown` are in both files, `fixed` in that of a validation alone."""
    experience, scores = random_experience(config, LENGTHS)
    trained = read(train_file(record_of(experience, scores), config, BACKEND))[0].column_names
    assert {*trained} == {*NUMBERS, *TEXTS, *NAMES, SHOWN, *TOKEN_LISTS, *TURN_LISTS} - {"fixed"}
    result = ValidationResult(Accuracy(overall=0.5), {}, scores, {}, lengths=np.array(LENGTHS, np.int32))
    assert {*read(val_file(result, config, 3))[0].column_names} == {*OF_VALIDATIONS}
