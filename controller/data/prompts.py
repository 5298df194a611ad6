"""Loads prompts as token ids, and selects the prompts of each training step as a pure function of (seed, step)."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controller.data.chat_template import Tools
from controller.data.epoch_order import epoch_order, mixed_order, quotas
from controller.data.image_rows import IMAGE_SIGN, RowImageReader
from controller.data.image_tokens import ImageTokens
from controller.data.images import IMAGE_SIZES, IMAGES
from controller.data.prompt_files import NeedsTruth, PromptRow, Split, always_needed, read_rows
from controller.data.tokenizer import Tokenizer
from controller.models.vision import NO_VISION, VisionInput
from splitppo.batch import Batch, Column, concatenate
from splitppo.columns import spec_of
from splitppo.config import ConfigError, DataConfig
from splitppo.images.columns import images_of_row
from splitppo.splitmix import splitmix64

log = logging.getLogger(__name__)

MAX_CHARACTERS = 2**22  # of one prompt; its tokens take some hundred bytes of memory for each while they are made
NO_ROWS = np.empty(0, np.int64)
ToolsOf: TypeAlias = Callable[[str], Tools]  # the schemas of the tools that prompts of a data source name
# The columns that the worker groups get of prompts; those of images only if a row of the split has any.
PROMPT_COLUMNS = ("prompts", IMAGES, IMAGE_SIZES)


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Tokenised prompts of a split, of a step, or of a part of these; each field has one entry per prompt.

    Attributes:
        row_indices: [num_prompts] int64, the indices of the prompts in their split.
        prompts: token ids.
        texts: the rendered texts, before truncation.
        rows: the rows of the data files, for the scorer.
        images: the columns `images` and `image_sizes`; None if no row of the split has images.
    """

    row_indices: NDArray[np.int64]
    prompts: Column
    texts: tuple[str, ...]
    rows: tuple[PromptRow, ...]
    images: Batch | None = None

    @property
    def num_prompts(self) -> int:
        return len(self.row_indices)

    @property
    def data_sources(self) -> frozenset[str]:
        """The names of the data sources that the prompts come from."""
        return frozenset(row.data_source for row in self.rows)

    @property
    def columns(self) -> Batch:
        """The columns that the worker groups get of the prompts: PROMPT_COLUMNS, or the first alone without images."""
        tokens = Batch(self.num_prompts, {"prompts": self.prompts})
        return tokens if self.images is None else tokens.merge(self.images)

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names of `columns`."""
        return PROMPT_COLUMNS[:1] if self.images is None else PROMPT_COLUMNS

    def take(self, places: NDArray[np.int64]) -> "PromptBatch":
        """Returns a batch with the prompts at these indices of this batch, in this order."""
        return PromptBatch(
            row_indices=self.row_indices[places],
            prompts=self.prompts.take(places),
            texts=tuple(self.texts[place] for place in places),
            rows=tuple(self.rows[place] for place in places),
            images=None if self.images is None else self.images.take(places),
        )

    def images_of(self, place: int) -> list[tuple[str, memoryview]]:
        """Returns name and file of each image of the prompt at this index of the batch, in the prompt's order."""
        if self.images is None:
            return []
        row = self.images.take(np.array([place]))
        [images] = row[IMAGES].rows()
        [sizes] = row[IMAGE_SIZES].rows()
        names = self.rows[place].images.names
        return [(name, image.data) for name, image in zip(names, images_of_row(images, sizes), strict=True)]

    def of_texts(self) -> "PromptBatch":
        """Returns the same prompts without their images, for whoever reads texts alone."""
        return replace(self, images=None)

    @classmethod
    def join(cls, batches: "Sequence[PromptBatch]") -> "PromptBatch":
        """Concatenates the prompts of several batches of a split into one batch, in order."""
        columns = concatenate([batch.columns for batch in batches])
        return cls(
            row_indices=np.concatenate([batch.row_indices for batch in batches]),
            prompts=columns["prompts"],
            texts=tuple(text for batch in batches for text in batch.texts),
            rows=tuple(row for batch in batches for row in batch.rows),
            images=columns.select([IMAGES, IMAGE_SIZES]) if IMAGES in columns else None,
        )

    def parts(self, num_prompts: int) -> "Iterator[PromptBatch]":
        """Divides the batch into parts of at most `num_prompts` prompts and yields these parts, in order."""
        for start in range(0, self.num_prompts, num_prompts):
            yield self.take(np.arange(start, min(start + num_prompts, self.num_prompts)))

    def to_batch(self, run_seed: int, step: int, num_samples: int, *, earlier: NDArray[np.int64] = NO_ROWS) -> Batch:
        """Makes the input of the RPC Generate: a row per prompt with `columns` and `num_samples` sampling `seeds`.

        A prompt that repeats in the batch, or whose row index is in `earlier` (prompts of this step), gets new seeds.
        """
        occurrences = _occurrences(np.concatenate([earlier, self.row_indices]))[len(earlier) :]
        samples = np.arange(num_samples) + num_samples * occurrences[:, None]
        seeds = response_seeds(run_seed, step, self.row_indices[:, None], samples)
        lengths = np.full(self.num_prompts, num_samples, np.int32)
        return self.columns.merge(Batch(self.num_prompts, {"seeds": Column(seeds.reshape(-1), lengths)}))

    def repeated(self, num_samples: int) -> "PromptBatch":
        """Repeats every prompt of the batch `num_samples` times, in order, so that each response has its prompt."""
        return self.take(np.repeat(np.arange(self.num_prompts), num_samples))


