"""Bearer tokens: where they are read, how a caller shows one, how a server tells whether it is right."""

from __future__ import annotations

import hmac
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from splitppo.config import ConfigError, SecurityConfig
from splitppo.rpc.secret_files import warn_if_others_can_read

# How the local launcher hands the token of its run to the groups; read where the configuration names no token.
RUN_TOKEN_VARIABLE = "SPLITPPO_RUN_TOKEN"  # noqa: S105 - a name

# What can travel in a header, and is long enough not to be guessed.
_TOKEN = re.compile(r"[\x21-\x7e]{16,512}")
_HEADER = "authorization"
_SCHEME = "Bearer "


@dataclass(frozen=True)
class Tokens:
    """The tokens of a process; never empty. The first is shown to others, any of them is taken from others."""

    accepted: tuple[str, ...]

    def __repr__(self) -> str:
        return "Tokens(...)"

    @classmethod
    def parse(cls, text: str, source: str) -> Tokens:
        """One token per line.

        Raises:
            ConfigError: none, or one that is too short, too long or not printable ASCII; its text is not repeated.
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
        """What a caller sends with every call."""
        return ((_HEADER, f"{_SCHEME}{self.accepted[0]}"),)

    def why_refused(self, metadata: Iterable[tuple[str, Any]]) -> str:
        """What is wrong with the token that a call carries; empty if nothing is. Never repeats it."""
        shown = [_as_bytes(value) for key, value in metadata if key == _HEADER]
        if not shown:
            return "no token"
        if len(shown) > 1:
            return "more than one token"
        # All are compared, each in constant time: how long it takes says nothing of a token.
        matches = [hmac.compare_digest(shown[0], f"{_SCHEME}{token}".encode()) for token in self.accepted]
        return "" if any(matches) else "wrong token"


def new_token() -> str:
    """A random one."""
    return secrets.token_urlsafe(32)


def load_tokens(config: SecurityConfig, environment: Mapping[str, str] = os.environ) -> Tokens | None:
    """The tokens that the configuration names, else those of the launcher that started this process, else None.

    Raises:
        ConfigError: the file cannot be read, the variable is not set, or there is no usable token in it.
    """
    if config.token_file is not None:
        source = f"services.security.token_file: {config.token_file}"
        try:
            text = config.token_file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"services.security.token_file: cannot read {config.token_file}: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{source} is not a text file") from error
        warn_if_others_can_read(config.token_file, "token_file")
        return Tokens.parse(text, source)
    if config.token_env is not None:
        if config.token_env not in environment:
            raise ConfigError(f"services.security.token_env: environment variable {config.token_env} is not set")
        return Tokens.parse(environment[config.token_env], f"environment variable {config.token_env}")
    if handed_down := environment.get(RUN_TOKEN_VARIABLE):
        return Tokens.parse(handed_down, f"environment variable {RUN_TOKEN_VARIABLE}")
    return None


def _as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")
