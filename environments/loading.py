"""Loads what the model talks with: tools, classes and coroutines from the user's files, and parsers of calls."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from environments.adapters.python import load_python
from environments.adapters.verl_tools import load_verl_tools
from environments.chat import Chat, ToolCall
from environments.loops import Environment, converse_with_tools
from environments.messages import Schemas, Setup
from environments.tool_calls import hermes, llama3_json, qwen3_coder
from environments.tools import Tool, message_of
from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.multi_turn import MCP_TOOLS, EnvironmentConfig, MultiTurnConfig, is_file_and_name
from splitppo.config_error import ConfigError, config_errors
from splitppo.our_commands import missing_package
from splitppo.user_file import callable_of, import_file

if TYPE_CHECKING:  # it needs packages of an extra
    from environments.programs.agents import Agents

Parse = Callable[[str, Schemas], tuple[str, Sequence[ToolCall]]]
ToolsOfServers = Mapping[str, Sequence[Tool]]  # of MCP servers, by their names

_KEY = "rollout.multi_turn"
_NO_TOOL_METHODS = ("reset", "step", "get_reward", "close", "privileged")
_PARSERS: Mapping[str | None, Parse] = {
    None: lambda text, _: (text, ()),
    "hermes": hermes.parse,
    "qwen3_coder": qwen3_coder.parse,
    "llama3_json": llama3_json.parse,
}
_files: dict[Path, ModuleType] = {}  # imported once each, so that the tools of one file share its globals


@dataclass(frozen=True)
class Loaded:
    """One environment of the configuration, loaded.

    Attributes:
        name: what it is called in errors.
        converse: holds one conversation.
        schemas: the JSON schemas of its tools.
        is_users_coroutine: True if `converse` is the user's own.
        path: the user's file that has the class or coroutine; None: there is none.
    """

    name: str
    converse: Callable[[Chat, Mapping[str, Any]], Awaitable[Any]]
    schemas: Schemas = ()
    is_users_coroutine: bool = False
    path: Path | None = None


async def load_servers(config: MultiTurnConfig) -> ToolsOfServers:
    """Returns the tools of each MCP server that environments use; its session lives in the running event loop.

    Raises:
        ConfigError: the SDK is missing, or a server cannot be used.
    """
    if not config.servers:
        return {}
    server = _adapter("mcp", f"{_KEY}.mcp_servers").Server
    return {name: await server(name, config).tools() for name in sorted(config.servers)}


async def load_agents(config: MultiTurnConfig) -> "Agents | None":
    """Opens the chat API that agents call, in the running event loop; None if no environment is an agent.

    Raises:
        ConfigError: packages are missing, or the API cannot listen where it should.
    """
    if not any(environment.is_agent for environment in config.environments.values()):
        return None
    agents = _package("environments.programs.agents", f"{_KEY}.gateway")
    opened: Agents = await agents.Agents.open(config)
    return opened


def load_environments(setup: Setup, servers: ToolsOfServers, agents: "Agents | None" = None) -> dict[str, Loaded]:
    """Loads all environments, with the tools of MCP servers; ConfigError says in one sentence what is wrong where."""
    named = partial(_tools_named, setup.code, servers)
    loaded = {}
    for name, config in setup.config.environments.items():
        key = f"{_KEY}.environments.{name}"
        if agents is not None and config.is_agent:
            loaded[name] = _load_agent(key, config, agents)
        else:
            loaded[name] = _load(key, config, named, setup)
    return loaded


def load_parser(tool_format: str | None) -> Parse:
    """Returns what reads the calls of a turn; None: a turn has none. ConfigError: the user's file cannot be used."""
    return _PARSERS.get(tool_format) or _load_function(f"{_KEY}.tool_format", str(tool_format))


def _load(key: str, config: EnvironmentConfig, named: Callable[[str, str], Sequence[Tool]], setup: Setup) -> Loaded:
    """Loads one environment, or says in a ConfigError what is wrong with it.

    without a name           the tools that it lists
    a name without a path    a built-in environment
    a coroutine of a file    the user's conversation, as it is
    a class of a file        the user's environment: its `reset`, and its tools or its `step`
    """
    if config.name is None:
        found = [tool for entry in config.tools for tool in named(entry, f"{key}.tools")]
        tools = {tool.name: tool for tool in found}
        if len(tools) < len(found):
            raise ConfigError(
                f"{key}.tools: two tools have one name; expected names that differ, got {', '.join(config.tools)}"
            )
        return Loaded(", ".join(config.tools), partial(converse_with_tools, tools), [tool.schema for tool in found])
    if config.path is None:
        return _load_adapter(f"key '{key}.kwargs': {config.name}", config.name, config.kwargs, setup.is_start)
    user_code = callable_of(_import(config.path, f"{key}.path"), config.name, f"{key}.name")
    name = f"{config.name} of {config.path}"
    if inspect.iscoroutinefunction(user_code):
        return Loaded(name, user_code, is_users_coroutine=True, path=config.path)
    if not inspect.isclass(user_code) or not callable(getattr(user_code, "reset", None)):
        raise ConfigError(f"key '{key}.name': {name}: expected a class with reset, or a coroutine converse(chat, row)")
    with config_errors(TypeError, before=f"key '{key}.kwargs': {name}: "):
        inspect.signature(user_code).bind(**config.kwargs)
    tools = _tools_of(user_code, f"key '{key}.name': {name}")
    create = partial(user_code, **config.kwargs)
    environment = Environment(create, name, tools, config.path, asks_privileged=setup.asks_privileged)
    return Loaded(name, environment.converse, [tool.schema for tool in tools.values()])


