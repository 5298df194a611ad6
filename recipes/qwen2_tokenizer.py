"""Makes small tokenizers with the normaliser, pre-tokeniser and decoder of Qwen2's tokenizer.

transformers loads the tokenizer of every Qwen2 model with those parts, whatever tokenizer.json says. A recipe's model
gets the same ids from transformers and from `tokenizers` only if its tokenizer has these parts too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# The characters of the recipes whose tokens are characters: newline and printable ASCII.
PRINTABLE = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
_PRETOKENIZE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def character_tokenizer(
    characters: Iterable[str], special_tokens: Sequence[str], words: Sequence[str] = ()
) -> Tokenizer:
    """Makes a tokenizer with one token per ASCII character: a byte-level BPE without merges.

    Characters that are not listed are dropped. Special tokens get the first ids, in order. Each of `words` is one token
    wherever it stands in a text; where several begin, the longest counts.
    """
    # Byte-level BPE writes spaces and control characters of ASCII 256 code points higher.
    symbols = [chr(ord(character) + 256) if character <= " " else character for character in characters]
    vocabulary = {token: index for index, token in enumerate([*special_tokens, *symbols])}
    tokenizer = _assemble(models.BPE(vocab=vocabulary, merges=[]), special_tokens)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, special_tokens: Sequence[str]) -> Tokenizer:
    """Trains a byte-level BPE tokenizer on `texts`; the tokenizer encodes any text.

    Special tokens get the first ids, in order.
    """
    tokenizer = _assemble(models.BPE(), special_tokens)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, *, named_tokens: Mapping[str, str], chat_template: str | None = None
) -> None:
    """Writes tokenizer.json and tokenizer_config.json of a Hugging Face tokenizer into a folder.

    Args:
        tokenizer: the tokenizer to save.
        folder: made if it is missing.
        named_tokens: e.g. {"eos_token": "<eos>"}.
        chat_template: Jinja text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "clean_up_tokenization_spaces": False, **named_tokens}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _assemble(model: models.Model, special_tokens: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRETOKENIZE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer
