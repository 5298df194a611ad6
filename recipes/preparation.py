"""What the recipes' prepare.py share: command line, reading rows, writing them in verl's schema, tiny models.

The input is a folder or a data set of the Hugging Face hub with the files of both splits, or a single file, beside
which --test-file or --test-rows says what the test split is. The output is train.parquet and test.parquet, and the tiny
random models that cpu.yaml trains. What is there already, with the same content, is left alone.
"""

import argparse
import filecmp
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from splitppo.jsonl import read_jsonl

Row = dict[str, Any]
EXIT_BAD_INPUT = 2
SPLITS = ("train", "test")
_JSONL = (".jsonl", ".jsonl.gz", ".json")
_MAX_SHOWN = 100  # characters of a text in the sample


class BadInput(ValueError):
    """An input that cannot be prepared; the message names the file and, where it is one row, its line."""


@dataclass(frozen=True)
class Example:
    """A row of the input.

    Attributes:
        place: "file, line 7", for messages.
        fields: as the file has them.
        split, index: where its row goes; the index counts from 0.
    """

    place: str
    fields: Mapping[str, Any]
    split: str = "train"
    index: int = 0

    def text(self, *names: str, may_be_empty: bool = False) -> str:
        """The text under the first of these names that the row has. BadInput if it has none, or something else."""
        for name in names:
            if name in self.fields:
                value = self.fields[name]
                if not isinstance(value, str) or not (may_be_empty or value.strip()):
                    got = repr(value) if value is None or isinstance(value, str | int) else type(value).__name__
                    raise BadInput(f"{self.place}: expected a text under {name!r}, got {got}")
                return value
        wanted, there = " or ".join(map(repr, names)), ", ".join(self.fields) or "nothing"
        raise BadInput(f"{self.place}: expected a text under {wanted}, the row has {there}")

    def verl_row(
        self, data_source: str, prompt: str | list[dict[str, str]], ability: str, reward_model: Row, **extra_info: Any
    ) -> Row:
        """The row of a prompt file, in verl's schema; a plain prompt becomes the user's message."""
        return {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
            "ability": ability,
            "reward_model": reward_model,
            "extra_info": {"split": self.split, "index": self.index, **extra_info},
        }


@dataclass(frozen=True)
class Recipe:
    """What is a data set's own.

    Attributes:
        name: of the recipe, for messages.
        to_row: the row of an example, None for one that is left out; BadInput for one that is wrong.
        files: for each split, patterns of files in a folder or a data set of the hub. The files of the first pattern
            that finds any are read, in the order of their names.
        tiny_models: names of the tiny models that cpu.yaml needs, of `recipes.tiny_models.KINDS`.
        unprintable: keys whose texts are never printed.
    """

    name: str
    to_row: Callable[[Example], Row | None]
    files: Mapping[str, Sequence[str]]
    tiny_models: Sequence[str] = ("tiny_model",)
    unprintable: Collection[str] = ()

    def say(self, text: str) -> None:
        """Prints a line."""
        print(f"{self.name}: {text}", flush=True)


