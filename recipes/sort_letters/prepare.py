"""Makes what the quickstart (sorting letters) needs: tokenizer, warm-started model, training and validation prompts.

    python -m recipes.sort_letters.prepare [--output .cache/sort_letters] [--seed 0] [--warm-start-steps 130]

The output depends on the arguments and on the code of this recipe only, and is made once: a fingerprint of both lies
beside it. The output folder appears whole or not at all.
"""

import argparse
import time
from pathlib import Path

from tokenizers import Tokenizer

from recipes.made_once import code_fingerprint, make_once
from recipes.qwen2_tokenizer import character_tokenizer, save_tokenizer
from recipes.rows import write_parquet
from recipes.sort_letters import task

DEFAULT_OUTPUT = Path(".cache/sort_letters")
DEFAULT_SEED = 0
DEFAULT_WARM_START_STEPS = 130
PAD, EOS = "<pad>", "<eos>"


def main() -> None:
    """Parses the command line and prepares the quickstart's model and prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--warm-start-steps", type=int, default=DEFAULT_WARM_START_STEPS)
    prepare(**vars(parser.parse_args()))


def prepare(
    output: Path = DEFAULT_OUTPUT, *, seed: int = DEFAULT_SEED, warm_start_steps: int = DEFAULT_WARM_START_STEPS
) -> None:
    """Makes the quickstart's model/, train.parquet and val.parquet in `output`, unless they are there.

    Several processes may call this function at the same time.
    """
    started = time.monotonic()
    recipe = Path(__file__).parent
    own = (recipe / name for name in ("task.py", "warm_start.py", "prepare.py"))
    code = code_fingerprint(*own, recipe.parent / "qwen2_tokenizer.py", recipe.parent / "rows.py")
    wanted = {"seed": seed, "warm_start_steps": warm_start_steps, **code}
    if make_once(output, wanted, lambda folder: _make(folder, seed, warm_start_steps)):
        print(f"sort_letters: model and prompts made in {time.monotonic() - started:.0f} s: {output}", flush=True)
    else:
        print(f"sort_letters: model and prompts are ready in {output}", flush=True)


def make_tokenizer() -> Tokenizer:
    """Makes a tokenizer with one token per character: newline, printable ASCII and two special tokens."""
    characters = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
    return character_tokenizer(characters, [PAD, EOS])


def _make(folder: Path, seed: int, warm_start_steps: int) -> None:
    from recipes.sort_letters import warm_start  # imports torch, which a folder that is ready does not need

    print("sort_letters: warm-starting the model by supervised steps, about ten seconds", flush=True)
    words = task.split_words(seed)
    write_parquet(task.rows_of(words.train, "train"), folder / "train.parquet")
    write_parquet(task.rows_of(words.val, "val"), folder / "val.parquet")
    tokenizer = make_tokenizer()
    model = warm_start.train(
        words,
        tokenizer,
        warm_start_steps,
        eos=tokenizer.token_to_id(EOS),
        pad=tokenizer.token_to_id(PAD),
        seed=seed,
    )
    model.save_pretrained(folder / "model")
    save_tokenizer(tokenizer, folder / "model", named_tokens={"eos_token": EOS, "pad_token": PAD, "unk_token": EOS})


if __name__ == "__main__":
    main()
