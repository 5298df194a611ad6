"""Bearer tokens for gRPC calls: reads them, adds one to calls, and checks those of callers."""

import hmac
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from splitppo.config_error import ConfigError, config_errors
from splitppo.rpc.secret_files import read_file

if TYPE_CHECKING:  # probes of health start often, and do without the configuration
    from splitppo.config.subsections.security import SecurityConfig

# The variable by which the local launcher gives the token of its run to the groups, if the configuration names none.
RUN_TOKEN_VARIABLE = "SPLITPPO_RUN_TOKEN"  # noqa: S105 - a name

# A token can travel in a header, and is too long to be guessed.
_TOKEN = re.compile(r"[\x21-\x7e]{16,512}")
_HEADER = "authorization"
_SCHEME = "Bearer "


@dataclass(frozen=True, repr=False)  # shows no secret
class BearerTokens:
    """The bearer tokens of a process, at least one.

    The process sends the first token with its own calls, and accepts any of the tokens from callers.
    """

    accepted: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, source: str) -> "BearerTokens":
        """Parses bearer tokens, one on each line of `text`; `source` names the file or variable in errors.

        Raises:
            ConfigError: a token cannot be used, or the text has no token; the message does not repeat the text.
        """
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            raise ConfigError(f"{source} is empty, expected a token of 16 to 512 characters on each line")
        for number, line in enumerate(lines, 1):
            if not _TOKEN.fullmatch(line):
                raise ConfigError(
                    f"{source}: token {number} must be 16 to 512 printable ASCII characters without spaces, it has"
                    f" {len(line)} characters; python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"
                )
        return cls(tuple(lines))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((_HEADER, f"{_SCHEME}{self.accepted[0]}"),)

    def why_refused(self, metadata: Iterable[tuple[str, Any]]) -> str:
        """Returns what is wrong with the bearer token of a call (not the token itself); "" if the token is accepted."""
        shown = [value for key, value in metadata if key == _HEADER]
        if not shown:
            return "no token"
        if len(shown) > 1:
            return "more than one token"
        value = shown[0] if isinstance(shown[0], bytes) else str(shown[0]).encode(errors="replace")
        # All tokens are compared, each in constant time: the duration tells nothing about a token.
        matches = [hmac.compare_digest(value, f"{_SCHEME}{token}".encode()) for token in self.accepted]
        return "" if any(matches) else "wrong token"


def load_tokens(config: "SecurityConfig", environment: Mapping[str, str] = os.environ) -> BearerTokens | None:
    """Reads the bearer tokens from the file or variable of the configuration, else from the local launcher's variable.

    Returns None if there are no tokens.

    Raises:
        ConfigError: the file cannot be read, the variable is not set, or it holds no usable token.
    """
    if config.token_file is not None:
        source = f"services.security.token_file: {config.token_file}"
        with config_errors(UnicodeDecodeError, instead=f"{source} is not a text file"):
            text = read_file(config.token_file, "services.security.token_file", is_secret=True).decode()
        return BearerTokens.parse(text, source)
    variable = config.token_env or RUN_TOKEN_VARIABLE
    if config.token_env is None and not environment.get(variable):
        return None
    if variable not in environment:
        raise ConfigError(f"services.security.token_env: environment variable {variable} is not set")
    return BearerTokens.parse(environment[variable], f"environment variable {variable}")
