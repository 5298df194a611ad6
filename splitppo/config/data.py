"""The section `data`."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from splitppo.config.row_filters import RowFilters
from splitppo.config.section import OneOrMany, PositiveInt, Section

_Paths = Annotated[tuple[str, ...], OneOrMany]


class _ClassInFile(Section):
    """A class of the user's: two keys, its file and its name there."""

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        if len({value is None for _, value in self}) > 1:
            raise ValueError(f"expected both {' and '.join(type(self).model_fields)}, or neither")
        return self


class CustomDatasetConfig(_ClassInFile):
    """A class of yours that gives the rows, in place of the reading of files."""

    path: Path | None = Field(None, description="Python file with the class")
    name: str | None = Field(None, description="its name in that file")


class SamplerConfig(_ClassInFile):
    """A class of yours that says which prompts come when, in place of `shuffle`."""

    class_path: Path | None = Field(None, description="Python file with the class")
    class_name: str | None = Field(None, description="its name in that file")


class DataConfig(Section):
    """Prompts: which files, how many per step, how long."""

    train_files: _Paths = Field(description="parquet or JSONL files with the training prompts", min_length=1)
    train_weights: tuple[Annotated[float, Field(gt=0.0)], ...] | None = Field(
        None,
        description="a number per training file: their shares of an epoch, which has as many prompts as all files have"
        " rows; null: every row once per epoch",
    )
    val_files: _Paths = Field((), description="parquet or JSONL files with the validation prompts")
    train_batch_size: PositiveInt = Field(description="prompts per step")
    gen_batch_size: PositiveInt | None = Field(
        None, description="prompts drawn and answered at a time with algorithm.filter_groups; null: train_batch_size"
    )
    max_prompt_length: PositiveInt = Field(512, description="tokens; longer prompts are filtered or truncated")
    max_response_length: PositiveInt = Field(512, description="tokens sampled at most per response")
    prompt_key: str = Field("prompt", description="column that holds the chat messages or the plain prompt")
    max_samples: PositiveInt | None = Field(
        None, description="use only the first N training rows that pass the filters, all files together in their order"
    )
    val_max_samples: PositiveInt | None = Field(None, description="the same for validation")
    filters: RowFilters = Field(
        {},
        description="column (a.b: b inside of a) and what it must be: a value, one of a list, or {min, max}; training"
        " rows that do not pass are left out",
    )
    val_filters: RowFilters = Field({}, description="the same for validation")
    shuffle: bool = Field(True, description="a new prompt order in each epoch, a function of seed and epoch")
    custom_cls: CustomDatasetConfig = CustomDatasetConfig()
    sampler: SamplerConfig = SamplerConfig()
    filter_overlong_prompts: bool = Field(True, description="drop prompts longer than max_prompt_length")
    truncation: Literal["error", "left", "right", "middle"] = Field(
        "error", description="what happens to an overlong prompt that is not filtered; the side that is cut"
    )
    tokenizer: str | None = Field(None, description="folder or hub name; default: actor.model")
    chat_template: Path | None = Field(None, description="Jinja file that replaces the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = Field({}, description="passed to the template")

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if self.train_weights is None:
            return self
        if len(self.train_weights) != len(self.train_files):
            raise ValueError(
                f"train_weights has {len(self.train_weights)} numbers for {len(self.train_files)} train_files;"
                " expected one for each"
            )
        for other, is_set in (("custom_cls", self.custom_cls.path), ("sampler", self.sampler.class_path)):
            if is_set is not None:
                raise ValueError(f"train_weights and {other} exclude each other: remove one of them")
        return self

    @property
    def draw_key(self) -> str:
        """The key that says how many prompts are drawn at a time."""
        return "data.train_batch_size" if self.gen_batch_size is None else "data.gen_batch_size"

    @property
    def draw_size(self) -> int:
        """Prompts drawn at a time: those of a step, or of one of its generations with algorithm.filter_groups."""
        return self.train_batch_size if self.gen_batch_size is None else self.gen_batch_size

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.max_prompt_length + self.max_response_length
