"""Checks that the teachers of a run can teach its rows: each row has one, and they have the policy's tokens."""

import logging
from collections.abc import Set
from pathlib import Path

from controller.data.same_tokens import other_tokenizer
from controller.data.tokenizer import Tokenizer, load_tokenizer
from controller.models.folder import model_folder
from splitppo.config import Config, ConfigError

log = logging.getLogger(__name__)


def check_teachers(config: Config, tokenizer: Tokenizer, data_sources: Set[str]) -> None:
    """Checks that each row has a teacher, each teacher rows, and all the tokenizer of the policy, token by token.

    Teachers that groups started elsewhere have in folders of their own are not compared.

    Raises:
        ConfigError: a data source has no teacher or no rows, a tokenizer cannot be read, or a token has another id.
    """
    teacher = config.teacher
    if not teacher.folders:
        return
    if without := sorted(source for source in data_sources if teacher.number_of(source) is None):
        raise ConfigError(
            f"teacher.models: data_source {without[0]!r} has no teacher: add it, or set teacher.model, which teaches"
            " all others"
        )
    if unknown := sorted(teacher.models.keys() - data_sources):
        sources = ", ".join(sorted(data_sources))
        raise ConfigError(f"teacher.models: no training prompt has data_source {unknown[0]!r}; they have {sources}")
    if teacher.signal == "top_k" and teacher.top_k > tokenizer.vocab_size:
        raise ConfigError(f"teacher.top_k ({teacher.top_k}) must not exceed the {tokenizer.vocab_size} tokens")
    own = tokenizer.backend.get_vocab()
    for folder in teacher.folders:
        key = teacher.key_of(folder)
        if config.services.launch == "external" and not Path(folder).expanduser().is_dir():
            log.warning("%s: %s is not on this machine, its tokenizer is not compared", key, folder)
            continue
        if not (model_folder(folder, key) / "tokenizer.json").is_file():
            raise ConfigError(f"{key}: {folder} has no tokenizer.json: expected the tokenizer of the policy")
        theirs = load_tokenizer(folder, section="teacher", model_key=key).backend.get_vocab()
        if different := own.items() ^ theirs.items():
            raise other_tokenizer(key, folder, different, own, theirs)
