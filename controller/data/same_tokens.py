"""Compares the tokens of models: a critic reads, and a teacher rates, the very token ids that the policy samples."""

from collections.abc import Iterable, Mapping
from operator import itemgetter

from controller.data.tokenizer import Tokenizer, read_token_ids
from controller.models.folder import model_folder, read_description
from splitppo.config import Config, ConfigError


def check_critic_tokens(config: Config, tokenizer: Tokenizer) -> None:
    """Checks that the critic can read every token of the policy's tokenizer, and reads it as the same token.

    The critic may be any model with a row in its embedding for each token id. If its folder has a tokenizer, no token
    of the policy may have another id there, and no id another token; the critic may lack tokens, and have more. A
    critic that begins as the policy reads what the policy samples, also where `data.tokenizer` is another one.

    Raises:
        ConfigError: it cannot; or its files cannot be read.
    """
    if not config.uses_critic or config.services.launch == "external":
        return
    key = "critic.model"
    model = config.critic.model
    sizes = {**read_description(model, key), **config.critic.override_config}
    tokenizer.check_fits(sizes.get("vocab_size"), key="data.tokenizer", model_key=key)
    folder = model_folder(model, key)
    reads_as_policy = model in (config.actor.model, config.data.tokenizer)
    if reads_as_policy or not (folder / "tokenizer.json").is_file():
        return
    own = tokenizer.backend.get_vocab()
    theirs = read_token_ids(folder)
    tokens_there = {number: token for token, number in theirs.items()}
    different = [
        (token, number)
        for token, number in own.items()
        if theirs.get(token, number) != number or tokens_there.get(number, token) != token
    ]
    if different:
        token, number = min(different, key=itemgetter(1))
        other = "" if token in theirs else f", where {tokens_there[number]!r} has id {number}"
        raise other_tokenizer(key, folder, [(token, number)], own, theirs, other)


def other_tokenizer(
    key: str,
    folder: object,
    different: Iterable[tuple[str, int]],
    own: Mapping[str, int],
    theirs: Mapping[str, int],
    more: str = "",
) -> ConfigError:
    """Makes the error for a model whose tokenizer has other tokens: it names that with the lowest id.

    `different` are tokens with an id that they have in one of the two vocabularies, `own` and `theirs`.
    """
    token, _ = min(different, key=itemgetter(1))
    return ConfigError(
        f"{key}: {folder} has another tokenizer than the policy (data.tokenizer): token {token!r} has"
        f" {_id_of(token, theirs)} there{more}, and {_id_of(token, own)} here"
    )


def _id_of(token: str, vocabulary: Mapping[str, int]) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "no id"
