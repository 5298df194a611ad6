"""The configuration section `rollout.multi_turn`: conversations of several turns with tools and environments."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from splitppo.config.section import (
    IS_WORK,
    MAY_CHANGE,
    CountOrAuto,
    Key,
    NumberOrAuto,
    OneOrMany,
    PositiveInt,
    Section,
    Share,
    SwitchOrAuto,
    expected,
)
from splitppo.config.subsections.gateway import GatewayConfig
from splitppo.config.subsections.mcp_server import McpServerConfig
from splitppo.config_error import did_you_mean

# The ways in which models write calls of tools; any other name is that of a user's parser, "file.py:function".
TOOL_FORMATS = ("hermes", "qwen3_coder", "llama3_json")
ADAPTERS = ("gymnasium", "openenv")  # environments that are built in
MAX_OBSERVATION_LENGTH = 8192  # tokens; replies travel in messages of bounded size
MCP_TOOLS = re.compile(r"mcp:([^/]+)(?:/(.+))?")  # all tools of a server, or one of them


def is_file_and_name(text: str | None) -> bool:
    """Returns True for text of the form "file.py:name"."""
    path, _, name = (text or "").rpartition(":")
    return path.endswith(".py") and name.isidentifier()


def _is_tool(text: str) -> bool:
    is_file = text.endswith((".yaml", ".yml", ".json", ".py"))
    return is_file or text == "python" or is_file_and_name(text) or MCP_TOOLS.fullmatch(text) is not None


def _is_tool_format(text: str) -> bool:
    return text in ("auto", *TOOL_FORMATS) or is_file_and_name(text)


ToolName = Annotated[str, expected("file.py:function, python, mcp:SERVER, or a file of verl's", _is_tool)]
AgentName = Annotated[str, expected("file.py:function", is_file_and_name)]
Command = Annotated[tuple[str, ...], expected("a program and its arguments, as a list of texts")]
AgentReward = Annotated[
    Literal["return", "output", "endpoint"] | None,
    expected("return (of an agent), output or endpoint (of a command), or null"),
]
ToolFormat = Annotated[str, expected(f"auto, {', '.join(TOOL_FORMATS)}, or file.py:function", _is_tool_format)]


class EnvironmentConfig(Section):
    """The environment that the model talks with: one of your own, a built-in one, tools, or an agent program.

    One of `name`, with `path` if it is your own, `tools`, `agent` and `command` must be given.
    """

    path: Path | None = None
    """The Python file of your environment. null: name is that of a built-in one."""

    name: str | None = None
    """The name in that file: a class with reset, and with tool methods or step; or a coroutine
    converse(chat, row). Without path: gymnasium or openenv."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """The arguments that the class is called with."""

    tools: Annotated[tuple[ToolName, ...], OneOrMany] = ()
    """The tools that the model may call: typed functions, each as file.py:function; python, which runs programs in
    sandboxes; tools for verl, as its file.yaml of classes, or file.py of functions with its decorator; tools of
    `mcp_servers`, as mcp:SERVER for all of a server, or mcp:SERVER/TOOL."""

    agent: AgentName | None = None
    """An agent of yours that calls a chat API, as file.py:function: async def run(endpoint, row), or a plain function,
    which runs in a thread. It may return a number, or a dict with score."""

    command: Command = ()
    """An agent that is a program, with its arguments. Each conversation has a process of its own, which gets the row on
    its standard input, and in environment variables where the chat API is."""

    env: dict[str, str] = Field(default_factory=dict)
    """The environment variables of `command`, beside the few that it has anyway. $NAME in a value is the value of a
    variable of the controller, which is stored nowhere; $$ is a dollar sign."""

    reward: AgentReward = None
    """The only way in which an agent gives rewards. return: what the function returns. output: the last line that the
    program prints, a JSON object with score. endpoint: POST /v1/reward, with a key that the program finds in its row.
    null: return for a function; a program gives none, the scorers of the data source must."""

    @property
    def label(self) -> str:
        """The name of the environment in errors."""
        if self.is_agent:
            return self.agent or shlex.join(self.command)
        return ", ".join(self.tools) or " of ".join(str(part) for part in (self.name, self.path) if part is not None)

    @property
    def is_agent(self) -> bool:
        """True if it is an agent, which makes its own messages and calls a chat API."""
        return self.agent is not None or bool(self.command)

    @property
    def gives_rewards(self) -> bool:
        """True unless all rewards come from the scorers of the data source."""
        return not self.tools and not (self.command and self.reward is None)

    @property
    def is_remote(self) -> bool:
        """True if a server answers, or a part of it, so that nothing here says that it answers the same again."""
        return (self.path is None and self.name == "openenv") or any(tool.startswith("mcp:") for tool in self.tools)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Leaves out keys of agents without a value: by the rest, earlier releases name an environment in a record."""
        of_agents = ("agent", "command", "env", "reward")
        return [(key, value) for key, value in super().__repr_args__() if value or key not in of_agents]

    def _check_keys(self) -> None:
        """Raises ValueError unless exactly one environment is given, with the keys that are its own."""
        if self.path is not None and self.name is None:
            raise ValueError("path and name belong together: expected both, or neither")
        given = [kind for kind in ("name", "tools", "agent", "command") if getattr(self, kind)]
        if len(given) != 1:
            raise ValueError(
                "expected one of name, with path if it is your own, tools, agent and command, got"
                f" {' and '.join(given) or 'none'}"
            )
        if self.path is None and self.name not in (None, *ADAPTERS):
            hint = did_you_mean(str(self.name), ADAPTERS)
            raise ValueError(f"name: expected {' or '.join(ADAPTERS)}, or a path beside it, got {self.name!r}{hint}")
        if self.kwargs and self.name is None:
            raise ValueError("kwargs: they are those of a class, and there is no name")
        if self.env and not self.command:
            raise ValueError("env: they are variables of a command, and there is none")
        ways = {"agent": ("return",), "command": ("output", "endpoint")}.get(given[0], ())
        if self.reward is not None and self.reward not in ways:
            whose = f"of {given[0]} are {' and '.join((*ways, 'null'))}" if ways else "are of agent and command alone"
            raise ValueError(f"reward: got {self.reward}; the ways {whose}")
        if twice := [tool for tool in self.tools if self.tools.count(tool) > 1]:
            raise ValueError(
                f"tools: expected each tool once, {twice[0]} stands there {self.tools.count(twice[0])} times"
            )


