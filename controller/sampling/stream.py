"""Has responses sampled, as one stream of parts: training, baselines, validation and the probe all read `sample`.

P prompts with n samples each; B = P x n responses, ordered by prompt, then sample.

`sample` deals the prompts to the groups that sample. Each group gets its prompts with their seeds (PutBatch), samples
the responses (Generate), and gives them back part by part, those first that have ended first (GetBatch). With
environments, every response is a conversation, which talk.py leads meanwhile.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from controller.conversations.conversation import Conversation, mask_lost
from controller.conversations.environments import Environments
from controller.data.prompts import PromptBatch
from controller.sampling.devices import Devices
from controller.sampling.talk import Talk, TurnInbox
from controller.sampling.versions import HeldVersion, PublishedVersions, Restart, Watch, nothing_to_watch, raise_error
from controller.schedule import run_calls
from controller.workers.clients import ActorClient, RolloutClient, SamplingClient
from controller.workers.command import CommandReply
from controller.workers.concurrency import task_group
from controller.workers.work import Work
from controller.workers.worker_groups import Workers
from splitppo.batch import Array, Batch, Column, concatenate, row_order
from splitppo.config import Config, Schedule
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, SLOT_KIND_SHARE, Slot

T = TypeVar("T")
# What a later update needs of rollouts that the actor's group has not sampled itself.
UPDATE_COLUMNS = ("responses", "rollout_log_probs", "seeds")
# What the responses of conversations have besides: which tokens were sampled, and where contexts begin.
CONVERSATION_COLUMNS = ("response_mask", "segments")


@dataclass(frozen=True, eq=False)
class SamplingGroups:
    """The worker groups that sample, and what they need for it.

    Attributes:
        actor: the client of the actor's group, whose weights are always those of its own step.
        rollout: the client of the rollout group; None if the actor's group alone samples.
        share: the share of the prompts that the rollout group answers, from 0 to 1; the actor's group has the rest.
        schedule: whether both groups may sample at the same time.
        published: the versions of the policy in files.
        held: the version that the rollout group holds; None without such a group.
        devices: the turns of groups that share devices.
        environments: what the policy talks with; None if every response has one turn.
    """

    actor: ActorClient
    rollout: RolloutClient | None
    share: float
    schedule: Schedule
    published: PublishedVersions
    held: HeldVersion | None
    devices: Devices
    environments: Environments | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        workers: Workers,
        environments: Environments | None = None,
        *,
        watch: Watch = nothing_to_watch,
        restart: Restart = raise_error,
    ) -> Self:
        """Makes the sampling groups of connected workers; `watch` and `restart` are of the rollout group."""
        rollout = workers.rollout
        share = config.rollout.share
        assert share != "auto", "load resolves it"
        published = PublishedVersions(config, workers.actor, has_reader=rollout is not None)
        return cls(
            actor=workers.actor,
            rollout=rollout,
            share=0.0 if rollout is None else share,
            schedule=config.run.schedule,
            published=published,
            held=None if rollout is None else HeldVersion(config, rollout, published, watch, restart),
            devices=Devices(are_shared=rollout is not None and config.rollout_shares_devices),
            environments=environments,
        )


@dataclass(frozen=True, eq=False)
class Asked:
    """The responses that are asked for: to which prompts, from which version of the policy, and where they are kept.

    Attributes:
        prompts: the P prompts, each once.
        seeded: the prompts with n seeds each (`PromptBatch.to_batch`).
        version: the step whose weights sample.
        params: temperature, limits and the like.
        slot: the slot in which the groups keep the responses.
        num_parts: the number of parts, of all groups together, in which the responses come.
        columns: the columns that the caller needs.
        work: the name of the work in the timeline.
        talk: the conversations of the responses; None if every response has one turn.
        max_step_tokens: the most tokens of each response that are sampled now; 0: whole responses. `seeded` may have
            what the responses have already (`begun_responses`, `begun_log_probs`), and then has one seed in each row.
    """

    prompts: PromptBatch
    seeded: Batch
    version: int
    params: SamplingParams
    slot: Slot
    num_parts: int = 1
    columns: Sequence[str] = ("responses",)
    work: str = "gen"
    talk: Talk | None = None
    max_step_tokens: int = 0

    @property
    def num_samples(self) -> int:
        """n, the number of responses to each prompt."""
        return int(self.seeded["seeds"].lengths[0])


@dataclass(frozen=True, eq=False)
class Part:
    """Some responses of a batch that ended one after another, and are fetched, scored and sent on together.

    Attributes:
        slot: the slot in which the workers keep the rows: a part of the batch's slot, or the whole slot if this is the
            only part.
        places: [num_rows] ascending, the indices of the rows in the batch, which is ordered by prompt, then sample.
        prompts: the prompt of each row.
        rollouts: prompts and responses; with the column `places` if there are other parts.
        conversations: what happened in the conversation of each row; empty if every response has one turn.
    """

    slot: Slot
    places: Array
    prompts: PromptBatch
    rollouts: Batch
    conversations: Sequence[Conversation] = ()

    @classmethod
    def join(cls, slot: Slot, parts: "Sequence[Part]") -> "Part":
        """Joins all parts of a batch into one part of the batch's slot, in the order of the prompts."""
        order = order_of(parts)
        conversations = [one for part in parts for one in part.conversations]
        return cls(
            slot=slot,
            places=np.arange(len(order)),
            prompts=PromptBatch.join([part.prompts for part in parts]).take(order),
            rollouts=in_order([part.rollouts for part in parts], parts),
            conversations=[conversations[index] for index in order] if conversations else (),
        )


