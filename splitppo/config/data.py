"""The section `data`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from splitppo.config.section import OneOrMany, PositiveInt, Section

_Paths = Annotated[tuple[str, ...], OneOrMany]


class DataConfig(Section):
    """Prompts: which files, how many per step, how long."""

    train_files: _Paths = Field(description="parquet or JSONL files with the training prompts", min_length=1)
    val_files: _Paths = Field((), description="parquet or JSONL files with the validation prompts")
    train_batch_size: PositiveInt = Field(description="prompts per step")
    max_prompt_length: PositiveInt = Field(512, description="tokens; longer prompts are filtered or truncated")
    max_response_length: PositiveInt = Field(512, description="tokens sampled at most per response")
    prompt_key: str = Field("prompt", description="column that holds the chat messages or the plain prompt")
    max_samples: PositiveInt | None = Field(None, description="use only the first N training rows")
    val_max_samples: PositiveInt | None = Field(None, description="use only the first N validation rows")
    shuffle: bool = Field(True, description="a new prompt order in each epoch, a function of seed and epoch")
    filter_overlong_prompts: bool = Field(True, description="drop prompts longer than max_prompt_length")
    truncation: Literal["error", "left", "right", "middle"] = Field(
        "error", description="what happens to an overlong prompt that is not filtered; the side that is cut"
    )
    tokenizer: str | None = Field(None, description="folder or hub name; default: actor.model")
    chat_template: Path | None = Field(None, description="Jinja file that replaces the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = Field({}, description="passed to the template")

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.max_prompt_length + self.max_response_length
