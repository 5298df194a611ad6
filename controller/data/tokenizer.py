"""Text to token ids and back, as the model's Hugging Face folder defines it.

Uses the `tokenizers` library directly: the controller needs neither transformers nor torch. Rendering and encoding
give the same ids as `AutoTokenizer.apply_chat_template`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from controller.data.chat_template import ChatTemplate, Prompt, load_chat_template
from controller.data.model_folder import model_folder, read_json
from splitppo.config import ConfigError

_NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ENCODE_CHUNK = 4096  # prompts whose encodings are in memory at a time


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with its chat template.

    Attributes:
        backend: the `tokenizers` object; never truncates, never pads.
        eos_token_ids: every id that ends a response: of generation_config.json first, then of config.json, then the
            tokenizer's own eos_token. Empty if the model has none.
        chat_template: renders messages.
    """

    backend: tokenizers.Tokenizer
    eos_token_ids: tuple[int, ...] = ()
    chat_template: ChatTemplate = field(default_factory=ChatTemplate)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included (a model's embedding may be padded to more)."""
        return self.backend.get_vocab_size()

    def encode_batch(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of prompts that were rendered to `texts`; adds special tokens only where no template did."""
        ids: list[NDArray[np.int32]] = []
        pairs = zip(prompts, texts, strict=True)
        for is_templated, group in groupby(pairs, lambda pair: self.chat_template.applies_to(pair[0])):
            alike = [text for _, text in group]
            for start in range(0, len(alike), _ENCODE_CHUNK):
                chunk = alike[start : start + _ENCODE_CHUNK]
                encodings = self.backend.encode_batch_fast(chunk, add_special_tokens=not is_templated)
                ids += [np.asarray(encoding.ids, np.int32) for encoding in encodings]
        return ids

    def decode_batch(self, rows: Sequence[NDArray[Any]]) -> list[str]:
        """The text of each row of token ids, without special tokens."""
        return self.backend.decode_batch([row.tolist() for row in rows])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens, without special tokens."""
        return self.backend.decode(ids)

    def pieces(self, ids: Sequence[int]) -> Sequence[str]:
        """The text of each token by itself, which need not be its part of the text of all."""
        pieces = self._pieces
        if new := [one for one in set(ids) if one not in pieces]:
            pieces.update(zip(new, self.backend.decode_batch([[one] for one in new]), strict=True))
        return [pieces[one] for one in ids]

    @cached_property
    def _pieces(self) -> dict[int, str]:
        """The texts of single tokens that were asked for so far."""
        return {}


def load_tokenizer(
    source: str,
    *,
    chat_template: Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    section: str = "data",
    model_key: str = "actor.model",
) -> Tokenizer:
    """Loads the tokenizer of a local model folder or a hub name, with its own chat template or that of a Jinja file.

    `section` and `model_key` are what errors name: whose keys tokenizer and chat_template are, and tokenizer's default.
    Raises ConfigError: folder, tokenizer.json or template missing or unreadable.
    """
    folder = model_folder(source, f"{section}.tokenizer, by default {model_key}")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json; save the tokenizer there in the fast format"
            f" (AutoTokenizer.from_pretrained(...).save_pretrained(...)) or set {section}.tokenizer to a model that has"
            " one"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{file} is not a readable tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens({**read_json(folder / "special_tokens_map.json"), **config})
    # Special for encoding and decoding, also where tokenizer.json does not say so.
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [token for token in special_tokens.values() if token not in known and backend.token_to_id(token) is not None]
    )
    return Tokenizer(
        backend,
        _eos_token_ids(folder, backend, special_tokens.get("eos_token")),
        load_chat_template(
            folder, config, chat_template, {**special_tokens, **(chat_template_kwargs or {})}, section=section
        ),
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens, each given as text or as an object with its content."""
    values = {name: config.get(name) for name in _NAMED_SPECIAL_TOKENS}
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    own = None if eos_token is None else backend.token_to_id(eos_token)
    return tuple(dict.fromkeys(ids if own is None else [*ids, own]))