# A batch of prompts, and the scores [B] of its responses.
Answered: TypeAlias = tuple[PromptBatch, NDArray[np.float32]]


class PromptSource(Protocol):
    """Decides which training prompts come next. A batch has the prompts of a step, or of one round of a step."""

    @property
    def table(self) -> PromptBatch:
        """The table of all training prompts."""

    def num_steps(self, num_epochs: int) -> int:
        """Returns the number of prompt batches in the first `num_epochs` data epochs."""

    def batch_at(self, step: int) -> PromptBatch:
        """Returns the next batch of prompts; batches must be requested in order, each once.

        `step` is the number of the batch in the run, from 1. It is the training step if each step uses one batch.
        """

    def epoch_of(self, step: int) -> int:
        """Returns the data epoch, from 0, of the batch that was returned last."""

    def state_after(self, answered: Sequence[Answered]) -> Mapping[str, Any] | None:
        """Returns, after the scores of a step, the state as JSON from which `restored` continues, for a checkpoint."""

    def restored(self, state: Mapping[str, Any] | None) -> Self:
        """Returns a prompt source that continues from a result of `state_after`; None: from the run's start."""


@dataclass(eq=False)
class PromptDataset:
    """Selects the training prompts of each step as a function of (seed, step), without state.

    Each epoch has its own order. A batch that would be incomplete at the end of an epoch is left out.

    Attributes:
        weights: each file's share of an epoch; None for all prompts of all files.
        shuffle: False keeps the order of the files, or, with weights, interleaves their prompts evenly.
        batch_key: the key of `batch_size`, for errors.

    Raises:
        ConfigError: the table does not fill a batch, or a file has no share.
    """

    table: PromptBatch
    batch_size: int
    seed: int
    shuffle: bool
    weights: Sequence[float] | None = None
    batch_key: str = "data.train_batch_size"

    def __post_init__(self) -> None:
        if self.batch_size > self.table.num_prompts:
            prompts = f"the number of training prompts ({self.table.num_prompts})"
            raise ConfigError(f"{self.batch_key} ({self.batch_size}) is larger than {prompts}")
        self._mixture = None if self.weights is None else _mixture(self.table, self.weights)

    @property
    def steps_per_epoch(self) -> int:
        return self.table.num_prompts // self.batch_size

    def num_steps(self, num_epochs: int) -> int:
        """Returns the number of training steps in the first `num_epochs` data epochs."""
        return num_epochs * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """Returns the data epoch, from 0, of a training step, from 1."""
        return (step - 1) // self.steps_per_epoch

    def batch_at(self, step: int) -> PromptBatch:
        """Returns the prompts of a training step (from 1), which depend on files, seed and step alone."""
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}")
        start = (step - 1) % self.steps_per_epoch * self.batch_size
        epoch = self.epoch_of(step)
        if self._mixture is None:
            order = epoch_order(self.table.num_prompts, self.seed, epoch, shuffle=self.shuffle)
        else:
            order = mixed_order(*self._mixture, self.seed, epoch, shuffle=self.shuffle)
        return self.table.take(order[start : start + self.batch_size])

    def state_after(self, answered: Sequence[Answered]) -> None:
        """Returns None: the order of the prompts depends on no state."""

    def restored(self, state: Mapping[str, Any] | None) -> Self:  # noqa: ARG002 - of PromptSource
        return self


