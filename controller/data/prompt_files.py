"""Reads and checks rows of prompts from parquet files, JSONL files or a user's class."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from controller.data.image_rows import OTHER_MEDIA, RowImageReader
from controller.data.images import NO_IMAGES, RowImages
from controller.data.row_values import check_texts, is_missing, without_nulls
from splitppo.config import ConfigError, DataConfig
from splitppo.config.subsections.row_filters import Condition, ValueRange, passes
from splitppo.config_error import config_errors
from splitppo.jsonl import read_jsonl
from splitppo.user_file import describe, load_from_file

Split = Literal["train", "val"]
# The rows of a file may have so many characters, or so many for each byte: what repeats needs little room in a file.
_MAX_CHARACTERS = 2**28
_MAX_CHARACTERS_PER_BYTE = 100
_ROWS_AT_A_TIME = 64  # of a parquet file; its rows may be much longer than in the file
_ROWS_WITH_MEDIA_AT_A_TIME = 8
_Contents = Iterator[tuple[str, Mapping[str, Any]]]  # (place, columns by name)
NeedsTruth: TypeAlias = Callable[[str], bool]  # whether responses of a data source are compared with a ground truth


@dataclass(frozen=True)
class PromptRow:
    """One checked row of a data file: a prompt with what its scorer needs.

    Attributes:
        place: the file and the number of the row, for errors: e.g. "train.parquet, row 3" (from 1).
        prompt: chat messages, or text.
        data_source, ground_truth, extra_info: the input of the scorer.
        file_index: the index of its file in the split.
        observation: the text by which its environment began, which follows the prompt.
        images: the images of the prompt, in their order.
    """

    place: str
    prompt: str | list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    file_index: int = 0
    observation: str = ""
    images: RowImages = NO_IMAGES

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the row that an environment gets; a null in extra_info counts as no field."""
        truth = without_nulls(self.ground_truth)
        return {**without_nulls(self.extra_info), "data_source": self.data_source, "ground_truth": truth}

    @property
    def begun_prompt(self) -> str | list[dict[str, Any]]:
        """The prompt with the text by which its environment began."""
        return appended(self.prompt, self.observation) if self.observation else self.prompt


def appended(prompt: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    """Returns a prompt with a text at the end of the last message of the user, or of the last one."""
    if isinstance(prompt, str):
        return prompt + text
    of_user = [place for place, message in enumerate(prompt) if message["role"] == "user"]
    place = of_user[-1] if of_user else len(prompt) - 1
    content = prompt[place]["content"]
    content = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [*prompt[:place], {**prompt[place], "content": content}, *prompt[place + 1 :]]


def always_needed(data_source: str) -> bool:  # noqa: ARG001 - of NeedsTruth
    """Returns that responses of every data source are compared with a ground truth."""
    return True


class _Source(NamedTuple):
    """A data file of a split, or the user's class.

    Attributes:
        name: for errors.
        folder: the folder to which paths in its rows are relative.
        max_characters: the most characters that its rows may have.
        contents: its rows.
    """

    name: str
    folder: Path
    max_characters: float
    contents: _Contents


def read_rows(
    config: DataConfig,
    split: Split,
    needs_truth: NeedsTruth = always_needed,
    images: RowImageReader | None = None,
) -> list[PromptRow]:
    """Reads the first `max_samples` rows of a split (train or val) that pass its filters, in the order of its files.

    `images` reads the images of the rows; None: rows with images are refused.

    Raises:
        ConfigError: a file is missing, unreadable or empty, a row lacks a column or the ground truth that it needs, or
            has a text that cannot be encoded or an image that is not read, the user's class fails, or no row passes the
            filters.
    """
    images = images or RowImageReader(config)
    is_train = split == "train"
    key = "data.custom_cls" if config.custom_cls.path else f"data.{split}_files"
    max_samples = config.max_samples if is_train else config.val_max_samples
    filters_key, filters = ("data.filters", config.filters) if is_train else ("data.val_filters", config.val_filters)
    rows: list[PromptRow] = []
    num_read = 0
    for file_index, source in enumerate(_sources(config, split, filters)):
        is_empty = True
        num_characters = 0
        for place, content in source.contents if len(rows) != max_samples else ():
            is_empty = False
            num_read = num_read + 1
            row, length = _checked(content, place, config.prompt_key, file_index, needs_truth)
            num_characters += length
            if num_characters > source.max_characters:
                raise ConfigError(
                    f"{place}: the rows up to this one have {num_characters:,} characters, much more than the file has"
                    f" bytes; expected at most {_MAX_CHARACTERS:,}, or {_MAX_CHARACTERS_PER_BYTE} for each byte"
                )
            if all(passes(_value(content, place, column), condition) for column, condition in filters.items()):
                prompt, of_row = images.read(content, row.prompt, place, source.folder)
                rows.append(replace(row, prompt=prompt, images=of_row))
            if len(rows) == max_samples:
                break
        if is_empty and len(rows) != max_samples:
            raise ConfigError(f"{key}: {source.name} has no rows")
    if not rows:
        raise ConfigError(f"{filters_key}: none of the {num_read} rows of {key} passes {_shown_filters(filters)}")
    return rows


def _sources(config: DataConfig, split: Split, filters: Mapping[str, Condition]) -> Iterator[_Source]:
    """Yields each data file of a split, or the user's class."""
    files = config.train_files if split == "train" else config.val_files
    if config.custom_cls.path is not None and config.custom_cls.name is not None:
        name = f"{config.custom_cls.name} of {config.custom_cls.path}"
        yield _Source(name, Path(), inf, _custom_rows(config.custom_cls.path, config.custom_cls.name, config, split))
        return
    media = (config.image_key, *OTHER_MEDIA)
    for file in (Path(file).expanduser() for file in files):
        if not file.is_file():
            raise ConfigError(f"data.{split}_files: no such file {file}")
        limit = max(_MAX_CHARACTERS, _MAX_CHARACTERS_PER_BYTE * file.stat().st_size)
        yield _Source(str(file), file.parent, limit, _file_rows(file, [config.prompt_key, *filters], media))


def _custom_rows(path: Path, name: str, config: DataConfig, split: Split) -> _Contents:
    """Yields the rows of a user's dataset class: by iteration, or by index if the class has no iterator."""
    make = load_from_file(path, name, path_key="data.custom_cls.path", name_key="data.custom_cls.name")
    try:
        files = config.train_files if split == "train" else config.val_files
        dataset = make(data_files=list(files), data_config=config, split=split)
        contents = dataset if hasattr(dataset, "__iter__") else (dataset[index] for index in range(len(dataset)))
        for number, content in enumerate(contents, start=1):
            place = f"{name} of {path} ({split}), row {number}"
            if not isinstance(content, Mapping):
                raise ConfigError(f"{place}: expected a mapping of columns, got {_shown(content)}")
            yield place, content
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"data.custom_cls: {name} of {path} gave no {split} rows: {describe(error)}") from error


