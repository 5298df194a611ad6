"""Text to token ids and back, as the model's Hugging Face folder defines it.

Uses the `tokenizers` library and jinja2 directly: the controller needs neither transformers nor torch. Rendering and
encoding give the same ids as `AutoTokenizer.apply_chat_template`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import numpy as np
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray

from splitppo.config import ConfigError

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages

_HUB_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)
_NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ENCODE_CHUNK = 4096


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with its chat template.

    Attributes:
        backend: the `tokenizers` object; never truncates, never pads.
        special_tokens: named special tokens, e.g. {"eos_token": "<|im_end|>"}; the template sees them.
        eos_token_ids: every id that ends a response: of generation_config.json first, then of config.json, then the
            tokenizer's own eos_token. Empty if the model has none.
        chat_template: None for a base model without one.
        chat_template_kwargs: further variables of the template.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    chat_template: jinja2.Template | None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included (a model's embedding may be padded to more)."""
        return self.backend.get_vocab_size()

    def render(self, prompt: Prompt) -> str:
        """The text that the model sees: messages through the chat template, with the generation prompt.

        A plain string is returned as it is; so are the contents of messages, one per line, where the model has no
        chat template.

        Raises:
            ValueError: no messages, a message without role and content, or a refusal by the template.
        """
        if isinstance(prompt, str):
            return prompt
        _check_messages(prompt)
        if self.chat_template is None:
            return "\n".join(_plain_content(message) for message in prompt)
        variables = {**self.special_tokens, **self.chat_template_kwargs}
        try:
            return self.chat_template.render(
                **{"messages": prompt, "tools": None, "documents": None, "add_generation_prompt": True, **variables}
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def encode(self, prompt: Prompt) -> NDArray[np.int32]:
        """Token ids [P] of one prompt. Raises ValueError as `render` does."""
        return self.encode_rendered([self.render(prompt)], [self.applies_template(prompt)])[0]

    def applies_template(self, prompt: Prompt) -> bool:
        """Whether the rendered prompt has its special tokens already."""
        return self.chat_template is not None and not isinstance(prompt, str)

    def encode_rendered(self, texts: Sequence[str], templated: Sequence[bool]) -> list[NDArray[np.int32]]:
        """Token ids of rendered prompts; the tokenizer adds its special tokens only where no template did."""
        ids: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * len(texts)
        for with_template in (False, True):
            chosen = [index for index, value in enumerate(templated) if value is with_template]
            for start in range(0, len(chosen), _ENCODE_CHUNK):
                part = chosen[start : start + _ENCODE_CHUNK]
                encodings = self.backend.encode_batch_fast(
                    [texts[index] for index in part], add_special_tokens=not with_template
                )
                for index, encoding in zip(part, encodings, strict=True):
                    ids[index] = np.asarray(encoding.ids, dtype=np.int32)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens)

    def decode_batch(self, rows: Sequence[NDArray[Any]], *, skip_special_tokens: bool = True) -> list[str]:
        """The text of each row of token ids."""
        return self.backend.decode_batch([row.tolist() for row in rows], skip_special_tokens=skip_special_tokens)


def load_tokenizer(
    source: str, *, chat_template: Path | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
) -> Tokenizer:
    """Loads the tokenizer of a local model folder or a hub name.

    Args:
        source: folder with a `tokenizer.json`, or a name on the Hugging Face hub (only the small files are fetched).
        chat_template: Jinja file that replaces the model's own template.
        chat_template_kwargs: further variables for the template.

    Raises:
        ConfigError: folder, tokenizer.json or template missing or unreadable.
    """
    folder = model_folder(source, "data.tokenizer, by default actor.model")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json; save the tokenizer there in the fast format"
            " (AutoTokenizer.from_pretrained(...).save_pretrained(...)) or set data.tokenizer to a model that has one"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{file} is not a readable tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(folder, config)
    _mark_special(backend, special_tokens)
    template = _template_text(folder, config, chat_template)
    return Tokenizer(
        backend,
        special_tokens,
        _eos_token_ids(folder, backend, special_tokens),
        None if template is None else _compile(template, str(chat_template or folder)),
        dict(chat_template_kwargs or {}),
    )


def model_folder(source: str, key: str) -> Path:
    """The folder that `source`, the value of `key`, names; the small files of a hub name are fetched.

    Raises:
        ConfigError: there is no such folder, and no such model on the hub.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ConfigError(f"model folder {source} does not exist (key {key})")
    import huggingface_hub  # slow to import, and a local folder does not need it

    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:  # HTTP errors of the hub are OSErrors
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{source!r} is neither a local folder nor a model that the Hugging Face hub gives us (key {key}): {reason}"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty if the file is not there. ConfigError if the file is something else."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens; tokenizer_config.json wins over the older special_tokens_map.json."""
    merged = {**read_json(folder / "special_tokens_map.json"), **config}
    tokens = {}
    for name in _NAMED_SPECIAL_TOKENS:
        value = merged.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _mark_special(backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
    """Makes named special tokens special for encoding and decoding, where tokenizer.json does not say so."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [token for token in special_tokens.values() if token not in known]
    backend.add_special_tokens([token for token in missing if backend.token_to_id(token) is not None])


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> tuple[int, ...]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    if "eos_token" in special_tokens:
        own = backend.token_to_id(special_tokens["eos_token"])
        ids += [] if own is None else [own]
    return tuple(dict.fromkeys(ids))


def _template_text(folder: Path, config: Mapping[str, Any], override: Path | None) -> str | None:
    """The chat template: the override, else chat_template.jinja, else tokenizer_config.json's."""
    if override is not None:
        if not override.is_file():
            raise ConfigError(f"data.chat_template: no such file {override}")
        return override.read_text(encoding="utf-8")
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if not isinstance(template, list):
        return template
    named = {entry["name"]: str(entry["template"]) for entry in template}
    if "default" not in named:
        raise ConfigError(
            f"{folder}: tokenizer_config.json has the chat templates {', '.join(named)}, but no default one;"
            " set data.chat_template to a file"
        )
    return named["default"]


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks assistant text for training; rendered as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Leaves the body in place of the block, in a scope of its own."""
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _compile(template: str, source: str) -> jinja2.Template:
    """Compiles in the sandbox, with the settings, filters and functions that transformers gives to chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[[str], str]] = {"raise_exception": _raise_exception, "strftime_now": time.strftime}
    environment.globals.update(functions)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{source}: the chat template is not valid Jinja: {error}") from error


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML; chat templates expect plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _check_messages(messages: Messages) -> None:
    if not messages:
        raise ValueError("expected at least one message, got none")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise ValueError(f"expected messages with 'role' and 'content', got {message!r}")


def _plain_content(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if not isinstance(content, str):
        raise ValueError(f"the model has no chat template, so a message's content must be text, got {content!r}")
    return content
