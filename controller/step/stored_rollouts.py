"""The form of the file in which a checkpoint stores rollouts, finished or begun: safetensors, with a JSON in it.

Arrays have the names of their columns; a column of ragged rows is two arrays, `NAME.values` and `NAME.lengths`; one
array of bytes holds JSON for everything else. Texts and images of prompts that are in the data files are left out: the
file has their row indices, and their tokens and the names of their images, which show if a data file has changed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from controller.data.prompts import PromptBatch
from splitppo.batch import Column
from splitppo.config import ConfigError

T = TypeVar("T")
Arrays = Mapping[str, NDArray[Any]]
_OTHERS = "json"  # what is no array, as bytes


def serialise_rollouts(arrays: Arrays, columns: Mapping[str, Column], others: Mapping[str, Any]) -> bytes:
    """Makes the content of a file from arrays, columns of ragged rows, and whatever else JSON can hold."""
    content = dict(arrays)
    for name, column in columns.items():
        content |= {f"{name}.values": column.values, f"{name}.lengths": column.lengths}
    content[_OTHERS] = np.frombuffer(json.dumps(others).encode(), np.uint8)
    return save({name: np.ascontiguousarray(array) for name, array in content.items()})


def parse_rollouts(content: bytes, make: Callable[[Arrays, Mapping[str, Any]], T]) -> T:
    """Parses what `serialise_rollouts` has made, and returns what `make` makes of the arrays and the JSON.

    Raises:
        ConfigError: another version has written the file: it is no such file, or `make` misses something in it.
    """
    try:
        arrays = load(content)
        return make(arrays, json.loads(arrays[_OTHERS].tobytes()))
    except ConfigError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the checkpoint's rollouts are not what this version writes: {error!r}") from error


def stored_column(arrays: Arrays, name: str) -> Column:
    """Returns a column of ragged rows, whose values and row lengths are two arrays of the file."""
    return Column(arrays[f"{name}.values"], arrays[f"{name}.lengths"])


def prompts_of_rows(row_indices: NDArray[np.int64], table: PromptBatch) -> PromptBatch:
    """Returns the prompts of these rows of the training data; ConfigError if the data has fewer rows by now."""
    if row_indices.max(initial=0) >= table.num_prompts:
        found = f"{table.num_prompts} training prompts"
        raise ConfigError(f"data.train_files: the checkpoint holds responses to row {row_indices.max()}, got {found}")
    return table.take(row_indices)


def image_names(prompts: PromptBatch) -> list[list[str]]:
    """Returns the names of the images of each prompt, which show if a data file has changed."""
    return [[*row.images.names] for row in prompts.rows]


def check_prompts(
    stored: Column, prompts: PromptBatch, key: str, stored_images: Sequence[Sequence[str]] | None = None
) -> None:
    """Checks that the stored tokens and names of images are those of `prompts`, as `data.train_files` has them now.

    Raises:
        ConfigError: they are others; `key` names what has stored them.
    """
    now = prompts.prompts
    has_same_tokens = np.array_equal(stored.lengths, now.lengths) and np.array_equal(stored.values, now.values)
    if not has_same_tokens or stored_images not in (None, image_names(prompts)):
        raise ConfigError(
            f"data.train_files: the checkpoint holds responses to other prompts than these ({key});"
            " expected the files that the run began with"
        )