def _file_rows(file: Path, wanted: Sequence[str], media: Sequence[str]) -> _Contents:
    """Yields the place ("file, line 7", from 1) and the content of each row of a parquet or JSONL file."""
    if file.suffix == ".parquet":
        yield from _parquet_rows(file, wanted, media)
    elif file.suffix in {".jsonl", ".json"}:
        with config_errors(ValueError):
            for number, content in read_jsonl(file):
                yield f"{file}, line {number}", content
    else:
        raise ConfigError(f"{file}: expected a .parquet or .jsonl file")


def _parquet_rows(file: Path, wanted: Sequence[str], media: Sequence[str]) -> _Contents:
    """Yields the place ("file, row 7", from 1) and the columns of each row of a parquet file, or raises a ConfigError.

    Only those columns are read that a prompt may need: those of `wanted`, and those of `media`, of which few rows are
    in memory at a time. Of a name with dots, such as "extra.level", the column before the first dot is read, too.
    """
    import pyarrow.parquet as pq  # slow to import, and JSONL does not need it
    from pyarrow import ArrowException, default_memory_pool

    kinds = (ArrowException, OSError, UnicodeDecodeError, MemoryError)
    unreadable = config_errors(*kinds, before=f"{file} is not a readable parquet file: ")
    with unreadable, pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as table:
        of_all = {"data_source", "reward_model", "extra_info", *media, *wanted}
        of_all |= {name.split(".")[0] for name in wanted}
        columns = [name for name in table.schema_arrow.names if name in of_all]
        has_media = not {*media}.isdisjoint(columns)
        batch_size = _ROWS_WITH_MEDIA_AT_A_TIME if has_media else _ROWS_AT_A_TIME
        batches = table.iter_batches(batch_size=batch_size, columns=columns)
        try:
            for number, content in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                yield f"{file}, row {number}", content
        finally:  # else Arrow keeps the memory of all images of a row group
            del batches
            default_memory_pool().release_unused()


def _checked(
    content: Mapping[str, Any], place: str, prompt_key: str, file_index: int, needs_truth: NeedsTruth
) -> tuple[PromptRow, int]:
    """Returns the row of these columns, and how many characters they have; ConfigError says what is wrong."""
    lengths = []

    def column(name: str, expected: type | tuple[type, ...], words: str) -> Any:
        if name not in content:
            raise ConfigError(f"{place}: column {name!r} is missing; the row has {', '.join(content) or 'none'}")
        if not isinstance(content[name], expected):
            raise ConfigError(f"{place}: column {name!r} must be {words}, got {_shown(content[name])}")
        with config_errors(ValueError, before=f"{place}: column {name!r}: "):
            lengths.append(check_texts(content[name]))
        return content[name]

    reward_model = column("reward_model", dict, "a mapping with 'ground_truth'")
    prompt = column(prompt_key, (str, list), "chat messages or text")
    row = PromptRow(
        place=place,
        prompt=prompt if isinstance(prompt, str) else [_without_nulls(message) for message in prompt],
        data_source=column("data_source", str, "text"),
        ground_truth=reward_model.get("ground_truth"),
        extra_info=column("extra_info", dict, "a mapping") if content.get("extra_info") is not None else {},
        file_index=file_index,
    )
    if is_missing(row.ground_truth) and reward_model.get("style") != "model" and needs_truth(row.data_source):
        raise ConfigError(
            f"{place}: column 'reward_model' has no 'ground_truth', with which responses are compared, got"
            f" {_shown(reward_model)}; style: model in it says that none is needed"
        )
    return row, sum(lengths)


def _without_nulls(message: Any) -> Any:
    """Returns a chat message without its nulls, but for the content of one that calls tools, as templates expect it."""
    kept = without_nulls(message)
    is_call = isinstance(message, Mapping) and bool(message.get("tool_calls"))
    return {"content": None, **kept} if is_call else kept


def _value(content: Mapping[str, Any], place: str, column: str) -> Any:
    """Returns the value that a filter tests in a data row; `a.b` is entry b of column a, or the column named `a.b`."""
    value: Any = content
    for name in [column] if column in content else column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ConfigError(f"{place}: column {column!r}, which a filter names, is missing")
        value = value[name]
    return value


def _shown_filters(filters: Mapping[str, Condition]) -> str:
    conditions = {
        column: condition.model_dump(exclude_none=True) if isinstance(condition, ValueRange) else list(condition)
        for column, condition in filters.items()
    }
    return ", ".join(f"{column}: {condition}" for column, condition in conditions.items())


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
