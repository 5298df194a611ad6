"""Checks, before a run starts, that its conversations can be held: environments, chat template, way to call tools."""

from collections.abc import Iterable

from controller.data.chat_template import detect_tool_format
from controller.data.tokenizer import Tokenizer
from controller.data.turn_tokens import TurnTokens
from splitppo.config import Config, ConfigError
from splitppo.config.subsections.multi_turn import TOOL_FORMATS

_FORMAT = "rollout.multi_turn.tool_format"


def check_conversations(config: Config, tokenizer: Tokenizer, data_sources: Iterable[str]) -> None:
    """Checks that every data source has an environment, if one has, and that the chat template can render its replies.

    Raises:
        ConfigError: it is not so.
    """
    multi_turn = config.rollout.multi_turn
    if not multi_turn.environments:
        return
    environments = {source: multi_turn.environment_of(source) for source in sorted(data_sources)}
    if without := [source for source, environment in environments.items() if environment is None]:
        raise ConfigError(
            f"rollout.multi_turn.environments: no environment for data_source {without[0]!r}; name it, or default"
        )
    _check_role("user", config, tokenizer, "rollout.multi_turn.environments")
    if any(environment and environment.tools for environment in environments.values()):
        check_tools(config, tokenizer)


def check_tools(config: Config, tokenizer: Tokenizer) -> None:
    """Checks that the chat template takes tools and their results, and that it is known how the model calls them.

    Raises:
        ConfigError: it is not so.
    """
    if not tokenizer.chat_template.takes_tools:
        raise ConfigError(
            f"{_FORMAT}: the chat template of actor.model takes no tools; set data.chat_template, or use step"
        )
    _check_role("tool", config, tokenizer, _FORMAT)
    if tool_format_of(config, tokenizer) is None:
        raise ConfigError(
            f"{_FORMAT}: auto finds none of {', '.join(TOOL_FORMATS)} in the chat template of actor.model; expected the"
            " name of a parser of your own, file.py:function"
        )


def tool_format_of(config: Config, tokenizer: Tokenizer) -> str | None:
    """Returns how the model calls tools, `auto` resolved; None if the chat template takes none, or in no known way."""
    given = config.rollout.multi_turn.tool_format
    if not tokenizer.chat_template.takes_tools:
        return None
    return detect_tool_format(tokenizer.chat_template.source) if given == "auto" else given


def _check_role(role: str, config: Config, tokenizer: Tokenizer, key: str) -> None:
    try:
        TurnTokens(tokenizer, config.rollout.multi_turn.max_observation_length).check(role)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; set data.chat_template") from error
