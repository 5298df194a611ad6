"""Checks, before a run starts, that its conversations can be held: environments, chat template, way to call tools."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from controller.data.chat_template import Tools, detect_tool_format
from controller.data.environment_text import EnvironmentText
from controller.data.prompt_files import PromptRow
from controller.data.prompts import ToolsOf, no_tools
from controller.data.row_values import check_texts
from controller.data.tokenizer import Tokenizer
from controller.data.turn_tokens import TurnTokens
from controller.workers.concurrency import gather_calls
from environments.messages import Answer
from environments.pool import EnvironmentProcesses
from splitppo.config import Config, ConfigError
from splitppo.config.subsections.multi_turn import TOOL_FORMATS, EnvironmentConfig, MultiTurnConfig
from splitppo.config_error import config_errors

_FORMAT = "rollout.multi_turn.tool_format"
NUM_TRIED = 3  # rows of an environment with which it is tried


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
        ConfigError: a file of the user's cannot be used, the chat template does not take the tools, or a schema spells
            a special token.
    """
    section = config.rollout.multi_turn
    if not section.environments:
        return no_tools
    schemas = _load(config, section, tool_format_of(config, tokenizer))
    if any(schemas.values()):
        check_tools(config, tokenizer)
        check_schemas(schemas, tokenizer)
    return lambda source: schemas.get(source, schemas.get("default", ()))


def check_schemas(schemas: Mapping[str, Tools], tokenizer: Tokenizer) -> None:
    """Checks that no schema of a tool, which may be of somebody else's server, spells a special token.

    Raises:
        ConfigError: one does; in a prompt it would end the turn, or begin another role's.
    """
    encoder = EnvironmentText(tokenizer)

    def check(text: str) -> None:
        if token := encoder.spelled(text):
            raise ValueError(f"it spells {token!r}, which is a special token of the model")

    for name, tools in schemas.items():
        for tool in tools:
            place = f"rollout.multi_turn.environments.{name}: the schema of the tool {tool['function']['name']!r}: "
            with config_errors(ValueError, before=place):
                check_texts(tool, check)


async def must_record(section: MultiTurnConfig, processes: EnvironmentProcesses, rows: Sequence[PromptRow]) -> bool:
    """Decides whether the conversations of a run are recorded, by `record`.

    `auto`: if sampling is exact, and a tool is remote, or an environment of one of the first rows answers otherwise
    when it begins with the same seed again and is told an empty turn.

    Raises:
        ConfigError: `record` is false, and an environment answers otherwise.
    """
    if section.record is True:
        return True
    if not section.reply_steps:  # sampling is not exact: a repeated step may differ anyway
        return False
    if section.record == "auto" and any(environment.is_remote for environment in section.environments.values()):
        return True

    async def answers(row: PromptRow) -> list[Answer]:
        """Begins a row's environment and tells it an empty turn; returns its answers, which may end with the first."""
        episode = processes.begin(row.data_source, row.fields, seed=0, prompt=row.prompt)
        first = await episode.start()
        try:
            return [first] if first.is_over else [first, await episode.say("", "stop")]
        finally:
            episode.abandon()

    by_environment: dict[str, list[PromptRow]] = {}
    for row in rows:
        by_environment.setdefault(processes.key_of(row.data_source), []).append(row)
    tried = [(key, row) for key, own in by_environment.items() for row in own[:NUM_TRIED]]

    async def answers_twice(row: PromptRow) -> Sequence[list[Answer]]:
        return await gather_calls(answers(row), answers(row))

    pairs = await gather_calls(*(answers_twice(row) for _, row in tried))
    for (key, _), (first, second) in zip(tried, pairs, strict=True):
        if first != second and section.record is False:
            differ_in_texts = [answer.messages for answer in first] != [answer.messages for answer in second]
            raise ConfigError(
                f"rollout.multi_turn.record is false, but environments.{key} ({section.environments[key].label})"
                f" gave other {'texts' if differ_in_texts else 'rewards'} for the same seed: a resumed run would differ"
            )
    return any(first != second for first, second in pairs)


def with_server_tools(config: Config) -> Config:
    """Asks the MCP servers of a configuration for their tools, and returns a copy that has them as `mcp_tools`.

    So they are part of the run: environment processes compare with them, and a resumed run must find the same.

    Raises:
        ConfigError: a server cannot be used.
    """
    section = config.rollout.multi_turn
    if not section.servers:
        return config
    each = {name: EnvironmentConfig(tools=(f"mcp:{name}",)) for name in section.servers}
    found = _load(config, section.changed("", {"environments": each, "mcp_tools": {}}), None)
    tools = {name: {tool["function"]["name"]: tool for tool in found[name]} for name in sorted(found)}
    return config.changed("rollout.multi_turn", {"mcp_tools": tools})


def _load(config: Config, section: MultiTurnConfig, tool_format: str | None) -> dict[str, Tools]:
    """Loads environments in a process, which ends; returns the schemas of each one's tools.

    Raises:
        ConfigError: one of them cannot be used, or a schema has a text that cannot be encoded.
    """

    async def load() -> dict[str, Tools]:
        async with EnvironmentProcesses(section, config.reward.code, tool_format=tool_format) as processes:
            return {name: processes.schemas_of(name) for name in section.environments}

    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
        schemas = thread.submit(asyncio.run, load()).result()
    for name, tools in schemas.items():
        for tool in tools:
            with config_errors(ValueError, before=f"rollout.multi_turn.environments.{name}: the schema of a tool: "):
                check_texts(tool)
    return schemas


def _check_role(role: str, config: Config, tokenizer: Tokenizer, key: str) -> None:
    """Checks that the chat template renders messages of this role after a turn; else a ConfigError names the key."""
    try:
        TurnTokens(tokenizer, config.rollout.multi_turn.max_observation_length).check(role)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; set data.chat_template") from error
