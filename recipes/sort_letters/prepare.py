"""Makes what the quickstart (sorting letters) needs: tokenizer, warm-started model, training and validation prompts.

    python -m recipes.sort_letters.prepare [--output .cache/sort_letters] [--seed 0] [--warm-start-steps 130]

The output depends on the arguments and on the code of this recipe only, and is made once: a fingerprint of both lies
beside it. The output folder appears whole or not at all.
"""

from pathlib import Path

from tokenizers import Tokenizer

from recipes.qwen2_tokenizer import PRINTABLE, character_tokenizer, save_tokenizer
from recipes.rows import write_parquet
from recipes.sort_letters import task
from recipes.warm_started import WarmStarted

PAD = "<pad>"
EOS = "<eos>"


def make_tokenizer() -> Tokenizer:
    """Makes a tokenizer with one token per character: newline, printable ASCII and two special tokens."""
    return character_tokenizer(PRINTABLE, [PAD, EOS])


def make(folder: Path, seed: int, warm_start_steps: int, *, hidden_size: int = 128) -> None:
    """Fills a folder with the files of the recipe; a model of another width is a student of benchmarks/curves.py."""
    from recipes import warm_start  # imports torch, which a folder that is ready does not need
    from recipes.sort_letters.warm_start import examples

    print("sort_letters: warm-starting the model by supervised steps, about ten seconds", flush=True)
    words = task.split_words(seed)
    write_parquet(task.rows_of(words.train, "train"), folder / "train.parquet")
    write_parquet(task.rows_of(words.val, "val"), folder / "val.parquet")
    tokenizer = make_tokenizer()
    config = warm_start.small_qwen2(tokenizer, eos=EOS, pad=PAD, max_position_embeddings=64, hidden_size=hidden_size)
    demonstrations = examples(words, tokenizer, eos=config.eos_token_id, seed=seed)
    model = warm_start.train(config, demonstrations, warm_start_steps, seed=seed)
    model.save_pretrained(folder / "model")
    save_tokenizer(tokenizer, folder / "model", named_tokens={"eos_token": EOS, "pad_token": PAD, "unk_token": EOS})


RECIPE = WarmStarted("sort_letters", code=("task.py", "warm_start.py", "prepare.py"), num_steps=130, make=make)
prepare = RECIPE.prepare

if __name__ == "__main__":
    RECIPE.main(__doc__)
