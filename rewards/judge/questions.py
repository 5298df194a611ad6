"""Writes the request to a judge about a response, and reads the score from the judge's answer."""

import json
import os
import re

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rewards.samples import Failure, Sample, Scored
from splitppo.config import ConfigError
from splitppo.config.subsections.judge import JudgeConfig
from splitppo.config_error import config_errors

_DEFAULT_TEMPLATE = """\
You mark the last answer of a conversation.
{% for message in messages %}

[{{ message.role }}]
{{ message.content }}
{% endfor %}

[the answer to be marked]
{{ response }}
[end of the answer]
{% if ground_truth %}

[a correct answer, for comparison]
{{ ground_truth }}
{% endif %}

How good is the answer? Give your reason in at most three sentences. Then end with a line "Score: N", where N is a
number from {{ lowest }} (useless) to {{ highest }} (perfect).
"""
_FIELDS = ("messages", "prompt", "response", "ground_truth", "data_source", "extra_info")
_LIMITS = ("lowest", "highest")


class Questions:
    """Writes requests to a judge from the Jinja template of the configuration, and reads scores from the answers.

    Raises:
        ConfigError: the template cannot be read, is not valid Jinja, or uses an unknown name.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._limits = dict(zip(_LIMITS, (f"{mark:g}" for mark in config.score_range), strict=True))
        self._template = _load_template(config)
        self._pattern = re.compile(config.score_pattern)

    def ask(self, sample: Sample) -> bytes:
        """Writes the JSON body of a request to the judge about a sample; ValueError if the template does not work."""
        fields = {name: getattr(sample, name) for name in _FIELDS}
        if sample.last_context is not None:
            fields["response"] = sample.last_context
        if self._config.conversation == "last_turn":
            fields["response"] = sample.last_turn
        try:
            content = self._template.render(fields | self._limits)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ValueError(f"the judge's template cannot be filled in: {error}") from error
        config = self._config
        return json.dumps(
            {
                "model": config.model,
                "messages": [{"role": "user", "content": content}],
                "temperature": config.temperature,
                "max_tokens": config.max_tokens,
            }
        ).encode()

    def score(self, answer: str) -> Scored:
        """Converts the mark in a judge's answer to a score in [0, 1]; the result has a failure if there is no mark.

        The field `judge_answer` of the result is the whole answer.
        """
        lowest, highest = self._config.score_range
        extra = {"judge_answer": answer}
        marks = self._pattern.findall(answer)
        try:
            mark = float(marks[-1])
        except (IndexError, ValueError):
            return Scored(0.0, extra, Failure.UNPARSABLE, f"the judge's answer has no mark: {shown(answer)}")
        if not lowest <= mark <= highest:
            expected = f"expected {lowest:g} to {highest:g}"
            return Scored(0.0, extra, Failure.UNPARSABLE, f"the judge's mark is {mark:g}, {expected}")
        return Scored((mark - lowest) / (highest - lowest), extra)


def headers(config: JudgeConfig) -> dict[str, str]:
    """Returns the HTTP headers of every request to the judge, with the API key if one is configured.

    Raises ConfigError if the environment variable of the API key is not set or contains no key.
    """
    content = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
    if config.api_key_env is None:
        return content
    key = os.environ.get(config.api_key_env, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        problem = "is not set" if not key else "holds no API key: expected one line of ASCII"
        raise ConfigError(f"key 'reward.judge.api_key_env': the environment variable {config.api_key_env} {problem}")
    return {**content, "Authorization": f"Bearer {key}"}


def shown(text: str) -> str:
    """Shortens a text to 120 characters on one line, in quotes, for use in messages."""
    line = " ".join(text.split())
    return repr(line if len(line) <= 120 else f"{line[:117]}...")


def _load_template(config: JudgeConfig) -> jinja2.Template:
    """Loads the template of the prompt to the judge; ConfigError if it is no Jinja or uses an unknown field."""
    key = "key 'reward.judge.prompt_template'"
    text = _DEFAULT_TEMPLATE
    if config.prompt_template is not None:
        with config_errors(OSError, UnicodeDecodeError, before=f"{key}: cannot read {config.prompt_template}: "):
            text = config.prompt_template.read_text(encoding="utf-8")
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    with config_errors(jinja2.TemplateError, before=f"{key}: {config.prompt_template} is no valid Jinja: "):
        used = jinja2.meta.find_undeclared_variables(environment.parse(text))
        template: jinja2.Template = environment.from_string(text)
    if unknown := sorted(used - {*_FIELDS, *_LIMITS} - environment.globals.keys()):
        names = ", ".join((*_FIELDS, *_LIMITS))
        raise ConfigError(f"{key}: {config.prompt_template} uses {unknown[0]!r}; known: {names}")
    return template