def _load_adapter(label: str, name: str, kwargs: Mapping[str, Any], is_start: bool) -> Loaded:
    """Loads a built-in environment; ConfigError if it does not take these arguments.

    At the start of a run one is made, too, and asked if it can work (`check`).
    """
    adapter = _adapter(name, label).Adapter
    try:
        inspect.signature(adapter).bind(**kwargs)
        if is_start:
            adapter(**kwargs).check()
    except Exception as error:
        raise ConfigError(f"{label}: {message_of(error).splitlines()[0]}") from error
    return Loaded(name, Environment(partial(adapter, **kwargs), name, {}).converse)


def _load_agent(key: str, config: EnvironmentConfig, agents: "Agents") -> Loaded:
    """Loads an agent: a function of the user's, or a program; ConfigError: there is none."""
    if config.agent is None:
        return Loaded(config.label, agents.command(key, config).converse)
    function = _load_function(f"{key}.agent", config.agent)
    signature = inspect.signature(function)
    expected = f"expected run(endpoint, row), got {config.agent.rpartition(':')[2]}{signature}"
    with config_errors(TypeError, before=f"key '{key}.agent': {config.agent}: {expected}: "):
        signature.bind("endpoint", "row")
    path = Path(config.agent.rpartition(":")[0])
    return Loaded(config.label, agents.function(function, config.agent, path).converse, path=path)


def _adapter(name: str, label: str) -> ModuleType:
    """Imports an adapter; ConfigError names the extra that has its packages, if they are missing."""
    return _package(f"environments.adapters.{name}", label)


def _package(module: str, label: str) -> ModuleType:
    """Imports a module of ours; ConfigError names the extra that has the packages it needs, if they are missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{label}: {missing_package(error.name)}") from error


def _tools_named(code: CodeConfig, servers: ToolsOfServers, entry: str, key: str) -> Sequence[Tool]:
    """Returns the tools that an entry of `tools` stands for."""
    if entry == "python":
        return [load_python(code)]
    if is_file_and_name(entry):
        function = _load_function(key, entry)
        if inspect.isclass(function):
            raise ConfigError(f"{key}: {entry} is a class, expected a function; give an environment as path and name")
        return [_tool(f"{key}: {entry}", function)]
    if (of_server := MCP_TOOLS.fullmatch(entry)) is None:
        return load_verl_tools(Path(entry))
    tools = {tool.name: tool for tool in servers[of_server[1]]}
    if chosen := [tool for name, tool in tools.items() if of_server[2] in (None, name)]:
        return chosen
    raise ConfigError(f"{key}: {entry}: the server has no such tool, it has {', '.join(tools) or 'none'}")


def _tools_of(user_class: type, label: str) -> dict[str, Tool]:
    """Returns the public methods of a class as tools; none for a class with `step`."""
    tools = {
        method: _tool(f"{label}: {method}", getattr(user_class, method))
        for method in dir(user_class)
        if not method.startswith("_")
        and method not in _NO_TOOL_METHODS
        and isinstance(inspect.getattr_static(user_class, method), FunctionType)
    }
    has_step = callable(getattr(user_class, "step", None))
    if bool(tools) == has_step:
        found = f"both step and {', '.join(tools)}" if has_step else "neither"
        raise ConfigError(f"{label}: expected either step or public methods that are tools, got {found}")
    return tools


def _load_function(key: str, function: str) -> Any:
    path, _, name = function.rpartition(":")
    return callable_of(_import(Path(path), key), name, key)


def _import(path: Path, key: str) -> ModuleType:
    if path not in _files:
        _files[path] = import_file(path, key)
    return _files[path]


def _tool(label: str, function: Callable[..., Any]) -> Tool:
    with config_errors(ValueError, before=f"{label}: "):
        return Tool.of(function)
