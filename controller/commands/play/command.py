"""Runs `play`: one conversation with the environment of a row, by hand or by the model, in the terminal."""

import argparse
import asyncio
import json
import logging
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np

from controller.commands.play.by_hand import HandPolicy, Left, TypedTurns
from controller.commands.play.group import actor_group
from controller.commands.play.keyboard import Keyboard, NothingToRead
from controller.commands.play.transcript import Transcript
from controller.commands.play.watched import CannotPlay, WatchedEnvironments, WatchedPolicy
from controller.conversations.checks import tool_format_of, with_server_tools
from controller.conversations.environments import Environments
from controller.data.prompts import PromptBatch
from controller.data.turn_tokens import TurnTokens
from controller.outcome import sentence
from controller.preflight import Inputs, load_inputs, read_inputs
from controller.sampling.devices import Devices
from controller.sampling.stream import Asked, Part, SamplingGroups, sample
from controller.sampling.talk import Talk
from controller.sampling.versions import PublishedVersions
from controller.scoring.scorer import Scorer
from controller.workers.clients import ActorClient, sampling_params
from controller.workers.local_group import GroupFailed
from controller.workers.work import Work
from rewards.manager import RewardManager
from splitppo.config import Config, ConfigError, load_config
from splitppo.config.subsections.multi_turn import is_file_and_name
from splitppo.printable import printable
from splitppo.rpc.errors import WireError
from splitppo.v1.batch_pb2 import SLOT_KIND_EVALUATION, Slot

DESCRIPTION = """Holds one conversation with the environment of a row, and shows its tokens, contexts and rewards. You
type the turns of the model, or with --model the policy says them. Nothing is trained, and no run folder is changed."""


@dataclass(frozen=True)
class _Game:
    """Everything that a conversation is held with: configuration and inputs, the row, who types, and who sees it."""

    config: Config
    inputs: Inputs
    prompt: PromptBatch
    keyboard: Keyboard
    transcript: Transcript


