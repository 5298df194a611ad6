"""Deals prompts to the worker groups that sample, and has each group sample the responses to its share of them.

P prompts with n samples each; B = P x n responses, ordered by prompt, then sample.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from controller.sampling.versions import OnReply, Sampler
from controller.workers.clients import SamplerClient
from controller.workers.command import CommandReply
from controller.workers.concurrency import gather_calls
from splitppo.batch import Batch, Column
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, SLOT_KIND_SHARE, Slot
from splitppo.v1.conversation_pb2 import Conversation, TurnsEnded

# Called with finished responses: the columns that were asked for, and `places`, their indices among all B responses.
OnRows = Callable[[Batch], None]


class Replies(Protocol):
    """Answers the turns of responses that one group samples in one attempt: each response is then a conversation.

    Attributes:
        request: what the Generate request asks for.
        rows: the rows to sample, one for each response, in place of `Share.seeded`.
    """

    request: Conversation
    rows: Batch

    def on_turns(self, ended: TurnsEnded) -> None:
        """Takes turns that have ended; the same turn may be told several times."""

    async def run(self) -> None:
        """Sends a reply to every turn that takes one, until all conversations are over."""

    async def finished(self, places: NDArray[np.int32]) -> None:
        """Waits until the conversations at these places of the whole batch are over."""


def goes_to_rollout_group(lengths_P: NDArray[np.int32], share: float) -> NDArray[np.bool_]:
    """Returns for each prompt whether the rollout group answers it, [P]: a share of short and long prompts alike.

    Of the prompts in the order of their lengths, prompt i goes to the rollout group if floor((i + 1) share) is larger
    than floor(i share). So the choice depends on prompts and share alone, never on which group is faster.
    """
    chosen_P = np.empty(len(lengths_P), np.bool_)
    chosen_P[np.argsort(-lengths_P, kind="stable")] = np.diff(np.floor(np.arange(len(lengths_P) + 1) * share)) > 0
    return chosen_P


@dataclass(eq=False)
class Share:
    """The responses that one worker group samples: all responses to some prompts of a batch.

    Attributes:
        client: the gRPC client of the group.
        seeded: the prompts, each with its seeds.
        places: [num_rows] ascending, the indices of the responses among those of the whole batch.
        slot: the slot in which the group keeps the responses.
        num_parts: the number of parts in which the responses come.
    """

    sampler: Sampler
    client: SamplerClient
    seeded: Batch
    places: NDArray[np.int32]
    slot: Slot
    num_parts: int

    def __post_init__(self) -> None:
        self.fetched: list[NDArray[np.int32]] = []  # the places of each part

    async def sample(
        self,
        version: int,
        sampling: SamplingParams,
        columns: Sequence[str],
        *,
        on_reply: OnReply,
        on_rows: OnRows,
        on_sampled: Callable[[], None] = lambda: None,
        converse: Callable[["Share"], Replies] | None = None,
    ) -> CommandReply:
        """Has the responses sampled with the policy of `version`; returns the group's reply to the last attempt.

        `on_rows` gets the responses of each part as soon as they are fetched, `on_sampled` is called when the group has
        sampled all. `converse` makes what answers the turns of an attempt, if the responses are conversations. If a
        rollout group is lost, the same responses are sampled again; those that were fetched before
        stay as they are, because other groups may have computed with them.
        """

        async def attempt() -> CommandReply:
            replies = None if converse is None else converse(self)
            await self.client.put_batch(self.slot, self.seeded if replies is None else replies.rows)
            ended = [asyncio.Event() for _ in range(self.num_parts)]
            calls = [generate(ended, replies), self._fetch(ended, columns, on_rows, replies)]
            reply: CommandReply = (await gather_calls(*calls, *(() if replies is None else (replies.run(),))))[0]
            return reply

        async def generate(ended: Sequence[asyncio.Event], replies: Replies | None) -> CommandReply:
            reply = await self.client.generate(
                self.slot,
                sampling,
                base_step=version,
                num_parts=self.num_parts,
                sleep_after=self.sampler.takes_turns(self.client),
                on_part=lambda part: ended[part - 1].set(),
                conversation=None if replies is None else replies.request,
                on_turns=(lambda _: None) if replies is None else replies.on_turns,
            )
            for event in ended:
                event.set()
            on_sampled()
            return reply

        return await self.sampler.sample(self.client, version, on_reply, attempt)

    async def _fetch(
        self, ended: Sequence[asyncio.Event], columns: Sequence[str], on_rows: OnRows, replies: Replies | None
    ) -> None:
        """Fetches each part when it has ended, and hands on those rows that were not handed on before."""
        known = np.concatenate([np.empty(0, np.int32), *self.fetched])
        for part, event in enumerate(ended, start=1):
            await event.wait()
            if self.num_parts == 1:
                rows = await self.client.get_batch(self.slot, columns)
                places = self.places
            else:
                slot = Slot(kind=self.slot.kind, step=self.slot.step, part=part)
                rows = await self.client.get_batch(slot, [*columns, "places"])
                places = self.places[rows["places"].values]
            new = np.flatnonzero(~np.isin(places, known))
            if len(new):
                if replies is not None:
                    await replies.finished(places[new])
                self.fetched.append(places[new])
                placed = Batch(len(new), {"places": Column(places[new], np.ones(len(new), np.int32))})
                on_rows(rows.select(columns).take(new).merge(placed))


def deal(sampler: Sampler, seeded: Batch, slot: Slot, num_parts: int = 1) -> list[Share]:
    """Divides prompts among the groups that sample; returns the shares that have prompts, the actor's first.

    Each prompt of `seeded` has equally many seeds. The responses come in about `num_parts` parts in all. If several
    groups sample the rollouts of a step, each keeps its own in a slot of its own kind, because the slot of the step has
    the rollouts of all groups.
    """
    num_prompts = seeded.num_rows
    num_samples = int(seeded["seeds"].lengths[0])
    chosen_P = goes_to_rollout_group(seeded["prompts"].lengths, sampler.share)
    dealt = [(sampler.actor, np.flatnonzero(~chosen_P)), (sampler.rollout, np.flatnonzero(chosen_P))]
    kind = SLOT_KIND_SHARE if 0 < chosen_P.sum() < num_prompts and slot.kind == SLOT_KIND_EXPERIENCE else slot.kind
    shares = []
    for client, prompts in dealt:
        if client is not None and len(prompts):
            places = (prompts[:, None] * num_samples + np.arange(num_samples)).reshape(-1).astype(np.int32)
            own_slot = Slot(kind=kind, step=slot.step, part=slot.part)
            own_parts = max(1, round(num_parts * len(prompts) / num_prompts))
            shares.append(Share(sampler, client, seeded.take(prompts), places, own_slot, own_parts))
    return shares
