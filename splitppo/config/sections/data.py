"""The section `data`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from splitppo.config.section import SHAPES_WORKER, OneOrMany, PositiveInt, Section
from splitppo.config.subsections.row_filters import RowFilters

_Paths = Annotated[tuple[str, ...], OneOrMany]


class _ClassInFile(Section):
    """A class of the user's: two keys, its file and its name there."""

    def _check_keys(self) -> None:
        if len({value is None for _, value in self}) > 1:
            raise ValueError(f"expected both {' and '.join(type(self).model_fields)}, or neither")


class CustomDatasetConfig(_ClassInFile):
    """A class of yours that gives the rows, in place of the reading of files."""

    path: Path | None = None
    """Python file with the class"""

    name: str | None = None
    """its name in that file"""


class SamplerConfig(_ClassInFile):
    """A class of yours that says which prompts come when, in place of `shuffle`."""

    class_path: Path | None = None
    """Python file with the class"""

    class_name: str | None = None
    """its name in that file"""


class DataConfig(Section):
    """Prompts: which files, how many per step, how long."""

    train_files: _Paths = Field(min_length=1)
    """parquet or JSONL files with the training prompts"""

    train_weights: tuple[Annotated[float, Field(gt=0.0)], ...] | None = None
    """a number per training file: their shares of an epoch, which has as many prompts as all files have rows; null:
    every row once per epoch"""

    val_files: _Paths = ()
    """parquet or JSONL files with the validation prompts"""

    train_batch_size: PositiveInt
    """prompts per step"""

    gen_batch_size: PositiveInt | None = None
    """prompts drawn and answered at a time with algorithm.filter_groups; null: train_batch_size"""

    max_prompt_length: PositiveInt = 512
    """tokens; longer prompts are filtered or truncated"""

    max_response_length: Annotated[PositiveInt, SHAPES_WORKER] = 512
    """tokens sampled at most per response"""

    prompt_key: str = "prompt"
    """column that holds the chat messages or the plain prompt"""

    max_samples: PositiveInt | None = None
    """use only the first N training rows that pass the filters, all files together in their order"""

    val_max_samples: PositiveInt | None = None
    """the same for validation"""

    filters: RowFilters = Field(default_factory=dict)
    """column (a.b: b inside of a) and what it must be: a value, one of a list, or {min, max}; training rows that do
    not pass are left out"""

    val_filters: RowFilters = Field(default_factory=dict)
    """the same for validation"""

    shuffle: bool = True
    """a new prompt order in each epoch, a function of seed and epoch"""

    custom_cls: CustomDatasetConfig = CustomDatasetConfig()
    sampler: SamplerConfig = SamplerConfig()
    filter_overlong_prompts: bool = True
    """drop prompts longer than max_prompt_length"""

    truncation: Literal["error", "left", "right", "middle"] = "error"
    """what happens to an overlong prompt that is not filtered; the side that is cut"""

    tokenizer: Annotated[str | None, SHAPES_WORKER] = None
    """folder or hub name; default: actor.model"""

    chat_template: Path | None = None
    """Jinja file that replaces the tokenizer's chat template"""

    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """passed to the template"""

    def _check_keys(self) -> None:
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
        """The key that says how many prompts are drawn at a time."""
        return "data.train_batch_size" if self.gen_batch_size is None else "data.gen_batch_size"

    @property
    def draw_size(self) -> int:
        """The prompts drawn at a time: those of a step, or of a generation of it with algorithm.filter_groups."""
        return self.train_batch_size if self.gen_batch_size is None else self.gen_batch_size

    @property
    def longest_row(self) -> int:
        """The tokens of the longest prompt with the longest response."""
        return self.max_prompt_length + self.max_response_length