def command_line(description: str | None) -> argparse.ArgumentParser:
    """The options of every recipe."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, metavar="DIR_HUB_NAME_OR_FILE", help="folder, data set or file")
    parser.add_argument("--test-file", metavar="FILE", help="the test split; the input is read for training alone")
    parser.add_argument("--test-rows", type=int, metavar="N", help="the input's last N rows are the test split")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR")
    parser.add_argument("--no-tiny-model", action="store_true", help="make the prompt files only (needs no torch)")
    return parser


def run(recipe: Recipe, options: argparse.Namespace) -> int:
    """Makes the files of a recipe and returns the exit status: 2 for input that cannot be prepared."""
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
    if recipe.tiny_models and not options.no_tiny_model:
        from recipes.tiny_models import make_tiny_model

        for name in recipe.tiny_models:
            recipe.say(make_tiny_model(name, rows["train"], options.output / name))
    return 0


def read_splits(
    recipe: Recipe, source: str, test_file: str | None = None, test_rows: int | None = None
) -> dict[str, list[Example]]:
    """The examples of both splits.

    Raises:
        BadInput: a file or the test split is missing, or a file cannot be read, is empty or has a line that is no JSON.
    """
    if test_file is not None and test_rows is not None:
        raise BadInput("expected --test-file or --test-rows, got both")
    files = find_files(source, recipe.files, has_test=test_file is None and test_rows is None)
    content = [row for file in files["train"] for row in read_rows(file)]
    if test_rows is not None:
        if not 0 < test_rows < len(content):
            raise BadInput(f"--test-rows: expected a number from 1 to {len(content) - 1}, got {test_rows}")
        splits = {"train": content[:-test_rows], "test": content[-test_rows:]}
    else:
        of_test = files["test"] if test_file is None else [Path(test_file).expanduser()]
        splits = {"train": content, "test": [row for file in of_test for row in read_rows(file)]}
    return {
        split: [Example(place, fields, split, index) for index, (place, fields) in enumerate(of_split)]
        for split, of_split in splits.items()
    }


def find_files(source: str, patterns: Mapping[str, Sequence[str]], *, has_test: bool = True) -> dict[str, list[Path]]:
    """The files of each split, or of the training split alone, in a folder or a data set of the hub, which is fetched.

    Raises:
        BadInput: no such folder or data set, or a split is missing in it; a single file, and no word on the test split.
    """
    folder = Path(source).expanduser()
    if folder.is_file():
        if has_test:
            raise BadInput(f"{folder} is one file: say by --test-file or --test-rows what the test split is")
        return {"train": [folder]}
    if not folder.is_dir():
        folder = _fetch(source, [pattern for split in SPLITS for pattern in patterns[split]])
    found = {}
    for split in SPLITS if has_test else SPLITS[:1]:
        matches = (sorted(folder.glob(pattern)) for pattern in patterns[split])
        found[split] = next((files for files in matches if files), [])
        if not found[split]:
            raise BadInput(f"{folder} has no {' or '.join(patterns[split])}")
    return found


def read_rows(file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """(place, fields) of each row of a JSONL or parquet file.

    Raises:
        BadInput: it cannot be read, has no rows, or a line is no JSON object.
    """
    if file.suffix != ".parquet" and not file.name.endswith(_JSONL):
        raise BadInput(f"{file}: expected a file that ends in .parquet, {', '.join(_JSONL)}")
    try:
        rows = list(_parquet_rows(file) if file.suffix == ".parquet" else _jsonl_rows(file))
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise BadInput(f"cannot read {file}: {_first_line(error)}") from error
    except ValueError as error:
        raise BadInput(_first_line(error)) from error
    if not rows:
        raise BadInput(f"{file} has no rows")
    return rows


def write_parquet(rows: list[Row], file: Path) -> bool:
    """Writes the file whole or not at all; False if it is there with the same bytes, and left alone.

    Raises:
        BadInput: the file cannot be written there, or a column has values of several kinds.
    """
    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        table = pa.Table.from_pylist(rows)
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, unfinished)
        if file.is_file() and filecmp.cmp(file, unfinished, shallow=False):
            unfinished.unlink()
            return False
        unfinished.replace(file)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadInput(f"cannot write {file}: {_first_line(error)}") from error
    return True


def shown(value: Any, path: str = "", *, unprintable: Collection[str] = ()) -> Iterator[str]:
    """Lines "prompt[0].content: ..." for what a row holds; under the unprintable keys the length stands for a text."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from shown(entry, f"{path}.{key}" if path else key, unprintable=unprintable)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from shown(entry, f"{path}[{index}]", unprintable=unprintable)
    elif path.rpartition(".")[2] in unprintable:
        yield f"{path}: {len(value)} characters"
    else:
        text = " ".join(str(value).split())
        yield f"{path}: {text if len(text) <= _MAX_SHOWN else f'{text[:_MAX_SHOWN]}...'}"


def _jsonl_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, fields in read_jsonl(file):
        yield f"{file}, line {number}", fields


def _parquet_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, fields in enumerate(pq.read_table(file).to_pylist(), start=1):
        yield f"{file}, row {number}", fields


def _fetch(name: str, patterns: Sequence[str]) -> Path:
    """Downloads what the patterns name of a data set; returns its folder."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise BadInput(f"there is no folder {name}")
    import huggingface_hub  # slow to import, and local files do not need it

    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # the hub's HTTP errors are OSErrors
        raise BadInput(
            f"{name!r} is neither a folder nor a data set that the Hugging Face hub gives us: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
