"""The configuration of an MCP server, an entry of `rollout.multi_turn.mcp_servers`."""

from pydantic import Field

from splitppo.config.section import Section


class McpServerConfig(Section):
    """An MCP server whose tools the model may call.

    Either `url` or `command` must be given.
    """

    url: str | None = None
    """The address of a server that speaks streamable HTTP. $NAME in it is the value of an environment variable, which
    is stored nowhere; $$ is a dollar sign."""

    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers of each request, with $NAME as in `url`, e.g. {Authorization: Bearer $SEARCH_TOKEN}."""

    command: tuple[str, ...] = ()
    """A program with its arguments that serves its standard input and output. Each environment process starts its own,
    with the controller's environment variables."""

    def _check_keys(self) -> None:
        if bool(self.url) == bool(self.command):
            raise ValueError("expected either url or command")
        if self.headers and not self.url:
            raise ValueError("headers: they are sent to a url, and there is none")