def play(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Holds one conversation; returns 0 if it came to its end or the user left, 1 if not. May raise ConfigError."""
    parser.add_argument("--row", type=int, default=1, metavar="N", help="row of the training prompts, from 1")
    parser.add_argument(
        "--model",
        action="store_true",
        help="the model plays: that of the checkpoint in run.resume, or of the newest one in run.dir, else actor.model",
    )
    parser.add_argument(
        "--agent",
        metavar="FILE:FUNCTION",
        help="an agent that calls a chat API, or its command line, in the place of the environments of the file",
    )
    parser.add_argument("--tokens", action="store_true", help="show each token with its id, not the text alone")
    options = parser.parse_intermixed_args(arguments)
    overrides = [*options.overrides, *([] if options.agent is None else [_as_environment(options.agent)])]
    config = with_server_tools(load_config(options.config, overrides))
    if not config.rollout.multi_turn.environments:
        raise ConfigError("rollout.multi_turn.environments: expected an environment to play with, got none")
    inputs = load_inputs(config) if options.model else read_inputs(config, None)
    transcript = Transcript(config, inputs.tokenizer, shows_tokens=options.tokens)
    game = _Game(config, inputs, _prompt(inputs, options.row), Keyboard(), transcript)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        asyncio.run(_play(game, with_model=options.model))
    except Left:
        transcript.line("left before the conversation was over: nothing is scored")
    except (CannotPlay, NothingToRead, GroupFailed, WireError) as error:
        sys.stderr.write(f"error: {printable(sentence(error))}\n")
        return 1
    return 0


def _as_environment(agent: str) -> str:
    """Returns the override that makes an agent the environment of all rows: a function, or a command line."""
    kind = {"agent": agent} if is_file_and_name(agent) else {"command": shlex.split(agent), "reward": "output"}
    return f"rollout.multi_turn.environments={json.dumps({'default': kind})}"


def _prompt(inputs: Inputs, number: int) -> PromptBatch:
    """Returns the training prompt of a row, as a batch of one; ConfigError: there is no such row."""
    table = inputs.prompts.table
    if not 1 <= number <= table.num_prompts:
        raise ConfigError(f"--row: expected 1 to {table.num_prompts}, the number of training prompts, got {number}")
    return table.take(np.array([number - 1]))


async def _play(game: _Game, *, with_model: bool) -> None:
    """Opens what the conversation needs, holds it, and prints its score.

    Raises:
        CannotPlay: the environment has failed.
        Left, NothingToRead: the user has left, or says nothing more.
    """
    [row] = game.prompt.rows
    sources = game.inputs.scored_sources(game.config) & {row.data_source}
    policy_of = _model(game) if with_model else _hand(game)
    async with RewardManager(game.config.reward, sources) as rewards, _environments(game) as environments:
        async with policy_of as (policy, step):
            part = await _response(game, environments, policy, step)
        [talk] = part.conversations
        if talk.lost:
            raise CannotPlay(f"the environment failed: {talk.lost}")
        scorer = Scorer(game.inputs.tokenizer, rewards, stop=game.config.rollout.stop)
        scores = await scorer.score(part.prompts, part.rollouts, part.conversations, num_examine=0)
    score = float(scores.scores[0])
    of_environment = sum(talk.turn_rewards) + talk.end_score
    game.transcript.over(talk, score - of_environment if sources else None, score)
    if game.config.reward_model_host is not None:
        game.transcript.line("the reward model, whose score a run adds, is not asked")
    if scores.failures[0] is not None:
        raise CannotPlay(f"{row.place}: no score from a scorer: {scores.messages[0]}")


@asynccontextmanager
async def _environments(game: _Game) -> AsyncIterator[Environments]:
    """Starts the environment processes; what the user's code prints goes to the error output."""
    config = game.config
    tokenizer = game.inputs.tokenizer
    section = config.rollout.multi_turn
    [row] = game.prompt.rows
    tool_format = tool_format_of(config, tokenizer)
    async with WatchedEnvironments(section, config.reward.code, tool_format=tool_format) as processes:
        processes.transcript = game.transcript
        environment = section.environment_of(row.data_source)
        assert environment is not None, "check_conversations has found one"
        names = [tool["function"]["name"] for tool in processes.schemas_of(row.data_source)]
        with_tools = f", with the tools {', '.join(names)} (tool_format: {tool_format})" if names else ""
        game.transcript.line(f"environment: {environment.label}{with_tools}")
        game.transcript.line(f"row: {row.place}, data_source {row.data_source!r}, ground truth {row.ground_truth!r}")
        yield Environments(config, processes, tokenizer, TurnTokens(tokenizer, section.max_observation_length))


@asynccontextmanager
async def _hand(game: _Game) -> AsyncIterator[tuple[WatchedPolicy, int]]:
    """Gives the policy that the user plays."""
    tokenizer = game.inputs.tokenizer
    game.transcript.line("you are the model: type its turns; an empty line ends one, /help says more")
    turns = TypedTurns(game.keyboard, game.transcript, tokenizer)

    async def no_pause() -> None:
        pass

    yield WatchedPolicy(HandPolicy(game.config, tokenizer, turns, game.transcript), game.transcript, no_pause), 0


@asynccontextmanager
async def _model(game: _Game) -> AsyncIterator[tuple[WatchedPolicy, int]]:
    """Gives the policy of the actor's group; on a terminal it waits for Enter before it is told what follows a turn."""

    async def pause() -> None:
        while game.keyboard.is_terminal:
            match await game.keyboard.line("Enter: on, /tokens, /quit> "):
                case "/quit":
                    raise Left
                case "/tokens":
                    game.transcript.tokens()
                case _:
                    return

    game.transcript.line("starting the actor's group")
    async with actor_group(game.config) as (actor, step):
        whose = f"the checkpoint of step {step}" if step else game.config.actor.model
        game.transcript.line(f"the model: {whose}")
        yield WatchedPolicy(actor, game.transcript, pause), step


async def _response(game: _Game, environments: Environments, policy: WatchedPolicy, step: int) -> Part:
    """Has the one response said, with the environment of the row, in the way of a step of a run."""
    config = game.config
    actor = cast(ActorClient, policy)  # all that sampling calls is there
    groups = SamplingGroups(
        actor=actor,
        rollout=None,
        share=0.0,
        schedule="serial",
        published=PublishedVersions(config, actor, has_reader=False),
        held=None,
        devices=Devices(are_shared=False),
        environments=environments,
    )
    asked = Asked(
        prompts=game.prompt,
        seeded=game.prompt.to_batch(config.run.seed, step, 1),
        version=step,
        params=sampling_params(config.rollout, config.data),
        slot=Slot(kind=SLOT_KIND_EVALUATION, step=step),
        talk=Talk.about(environments, game.prompt, config.run.seed, step),
    )
    [part] = [part async for part in sample(groups, asked, Work(step))]
    return part
