"""Code shared by the prepare.py of all recipes: command line, input files, prompt files in verl's schema, tiny models.

The input is a folder or a data set of the Hugging Face hub with the files of both splits, or a single file; then
--test-file or --test-rows names the test split. The output is train.parquet and test.parquet, and the tiny random
models that cpu.yaml trains. A file that is there already, with the same content, is not written again.
"""

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.rows import BadInput, Example, Row, read_rows, write_parquet
from recipes.tiny_models import make_tiny_model
from splitppo.model_folder import local_folder

EXIT_BAD_INPUT = 2
SPLITS = ("train", "test")
_MAX_SHOWN = 100  # characters of a text in the sample


@dataclass(frozen=True)
class Recipe:
    """A data set that can be prepared for training: its files, and the function that reads its rows.

    Attributes:
        name: the name of the recipe, for messages.
        to_row: returns the row of an example, None for an example that is left out; BadInput for a wrong example.
        files: for each split, patterns of files in a folder or a data set of the hub. The files of the first pattern
            that matches any are read, in the order of their names.
        tiny_models: names of the tiny models that cpu.yaml needs, out of `recipes.tiny_models.KINDS`.
        unprintable: keys whose texts are never printed.
    """

    name: str
    to_row: Callable[[Example], Row | None]
    files: Mapping[str, Sequence[str]]
    tiny_models: Sequence[str] = ("tiny_model",)
    unprintable: Collection[str] = ()

    def say(self, text: str) -> None:
        """Prints a line of text that begins with the name of the recipe."""
        print(f"{self.name}: {text}", flush=True)


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Makes an argument parser with the options that every recipe's prepare.py has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, metavar="DIR_HUB_NAME_OR_FILE", help="folder, data set or file")
    parser.add_argument("--test-file", metavar="FILE", help="the test split; the input is read for training alone")
    parser.add_argument("--test-rows", type=int, metavar="N", help="the input's last N rows are the test split")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR")
    parser.add_argument("--no-tiny-model", action="store_true", help="make the prompt files only (needs no torch)")
    return parser


def run(recipe: Recipe, options: argparse.Namespace) -> int:
    """Writes the prompt files and tiny models of a recipe; returns the exit code, 2 for input that is not usable."""
    try:
        rows = {}
        for split, examples in read_splits(recipe, options.input, options.test_file, options.test_rows).items():
            rows[split] = [row for row in map(recipe.to_row, examples) if row is not None]
            if not rows[split]:
                raise BadInput(f"none of the {len(examples)} rows for {split} can be used")
            if left_out := len(examples) - len(rows[split]):
                recipe.say(f"{left_out} of {len(examples)} rows for {split} are left out")
        for split in SPLITS:
            file = options.output / f"{split}.parquet"
            is_new = write_parquet(rows[split], file)
            recipe.say(f"{len(rows[split])} rows in {file}{'' if is_new else ', which is up to date'}")
    except BadInput as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    recipe.say("the first row for training:")
    for line in shown(rows["train"][0], unprintable=recipe.unprintable):
        print(f"  {line}", flush=True)
    for name in () if options.no_tiny_model else recipe.tiny_models:
        recipe.say(make_tiny_model(name, rows["train"], options.output / name))
    return 0


def read_splits(
    recipe: Recipe, source: str, test_file: str | None = None, test_rows: int | None = None
) -> dict[str, list[Example]]:
    """Reads the examples of a recipe's input, by split (train and test).

    Raises:
        BadInput: a file or the test split is missing; a file cannot be read, is empty, or has a line that is no JSON.
    """
    if test_file is not None and test_rows is not None:
        raise BadInput("expected --test-file or --test-rows, got both")
    files = find_files(source, recipe.files, has_test=test_file is None and test_rows is None)
    if test_file is not None:
        files["test"] = [Path(test_file).expanduser()]
    splits = {split: [row for file in of_split for row in read_rows(file)] for split, of_split in files.items()}
    if test_rows is not None:
        content = splits["train"]
        if not 0 < test_rows < len(content):
            raise BadInput(f"--test-rows: expected a number from 1 to {len(content) - 1}, got {test_rows}")
        splits = {"train": content[:-test_rows], "test": content[-test_rows:]}
    return {
        split: [Example(place, fields, split, index) for index, (place, fields) in enumerate(of_split)]
        for split, of_split in splits.items()
    }


def find_files(source: str, patterns: Mapping[str, Sequence[str]], *, has_test: bool = True) -> dict[str, list[Path]]:
    """Finds the data files of each split (train and test), or of the training split alone.

    `source` is a folder, or a data set of the hub, which is downloaded.

    Raises:
        BadInput: there is no such folder or data set, or it lacks a split; or it is a single file, and nothing names
            the test split.
    """
    file = Path(source).expanduser()
    if file.is_file():
        if has_test:
            raise BadInput(f"{file} is one file: say by --test-file or --test-rows what the test split is")
        return {"train": [file]}
    try:
        folder = local_folder(source, [pattern for split in SPLITS for pattern in patterns[split]], "dataset")
    except ValueError as error:
        raise BadInput(str(error)) from error
    files = {}
    for split in SPLITS if has_test else SPLITS[:1]:
        matches = (sorted(folder.glob(pattern)) for pattern in patterns[split])
        files[split] = next((some for some in matches if some), [])
        if not files[split]:
            raise BadInput(f"{folder} has no {' or '.join(patterns[split])}")
    return files


def shown(value: Any, path: str = "", *, unprintable: Collection[str] = ()) -> Iterator[str]:
    """Yields lines of text ("prompt[0].content: ...") that show a data row; of unprintable texts only the length."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from shown(entry, f"{path}.{key}" if path else key, unprintable=unprintable)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from shown(entry, f"{path}[{index}]", unprintable=unprintable)
    elif path.rpartition(".")[2] in unprintable:
        yield f"{path}: {len(value)} characters"
    elif isinstance(value, bytes):
        yield f"{path}: {len(value)} bytes"
    else:
        text = " ".join(str(value).split())
        yield f"{path}: {text if len(text) <= _MAX_SHOWN else f'{text[:_MAX_SHOWN]}...'}"
