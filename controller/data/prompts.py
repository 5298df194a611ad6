"""Prompts: tokenised once, and handed out as a pure function of (seed, step)."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controller.data.prompt_files import PromptRow, read_rows
from controller.data.tokenizer import Tokenizer
from splitppo.batch import COLUMN_DTYPES, Batch, Column
from splitppo.config import ConfigError, DataConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Tokenised prompts: all of a split, those of a step, or a part of either; each field has one entry per prompt.

    Attributes:
        row_indices: [num_prompts], the prompts' places in their split.
        prompts: token ids.
        texts: what was tokenised, before any truncation.
        rows: what the files say, for the scorer.
    """

    row_indices: NDArray[np.int64]
    prompts: Column
    texts: tuple[str, ...]
    rows: tuple[PromptRow, ...]

    @property
    def num_prompts(self) -> int:
        return len(self.row_indices)

    @property
    def data_sources(self) -> frozenset[str]:
        """The sources that need a reward."""
        return frozenset(row.data_source for row in self.rows)

    def take(self, places: NDArray[np.int64]) -> "PromptBatch":
        """The prompts at these places of the batch, in this order."""
        return PromptBatch(
            row_indices=self.row_indices[places],
            prompts=self.prompts.take(places),
            texts=tuple(self.texts[place] for place in places),
            rows=tuple(self.rows[place] for place in places),
        )

    def parts(self, num_prompts: int) -> "Iterator[PromptBatch]":
        """Every prompt once, in order, in parts of at most `num_prompts`."""
        for start in range(0, self.num_prompts, num_prompts):
            yield self.take(np.arange(start, min(start + num_prompts, self.num_prompts)))

    def to_batch(self, run_seed: int, step: int, num_samples: int) -> Batch:
        """What Generate reads: one row per prompt with `prompts` and `num_samples` sampling `seeds`."""
        seeds = response_seeds(run_seed, step, self.row_indices[:, None], np.arange(num_samples))
        lengths = np.full(self.num_prompts, num_samples, np.int32)
        return Batch(self.num_prompts, {"prompts": self.prompts, "seeds": Column(seeds.reshape(-1), lengths)})

    def repeated(self, num_samples: int) -> "PromptBatch":
        """The prompt of each response: every prompt `num_samples` times, ordered by prompt."""
        return self.take(np.repeat(np.arange(self.num_prompts), num_samples))


@dataclass(frozen=True, eq=False)
class PromptDataset:
    """Which prompts of a table a step trains on: an order of its own per epoch, incomplete batches left out, no state.

    Without `shuffle` the files' order is kept. Raises ConfigError if the table does not fill a batch.
    """

    table: PromptBatch
    batch_size: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.batch_size > self.table.num_prompts:
            found = f"the number of training prompts ({self.table.num_prompts})"
            raise ConfigError(f"data.train_batch_size ({self.batch_size}) is larger than {found}")

    @property
    def steps_per_epoch(self) -> int:
        return self.table.num_prompts // self.batch_size

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, that a step, from 1, belongs to."""
        return (step - 1) // self.steps_per_epoch

    def batch_at(self, step: int) -> PromptBatch:
        """The prompts of a step (from 1): the same for the same files, seed and step, whatever was asked before."""
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}")
        start = (step - 1) % self.steps_per_epoch * self.batch_size
        num_prompts = self.table.num_prompts
        order = _epoch_order(num_prompts, self.seed, self.epoch_of(step)) if self.shuffle else np.arange(num_prompts)
        return self.table.take(order[start : start + self.batch_size])


def load_prompts(config: DataConfig, tokenizer: Tokenizer, split: Literal["train", "val"]) -> PromptBatch:
    """Reads, renders and tokenises the prompts of a split.

    Raises ConfigError: as `read_rows`; or a prompt is too long with `truncation` "error", or no prompt is left.
    """
    key, limit = f"data.{split}_files", config.max_prompt_length
    files = {"train": config.train_files, "val": config.val_files}[split]
    max_samples = {"train": config.max_samples, "val": config.val_max_samples}[split]
    rows = read_rows(files, key=key, prompt_key=config.prompt_key, max_samples=max_samples)
    texts = [_render(row, tokenizer) for row in rows]
    ids = tokenizer.encode_batch([row.prompt for row in rows], texts)
    for row, prompt in zip(rows, ids, strict=True):
        if len(prompt) == 0:
            raise ConfigError(f"{row.place}: column {config.prompt_key!r} has no tokens")
    kept = np.flatnonzero([not config.filter_overlong_prompts or len(prompt) <= limit for prompt in ids])
    if len(kept) == 0:
        allowed = f"{limit} tokens; the shortest has {min(map(len, ids))}"
        raise ConfigError(f"{key}: all {len(rows)} prompts are longer than data.max_prompt_length ({allowed})")
    if len(kept) < len(rows):
        log.warning("%s: %d of %d prompts are overlong and left out", key, len(rows) - len(kept), len(rows))
    fitting = [_truncated(ids[index], config, rows[index].place) for index in kept]
    return PromptBatch(
        row_indices=np.arange(len(kept)),
        prompts=Column.from_rows(fitting, COLUMN_DTYPES["prompts"]),
        texts=tuple(texts[index] for index in kept),
        rows=tuple(rows[index] for index in kept),
    )


def response_seeds(run_seed: int, step: int, prompt_index: ArrayLike, sample: ArrayLike) -> NDArray[np.int64]:
    """The sampling seed of every response: a hash of where it stands in the run, the same for a replayed step.

    `prompt_index`, the prompt's place in its split, and `sample` are broadcast together; seeds lie in [0, 2**63).
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


@lru_cache(maxsize=2)
def _epoch_order(num_prompts: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The permutation of an epoch. Sorts raw generator output, which numpy keeps stable across its versions."""
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(num_prompts), kind="stable")


def _render(row: PromptRow, tokenizer: Tokenizer) -> str:
    try:
        return tokenizer.chat_template.render(row.prompt)
    except ValueError as error:
        raise ConfigError(f"{row.place}: {error}") from error


def _truncated(ids: NDArray[np.int32], config: DataConfig, place: str) -> NDArray[np.int32]:
    limit = config.max_prompt_length
    if len(ids) <= limit:
        return ids
    if config.truncation == "error":
        raise ConfigError(
            f"{place}: the prompt has {len(ids)} tokens, more than data.max_prompt_length ({limit});"
            " raise it, or set data.filter_overlong_prompts or data.truncation"
        )
    head = {"left": 0, "right": limit, "middle": limit // 2}[config.truncation]
    return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])
