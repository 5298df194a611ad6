"""Checks, before a run starts, that its conversations can be held: environments, chat template, way to call tools."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from controller.data.chat_template import Tools, detect_tool_format
from controller.data.prompt_files import PromptRow
from controller.data.prompts import ToolsOf, no_tools
from controller.data.tokenizer import Tokenizer
from controller.data.turn_tokens import TurnTokens
from environments.pool import EnvironmentProcesses
from splitppo.config import Config, ConfigError
from splitppo.config.subsections.multi_turn import TOOL_FORMATS

_FORMAT = "rollout.multi_turn.tool_format"


def check_conversations(config: Config, tokenizer: Tokenizer, rows: Sequence[PromptRow]) -> None:
    """Checks that every row has an environment, if one has, and that the chat template can render what follows a turn.

    Raises:
        ConfigError: it is not so.
    """
    multi_turn = config.rollout.multi_turn
    if not multi_turn.environments:
        return
    for row in rows:
        if multi_turn.environment_of(row.data_source) is None:
            raise ConfigError(
                f"rollout.multi_turn.environments: no environment for data_source {row.data_source!r}; name it, or"
                " default"
            )
    if any(tokenizer.chat_template.applies_to(row.prompt) for row in rows):
        _check_role("user", config, tokenizer, "rollout.multi_turn.environments")


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


def load_tools(config: Config, tokenizer: Tokenizer) -> ToolsOf:
    """Loads the user's environments and tools in a process, which ends; returns the schemas of a data source's tools.

    Raises:
        ConfigError: a file of the user's cannot be used, or the chat template does not take the tools.
    """
    section = config.rollout.multi_turn
    if not section.environments:
        return no_tools

    async def load() -> dict[str, Tools]:
        async with EnvironmentProcesses(
            section, config.reward.code, tool_format=tool_format_of(config, tokenizer)
        ) as processes:
            return {name: processes.schemas_of(name) for name in section.environments}

    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
        schemas = thread.submit(asyncio.run, load()).result()
    if any(schemas.values()):
        check_tools(config, tokenizer)
    return lambda source: schemas.get(source, schemas.get("default", ()))


def _check_role(role: str, config: Config, tokenizer: Tokenizer, key: str) -> None:
    try:
        TurnTokens(tokenizer, config.rollout.multi_turn.max_observation_length).check(role)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; set data.chat_template") from error
