"""Makes the parquet files of a step's and of a validation's responses; docs/run-folder.md has every column.

pyarrow is slow to import: who needs this file imports it where it is needed.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import tokenizers
from numpy.typing import NDArray

from controller.ppo.kl import clamp_log_ratio
from controller.ppo.masked_stats import Float32s, Mask
from controller.ppo.scores import Objects, Scores, Text
from controller.tracking.record.choice import choose
from controller.tracking.record.contexts import followed_turns
from controller.tracking.record.statistics import step_statistics
from controller.tracking.record.step_tokens import StepTokens
from controller.tracking.record.token_text import decode_with_ends
from controller.tracking.step_record import StepRecord
from controller.validation.result import ValidationResult
from splitppo.batch import Batch, Column
from splitppo.config import ActorConfig, Config
from splitppo.run_folder.append_log import json_line
from splitppo.run_folder.columns import SHOWN
from splitppo.run_folder.images import COLUMN as IMAGES
from splitppo.run_folder.images import KeepImages, no_images
from splitppo.run_folder.rollout_writer import step_file
from splitppo.segments import later_segments, num_contexts
from splitppo.splitmix import splitmix64

Rows = NDArray[np.int64]

_NUM_FIXED_PROMPTS = 64
_LARGEST_HALF = 6e4  # a list with larger numbers is float32
_LOG_PROBS = frozenset({"old", "ref", "rollout"})  # float32: their differences are small, and they may not be
# Numbers of responses that a run may lack.
_MAY_BE_MISSING = ("kl", "k3", "entropy", "mismatch", "value_first", "value_last", "value_error")
# The lists of a step, and their columns; the number `reward` is the sum of the list `rewards`.
_LISTS = {name: name for name in ("old", "ref", "rollout", "value", "ret", "advantage")} | {"reward": "rewards"}
# What the update's own forwards compute.
_OF_UPDATE = {"new": pa.float32(), "entropy_tokens": pa.float32(), "clip": pa.uint8()}


def train_file(
    record: StepRecord, config: Config, backend: tokenizers.Tokenizer, keep_images: KeepImages = no_images
) -> Any:
    """Returns the content of rollouts/train/{step}.parquet as a buffer; `config` is that of the step.

    Every step has the same columns: those that it may lack begin as nulls, which the numbers that it has replace.
    Numbers of responses are float32 in the file.
    """
    tokens = record.tokens
    scores = record.scores
    step = record.step
    talks = record.scores.conversations
    why_B = choose(tokens.numbers, scores, config, step)
    rows = np.flatnonzero(why_B)
    numbers = {**tokens.numbers, "why": why_B}
    floats = {name: those.astype(np.float32) for name, those in numbers.items() if those.dtype == np.float64}
    columns = {
        **_columns_of(scores, config.rollout.n),
        "is_truncated": pa.array(scores.is_truncated),
        "failure": pa.array(["" if failure is None else failure.value for failure in scores.failures], pa.string()),
        "turns": pa.array([1 if talk is None else talk.num_turns for talk in talks], pa.int16()),
        "lost": pa.array([talk is not None and bool(talk.lost) for talk in talks], pa.bool_()),
        **_contexts(record.experience.batch, talks, rows),
        **dict.fromkeys(_MAY_BE_MISSING, pa.nulls(len(why_B), pa.float32())),
        **{name: pa.array(those, from_pandas=True) for name, those in {**numbers, **floats}.items()},
        **_token_lists(tokens, scores, rows, record.versions),
        **_of_update(tokens, record.update_columns, config.actor),
        **_texts(scores, rows, config.tracking.num_shown(step), keep_images),
        **_decoded(tokens, rows, backend),
    }
    footer = {
        **{name: getattr(config.algorithm, name) for name in ("adv_estimator", "gamma", "lam")},
        **{name: getattr(config.actor, name) for name in ("clip_low", "clip_high")},
        "kl_coef": record.experience.metrics.get("actor/reward_kl_penalty_coeff", 0.0),
        **step_statistics(tokens, scores.scores),
    }
    return step_file(columns, step, num_sampled=len(rows), seed=config.run.seed, **footer)


def val_file(validation: ValidationResult, config: Config, step: int, keep_images: KeepImages = no_images) -> Any:
    """Returns the content of rollouts/val/{step}.parquet as a buffer: scores of all responses, and some texts.

    The texts are those of up to 64 prompts, which are the same at each validation.
    """
    scores = validation.scores
    prompts = np.unique(scores.prompt_indices)
    in_mixed_order = prompts[np.argsort(splitmix64(prompts.astype(np.uint64)))]  # mixed, but always in the same way
    is_fixed_B = np.isin(scores.prompt_indices, in_mixed_order[:_NUM_FIXED_PROMPTS])
    rows = np.flatnonzero(is_fixed_B)
    columns = {
        **_columns_of(scores, config.evaluation.n),
        "length": pa.array(validation.lengths, pa.int32()),
        "fixed": pa.array(is_fixed_B),
        **_texts(scores, rows, config.tracking.num_shown(0), keep_images),
        "response": _strings(scores.texts, rows, lambda text: text.response),
    }
    return step_file(columns, step)


def _contexts(batch: Batch, talks: Objects, rows: Rows) -> dict[str, Any]:
    """Returns the number of contexts of all responses, and of some where they begin and which turns they follow."""
    segments = later_segments(batch)
    of_rows = segments.rows()
    prompts = batch["prompts"].rows()
    responses = batch["responses"].rows()
    later = {row: of_rows[row].tolist() for row in rows[segments.lengths[rows] > 0].tolist()}
    followed = {
        row: [*followed_turns(prompts[row], responses[row], of_row, talks[row].turn_ends if talks[row] else ())]
        for row, of_row in later.items()
    }
    return {
        "contexts": pa.array(num_contexts(segments), pa.int32()),
        "segments": _of_some(later, batch.num_rows, pa.list_(pa.int32())),
        "followed_turns": _of_some(followed, batch.num_rows, pa.list_(pa.int32())),
    }


def _columns_of(scores: Scores, num_samples: int) -> dict[str, Any]:
    """Returns the columns that training and validation have."""
    rows = np.arange(scores.num_rows)
    extra = list(scores.extra)
    if scores.model_scores is not None:
        both = zip(scores.rule_scores.tolist(), scores.model_scores.tolist(), scores.extra, strict=True)
        extra = [{"rule_score": rule, "model_score": model, **others} for rule, model, others in both]
    return {
        "row": pa.array(rows, pa.int32()),
        "prompt_index": pa.array(scores.prompt_indices, pa.int64()),
        "sample": pa.array(rows % num_samples, pa.int16()),
        "data_source": pa.array(map(_clean, scores.data_sources), pa.string()),
        "place": pa.array(map(_clean, scores.places), pa.string()),
        "score": pa.array(scores.scores, pa.float32()),
        "extra": pa.array([json_line(fields).decode().strip() if fields else "" for fields in extra], pa.string()),
        "has_eos": pa.array(scores.has_eos),
    }


def shown_file(shown: Scores, step: int, num_samples: int, keep_images: KeepImages = no_images) -> Any:
    """Returns the content of a file that holds the responses alone that trackers show, where nothing is recorded.

    `num_samples` is the number of samples of a prompt.
    """
    texts = _texts(shown, np.arange(0), shown.num_rows, keep_images)
    return step_file({**_columns_of(shown, num_samples), **texts}, step)


def _texts(scores: Scores, recorded: Rows, num_shown: int, keep_images: KeepImages) -> dict[str, Any]:
    """Returns prompt, images, ground truth and messages of some responses, and what trackers show of the first ones."""
    shown = np.arange(min(num_shown, scores.num_rows))
    rows = np.union1d(recorded, shown)

    def as_json(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, default=str)

    def truth(text: Text) -> str:
        return text.ground_truth if isinstance(text.ground_truth, str) else as_json(text.ground_truth)

    return {
        "prompt": _strings(scores.texts, rows, lambda text: text.prompt),
        "ground_truth": _strings(scores.texts, rows, truth),
        "messages": _strings(scores.conversations, rows, lambda talk: talk and as_json(list(talk.messages))),
        SHOWN: _strings(scores.texts, shown, lambda text: text.response),
        IMAGES: _of_rows(
            scores.prompt_indices, rows, lambda prompt: " ".join(keep_images(prompt)) or None, pa.string()
        ),
    }


def _strings(objects: Objects, rows: Rows, text_of: Callable[[Any], str | None]) -> Any:
    """Returns a column of texts that some rows have; null for the others."""

    def cleaned(one: Any) -> str | None:
        text = text_of(one)
        return None if text is None else _clean(text)

    return _of_rows(objects, rows, cleaned, pa.string())


def _of_rows(objects: NDArray[Any], rows: Rows, value_of: Callable[[Any], Any], kind: Any) -> Any:
    """Returns a column with what `value_of` makes of the objects of some rows; null for the others."""
    return _of_some({row: value_of(objects[row]) for row in rows.tolist()}, len(objects), kind)


def _of_some(values: Mapping[int, Any], num_rows: int, kind: Any) -> Any:
    """Returns a column with the values of some rows; null for the others."""
    return pa.array([values.get(row) for row in range(num_rows)], kind)


def _clean(text: str) -> str:
    """Replaces half characters, which JSON may have and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def _decoded(tokens: StepTokens, rows: Rows, backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Returns the texts of some responses, special tokens included, and where each token ends in its text."""
    ids = Column(tokens.ids, tokens.lengths).rows()
    known = dict[int, str]()
    decoded = {row: decode_with_ends(backend, ids[row].tolist(), known) for row in rows.tolist()}
    texts, ends = ([decoded.get(row, (None, None))[part] for row in range(len(ids))] for part in (0, 1))
    return {"response": pa.array(texts, pa.string()), "ends": pa.array(ends, pa.list_(pa.int32()))}


def _lists(values_n: NDArray[Any], lengths_B: NDArray[np.int32], is_there_B: Mask, kind: Any) -> Any:
    """Makes a column of lists; `values_n` has the numbers of the rows that have a list, the others are null."""
    offsets = np.concatenate([[0], np.cumsum(np.where(is_there_B, lengths_B, 0))])
    # Nulls among the offsets: a mask of the lists would import pyarrow.compute, which takes as long as some steps.
    is_null = np.append(~is_there_B, False)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32(), mask=is_null), pa.array(values_n, kind))


def _token_lists(tokens: StepTokens, scores: Scores, rows: Rows, versions: Column | None) -> dict[str, Any]:
    """Returns the columns with a number per token, and those with one per turn, of some responses.

    `versions` has the version that sampled each token; None if the step's responses are of one version.
    """
    is_recorded_B = np.isin(np.arange(len(tokens.lengths)), rows)
    within_N = is_recorded_B[tokens.row_of]

    def lists(values_N: NDArray[Any], kind: Any) -> Any:
        return _lists(values_N[within_N], tokens.lengths, is_recorded_B, kind)

    columns = {
        "ids": lists(tokens.ids, pa.int32()),
        "flags": lists(tokens.counts + 2 * tokens.learned.astype(np.uint8), pa.uint8()),
        "version": pa.nulls(len(tokens.lengths), pa.list_(pa.int32())),
        **{column: pa.nulls(len(tokens.lengths), pa.list_(pa.float32())) for column in _LISTS.values()},
    }
    for name, values_N in tokens.lists.items():
        is_small = name not in _LOG_PROBS and (np.abs(values_N[within_N]) < _LARGEST_HALF).all()
        kind, of_numpy = (pa.float16(), np.float16) if is_small else (pa.float32(), np.float32)
        columns[_LISTS[name]] = lists(values_N.astype(of_numpy), kind)
    if versions is not None:
        columns["version"] = lists(versions.values, pa.int32())
    return columns | _of_turns(tokens, scores, rows, lists)


def _of_update(tokens: StepTokens, computed: Batch | None, actor: ActorConfig) -> dict[str, Any]:
    """Returns the columns of what the update has computed, and its mean entropy over a response's policy tokens."""
    num_rows = len(tokens.lengths)
    columns = {name: pa.nulls(num_rows, pa.list_(kind)) for name, kind in _OF_UPDATE.items()}
    if computed is None:
        return columns
    new = computed["update_log_probs"]
    entropy = computed["update_entropy"]
    is_there_B = new.lengths > 0
    within_N = is_there_B[tokens.row_of]
    values = {"new": new.values, "entropy_tokens": entropy.values}
    if actor.policy_loss.loss_mode == "vanilla" and "old" in tokens.lists:
        old = tokens.lists["old"][within_N]
        advantages = tokens.lists["advantage"][within_N]
        flags = clip_flags(new.values, old, advantages, actor)
        values["clip"] = np.where(tokens.learned[within_N], flags, 0).astype(np.uint8)
    for name, values_n in values.items():
        columns[name] = _lists(values_n, new.lengths, is_there_B, _OF_UPDATE[name])
    entropy_N = np.zeros(len(tokens.ids))
    entropy_N[within_N] = entropy.values
    columns["entropy"] = pa.array(tokens.means(entropy_N, tokens.counts & within_N), pa.float32(), from_pandas=True)
    return columns


def clip_flags(new_N: Float32s, old_N: Float32s, advantages_N: Float32s, actor: ActorConfig) -> NDArray[np.uint8]:
    """Says where the PPO clip loss has cut the gradient: 1 ratio too high, 2 too low, 4 dual clip, [N] uint8."""
    ratio_N = np.exp(clamp_log_ratio(np.subtract(new_N, old_N, dtype=np.float64)))
    is_high_N = (advantages_N > 0) & (ratio_N > 1.0 + actor.clip_high)
    is_low_N = (advantages_N < 0) & (ratio_N < 1.0 - actor.clip_low)
    is_dual_N = (advantages_N < 0) & (ratio_N > (actor.clip_ratio_c or np.inf))
    return np.asarray(is_high_N + 2 * is_low_N + 4 * is_dual_N, np.uint8)


def _of_turns(
    tokens: StepTokens, scores: Scores, rows: Rows, lists: Callable[[NDArray[Any], Any], Any]
) -> dict[str, Any]:
    """Returns the turn of each token, and the rewards and ends of turns; nulls without conversations."""
    talks = scores.conversations
    turns = pa.nulls(len(talks), pa.list_(pa.int16()))
    if any(talk is not None for talk in talks):
        places = Column(tokens.places, tokens.lengths).rows()
        all_ends = (() if talk is None else talk.turn_ends for talk in talks)
        turns_N = np.concatenate([1 + np.searchsorted(ends, row) for ends, row in zip(all_ends, places, strict=True)])
        turns = lists(np.where(tokens.counts, turns_N, 0), pa.int16())
    return {
        "turn": turns,
        "turn_rewards": _of_rows(talks, rows, lambda talk: talk and list(talk.turn_rewards), pa.list_(pa.float32())),
        "turn_ends": _of_rows(talks, rows, lambda talk: talk and list(talk.turn_ends), pa.list_(pa.int32())),
    }