def _mixture(table: PromptBatch, weights: Sequence[float]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (rows, rows per epoch) of each data file, by the files' weights; ConfigError if a file has no share."""
    sizes = np.bincount([row.file_index for row in table.rows], minlength=len(weights))
    counts = quotas(weights, table.num_prompts)
    for index, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        wrong = "none of its rows is left" if size == 0 else f"that is less than one of {table.num_prompts} prompts"
        if size == 0 or count == 0:
            raise ConfigError(f"data.train_weights gives file {index + 1} of data.train_files a share, but {wrong}")
    return tuple(map(int, sizes)), tuple(counts)


def no_tools(data_source: str) -> Tools:  # noqa: ARG001 - of ToolsOf
    """Returns the tools of every data source of a run without tools: none."""
    return ()


def load_prompts(
    config: DataConfig,
    tokenizer: Tokenizer,
    split: Split,
    tools_of: ToolsOf = no_tools,
    needs_truth: NeedsTruth = always_needed,
    vision: VisionInput = NO_VISION,
) -> PromptBatch:
    """Reads, renders and tokenises the prompts of a split (train or val); `vision` is what the policy reads of images.

    Raises:
        ConfigError: as in `read_rows` and `ImageTokens`, or a prompt is too long with `truncation` "error", or would be
            cut inside an image, or no prompt is left.
    """
    key = f"data.{split}_files"
    limit = config.max_prompt_length
    reader = RowImageReader(config, vision)
    rows = read_rows(config, split, needs_truth, reader)
    placeholders = _placeholders(rows, vision, tokenizer)
    if placeholders is not None:
        placeholders.check_texts(rows)
    texts = _rendered(rows, config.prompt_key, tokenizer, tools_of)
    if vision.settings is not None:
        _warn_of_no_images(rows, texts, config, key)
    ids = _encoded(rows, texts, config.prompt_key, tokenizer)
    if placeholders is not None:
        ids = [placeholders.expanded(prompt, row) for prompt, row in zip(ids, rows, strict=True)]
    kept = np.flatnonzero([not config.filter_overlong_prompts or len(prompt) <= limit for prompt in ids])
    if len(kept) == 0:
        with_tools = ", with its tools" if any(tools_of(row.data_source) for row in rows) else ""
        allowed = f"{limit} tokens; the shortest has {min(map(len, ids))}{with_tools}"
        raise ConfigError(
            f"{key}: all {len(rows)} prompts are longer than data.max_prompt_length ({allowed}): raise it"
        )
    if len(kept) < len(rows):
        log.warning("%s: %d of %d prompts are overlong and left out", key, len(rows) - len(kept), len(rows))
    fitting = [_truncated(ids[index], config, rows[index], placeholders) for index in kept]
    kept_rows = tuple(rows[index] for index in kept)
    has_images = any(row.images.names for row in kept_rows)
    return PromptBatch(
        row_indices=np.arange(len(kept)),
        prompts=Column.from_rows(fitting, spec_of("prompts").dtype),
        texts=tuple(texts[index] for index in kept),
        rows=kept_rows,
        images=reader.columns_of([row.images for row in kept_rows]) if has_images else None,
    )


def _placeholders(rows: Sequence[PromptRow], vision: VisionInput, tokenizer: Tokenizer) -> ImageTokens | None:
    """Returns the tokens that stand for images; None if the model reads none, or neither rows nor tokenizer have any.

    Raises:
        ConfigError: rows have images, and the tokenizer lacks the token.
    """
    if vision.settings is None:
        return None
    has_token = tokenizer.backend.id_to_token(vision.settings.image_token_id) is not None
    has_images = any(row.images.names for row in rows)
    return ImageTokens(vision.settings, tokenizer) if has_token or has_images else None


def _warn_of_no_images(rows: Sequence[PromptRow], texts: Sequence[str], config: DataConfig, key: str) -> None:
    """Warns if prompts of a model that reads images have `<image>` as text, because no row has images."""
    if any(row.images.names for row in rows):
        return
    num_signs = sum(IMAGE_SIGN in text for text in texts)
    if num_signs:
        log.warning(
            "%s: %d prompts have %s, which is text there, because no row has images in the column that data.image_key"
            " names (%r)",
            key,
            num_signs,
            IMAGE_SIGN,
            config.image_key,
        )


def response_seeds(run_seed: int, step: int, prompt_index: ArrayLike, sample: ArrayLike) -> NDArray[np.int64]:
    """Computes the sampling seed of each response, in [0, 2**63): a hash of run seed, step, prompt and sample number.

    Therefore a step that is repeated has the same seeds. `prompt_index` is the index of the prompt in its split; it is
    broadcast with `sample`.
    """
    state = np.zeros(np.broadcast_shapes(np.shape(prompt_index), np.shape(sample)), np.uint64)
    for part in (run_seed, step, prompt_index, sample):
        state = splitmix64(state ^ np.asarray(part, dtype=np.uint64))
    return (state >> np.uint64(1)).astype(np.int64)


def _occurrences(row_indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Counts for each entry of an array how often it occurs before: [5, 7, 5] gives [0, 0, 1]."""
    order = np.argsort(row_indices, kind="stable")
    starts = np.flatnonzero(np.diff(row_indices[order], prepend=-1))
    lengths = np.diff(starts, append=len(order))
    counts = np.empty_like(order)
    counts[order] = np.arange(len(order)) - np.repeat(starts, lengths)
    return counts


def _rendered(rows: Sequence[PromptRow], prompt_key: str, tokenizer: Tokenizer, tools_of: ToolsOf) -> list[str]:
    """Returns the text of each row's prompt as the model sees it; ConfigError names the first row that has none."""
    rendered = tokenizer.chat_template.render_all([(row.prompt, tools_of(row.data_source)) for row in rows])
    texts = []
    for row, text in zip(rows, rendered, strict=False):  # the last one of fewer is an error
        if isinstance(text, ValueError):
            raise ConfigError(f"{row.place}: column {prompt_key!r}: {text}") from text
        texts.append(text)
    return texts


def _encoded(
    rows: Sequence[PromptRow], texts: Sequence[str], prompt_key: str, tokenizer: Tokenizer
) -> list[NDArray[np.int32]]:
    """Returns the tokens of each row's rendered text; ConfigError names the first row that has too much or nothing."""
    for row, text in zip(rows, texts, strict=True):
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(f"{row.place}: the prompt has {len(text):,} characters, more than {MAX_CHARACTERS:,}")
    ids = tokenizer.encode_batch([row.prompt for row in rows], texts)
    for row, prompt in zip(rows, ids, strict=True):
        if len(prompt) == 0:
            raise ConfigError(f"{row.place}: column {prompt_key!r} has no tokens")
    return ids


def _truncated(
    ids: NDArray[np.int32], config: DataConfig, row: PromptRow, placeholders: ImageTokens | None
) -> NDArray[np.int32]:
    """Cuts a prompt with too many tokens to `data.max_prompt_length`, at the place that `data.truncation` names.

    "left" and "right" cut tokens off on that side, "middle" keeps both ends. With "error" it raises a ConfigError, and
    also if it would cut an image.
    """
    limit = config.max_prompt_length
    if len(ids) <= limit:
        return ids
    if config.truncation == "error":
        raise ConfigError(
            f"{row.place}: the prompt has {len(ids)} tokens, more than data.max_prompt_length ({limit});"
            " raise it, or set data.filter_overlong_prompts or data.truncation"
        )
    head = {"left": 0, "right": limit, "middle": limit // 2}[config.truncation]
    tail = len(ids) - (limit - head)
    cut = None if placeholders is None else placeholders.first_cut(ids, row, head, tail)
    if cut is not None:
        raise ConfigError(
            f"{row.place}: truncation {config.truncation!r} would cut image {cut}; raise data.max_prompt_length or"
            " lower data.max_pixels"
        )
    return np.concatenate([ids[:head], ids[tail:]])


def warn_of_no_template(tokenizer: Tokenizer, rows: Iterable[PromptRow]) -> None:
    """Warns if prompts are chat messages that no chat template renders: roles and ends of turns are then left out."""
    first = next((row for row in rows if not isinstance(row.prompt, str)), None)
    if first is not None and tokenizer.chat_template.template is None:
        log.warning(
            "%s: the prompt has chat messages, but the tokenizer has no chat template: the model reads their contents"
            " alone, one per line (data.chat_template sets a template)",
            first.place,
        )
