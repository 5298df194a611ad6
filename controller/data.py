"""Prompts: tokenised once, and handed out as a pure function of (seed, step)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controller.prompt_rows import PromptRow, read_rows
from controller.tokenizer import Tokenizer
from splitppo.batch import COLUMN_DTYPES, Batch, Column
from splitppo.config import ConfigError, DataConfig

log = logging.getLogger(__name__)

Truncation = Literal["error", "left", "right", "middle"]


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Prompts of one step or of one part of a validation; every field has one entry per prompt.

    Attributes:
        row_indices: [num_prompts] int64, the prompts' places in their table.
        prompts: token ids.
        prompt_texts: what was tokenised, before any truncation.
        data_sources, ground_truths, extra_infos: as the files have them, for the scorer.
    """

    row_indices: NDArray[np.int64]
    prompts: Column
    prompt_texts: tuple[str, ...]
    data_sources: tuple[str, ...]
    ground_truths: tuple[Any, ...]
    extra_infos: tuple[dict[str, Any], ...]

    @property
    def num_prompts(self) -> int:
        return len(self.row_indices)

    def to_batch(self, run_seed: int, step: int, num_samples: int) -> Batch:
        """What Generate reads: one row per prompt with `prompts` and `num_samples` sampling `seeds`."""
        seeds = response_seeds(run_seed, step, self.row_indices[:, None], np.arange(num_samples))
        lengths = np.full(self.num_prompts, num_samples, np.int32)
        return Batch(self.num_prompts, {"prompts": self.prompts, "seeds": Column(seeds.reshape(-1), lengths)})

    def take(self, places: NDArray[np.int64]) -> PromptBatch:
        """The prompts at these places of the batch, in this order."""
        return PromptBatch(
            row_indices=self.row_indices[places],
            prompts=self.prompts.take(places),
            prompt_texts=tuple(self.prompt_texts[place] for place in places),
            data_sources=tuple(self.data_sources[place] for place in places),
            ground_truths=tuple(self.ground_truths[place] for place in places),
            extra_infos=tuple(self.extra_infos[place] for place in places),
        )

    def repeated(self, num_samples: int) -> Batch:
        """The column `prompts` of the generated rows: each prompt `num_samples` times, ordered by prompt."""
        rows = np.repeat(np.arange(self.num_prompts), num_samples)
        return Batch(len(rows), {"prompts": self.prompts.take(rows)})


class PromptTable:
    """Tokenised prompts of one split, in the order of the files."""

    def __init__(self, rows: Sequence[PromptRow], texts: Sequence[str], prompts: Column) -> None:
        """Takes rows with their rendered texts and token ids, one of each per prompt."""
        self._rows = rows
        self._texts = texts
        self._prompts = prompts

    @classmethod
    def load(
        cls,
        files: Sequence[str],
        tokenizer: Tokenizer,
        *,
        key: str,
        prompt_key: str,
        max_prompt_length: int,
        max_samples: int | None,
        filter_overlong: bool,
        truncation: Truncation,
    ) -> Self:
        """Reads, renders and tokenises.

        Args:
            files: parquet or JSONL files; their rows are taken one file after the other.
            tokenizer: renders chat messages and encodes.
            key: config key of the files, for errors.
            prompt_key: column with chat messages or a plain string.
            max_prompt_length: tokens.
            max_samples: only the first rows, counted before filtering.
            filter_overlong: drop longer prompts; otherwise `truncation` says what happens to them.
            truncation: the side that is cut off, or "error".

        Raises:
            ConfigError: a file or column is missing or of the wrong type, a prompt is too long with truncation
                "error", or no prompt is left.
        """
        places, rows = read_rows(files, key=key, prompt_key=prompt_key, max_samples=max_samples)
        texts = [_render(row, place, tokenizer) for row, place in zip(rows, places, strict=True)]
        templated = [tokenizer.applies_template(row.prompt) for row in rows]
        prompt_ids = tokenizer.encode_rendered(texts, templated)
        kept = []
        for index, ids in enumerate(prompt_ids):
            if len(ids) == 0:
                raise ConfigError(f"{places[index]}: column {prompt_key!r} has no tokens")
            if len(ids) > max_prompt_length:
                if filter_overlong:
                    continue
                prompt_ids[index] = _truncate(ids, max_prompt_length, truncation, places[index])
            kept.append(index)
        if not kept:
            raise ConfigError(
                f"{key}: all {len(rows)} prompts are longer than data.max_prompt_length ({max_prompt_length} tokens;"
                f" the shortest has {min(map(len, prompt_ids))})"
            )
        if len(kept) < len(rows):
            log.warning("%s: %d of %d prompts are overlong and left out", key, len(rows) - len(kept), len(rows))
        column = Column.from_rows([prompt_ids[index] for index in kept], COLUMN_DTYPES["prompts"])
        return cls([rows[index] for index in kept], [texts[index] for index in kept], column)

    @property
    def num_prompts(self) -> int:
        return len(self._rows)

    @property
    def data_sources(self) -> frozenset[str]:
        """The sources that need a reward."""
        return frozenset(row.data_source for row in self._rows)

    def take(self, row_indices: NDArray[np.int64]) -> PromptBatch:
        """The prompts at these places, in this order."""
        rows = [self._rows[index] for index in row_indices]
        return PromptBatch(
            row_indices=row_indices,
            prompts=self._prompts.take(row_indices),
            prompt_texts=tuple(self._texts[index] for index in row_indices),
            data_sources=tuple(row.data_source for row in rows),
            ground_truths=tuple(row.ground_truth for row in rows),
            extra_infos=tuple(row.extra_info for row in rows),
        )

    def parts(self, num_prompts: int) -> Iterator[PromptBatch]:
        """Every prompt once, in order, in parts of at most `num_prompts`."""
        for start in range(0, self.num_prompts, num_prompts):
            yield self.take(np.arange(start, min(start + num_prompts, self.num_prompts)))


