"""Prompts: tokenised once, and handed out as a pure function of (seed, step)."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controller.data.epoch_order import epoch_order, mixed_order, quotas
from controller.data.prompt_files import PromptRow, Split, read_rows
from controller.data.tokenizer import Tokenizer
from splitppo.batch import COLUMN_DTYPES, Batch, Column
from splitppo.config import ConfigError, DataConfig
from splitppo.splitmix import splitmix64

log = logging.getLogger(__name__)

NO_ROWS = np.empty(0, np.int64)


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

    @classmethod
    def join(cls, batches: "Sequence[PromptBatch]") -> "PromptBatch":
        """The prompts of several batches, one batch after the other."""
        values, lengths = (
            np.concatenate([getattr(one.prompts, name) for one in batches]) for name in ("values", "lengths")
        )
        return cls(
            row_indices=np.concatenate([one.row_indices for one in batches]),
            prompts=Column(values, lengths),
            texts=tuple(text for one in batches for text in one.texts),
            rows=tuple(row for one in batches for row in one.rows),
        )

    def parts(self, num_prompts: int) -> "Iterator[PromptBatch]":
        """Every prompt once, in order, in parts of at most `num_prompts`."""
        for start in range(0, self.num_prompts, num_prompts):
            yield self.take(np.arange(start, min(start + num_prompts, self.num_prompts)))

    def to_batch(self, run_seed: int, step: int, num_samples: int, *, earlier: NDArray[np.int64] = NO_ROWS) -> Batch:
        """Returns what Generate reads: one row per prompt with `prompts` and `num_samples` sampling `seeds`.

        A prompt that is there again, or among the row indices drawn `earlier` for this step, gets further seeds.
        """
        occurrences = _occurrences(np.concatenate([earlier, self.row_indices]))[len(earlier) :]
        samples = np.arange(num_samples) + num_samples * occurrences[:, None]
        seeds = response_seeds(run_seed, step, self.row_indices[:, None], samples)
        lengths = np.full(self.num_prompts, num_samples, np.int32)
        return Batch(self.num_prompts, {"prompts": self.prompts, "seeds": Column(seeds.reshape(-1), lengths)})

    def repeated(self, num_samples: int) -> "PromptBatch":
        """The prompt of each response: every prompt `num_samples` times, ordered by prompt."""
        return self.take(np.repeat(np.arange(self.num_prompts), num_samples))


# A batch of prompts, and [B], the scores of its responses.
Answered: TypeAlias = tuple[PromptBatch, NDArray[np.float32]]


class PromptSource(Protocol):
    """The order of the prompts of a table. A batch of them is a step's, or that of one generation of a step."""

    @property
    def table(self) -> PromptBatch:
        """All training prompts."""

    def num_steps(self, num_epochs: int) -> int:
        """Batches of the first data epochs."""

    def batch_at(self, step: int) -> PromptBatch:
        """The prompts of a batch, by its number in the run (from 1: the step, where each step draws one); batches are
        asked for one after the other.
        """

    def epoch_of(self, step: int) -> int:
        """The data epoch, from 0, that the batch which was asked for last belongs to."""

    def state_after(self, answered: Sequence[Answered]) -> Mapping[str, Any] | None:
        """Returns what the next batches depend on beside seed and number, as JSON, after a step that drew these."""

    def restored(self, state: Mapping[str, Any] | None) -> Self:
        """The same source, going on from such a state; None: from the start."""


@dataclass(frozen=True, eq=False)
class PromptDataset:
    """Prompts by (seed, step): an order of its own per epoch, incomplete batches left out, no state.

    `weights`, one per file, are the files' shares of an epoch. Without `shuffle` the files' order is kept, or, with
    weights, the files take turns. `batch_key` names the size in errors. Raises ConfigError if the table does not fill a
    batch, or a file has no share.
    """

    table: PromptBatch
    batch_size: int
    seed: int
    shuffle: bool
    weights: Sequence[float] | None = None
    batch_key: str = "data.train_batch_size"
    _mixture: tuple[tuple[int, ...], tuple[int, ...]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.batch_size > self.table.num_prompts:
            found = f"the number of training prompts ({self.table.num_prompts})"
            raise ConfigError(f"{self.batch_key} ({self.batch_size}) is larger than {found}")
        if self.weights is not None:
            object.__setattr__(self, "_mixture", _mixture(self.table, self.weights))

    @property
    def steps_per_epoch(self) -> int:
        return self.table.num_prompts // self.batch_size

    def num_steps(self, num_epochs: int) -> int:
        """Steps of the first epochs."""
        return num_epochs * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, that a step, from 1, belongs to."""
        return (step - 1) // self.steps_per_epoch

    def batch_at(self, step: int) -> PromptBatch:
        """The prompts of a step (from 1): the same for the same files, seed and step, whatever was asked before."""
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}")
        start, epoch = (step - 1) % self.steps_per_epoch * self.batch_size, self.epoch_of(step)
        if self._mixture is None:
            order = epoch_order(self.table.num_prompts, self.seed, epoch, shuffle=self.shuffle)
        else:
            order = mixed_order(*self._mixture, self.seed, epoch, shuffle=self.shuffle)
        return self.table.take(order[start : start + self.batch_size])

    def state_after(self, answered: Sequence[Answered]) -> None:
        """None: seed and step say all."""

    def restored(self, state: Mapping[str, Any] | None) -> Self:  # noqa: ARG002 - of PromptSource
        return self


def _mixture(table: PromptBatch, weights: Sequence[float]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rows, rows per epoch) of each file."""
    sizes = np.bincount([row.file_index for row in table.rows], minlength=len(weights))
    counts = quotas(weights, table.num_prompts)
    for index, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        wrong = "none of its rows is left" if size == 0 else f"that is less than one of {table.num_prompts} prompts"
        if size == 0 or count == 0:
            raise ConfigError(f"data.train_weights gives file {index + 1} of data.train_files a share, but {wrong}")
    return tuple(map(int, sizes)), tuple(counts)


def load_prompts(config: DataConfig, tokenizer: Tokenizer, split: Split) -> PromptBatch:
    """Reads, renders and tokenises the prompts of a split.

    Raises ConfigError: as `read_rows`; or a prompt is too long with `truncation` "error", or no prompt is left.
    """
    key, limit = f"data.{split}_files", config.max_prompt_length
    rows = read_rows(config, split)
    texts = [_render(row, config.prompt_key, tokenizer) for row in rows]
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
        state = splitmix64(state ^ np.asarray(part, dtype=np.uint64))
    return (state >> np.uint64(1)).astype(np.int64)


def _occurrences(row_indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Counts how often each entry stood there before: [5, 7, 5] gives [0, 0, 1]."""
    order = np.argsort(row_indices, kind="stable")
    starts = np.flatnonzero(np.diff(row_indices[order], prepend=-1))
    lengths = np.diff(starts, append=len(order))
    found = np.empty_like(order)
    found[order] = np.arange(len(order)) - np.repeat(starts, lengths)
    return found


def _render(row: PromptRow, prompt_key: str, tokenizer: Tokenizer) -> str:
    try:
        return tokenizer.chat_template.render(row.prompt)
    except ValueError as error:
        raise ConfigError(f"{row.place}: column {prompt_key!r}: {error}") from error


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