class MultiTurnConfig(Section):
    """The settings of conversations: what the model talks with, how it calls tools, and their limits."""

    environments: Annotated[dict[str, EnvironmentConfig], IS_WORK] = Field(default_factory=dict)
    """The environment that the model talks with, by data_source, and under `default` for all others: {path, name,
    kwargs} of an environment of your own, {name, kwargs} of a built-in one, {tools: [file.py:function, python,
    mcp:SERVER]}, or an agent that calls a chat API: {agent: file.py:function} or {command: [PROGRAM, ARGUMENT, ...]}.
    Empty: a response has one turn."""

    gateway: Annotated[GatewayConfig, MAY_CHANGE] = GatewayConfig()
    """The chat API that agents call."""

    mcp_servers: Annotated[dict[str, McpServerConfig], MAY_CHANGE] = Field(default_factory=dict)
    """MCP servers, by the names that `tools` has for them: {url, headers} or {command: [PROGRAM, ARGUMENT, ...]}."""

    mcp_tools: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """The tools of each MCP server. The controller asks the servers at every start and sets this key, so that a resumed
    run is refused if it does not find the tools that it began with."""

    tool_format: ToolFormat = "auto"
    """The way in which the model writes calls of tools: hermes (Qwen2.5, Qwen3), qwen3_coder, llama3_json, or a parser
    of your own, as file.py:function. auto: that of the chat template."""

    max_turns: Annotated[PositiveInt, IS_WORK] = 8
    """The largest number of turns of the model in a conversation."""

    max_turn_length: Annotated[PositiveInt | None, IS_WORK] = None
    """The largest number of tokens that the model samples in a turn. null: data.max_response_length, which bounds the
    whole conversation, replies of tools and environments included."""

    max_context_length: Annotated[PositiveInt | None, Key(is_work=True, shapes_worker=True)] = None
    """The largest number of tokens in a context: the prompt, or the messages with which a conversation begins a context
    anew, and all turns and replies that follow in it. It must exceed data.max_prompt_length. Models hold a context at a
    time, and data.max_response_length bounds the conversation with all of its contexts. null: data.max_prompt_length +
    data.max_response_length."""

    max_observation_length: Annotated[int, IS_WORK] = Field(1024, ge=1, le=MAX_OBSERVATION_LENGTH)
    """The largest number of tokens of what follows a turn. A longer text is cut in its middle."""

    max_parallel_calls: Annotated[PositiveInt, IS_WORK] = 1
    """The largest number of calls of one turn that are made. The model is told of those beyond it."""

    timeout_s: Annotated[float, MAY_CHANGE] = Field(60.0, gt=0.0)
    """The largest number of seconds that a tool, or an answer of an environment, may take; also that an agent may take
    to begin, and between an answer of the policy and its next request."""

    num_workers: Annotated[NumberOrAuto, MAY_CHANGE] = "auto"
    """The number of processes that environments and tools run in. auto: half of the cores, at least 1 and at most 8."""

    max_error_rate: Annotated[Share, MAY_CHANGE] = 0.2
    """The largest share of the conversations of a step, or of a validation, whose environment may fail. If more fail,
    the run ends. Tools that raise, and calls that are wrong, are told to the model and never end a run."""

    reply_steps: CountOrAuto = "auto"
    """The number of decoding steps after which a turn goes on; generation waits for its reply then. So the weights do
    not depend on how fast tools are. 0: a turn goes on as soon as its reply is there, which is faster and cannot be
    repeated exactly. auto: 32 on a CPU, 0 on GPUs. A resumed run keeps its number."""

    record: Annotated[SwitchOrAuto, MAY_CHANGE] = "auto"
    """The switch of the record of conversations, for environments that are not deterministic: a step that is repeated,
    after a crash or by a resumed run, gets the answers that the run folder has, and asks no environment. auto: true if
    reply_steps is over 0, and an environment answers otherwise when it begins with the same seed again, or a tool is
    remote."""

    def _check_keys(self) -> None:
        if missing := sorted(self.servers - self.mcp_servers.keys()):
            raise ValueError(f"mcp_servers: tools of environments name the server {missing[0]!r}, which is not there")

    @property
    def servers(self) -> frozenset[str]:
        """The names of the MCP servers that environments use."""
        tools = (tool for environment in self.environments.values() for tool in environment.tools)
        return frozenset(found[1] for found in map(MCP_TOOLS.fullmatch, tools) if found)

    def environment_of(self, data_source: str) -> EnvironmentConfig | None:
        """Returns the environment of a data source; None if its responses have one turn."""
        return self.environments.get(data_source, self.environments.get("default"))