def order_of(parts: Iterable[Part]) -> NDArray[np.int64]:
    """Returns for each row of the batch its index in the joined parts, [B]; `parts` are all parts of the batch."""
    return row_order(np.concatenate([part.places for part in parts]))


def in_order(columns: Sequence[Batch], parts: Sequence[Part]) -> Batch:
    """Joins columns of all parts of a batch, a `Batch` for each part; returns them in the order of the prompts."""
    joined = concatenate(columns)
    return joined if len(columns) == 1 else joined.take(order_of(parts))


class GrowingList(Generic[T]):
    """A list that grows until it is complete; several callers may iterate over it, each from the beginning."""

    def __init__(self, items: Iterable[T] = (), *, is_complete: bool = False) -> None:
        self._items = list(items)
        self._is_complete = is_complete
        self._has_grown = asyncio.Event()

    @property
    def items(self) -> Sequence[T]:
        """The items that are there by now."""
        return self._items

    def append(self, item: T) -> None:
        """Adds an item, and wakes all who wait for it."""
        self._items.append(item)
        self._wake()

    def complete(self) -> None:
        """Ends the list: who has had all of its items waits for no others."""
        self._is_complete = True
        self._wake()

    def _wake(self) -> None:
        self._has_grown.set()
        self._has_grown = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[T]:
        """Yields the items, each as soon as it is there."""
        number = 0
        while number < len(self._items) or not self._is_complete:
            if number == len(self._items):
                await self._has_grown.wait()
                continue
            yield self._items[number]
            number += 1


async def sample(
    groups: SamplingGroups, asked: Asked, record: Work, *, on_actor: asyncio.Event | None = None
) -> AsyncGenerator[Part, None]:
    """Has responses sampled, and yields them in parts, each as soon as it has arrived; the only way to sample.

    The parts are numbered as they arrive, over all groups. Only calls that compute row by row work on parts, so that
    their results are the same in any order. At the end, the actor's group has all rows of a step's own slot
    (SLOT_KIND_EXPERIENCE) there, whichever group has sampled them. `on_actor` is set as soon as the actor's group has
    all rows that it will have, which may be before the last part is fetched.

    If the rollout group is lost, the same responses are sampled again; those that were fetched before stay as they are,
    because other groups may have computed with them. Whoever reads no further closes the generator.
    """
    sampling = _Sampling(groups, asked, record, on_actor or asyncio.Event())
    running = asyncio.create_task(sampling.run())
    try:
        async for part in sampling.parts:
            yield part
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@dataclass(frozen=True, eq=False)
class Share:
    """The responses that one worker group samples: all responses to some prompts of a batch.

    Attributes:
        client: the gRPC client of the group.
        seeded: the prompts, each with its seeds.
        places: [num_rows] ascending, the indices of the responses among those of the whole batch.
        slot: the slot in which the group keeps the responses.
        num_parts: the number of parts in which the responses come.
    """

    client: SamplingClient
    seeded: Batch
    places: NDArray[np.int32]
    slot: Slot
    num_parts: int


