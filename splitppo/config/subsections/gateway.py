"""The configuration section `rollout.multi_turn.gateway`: the chat API that agent programs call."""

from pydantic import Field

from splitppo.config.section import PositiveInt, Section


class GatewayConfig(Section):
    """The chat API that agents call, which each environment process has, and how many programs live at a time."""

    host: str = "127.0.0.1"
    """The address that the API listens at. Another one than that of this machine alone is needed by agents in
    containers; the key of a conversation is all that lets a caller in."""

    port: int = Field(0, ge=0, le=65535)
    """The port that the API listens at. 0: any free one. Of several environment processes each takes the first free
    port from this one on."""

    max_agents: PositiveInt = 64
    """The largest number of programs (`command`) that live at a time, shared out among the environment processes. While
    more conversations are open, programs that wait for the policy are ended, and started again when it has answered:
    then they are answered from what was said."""
