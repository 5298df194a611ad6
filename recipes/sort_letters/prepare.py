"""Makes what the recipe needs: tokenizer, warm-started model, prompts for training and validation.

    python -m recipes.sort_letters.prepare [--output .cache/sort_letters] [--seed 0] [--warm-start-steps 130]

Everything is a function of the arguments and of this recipe's code, and is made once: a fingerprint of them lies beside
it. The output folder appears whole or not at all.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import shutil
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from recipes.qwen2_tokenizer import character_tokenizer, save_tokenizer
from recipes.sort_letters import task

DEFAULT_OUTPUT = Path(".cache/sort_letters")
DEFAULT_SEED = 0
DEFAULT_WARM_START_STEPS = 130
PAD, EOS = "<pad>", "<eos>"
FINGERPRINT_FILE = "fingerprint.json"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--warm-start-steps", type=int, default=DEFAULT_WARM_START_STEPS)
    arguments = parser.parse_args()
    prepare(arguments.output, seed=arguments.seed, warm_start_steps=arguments.warm_start_steps)


def prepare(
    output: Path = DEFAULT_OUTPUT, *, seed: int = DEFAULT_SEED, warm_start_steps: int = DEFAULT_WARM_START_STEPS
) -> None:
    """Makes model/, train.parquet and val.parquet unless they are there; safe when several processes call it."""
    wanted = fingerprint(seed, warm_start_steps)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.with_name(f"{output.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _stored_fingerprint(output) == wanted:
            print(f"sort_letters: model and prompts are ready in {output}", flush=True)
            return
        print("sort_letters: warm-starting the model by supervised steps, about ten seconds", flush=True)
        started = time.monotonic()
        scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
        try:
            _make(scratch, seed, warm_start_steps)
            (scratch / FINGERPRINT_FILE).write_text(json.dumps(wanted, indent=1), encoding="utf-8")
            shutil.rmtree(output, ignore_errors=True)
            scratch.rename(output)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        print(f"sort_letters: model and prompts made in {time.monotonic() - started:.0f} s: {output}", flush=True)


def fingerprint(seed: int, warm_start_steps: int) -> dict[str, str | int]:
    """What the output depends on: the arguments, this recipe's code, and the libraries that train and save."""
    code = hashlib.sha256()
    folder = Path(__file__).parent
    for file in (
        folder / "task.py",
        folder / "warm_start.py",
        folder / "prepare.py",
        folder.parent / "qwen2_tokenizer.py",
    ):
        code.update(file.read_bytes())
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {"seed": seed, "warm_start_steps": warm_start_steps, "code_sha256": code.hexdigest(), **versions}


def make_tokenizer() -> Tokenizer:
    """One token per character: newline, printable ASCII and two special tokens."""
    characters = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
    return character_tokenizer(characters, [PAD, EOS])


def save_rows(rows: list[dict[str, object]], file: Path) -> None:
    """One parquet file."""
    pq.write_table(pa.Table.from_pylist(rows), file)


def _make(folder: Path, seed: int, warm_start_steps: int) -> None:
    from recipes.sort_letters import warm_start  # imports torch, which a folder that is ready does not need

    words = task.split_words(seed)
    save_rows(task.rows_of(words.train, "train"), folder / "train.parquet")
    save_rows(task.rows_of(words.val, "val"), folder / "val.parquet")
    tokenizer = make_tokenizer()
    model = warm_start.train(
        words,
        tokenizer,
        warm_start.WarmStart(num_steps=warm_start_steps),
        eos=tokenizer.token_to_id(EOS),
        pad=tokenizer.token_to_id(PAD),
        seed=seed,
    )
    model.save_pretrained(folder / "model")
    save_tokenizer(tokenizer, folder / "model", named_tokens={"eos_token": EOS, "pad_token": PAD, "unk_token": EOS})


def _stored_fingerprint(output: Path) -> object:
    try:
        return json.loads((output / FINGERPRINT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    main()
