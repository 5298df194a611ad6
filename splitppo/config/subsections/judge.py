"""The configuration section `reward.judge`: a language model behind an OpenAI-compatible API marks responses."""

import re
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from splitppo.config.section import MAY_CHANGE, PositiveInt, Range, ScoredTurns, Section
from splitppo.config_error import config_errors


class JudgeConfig(Section):
    """The scorer `judge`: a language model behind an OpenAI-compatible API marks each response."""

    url: Annotated[str, MAY_CHANGE] = ""
    """The address of the API, e.g. http://127.0.0.1:8000/v1; requests go to <url>/chat/completions. Empty: no judge."""

    model: str = ""
    """The name of the judge's model at that address."""

    prompt_template: Path | None = None
    """A Jinja file with the question to the judge. It can use messages, prompt, response, ground_truth, data_source,
    extra_info, lowest and highest. null: a question that asks for a mark and a reason."""

    conversation: ScoredTurns = "all"
    """The part of a conversation of several turns that is the response in the question: all, with the answers of tools
    and environments; or last_turn, the model's last turn alone."""

    score_pattern: str = r"(?i)score:\s*(-?\d+(?:\.\d+)?)"
    """A regular expression with one group, which finds the mark in the judge's answer. The last match counts."""

    score_range: Range = (0.0, 10.0)
    """The lowest and the highest mark; they become the scores 0 and 1. Any mark outside of the range is a failure."""

    temperature: float = Field(0.0, ge=0.0)
    """The sampling temperature of the judge."""

    max_tokens: PositiveInt = 512
    """The largest number of tokens in the judge's answer."""

    concurrency: Annotated[PositiveInt, MAY_CHANGE] = 32
    """The largest number of requests at the same time."""

    timeout_s: Annotated[float, MAY_CHANGE] = Field(60.0, gt=0.0)
    """The number of seconds that one request may take."""

    retries: Annotated[int, MAY_CHANGE] = Field(4, ge=0)
    """The number of times that a request is repeated after HTTP 408, 425, 429 or 5xx, a time-out, or a lost
    connection."""

    backoff_s: Annotated[float, MAY_CHANGE] = Field(1.0, gt=0.0)
    """The pause before the first repetition, in seconds, more or less by up to half. The pause doubles with each
    further repetition."""

    api_key_env: Annotated[str | None, MAY_CHANGE] = Field(None, pattern=r"^[A-Z_][A-Z0-9_]*$")
    """The name of the environment variable, in capitals, that holds the API key. null: no key is sent."""

    @field_validator("url")
    @classmethod
    def _url_is_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and not (parts.scheme in {"http", "https"} and parts.hostname):
            raise ValueError("expected http://HOST:PORT/v1 or https://HOST/v1")
        if "@" in parts.netloc or parts.query:
            raise ValueError("expected no password and no query in it; api_key_env names the variable with the key")
        return url.rstrip("/")

    def _check_keys(self) -> None:
        """Raises ValueError if url or model is missing, or score_pattern has not one group, which finds the mark."""
        if bool(self.url) is not bool(self.model):
            given, missing = ("url", "model") if self.url else ("model", "url")
            raise ValueError(f"{given} is given, but not {missing}: a judge needs both")
        with config_errors(re.error, before=f"score_pattern: {self.score_pattern!r} is not a regular expression: "):
            num_groups = re.compile(self.score_pattern).groups
        if num_groups != 1:
            raise ValueError(
                f"score_pattern: expected one group, around the mark, found {num_groups} in {self.score_pattern!r}"
            )