class PromptDataset:
    """Which prompts a step trains on: a new order in each epoch, incomplete batches left out, no state to save."""

    def __init__(self, table: PromptTable, *, batch_size: int, seed: int, shuffle: bool) -> None:
        """Takes the table, `batch_size` in prompts, and the run's seed; checks that the table fills a batch.

        Raises:
            ConfigError: it does not.
        """
        if batch_size > table.num_prompts:
            raise ConfigError(
                f"data.train_batch_size ({batch_size}) is larger than the number of training prompts"
                f" ({table.num_prompts})"
            )
        self._table = table
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def table(self) -> PromptTable:
        return self._table

    @property
    def steps_per_epoch(self) -> int:
        return self._table.num_prompts // self._batch_size

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, that a step, from 1, belongs to."""
        return (step - 1) // self.steps_per_epoch

    def batch_at(self, step: int) -> PromptBatch:
        """The prompts of a step (from 1): the same for the same files, seed and step, whatever was asked before."""
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}")
        start = (step - 1) % self.steps_per_epoch * self._batch_size
        return self._table.take(self._epoch_order(self.epoch_of(step))[start : start + self._batch_size])

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """The permutation of an epoch. Sorts raw generator output, which numpy keeps stable across its versions."""
        if self._order is None or self._order[0] != epoch:
            order = np.arange(self._table.num_prompts)
            if self._shuffle:
                draws = np.random.PCG64([self._seed, epoch]).random_raw(len(order))
                order = np.argsort(draws, kind="stable")
            self._order = (epoch, order)
        return self._order[1]


def load_train_prompts(config: DataConfig, tokenizer: Tokenizer, *, seed: int) -> PromptDataset:
    """The training prompts, in the order that `seed` gives. Raises ConfigError as `PromptTable.load` does."""
    table = PromptTable.load(
        config.train_files,
        tokenizer,
        key="data.train_files",
        prompt_key=config.prompt_key,
        max_prompt_length=config.max_prompt_length,
        max_samples=config.max_samples,
        filter_overlong=config.filter_overlong_prompts,
        truncation=config.truncation,
    )
    return PromptDataset(table, batch_size=config.train_batch_size, seed=seed, shuffle=config.shuffle)


def load_val_prompts(config: DataConfig, tokenizer: Tokenizer) -> PromptTable | None:
    """The validation prompts; None if the run has none. Raises ConfigError as `PromptTable.load` does."""
    if not config.val_files:
        return None
    return PromptTable.load(
        config.val_files,
        tokenizer,
        key="data.val_files",
        prompt_key=config.prompt_key,
        max_prompt_length=config.max_prompt_length,
        max_samples=config.val_max_samples,
        filter_overlong=config.filter_overlong_prompts,
        truncation=config.truncation,
    )


def response_seeds(run_seed: int, step: int, prompt_index: ArrayLike, sample: ArrayLike) -> NDArray[np.int64]:
    """The sampling seed of every response: a hash of where the response stands in the run.

    Args:
        run_seed: the run's seed.
        step: the step that samples.
        prompt_index: place of the prompt in its table.
        sample: number of the sample. Broadcast together with prompt_index.

    Returns:
        int64 in [0, 2**63), of the broadcast shape; a replayed step gets the same ones.
    """
    state = np.zeros(np.broadcast_shapes(np.shape(prompt_index), np.shape(sample)), np.uint64)
    for part in (run_seed, step, prompt_index, sample):
        state = _splitmix64(state ^ np.asarray(part, dtype=np.uint64))
    return (state >> np.uint64(1)).astype(np.int64)


def _splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of SplitMix64 (Steele et al., 2014), elementwise; arrays wrap around silently."""
    mixed = np.atleast_1d(state) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))).reshape(state.shape)


def _truncate(ids: NDArray[np.int32], max_length: int, truncation: Truncation, place: str) -> NDArray[np.int32]:
    """At most `max_length` ids; the side named by `truncation` is cut off."""
    if truncation == "error":
        raise ConfigError(
            f"{place}: the prompt has {len(ids)} tokens, more than data.max_prompt_length ({max_length});"
            " raise it, or set data.filter_overlong_prompts or data.truncation"
        )
    if truncation == "left":
        return ids[-max_length:]
    if truncation == "right":
        return ids[:max_length]
    head = max_length // 2
    return np.concatenate([ids[:head], ids[len(ids) - (max_length - head) :]])


def _render(row: PromptRow, place: str, tokenizer: Tokenizer) -> str:
    try:
        return tokenizer.render(row.prompt)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error
