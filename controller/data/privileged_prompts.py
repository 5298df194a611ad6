"""Makes the text that the value model alone reads before the prompt of a response (`critic.privileged_prompt`).

The text becomes tokens of its own, the column `privileged_tokens`, which is sent to the critic's group and to no other.
It may come from a data file or an environment, so it gives no special token. Errors never have a value of a field.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from controller.data.environment_text import EnvironmentText, Tokens, Write, clean, plain_text
from controller.data.prompt_files import PromptRow
from controller.data.prompts import MAX_CHARACTERS
from controller.data.row_values import is_missing
from controller.data.tokenizer import Tokenizer
from splitppo.batch import Batch, Column
from splitppo.columns import spec_of
from splitppo.config import Config, CriticConfig
from splitppo.config_error import config_errors
from splitppo.text_fields import field_names, field_text, filled

PRIVILEGED = "privileged_tokens"
_KEPT_TEXTS = 4096  # all samples of a prompt have the same text
# The values that an environment has named for the critic, by name; None: the conversation was lost.
OfEnvironment = Mapping[str, str] | None


class PrivilegedPrompts:
    """Makes the privileged texts of a run's rows and their tokens.

    Attributes:
        tokenizer: that of the run, which the critic shares.
        names: the fields of the texts.
    """

    def __init__(self, template: str, max_length: int, tokenizer: Tokenizer) -> None:
        """Prepares texts of at most `max_length` tokens from a template of `critic.privileged_prompt`."""
        self.tokenizer = tokenizer
        self.names = field_names(template)
        self._template = template
        self._max_length = max_length
        self._encoder = EnvironmentText(tokenizer)
        self._plain = self._encoder.encode(plain_text(""))
        self._tokens = lru_cache(_KEPT_TEXTS)(self._encode)

    def text(self, row: PromptRow, of_environment: Mapping[str, str]) -> str:
        """Returns the text of a row; its fields are those of the row, and what its environment has named.

        Raises:
            ValueError: a field is missing, is in both, or is neither a text nor a number.
        """
        of_row = row.fields
        values = {}
        for name in self.names:
            if name in of_environment and not is_missing(of_row.get(name)):
                raise ValueError(
                    f"the field {name!r} is in the row and in privileged() of its environment: expected one"
                )
            value = of_environment.get(name, of_row.get(name))
            if is_missing(value):
                raise ValueError(f"there is no field {name!r}: {_known(of_row, of_environment)}")
            try:
                values[name] = field_text(value)
            except ValueError as error:
                raise ValueError(f"the field {name!r}: {error}") from error
        return clean(filled(self._template, values))

    def tokens(self, row: PromptRow, of_environment: OfEnvironment) -> Tokens:
        """Returns the tokens of a row's text; none for a lost conversation, from which nothing is learned.

        Raises:
            ValueError: as in `text`, or it is too long.
        """
        if of_environment is None:
            return np.empty(0, spec_of(PRIVILEGED).dtype)
        text = self.text(row, of_environment)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it has {len(text):,} characters, more than {MAX_CHARACTERS:,}")
        tokens = self._tokens(text)
        if len(tokens) > self._max_length:
            limit = f"critic.max_privileged_length ({self._max_length})"
            raise ValueError(f"it has {len(tokens)} tokens, more than {limit}")
        return tokens

    def column(self, rows: Sequence[PromptRow], of_environments: Sequence[OfEnvironment]) -> Batch:
        """Returns the column `privileged_tokens` of responses, each with its row and what its environment has named.

        Raises:
            ValueError: as in `tokens`.
        """
        tokens = [self.tokens(row, named) for row, named in zip(rows, of_environments, strict=True)]
        return Batch(len(rows), {PRIVILEGED: Column.from_rows(tokens, spec_of(PRIVILEGED).dtype)})

    def _encode(self, text: str) -> Tokens:
        def encode(write: Write) -> Tokens:
            return self._encoder.encode(write(text))

        return self._encoder.harmless(encode, self._plain)[1]


def privileged_prompts(config: CriticConfig, tokenizer: Tokenizer) -> PrivilegedPrompts | None:
    """Makes what makes privileged texts; None if the critic reads none."""
    if config.privileged_prompt is None:
        return None
    return PrivilegedPrompts(config.privileged_prompt, config.max_privileged_length, tokenizer)


def check_privileged(config: Config, tokenizer: Tokenizer, rows: Sequence[PromptRow]) -> None:
    """Checks that each training row has its privileged text, and that none is too long.

    What an environment names is not known yet: of a row that may get a field from it, the text is checked if the row
    has all fields itself. `Talk` checks the text of each conversation that begins.

    Raises:
        ConfigError: a row has no such text; the sentence names its place.
    """
    texts = privileged_prompts(config.critic, tokenizer)
    if texts is None:
        return
    for row in rows:
        environment = config.rollout.multi_turn.environment_of(row.data_source)
        may_name_more = environment is not None and environment.path is not None
        if may_name_more and not {*texts.names} <= row.fields.keys():
            continue
        with config_errors(ValueError, before=f"{row.place}: critic.privileged_prompt: "):
            texts.tokens(row, {})


def _known(of_row: Mapping[str, object], of_environment: Mapping[str, str]) -> str:
    """Returns the names of the fields that there are, in words."""
    own = ", ".join(name for name, value in of_row.items() if not is_missing(value))
    named = ", ".join(of_environment)
    return f"the row has {own}" + (f", its environment names {named}" if named else "")
