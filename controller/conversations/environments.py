"""Everything that the policy of a run talks with: processes of environments, limits of conversations, the record."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property

from controller.conversations.checks import must_record, tool_format_of
from controller.data.chat_template import Messages
from controller.data.contexts import Context, ContextTokens
from controller.data.observations import with_contexts, with_observations
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch
from controller.data.tokenizer import Tokenizer
from controller.data.turn_tokens import TurnTokens
from environments.messages import Answer
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
        may_ask_for_log_probs = any(one.path is not None or one.is_agent for one in limits.environments.values())
        assert limits.reply_steps != "auto", "load resolves it"
        return conversation_pb2.Conversation(
            max_turn_length=limits.max_turn_length or 0,
            reply_steps=limits.reply_steps,
            max_context_length=limits.max_context_length or 0,
            with_log_probs=may_ask_for_log_probs,
        )

    @property
    def max_context_length(self) -> int:
        """The most tokens that a context may have, those sampled in it included."""
        return self.config.longest_context

    def with_beginnings(self, asked: PromptBatch, beginnings: Sequence[Answer]) -> tuple[PromptBatch, Sequence[str]]:
        """Adds the texts by which environments begin to the prompts; a context by which one begins replaces its prompt.

        Returns the prompts, and for each why its context cannot replace it; "" if it can, or if there is none.

        Raises:
            ConfigError: a text has no room in its prompt.
        """
        limit = self.config.data.max_prompt_length
        tools_of = self.processes.schemas_of
        texts = [None if one.begins_context else _text_of(one) for one in beginnings]
        with config_errors(ValueError):
            begun = with_observations(asked, texts, self.tokenizer, max_prompt_length=limit, tools_of=tools_of)
        refused = [""] * len(beginnings)
        contexts: dict[int, tuple[Messages, Context]] = {}
        for place, answer in enumerate(beginnings):
            if answer.begins_context:
                try:
                    contexts[place] = answer.messages, self._context_as_prompt(asked.rows[place], answer)
                except ValueError as error:
                    refused[place] = f"{asked.rows[place].place}: {self._beginning_of(asked.rows[place])}: {error}"
        return with_contexts(begun, contexts), refused

    def _beginning_of(self, row: PromptRow) -> str:
        """Returns what the context is, in words, with which the environment of a row begins."""
        environment = self.config.rollout.multi_turn.environment_of(row.data_source)
        if environment is not None and environment.is_agent:
            return "the first request of the agent, which is the prompt"
        return "the environment began with a context"

    def _context_as_prompt(self, row: PromptRow, answer: Answer) -> Context:
        """Returns a context in the place of a prompt; ValueError: it cannot be rendered, or is too long."""
        limit = self.config.data.max_prompt_length
        context = self.context(row.data_source, answer)
        if len(context.tokens) > limit:
            raise ValueError(f"it has {len(context.tokens)} tokens, more than data.max_prompt_length ({limit})")
        return context

    def context(self, data_source: str, answer: Answer) -> Context:
        """Renders the context that an answer begins; ValueError: the chat template cannot write it."""
        tools = self.processes.schemas_of(data_source) if answer.tools is None else answer.tools
        return self._context_tokens.render(answer.messages, tools)

    @cached_property
    def _context_tokens(self) -> ContextTokens:
        return ContextTokens(self.tokenizer)

    def has_stopped(self, text: str, last_token: int, stop: Sequence[str] = ()) -> bool:
        """Returns True if a turn ended by itself, and not at a limit of its length; `stop`: stop texts of its own."""
        is_ended = last_token in self.tokenizer.eos_token_ids
        return is_ended or any(ending in text for ending in (*self.config.rollout.stop, *stop))


def _text_of(answer: Answer) -> str:
    return "".join(message["content"] for message in answer.messages)


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
    async with EnvironmentProcesses(
        section,
        config.reward.code,
        tool_format=tool_format,
        output=output,
        asks_privileged=config.critic.privileged_prompt is not None,
    ) as processes:
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
