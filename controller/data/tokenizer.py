"""Converts text to token ids and back, as defined by a model's Hugging Face folder.

The `tokenizers` library does the work: the controller needs neither transformers nor torch. Rendering and encoding give
the same ids as `AutoTokenizer.apply_chat_template`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from controller.data.chat_template import ChatTemplate, Prompt, load_chat_template
from controller.models.folder import model_folder
from splitppo.config import ConfigError
from splitppo.config_error import config_errors
from splitppo.model_folder import GENERATION_CONFIG, eos_token_ids, read_json

_NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# At most so many encodings are in memory, and, but for one text that is longer, of so many characters.
_ENCODE_CHUNK = 4096
_CHUNK_CHARACTERS = 2**20


@dataclass(frozen=True)
class Tokenizer:
    """Converts between text and token ids for one model, and has the model's chat template.

    Attributes:
        backend: the `tokenizers` object, without truncation and padding.
        eos_token_ids: all ids that end a response: those of generation_config.json, then of config.json, then the
            tokenizer's eos_token. Empty if the model has none.
        chat_template: renders messages.
    """

    backend: tokenizers.Tokenizer
    eos_token_ids: tuple[int, ...] = ()
    chat_template: ChatTemplate = field(default_factory=ChatTemplate)
    _pieces: dict[int, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def vocab_size(self) -> int:
        """The number of token ids, added tokens included; a model's embedding may have more rows."""
        return self.backend.get_vocab_size()

    @cached_property
    def largest_id(self) -> int:
        """The largest token id, of added tokens, too; ids may have gaps."""
        return max(self.backend.get_vocab().values(), default=-1)

    def check_fits(self, vocab_size: Any, *, key: str, model_key: str) -> None:
        """Checks that the model has a row for each token, if the size of its vocabulary is known; else ConfigError."""
        if isinstance(vocab_size, int) and self.largest_id >= vocab_size:
            tokens = f"the tokenizer ({key}) has {self.vocab_size} tokens, of ids up to {self.largest_id}"
            raise ConfigError(f"{tokens}, {model_key} a vocabulary of {vocab_size}")

    def encode_batch(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Converts prompts, already rendered to `texts`, into token ids.

        Special tokens are added only to prompts that no template has rendered.
        """
        ids: list[NDArray[np.int32]] = []
        pairs = zip(prompts, texts, strict=True)
        for is_templated, group in groupby(pairs, lambda pair: self.chat_template.applies_to(pair[0])):
            for chunk in _chunks(text for _, text in group):
                encodings = self.backend.encode_batch_fast(chunk, add_special_tokens=not is_templated)
                ids += [np.asarray(encoding.ids, np.int32) for encoding in encodings]
        return ids

    def decode_batch(self, rows: Sequence[NDArray[Any]]) -> list[str]:
        """Converts each row of token ids into text, without special tokens."""
        return self.backend.decode_batch([row.tolist() for row in rows])

    def decode(self, ids: Sequence[int]) -> str:
        """Converts token ids into text, without special tokens."""
        return self.backend.decode(ids)

    def pieces(self, ids: Sequence[int]) -> Sequence[str]:
        """Converts each token id into text by itself; together these texts need not be the text of all tokens."""
        if new := list(set(ids) - self._pieces.keys()):
            self._pieces.update(zip(new, self.backend.decode_batch([[token] for token in new]), strict=True))
        return [self._pieces[token] for token in ids]


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Divides texts into lists that are encoded at a time."""
    chunk: list[str] = []
    num_characters = 0
    for text in texts:
        if chunk and (len(chunk) == _ENCODE_CHUNK or num_characters + len(text) > _CHUNK_CHARACTERS):
            yield chunk
            chunk = []
            num_characters = 0
        chunk.append(text)
        num_characters += len(text)
    if chunk:
        yield chunk


def load_tokenizer(
    source: str,
    *,
    chat_template: Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    section: str = "data",
    model_key: str = "actor.model",
) -> Tokenizer:
    """Loads the tokenizer and chat template of a local model folder or of a model on the Hugging Face hub.

    Args:
        source: the folder or the name on the hub.
        chat_template: a Jinja file; None for the model's own template.
        chat_template_kwargs: further variables of the template.
        section: the section of the keys tokenizer and chat_template, for errors.
        model_key: the key that is the default of tokenizer, for errors.

    Raises:
        ConfigError: the folder, tokenizer.json or the template is missing or unreadable.
    """
    folder = model_folder(source, f"{section}.tokenizer, by default {model_key}")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json; save the tokenizer there in the fast format"
            f" (AutoTokenizer.from_pretrained(...).save_pretrained(...)) or set {section}.tokenizer to a model that has"
            " one"
        )
    backend = _read_backend(file)
    backend.no_truncation()
    backend.no_padding()
    config = read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens({**read_json(folder / "special_tokens_map.json"), **config})
    # Encoding and decoding treat them as special, also if tokenizer.json does not.
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [token for token in special_tokens.values() if token not in added and backend.token_to_id(token) is not None]
    )
    variables = {**special_tokens, **(chat_template_kwargs or {})}
    template = load_chat_template(folder, config, chat_template, variables, section=section)
    return Tokenizer(backend, _eos_token_ids(folder, backend, special_tokens.get("eos_token")), template)


def read_token_ids(folder: Path) -> dict[str, int]:
    """Reads the id of each token of a folder's tokenizer.json, added tokens included; ConfigError if unreadable."""
    return _read_backend(folder / "tokenizer.json").get_vocab()


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    with config_errors(Exception, before=f"{file} is not a readable tokenizer: "):  # the library raises no other kind
        return tokenizers.Tokenizer.from_file(str(file))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the named special tokens (such as eos_token) of a tokenizer's JSON file, each as text.

    A file gives each token as text or as an object with its content.
    """
    values = {name: config.get(name) for name in _NAMED_SPECIAL_TOKENS}
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    ids = [*eos_token_ids(folder / GENERATION_CONFIG), *eos_token_ids(folder / "config.json")]
    own = None if eos_token is None else backend.token_to_id(eos_token)
    return tuple(dict.fromkeys(ids if own is None else [*ids, own]))