def deal(groups: SamplingGroups, asked: Asked) -> list[Share]:
    """Divides prompts among the groups that sample; returns the shares that have prompts, the actor's first.

    The responses come in about `num_parts` parts in all. If several groups sample the rollouts of a step, each keeps
    its own in a slot of its own kind, because the slot of the step has the rollouts of all groups.
    """
    slot = asked.slot
    num_samples = asked.num_samples
    num_prompts = asked.seeded.num_rows
    to_rollout_P = goes_to_rollout_group(asked.seeded["prompts"].lengths, groups.share)
    is_divided = 0 < to_rollout_P.sum() < num_prompts
    kind = SLOT_KIND_SHARE if is_divided and slot.kind == SLOT_KIND_EXPERIENCE else slot.kind
    shares = []
    of_actor = np.flatnonzero(~to_rollout_P)
    of_rollout = np.flatnonzero(to_rollout_P)
    for client, prompts in ((groups.actor, of_actor), (groups.rollout, of_rollout)):
        if client is not None and len(prompts):
            places = (prompts[:, None] * num_samples + np.arange(num_samples)).reshape(-1).astype(np.int32)
            own_slot = Slot(kind=kind, step=slot.step, part=slot.part)
            own_parts = max(1, round(asked.num_parts * len(prompts) / num_prompts))
            shares.append(Share(client, asked.seeded.take(prompts), places, own_slot, own_parts))
    return shares


def goes_to_rollout_group(lengths_P: NDArray[np.int32], share: float) -> NDArray[np.bool_]:
    """Returns for each prompt whether the rollout group answers it, [P]: a share of short and long prompts alike.

    Of the prompts in the order of their lengths, prompt i goes to the rollout group if floor((i + 1) share) is larger
    than floor(i share). So the choice depends on prompts and share alone, never on which group is faster.
    """
    chosen_P = np.empty(len(lengths_P), np.bool_)
    chosen_P[np.argsort(-lengths_P, kind="stable")] = np.diff(np.floor(np.arange(len(lengths_P) + 1) * share)) > 0
    return chosen_P


class _Sampling:
    """One call of `sample`: the groups sample their shares, and `parts` grows with each part that is fetched.

    Attributes:
        prompts_B: the prompt of each response, with what its environment has said first.
        columns: the columns that are fetched.
    """

    def __init__(self, groups: SamplingGroups, asked: Asked, record: Work, on_actor: asyncio.Event) -> None:
        self.groups = groups
        self.asked = asked
        self.parts: GrowingList[Part] = GrowingList()
        self._record = record
        self._on_actor = on_actor
        self.prompts_B = asked.prompts.repeated(asked.num_samples)
        self._shares = deal(groups, asked)
        # The actor's group has not sampled all rows that it must have in the end.
        self._actor_lacks_rows = asked.slot.kind == SLOT_KIND_EXPERIENCE and not self._has_actor_all
        self.columns = asked.columns
        if self._actor_lacks_rows:
            self.columns = list(dict.fromkeys((*UPDATE_COLUMNS, *asked.columns)))

    @property
    def _has_actor_all(self) -> bool:
        return [share.client for share in self._shares] == [self.groups.actor]

    @property
    def _is_one_part(self) -> bool:
        return [share.num_parts for share in self._shares] == [1]

    async def run(self) -> None:
        """Samples all shares; afterwards the actor's group has what it must have."""
        talk = self.asked.talk
        try:
            if talk is None:
                await self._sample_shares()
                self._record.add_environments([])
            else:
                async with talk:
                    self.prompts_B = talk.prompts_B
                    await self._sample_shares()
                self._record.add_environments(talk.spans(self._record.step))
        finally:
            self.parts.complete()
        if self._actor_lacks_rows:
            await self._put_to_actor()
        self._on_actor.set()

    async def _put_to_actor(self) -> None:
        parts = self.parts.items
        columns = (*self.prompts_B.column_names, *self.columns)
        rollouts = in_order([part.rollouts.select(columns) for part in parts], parts)
        await self.groups.actor.put_batch(self.asked.slot, rollouts)

    async def _sample_shares(self) -> None:
        await run_calls(self.groups.schedule, *(partial(self._sample, share) for share in self._shares))

    async def _sample(self, share: Share) -> None:
        """Has a share sampled with the version that is asked for."""
        groups = self.groups
        version = self.asked.version
        fetched: list[NDArray[np.int32]] = []

        async def attempt() -> CommandReply:
            return await _Attempt(self, share, fetched).run()

        if share.client is groups.actor:
            await groups.published.publish_once(version, self._record.add_reply)  # before the actor's group is busy
            reply = await attempt()
        else:
            assert groups.held is not None, "only the rollout group is no actor"
            async with groups.devices.turn_of(share.client.role):
                reply = await groups.held.call(version, self._record.add_reply, attempt)
        parts = () if self._is_one_part else [places.tolist() for places in fetched]
        self._record.add_reply(share.client.role, self.asked.work, reply, parts=parts)

    def note_sampled(self, client: SamplingClient) -> None:
        """Notes that a group has sampled its share, which may be all that the actor's group needs."""
        if client is self.groups.actor and not self._actor_lacks_rows:
            self._on_actor.set()

    def add(self, places: NDArray[np.int32], columns: Batch, conversations: Sequence[Conversation]) -> None:
        """Adds responses that have arrived, as the next part."""
        slot = self.asked.slot
        prompts = self.prompts_B.take(places.astype(np.int64))
        rollouts = prompts.columns.merge(mask_lost(columns, conversations))
        if not self._is_one_part:
            slot = Slot(kind=slot.kind, step=slot.step, part=len(self.parts.items) + 1)
            numbers = Column(places, np.ones(len(places), np.int32))
            rollouts = rollouts.merge(Batch(len(places), {"places": numbers}))
        self.parts.append(Part(slot, places, prompts, rollouts, conversations))


