"""Tries the environments of a run with their first rows, before any group starts: what `--check` says of them."""

from collections.abc import Sequence

import numpy as np

from controller.conversations.checks import NUM_TRIED, must_record, tool_format_of
from controller.conversations.environments import Environments
from controller.data.privileged_prompts import PrivilegedPrompts, privileged_prompts
from controller.data.prompts import PromptBatch
from controller.data.tokenizer import Tokenizer
from controller.data.turn_tokens import TurnTokens
from controller.workers.concurrency import gather_calls
from environments.messages import Answer
from environments.pool import EnvironmentProcesses
from splitppo.config import Config, ConfigError
from splitppo.config_error import config_errors

_SHOWN_CHARACTERS = 200  # of a message that an agent asks with
_EMPTY_FAILED = (
    "    told an empty answer, it failed, which the emptiness may have caused (play answers otherwise): {error}\n"
)
_OF_PROGRAMS = (
    "  a traceback of a program with error 403 is expected here: it was told that the policy has no further turn\n"
)


async def try_environments(config: Config, tokenizer: Tokenizer, tables: Sequence[PromptBatch]) -> str:
    """Tries each environment with its first rows, and checks what `must_record` checks at the start of a run.

    Returns lines about all environments. `tables` are all prompts: those for training, and maybe those for validation.

    Raises:
        ConfigError: an environment fails when it begins, is told an empty turn or ends; what it begins with is no
            prompt; or the run would be refused.
    """
    section = config.rollout.multi_turn
    tool_format = tool_format_of(config, tokenizer)
    if not section.environments:
        return ""
    async with EnvironmentProcesses(
        section,
        config.reward.code,
        tool_format=tool_format,
        asks_privileged=config.critic.privileged_prompt is not None,
    ) as processes:
        turn_tokens = TurnTokens(tokenizer, section.max_observation_length)
        environments = Environments(config, processes, tokenizer, turn_tokens)
        privileged = privileged_prompts(config.critic, tokenizer)
        trials = [
            _tried(environments, prompt, privileged if table is tables[0] else None)
            for table in tables
            for prompt in _first_prompts(processes, table)
        ]
        tried = await gather_calls(*trials)
        asked = [_or_raise(one) for one in tried]
        await must_record(section, processes, tables[0].rows)
        tools = {key: [tool["function"]["name"] for tool in processes.schemas_of(key)] for key in section.environments}
    each = (
        f"{key}: {section.environments[key].label}" + (f" with the tools {', '.join(names)}" if names else "")
        for key, names in tools.items()
    )
    written = f" (tool_format: {tool_format})" if any(tools.values()) else ""
    has_programs = any(environment.command for environment in section.environments.values())
    return "".join([f"environments: {'; '.join(each)}{written}\n", *asked, _OF_PROGRAMS if has_programs else ""])


def _first_prompts(processes: EnvironmentProcesses, table: PromptBatch) -> list[PromptBatch]:
    """Returns the first prompts of each environment in a table, each as a batch of one."""
    places: dict[str, list[int]] = {}
    for place, row in enumerate(table.rows):
        places.setdefault(processes.key_of(row.data_source), []).append(place)
    return [table.take(np.array([place])) for own in places.values() for place in own[:NUM_TRIED]]


async def _tried(
    environments: Environments, prompt: PromptBatch, privileged: PrivilegedPrompts | None
) -> str | ConfigError:
    """Returns what `_try` returns or raises: of several environments that fail, the first in order is told."""
    try:
        return await _try(environments, prompt, privileged)
    except ConfigError as error:
        return error


def _or_raise(asked: str | ConfigError) -> str:
    """Returns what `_tried` has returned, or raises it."""
    if isinstance(asked, ConfigError):
        raise asked
    return asked


async def _try(environments: Environments, prompt: PromptBatch, privileged: PrivilegedPrompts | None) -> str:
    """Begins the environment of a prompt, tells it an empty turn, and ends it.

    Returns a line that says what it asked, if it began with messages of its own in the place of the prompt; else "".
    `privileged` makes what the value model alone reads; None: it reads nothing of this prompt.

    Raises:
        ConfigError: it fails, though the empty turn cannot be the cause, what it begins with is no prompt, or what it
            names for the critic gives no text.
    """
    [row] = prompt.rows
    episode = environments.processes.begin(row.data_source, row.fields, seed=0, prompt=row.prompt)

    def refuse_lost(answer: Answer, when: str) -> None:
        if answer.lost:
            raise ConfigError(f"{row.place}: the environment failed when it {when}: {answer.lost}")

    try:
        first = await episode.start()
        refuse_lost(first, "began")
        begun, [refused] = environments.with_beginnings(prompt, [first])
        if refused:
            raise ConfigError(refused)
        if privileged is not None:
            with config_errors(ValueError, before=f"{row.place}: critic.privileged_prompt: "):
                privileged.tokens(row, first.privileged)
        answer = first
        if not answer.is_over:
            answer = await episode.say("", "stop")
            refuse_lost(answer, "was told an empty turn")
        if not answer.is_over:
            answer = await episode.end()  # so that the environment is closed
            refuse_lost(answer, "ended")
    finally:
        episode.abandon()
    if answer.agent_is_wrong:
        raise ConfigError(f"{row.place}: the agent failed, whatever the policy says: {answer.agent_error}")
    asked = _asked(row.place, first, int(begun.prompts.lengths[0])) if first.begins_context else ""
    return asked + (_EMPTY_FAILED.format(error=answer.agent_error) if answer.agent_error else "")


def _asked(place: str, answer: Answer, num_tokens: int) -> str:
    """Returns a line about the messages that an environment begins with in the place of the prompt."""
    roles = ", ".join(message["role"] for message in answer.messages)
    last = str(answer.messages[-1]["content"])
    text = last if len(last) <= _SHOWN_CHARACTERS else f"{last[:_SHOWN_CHARACTERS]}..."
    names = ", ".join(tool["function"]["name"] for tool in answer.tools or ())
    tools = f", with the tools {names}" if names else ""
    return f"  {place}: asks first, in {num_tokens} tokens (messages: {roles}{tools}): {text!r}\n"
