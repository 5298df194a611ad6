"""Everything that the policy of a run talks with: processes of environments, limits of conversations, the record."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from controller.conversations.checks import must_record, tool_format_of
from controller.data.observations import with_observations
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch
from controller.data.tokenizer import Tokenizer
from controller.data.turn_tokens import TurnTokens
from environments.pool import EnvironmentProcesses
from environments.record import Record
from splitppo.config import Config
from splitppo.config_error import config_errors
from splitppo.run_folder.logs import ENVIRONMENTS_LOG, LOGS
from splitppo.v1 import conversation_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Environments:
    """The limits of all conversations of a run, the processes, and the text between turns as tokens.

    `record` is that of environments that are not deterministic; None: nothing is recorded.
    """

    config: Config
    processes: EnvironmentProcesses
    tokenizer: Tokenizer
    turn_tokens: TurnTokens
    record: Record | None = None

    @property
    def request(self) -> conversation_pb2.Conversation:
        """The part of a Generate request that asks for conversations."""
        limits = self.config.rollout.multi_turn
        assert limits.reply_steps != "auto", "load resolves it"
        return conversation_pb2.Conversation(
            max_turn_length=limits.max_turn_length or 0, reply_steps=limits.reply_steps
        )

    def with_beginnings(self, asked: PromptBatch, texts: Sequence[str]) -> PromptBatch:
        """Adds the texts by which environments begin to the prompts; ConfigError if one has no room."""
        limit = self.config.data.max_prompt_length
        tools_of = self.processes.schemas_of
        with config_errors(ValueError):
            return with_observations(asked, texts, self.tokenizer, max_prompt_length=limit, tools_of=tools_of)

    def has_stopped(self, text: str, last_token: int) -> bool:
        """Returns True if a turn ended by itself, and not at a limit of its length."""
        is_ended = last_token in self.tokenizer.eos_token_ids
        return is_ended or any(stop in text for stop in self.config.rollout.stop)


@asynccontextmanager
async def open_environments(
    config: Config, tokenizer: Tokenizer, rows: Sequence[PromptRow]
) -> AsyncIterator[Environments | None]:
    """Gives a `with` block what the policy talks with, in processes that end with it; None without environments.

    `rows` are those of the training prompts, by which `must_record` decides.
    """
    section = config.rollout.multi_turn
    if not section.environments:
        yield None
        return
    output = config.run.dir / LOGS / ENVIRONMENTS_LOG
    tool_format = tool_format_of(config, tokenizer)
    async with EnvironmentProcesses(section, config.reward.code, tool_format=tool_format, output=output) as processes:
        record = Record(config.run.dir / "episodes")
        was_recorded = section.record == "auto" and record.folder.exists()
        is_recorded = was_recorded or await must_record(section, processes, rows)
        log.info(
            "answers of environments are %s, as rollout.multi_turn.record: %s decides; %s",
            "recorded" if is_recorded else "not recorded",
            str(section.record).lower(),
            "a step that is repeated after a crash gets them again"
            if is_recorded
            else "set it to true if a step that is repeated after a crash must get the same ones",
        )
        turn_tokens = TurnTokens(tokenizer, section.max_observation_length)
        yield Environments(config, processes, tokenizer, turn_tokens, record if is_recorded else None)
