"""Lets a transcript see what passes between the policy and its environment; nothing is changed on the way."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from controller.commands.play.by_hand import HandPolicy
from controller.commands.play.transcript import Transcript
from controller.workers.clients import ActorClient
from controller.workers.command import CommandReply
from environments.messages import Answer, NoRoom
from environments.pool import EnvironmentProcesses, Episode
from splitppo.batch import Batch
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import Slot
from splitppo.v1.conversation_pb2 import TurnReply, TurnsEnded


class CannotPlay(Exception):
    """Raised if the environment has failed before the policy could say anything; the message is one sentence."""


class WatchedPolicy:
    """A policy that says its one response under the eyes of a transcript.

    Args:
        policy: says the turns.
        transcript: prints prompt, turns and what follows them.
        pause: is awaited before the policy is told what follows a turn.
    """

    def __init__(
        self, policy: ActorClient | HandPolicy, transcript: Transcript, pause: Callable[[], Awaitable[None]]
    ) -> None:
        self.role = policy.role
        self._policy = policy
        self._transcript = transcript
        self._pause = pause

    async def put_batch(self, slot: Slot, batch: Batch) -> None:
        """Prints the prompt, and passes it on."""
        [prompt] = batch["prompts"].rows()
        self._transcript.prompt(prompt.tolist())
        await self._policy.put_batch(slot, batch)

    async def get_batch(self, slot: Slot, columns: Sequence[str]) -> Batch:
        """Returns columns of the response."""
        return await self._policy.get_batch(slot, columns)

    async def generate(
        self, slot: Slot, sampling: SamplingParams, *, on_turns: Callable[[TurnsEnded], None], **named: Any
    ) -> CommandReply:
        """Has the response said, and prints each turn once, before the environment is told."""
        num_seen = 0

        def see(ended: TurnsEnded) -> None:
            nonlocal num_seen
            for turn in ended.turns:
                if turn.turn == num_seen + 1:
                    num_seen += 1
                    self._transcript.turn(turn)
            on_turns(ended)

        return await self._policy.generate(slot, sampling, on_turns=see, **named)

    async def reply(self, slot: Slot, replies: Sequence[TurnReply]) -> None:
        """Prints what follows a turn, and passes it on after the pause."""
        for reply in replies:
            self._transcript.reply(reply)
            if not reply.is_last:
                await self._pause()
        await self._policy.reply(slot, replies)


class WatchedEpisode(Episode):
    """An episode whose answers a transcript sees."""

    transcript: Transcript

    async def start(self) -> Answer:
        """Begins the conversation; CannotPlay: the environment fails at once."""
        answer = await super().start()
        if answer.lost:
            raise CannotPlay(f"the environment failed when it began: {answer.lost}")
        return answer

    async def refuse(self, no_room: NoRoom) -> Answer:
        """Says that the latest answer does not fit into the context, and returns the one that takes its place."""
        self.transcript.line(
            f"    [what follows has {no_room.num_tokens} tokens, and the context has room for {no_room.room.context}]"
        )
        return await super().refuse(no_room)

    async def _answer(self, *turns: Any) -> Answer:
        answer = await super()._answer(*turns)
        self.transcript.answer(answer)
        return answer


class WatchedEnvironments(EnvironmentProcesses):
    """Environment processes whose episodes a transcript sees."""

    transcript: Transcript

    def begin(self, *given: Any, **named: Any) -> Episode:
        """Returns a conversation that has not been started."""
        episode = WatchedEpisode(**vars(super().begin(*given, **named)))  # a dataclass with the same fields
        episode.transcript = self.transcript
        return episode
