"""Loads what the model talks with: tools, classes and coroutines from the user's files, and parsers of calls."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from environments.chat import Chat, ToolCall
from environments.loops import Environment, Tools
from environments.messages import Setup
from environments.tool_calls import hermes, llama3_json, qwen3_coder
from environments.tools import Tool
from splitppo.config.subsections.multi_turn import EnvironmentConfig
from splitppo.config_error import ConfigError
from splitppo.user_file import load_from_file

Parse = Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, Sequence[ToolCall]]]

KEY = "rollout.multi_turn"
_NO_TOOL_METHODS = ("reset", "step", "get_reward", "close")
_PARSERS: Mapping[str, Parse] = {
    "hermes": hermes.parse,
    "qwen3_coder": qwen3_coder.parse,
    "llama3_json": llama3_json.parse,
}


@dataclass(frozen=True)
class Loaded:
    """One environment of the configuration, loaded.

    Attributes:
        name: what it is called in errors.
        converse: holds one conversation.
        schemas: the JSON schemas of its tools.
        is_users_coroutine: True if `converse` is the user's own.
    """

    name: str
    converse: Callable[[Chat, Mapping[str, Any]], Awaitable[Any]]
    schemas: Sequence[Mapping[str, Any]] = ()
    is_users_coroutine: bool = False


@dataclass(frozen=True)
class Parser:
    """Reads the calls of a turn; `is_users` is True if the code is the user's."""

    parse: Parse
    is_users: bool = False


def load(setup: Setup) -> tuple[dict[str, Loaded], Parser]:
    """Loads all environments and the parser; ConfigError names the key and says in one sentence what is wrong."""
    loaded = {name: _load(f"{KEY}.environments.{name}", config) for name, config in setup.environments.items()}
    return loaded, _load_parser(setup.tool_format)


def _load_parser(tool_format: str | None) -> Parser:
    if tool_format is None:
        return Parser(lambda text, _: (text, ()))
    if tool_format in _PARSERS:
        return Parser(_PARSERS[tool_format])
    return Parser(_load_function(f"{KEY}.tool_format", tool_format), is_users=True)


def _load(key: str, config: EnvironmentConfig) -> Loaded:
    if config.path is None or config.name is None:
        found = [_tool(f"{key}.tools: {tool}", _load_function(f"{key}.tools", tool)) for tool in config.tools]
        tools = {tool.schema["function"]["name"]: tool for tool in found}
        if len(tools) < len(config.tools):
            raise ConfigError(
                f"{key}.tools: two tools have one name; expected names that differ, got {', '.join(config.tools)}"
            )
        return Loaded(", ".join(config.tools), Tools(tools).converse, _schemas(tools))
    user_code = load_from_file(config.path, config.name, path_key=f"{key}.path", name_key=f"{key}.name")
    name = f"{config.name} of {config.path}"
    if inspect.iscoroutinefunction(user_code):
        return Loaded(name, user_code, is_users_coroutine=True)
    if not inspect.isclass(user_code) or not callable(getattr(user_code, "reset", None)):
        raise ConfigError(f"key '{key}.name': {name}: expected a class with reset, or a coroutine converse(chat, row)")
    try:
        inspect.signature(user_code).bind(**config.kwargs)
    except TypeError as error:
        raise ConfigError(f"key '{key}.kwargs': {name}: {error}") from error
    return _load_class(f"key '{key}.name'", name, user_code, config.kwargs)


def _load_class(key: str, name: str, user_class: Any, kwargs: Mapping[str, Any]) -> Loaded:
    tools = {
        method: _tool(f"{key}: {name}: {method}", getattr(user_class, method))
        for method in dir(user_class)
        if not method.startswith("_")
        and method not in _NO_TOOL_METHODS
        and isinstance(inspect.getattr_static(user_class, method), FunctionType)
    }
    has_step = callable(getattr(user_class, "step", None))
    if bool(tools) == has_step:
        found = f"both step and {', '.join(tools)}" if has_step else "neither"
        raise ConfigError(f"{key}: {name}: expected either step or public methods that are tools, got {found}")
    reset_takes = partial(_taken, inspect.signature(user_class.reset))
    environment = Environment(partial(user_class, **kwargs), name, tools, reset_takes)
    return Loaded(name, environment.converse, _schemas(tools))


def _taken(signature: inspect.Signature, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that a function takes by name."""
    parameters = signature.parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(fields)
    return {name: value for name, value in fields.items() if name in parameters}


def _load_function(key: str, function: str) -> Any:
    path, _, name = function.rpartition(":")
    return load_from_file(Path(path), name, path_key=key, name_key=key)


def _tool(label: str, function: Callable[..., Any]) -> Tool:
    try:
        return Tool.of(function)
    except ValueError as error:
        raise ConfigError(f"{label}: {error}") from error


def _schemas(tools: Mapping[str, Tool]) -> tuple[Mapping[str, Any], ...]:
    return tuple(tool.schema for tool in tools.values())
