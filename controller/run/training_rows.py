"""Describes the training rows of a run, so that a resumed run can tell whether they are those that it began with."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
from pydantic import BaseModel, RootModel

from controller.data.prompt_files import PromptRow
from splitppo.config import DataConfig

ROWS_FILE = "training_rows.json"


class RowsOfFile(BaseModel, frozen=True, extra="forbid"):
    """The rows of a training file, in their order, as far as prompts and rewards of a run are made of them.

    Attributes:
        source: the file, or the user's class.
        num_rows: rows that pass the filters and fit.
        sha256: of prompt, data_source, ground_truth and extra_info of each of them, as lines of JSON; if it has images,
            also of their names and grids.
    """

    source: str
    num_rows: int
    sha256: str


class TrainingRows(RootModel[tuple[RowsOfFile, ...]], frozen=True):
    """The training rows of a run, file by file."""

    @classmethod
    def of(cls, config: DataConfig, rows: Iterable[PromptRow]) -> "TrainingRows":
        """Describes the rows that were read with a configuration."""
        sources = _sources(config)
        digests = [hashlib.sha256() for _ in sources]
        counts = [0 for _ in sources]
        for row in rows:
            digests[row.file_index].update(_line(row))
            counts[row.file_index] += 1
        described = zip(sources, counts, digests, strict=True)
        return cls(
            tuple(
                RowsOfFile(source=source, num_rows=count, sha256=digest.hexdigest())
                for source, count, digest in described
            )
        )

    def changed_from(self, before: "TrainingRows") -> str:
        """Names the files whose rows were others before, with numbers of rows; "" if all are the same."""
        return " and ".join(
            f"{now.source} ({then.num_rows} rows then, {now.num_rows} now)"
            for then, now in zip(before.root, self.root, strict=False)
            if (then.num_rows, then.sha256) != (now.num_rows, now.sha256)
        )


def _sources(config: DataConfig) -> Sequence[str]:
    """Returns the names of the training files, in the order of `PromptRow.file_index`; or that of the user's class."""
    if config.custom_cls.path is not None:
        return [f"{config.custom_cls.name} of {config.custom_cls.path}"]
    return [str(file) for file in config.train_files]


def _line(row: PromptRow) -> bytes:
    """Returns what counts of a row as a line of JSON; keys that JSON cannot have are left out."""
    content = [row.prompt, row.data_source, row.ground_truth, row.extra_info]
    if row.images.names:
        content += [row.images.names, row.images.grids]
    return _JSON.encode(content).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Returns something that JSON can hold for a value that it cannot, the same in each process.

    Of an object whose text may have its address, the name of the class is all that counts.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, bytes | date | time | timedelta | Decimal):
        return repr(value)
    return type(value).__qualname__


_JSON = json.JSONEncoder(default=_plain, skipkeys=True)  # made once: it reads a million rows