class _Attempt:
    """One attempt of a group to sample its share, while its parts are fetched and its conversations are led.

    Rows at places that an earlier attempt has `fetched` are not handed on again; those of this attempt are added.
    """

    def __init__(self, sampling: _Sampling, share: Share, fetched: list[NDArray[np.int32]]) -> None:
        self._sampling = sampling
        self._share = share
        self._fetched = fetched
        self._ended = [asyncio.Event() for _ in range(share.num_parts)]  # for each part
        self._turns = TurnInbox(share.client, share.slot, len(share.places))
        self._talks: list[asyncio.Task[Conversation]] = []  # for each row, if responses are conversations

    async def run(self) -> CommandReply:
        """Sends the rows, has them sampled, and fetches the responses; returns the reply to Generate."""
        share = self._share
        talk = self._sampling.asked.talk
        await share.client.put_batch(share.slot, share.seeded if talk is None else self._one_row_each())
        async with task_group() as tasks:
            if talk is not None:
                rows = enumerate(share.places.tolist())
                self._talks = [tasks.create_task(talk.converse(place, row, self._turns)) for row, place in rows]
            generating = tasks.create_task(self._generate())
            tasks.create_task(self._fetch())
        return generating.result()

    def _one_row_each(self) -> Batch:
        """Returns the rows of conversations: one for each response, with what its environment has said first."""
        places = self._share.places.astype(np.int64)
        one_each = np.ones(len(places), np.int32)
        prompts = self._sampling.prompts_B.prompts.take(places)
        return Batch(len(places), {"prompts": prompts, "seeds": Column(self._share.seeded["seeds"].values, one_each)})

    async def _generate(self) -> CommandReply:
        """Has the share sampled; marks each part as it ends, and afterwards all of them. Returns Generate's reply."""
        share = self._share
        asked = self._sampling.asked
        reply = await share.client.generate(
            share.slot,
            asked.params,
            base_step=asked.version,
            num_parts=share.num_parts,
            sleep_after=self._sampling.groups.devices.takes_turns(share.client.role),
            on_part=lambda part: self._ended[part - 1].set(),
            conversation=None if asked.talk is None else asked.talk.request(share.places.tolist()),
            on_turns=self._turns.end,
            max_step_tokens=asked.max_step_tokens,
        )
        for event in self._ended:  # a reply may arrive without its events, e.g. after a reconnect
            event.set()
        self._sampling.note_sampled(share.client)
        return reply

    async def _fetch(self) -> None:
        """Fetches each part when it has ended, and hands on those rows that were not handed on before."""
        share = self._share
        columns = self._sampling.columns
        places_before = np.concatenate([np.empty(0, np.int32), *self._fetched])  # of earlier attempts
        for part, event in enumerate(self._ended, start=1):
            await event.wait()
            if share.num_parts == 1:
                batch = await share.client.get_batch(share.slot, columns)
                rows = np.arange(batch.num_rows)
            else:
                slot = Slot(kind=share.slot.kind, step=share.slot.step, part=part)
                batch = await share.client.get_batch(slot, [*columns, "places"])
                rows = batch["places"].values
            new_rows = np.flatnonzero(~np.isin(share.places[rows], places_before))  # of `batch`
            if len(new_rows):
                conversations = [await self._talks[row] for row in rows[new_rows].tolist()] if self._talks else []
                places = share.places[rows[new_rows]]
                self._fetched.append(places)
                self._sampling.add(places, batch.select(columns).take(new_rows), conversations)
