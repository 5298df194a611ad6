"""The section `reward.judge`: a language model behind an OpenAI-compatible API, which marks responses."""

import re
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from splitppo.config.section import MAY_CHANGE, PositiveInt, Range, Section


class JudgeConfig(Section):
    """The scorer `judge`: a language model behind an OpenAI-compatible API marks each response."""

    url: Annotated[str, MAY_CHANGE] = ""
    """where <url>/chat/completions answers, e.g. http://127.0.0.1:8000/v1; empty: none"""

    model: str = ""
    """the model's name there"""

    prompt_template: Path | None = None
    """Jinja file with what the judge is asked: sees messages, prompt, response, ground_truth, data_source, extra_info,
    lowest, highest; default: a mark and a reason are asked for"""

    score_pattern: str = r"(?i)score:\s*(-?\d+(?:\.\d+)?)"
    """regular expression; the last match's group is the mark"""

    score_range: Range = (0.0, 10.0)
    """lowest and highest mark, which are the scores 0 and 1; any other mark is a failure"""

    temperature: float = Field(0.0, ge=0.0)
    """of the judge's sampling"""

    max_tokens: PositiveInt = 512
    """tokens of its answer"""

    concurrency: Annotated[PositiveInt, MAY_CHANGE] = 32
    """requests at the same time"""

    timeout_s: Annotated[float, MAY_CHANGE] = Field(60.0, gt=0.0)
    """seconds per request"""

    retries: Annotated[int, MAY_CHANGE] = Field(4, ge=0)
    """further requests after HTTP 408, 429 or 5xx, a time-out, a lost connection"""

    backoff_s: Annotated[float, MAY_CHANGE] = Field(1.0, gt=0.0)
    """seconds before the first of them, give or take half; twice as many before each next one"""

    api_key_env: Annotated[str | None, MAY_CHANGE] = Field(None, pattern=r"^[A-Z_][A-Z0-9_]*$")
    """environment variable that holds the API key, in capitals"""

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
        if bool(self.url) is not bool(self.model):
            given, missing = ("url", "model") if self.url else ("model", "url")
            raise ValueError(f"{given} is given, but not {missing}: a judge needs both")
        try:
            num_groups = re.compile(self.score_pattern).groups
        except re.error as error:
            raise ValueError(f"score_pattern: {self.score_pattern!r} is not a regular expression: {error}") from error
        if num_groups != 1:
            raise ValueError(
                f"score_pattern: expected one group, around the mark, found {num_groups} in {self.score_pattern!r}"
            )
