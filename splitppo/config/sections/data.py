"""The configuration section `data`: files of prompts, order of prompts, and lengths of prompts and responses."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from splitppo.config.section import SHAPES_WORKER, OneOrMany, PositiveInt, Section
from splitppo.config.subsections.row_filters import RowFilters

# At most as many as an image may have itself, see splitppo/images/headers.py.
_Pixels = Annotated[PositiveInt, Field(le=64_000_000)]
_Paths = Annotated[tuple[str, ...], OneOrMany]


class _ClassInFile(Section):
    """The base class of sections that name a class of the user; checks that file and class name are given together."""

    def _check_keys(self) -> None:
        if len({value is None for _, value in self}) > 1:
            raise ValueError(f"expected both {' and '.join(type(self).model_fields)}, or neither")


class CustomDatasetConfig(_ClassInFile):
    """A class of the user that supplies the rows of prompts, instead of files that are read."""

    path: Path | None = None
    """The Python file that defines the class. null: the rows come from train_files and val_files."""

    name: str | None = None
    """The name of the class in that file."""


class SamplerConfig(_ClassInFile):
    """A class of the user that chooses the order of the prompts, in place of `shuffle`."""

    class_path: Path | None = None
    """The Python file that defines the class. null: `shuffle` sets the order."""

    class_name: str | None = None
    """The name of the class in that file."""


class DataConfig(Section):
    """The settings of prompts: their files, how many of them a step takes, and how long they may be."""

    train_files: _Paths = Field(min_length=1)
    """The parquet or JSONL files with the training prompts: one path or a list."""

    train_weights: tuple[Annotated[float, Field(gt=0.0)], ...] | None = None
    """One number for each file of train_files: the file's share of an epoch. An epoch has as many prompts as all files
    together have rows. null: every row comes once per epoch."""

    val_files: _Paths = ()
    """The parquet or JSONL files with the validation prompts: one path or a list. Empty: the run validates nothing."""

    train_batch_size: PositiveInt
    """The number of prompts in each step."""

    gen_batch_size: PositiveInt | None = None
    """The number of prompts that are drawn and answered at a time if algorithm.filter_groups is on. null:
    train_batch_size."""

    max_prompt_length: PositiveInt = 512
    """The largest number of tokens in a prompt. filter_overlong_prompts and truncation decide what happens to a longer
    prompt."""

    max_response_length: Annotated[PositiveInt, SHAPES_WORKER] = 512
    """The largest number of tokens that are sampled for a response."""

    prompt_key: str = "prompt"
    """The column that holds the prompt: a list of chat messages, or plain text."""

    image_key: str = "images"
    """The column that holds the images of a prompt: a list of {bytes, path} or of paths, or null. Each `<image>` in the
    text of a message stands for one of them, in their order."""

    min_pixels: Annotated[_Pixels | None, SHAPES_WORKER] = None
    """The smallest number of pixels to which an image is scaled up. null: that of the model's
    preprocessor_config.json."""

    max_pixels: Annotated[_Pixels | None, SHAPES_WORKER] = None
    """The largest number of pixels to which an image is scaled down. An image has a token for each 28x28 (Qwen2.5-VL)
    or 32x32 (Qwen3-VL) of them. null: that of the model's preprocessor_config.json."""

    max_image_bytes: PositiveInt = 20_000_000
    """The largest file of an image, in bytes. A row with a larger one is an error."""

    max_samples: PositiveInt | None = None
    """Only the first N training rows that pass `filters` are used, over all files in their order. null: all rows."""

    val_max_samples: PositiveInt | None = None
    """Only the first N validation rows that pass `val_filters` are used, over all files in their order. null: all
    rows."""

    filters: RowFilters = Field(default_factory=dict)
    """Conditions on the training rows, by column: a value, a list of allowed values, or {min, max}. The column a.b is
    the entry b in the column a. Rows that do not meet all conditions are left out."""

    val_filters: RowFilters = Field(default_factory=dict)
    """Conditions on the validation rows, in the form of `filters`."""

    shuffle: bool = True
    """If true, the prompts of each epoch come in a new random order, which depends on run.seed and the epoch only. If
    false, they come in the order of the files."""

    custom_cls: CustomDatasetConfig = CustomDatasetConfig()
    sampler: SamplerConfig = SamplerConfig()
    filter_overlong_prompts: bool = True
    """If true, prompts of more than max_prompt_length tokens are left out. If false, see truncation."""

    truncation: Literal["error", "left", "right", "middle"] = "error"
    """The treatment of a prompt of more than max_prompt_length tokens if filter_overlong_prompts is false. error: the
    run is refused. left, right, middle: tokens are cut off on that side, or in the middle."""

    tokenizer: Annotated[str | None, SHAPES_WORKER] = None
    """The folder or hub name of the tokenizer of actor and critic. null: the tokenizer of actor.model."""

    chat_template: Path | None = None
    """A Jinja file that replaces the chat template of the tokenizer. null: the template of the tokenizer."""

    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments that the chat template is called with, e.g. {enable_thinking: false}."""

    @property
    def pixel_limits(self) -> tuple[int | None, int | None]:
        """The keys min_pixels and max_pixels."""
        return self.min_pixels, self.max_pixels

    def _check_keys(self) -> None:
        """Raises ValueError if bounds of pixels contradict each other, or train_weights do not fit what is read."""
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels ({self.min_pixels}) must not exceed max_pixels ({self.max_pixels})")
        if self.train_weights is None:
            return
        if len(self.train_weights) != len(self.train_files):
            raise ValueError(
                f"train_weights has {len(self.train_weights)} numbers for {len(self.train_files)} train_files;"
                " expected one for each"
            )
        for other, is_set in (("custom_cls", self.custom_cls.path), ("sampler", self.sampler.class_path)):
            if is_set is not None:
                raise ValueError(f"train_weights and {other} exclude each other: remove one of them")

    @property
    def draw_key(self) -> str:
        """The dotted name of the configuration key for the number of prompts that are taken from the data at a time."""
        return "data.train_batch_size" if self.gen_batch_size is None else "data.gen_batch_size"

    @property
    def draw_size(self) -> int:
        """The number of prompts taken from the data at a time: for a step, or with filter_groups for one round."""
        return self.train_batch_size if self.gen_batch_size is None else self.gen_batch_size

    @property
    def longest_row(self) -> int:
        """The largest number of tokens in a prompt and its response together, with all contexts of a conversation."""
        return self.max_prompt_length + self.max_response_length
