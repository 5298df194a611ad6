"""GSM8K (Cobbe et al., 2021) as prompt files, and the tiny model that cpu.yaml trains on them.

    python -m recipes.gsm8k.prepare --input DIR_OR_HUB_NAME --output DIR [--tiny-model DIR]

The input is a folder with train.jsonl and test.jsonl (or the parquet files of the hub's dataset), or a dataset's name
on the Hugging Face hub, such as openai/gsm8k. The output is train.parquet and test.parquet, in verl's schema.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from splitppo.jsonl import read_jsonl

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = ("train", "test")
EXIT_BAD_INPUT = 2
_FINAL_ANSWER = re.compile(r"#### *(-?[0-9.,]+)")


class BadInput(ValueError):
    """An input that cannot be prepared; the message names the file and, where it is one row, its line."""


def main(arguments: list[str]) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, metavar="DIR_OR_HUB_NAME")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR")
    parser.add_argument(
        "--tiny-model", type=Path, metavar="DIR", help="where the tiny model goes; default: OUTPUT/tiny_model"
    )
    parser.add_argument("--no-tiny-model", action="store_true", help="make the prompt files only (needs no torch)")
    options = parser.parse_args(arguments)
    try:
        files = find_files(options.input)
        rows = {split: [to_row(*item, split=split) for item in read_examples(files[split])] for split in SPLITS}
        for split in SPLITS:
            write_parquet(rows[split], options.output / f"{split}.parquet")
            print(f"gsm8k: {len(rows[split])} rows in {options.output / f'{split}.parquet'}", flush=True)
    except BadInput as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    if not options.no_tiny_model:
        from recipes.gsm8k.tiny_model import make_tiny_model  # imports torch

        folder = options.tiny_model or options.output / "tiny_model"
        num_parameters = make_tiny_model(rows["train"], folder)
        print(f"gsm8k: a random model of {num_parameters:,} parameters in {folder}", flush=True)
    return 0


def find_files(source: str) -> dict[str, Path]:
    """The file of each split in a local folder, or in a dataset of the hub, which is fetched.

    Raises:
        BadInput: no such folder or dataset, or a split is missing in it.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = _fetch(source)
    files = {}
    for split in SPLITS:
        # The hub's dataset has a second configuration, "socratic", whose answers are other texts.
        found = [
            folder / f"{split}.jsonl",
            folder / f"{split}.parquet",
            *sorted(folder.glob(f"main/{split}-*.parquet")),
        ]
        existing = [file for file in found if file.is_file()]
        if not existing:
            raise BadInput(f"{folder} has no {split}.jsonl, {split}.parquet or main/{split}-*.parquet")
        files[split] = existing[0]
    return files


def read_examples(file: Path) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Yields (place, index, example): the place, "file, line 7", is for messages, the index counts from 0.

    Raises:
        BadInput: the file cannot be read, is empty, or a line is no JSON object.
    """
    try:
        examples = list(_read_jsonl(file) if file.suffix == ".jsonl" else _read_parquet(file))
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise BadInput(f"cannot read {file}: {error}") from error
    if not examples:
        raise BadInput(f"{file} has no rows")
    for index, (place, example) in enumerate(examples):
        yield place, index, example


def to_row(place: str, index: int, example: Mapping[str, Any], *, split: str) -> dict[str, Any]:
    """One row of verl's schema.

    Raises:
        BadInput: no question or answer, or an answer without a final number after "####".
    """
    for key in ("question", "answer"):
        if not isinstance(example.get(key), str) or not example[key].strip():
            raise BadInput(f"{place}: expected a text under {key!r}, got {example.get(key)!r}")
    question, answer = example["question"], example["answer"]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_answer(answer, place)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def final_answer(answer: str, place: str) -> str:
    """The number after the last "####", without commas. BadInput if there is none."""
    numbers = _FINAL_ANSWER.findall(answer)
    if not numbers:
        raise BadInput(f'{place}: the answer has no number after "####"')
    return str(numbers[-1]).replace(",", "")


def write_parquet(rows: list[dict[str, Any]], file: Path) -> None:
    """Writes the file whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.unfinished")
    pq.write_table(pa.Table.from_pylist(rows), unfinished)
    unfinished.replace(file)


def _read_jsonl(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        for number, example in read_jsonl(file):
            yield f"{file}, line {number}", example
    except ValueError as error:
        raise BadInput(str(error)) from error


def _read_parquet(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, example in enumerate(pq.read_table(file).to_pylist(), start=1):
        yield f"{file}, row {number}", example


def _fetch(name: str) -> Path:
    """Downloads the dataset's files for both splits; returns their folder."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise BadInput(f"there is no folder {name}")
    import huggingface_hub

    patterns = [
        f"{prefix}{split}{suffix}" for split in SPLITS for prefix, suffix in (("", ".*"), ("main/", "-*.parquet"))
    ]
    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's HTTP errors are OSErrors
        reason = str(error).strip().split("\n")[0]
        raise BadInput(
            f"{name!r} is neither a folder nor a dataset that the Hugging Face hub gives us: {reason}"
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
