"""Fake services without processes: clients, a scorer and inputs that compute with numpy and log when each call runs.

Each fake is a subclass of the class that it replaces, so that a different signature is a type error. The constructor of
that class is not called: a method that is not replaced here fails.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from controller.conversations.conversation import Conversation
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch, PromptDataset
from controller.data.tokenizer import Tokenizer
from controller.ppo.scores import Scores, Text, objects
from controller.scoring.scorer import Scorer
from controller.tracking.display import Display, open_display
from controller.workers.clients import ActorClient, CriticClient, RewardClient, SamplingClient, Traffic, WorkerClient
from controller.workers.command import CommandReply
from rewards.samples import Failure
from rewards.source import FailureLimit
from splitppo.batch import Batch, Column, join_parts
from splitppo.columns import spec_of
from splitppo.config import Config
from splitppo.config.load import validate
from splitppo.v1 import conversation_pb2
from splitppo.v1.actor_pb2 import LossTerms, SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_EVALUATION, SLOT_KIND_EXPERIENCE, SLOT_KIND_SHARE, Slot
from splitppo.v1.conversation_pb2 import TurnsEnded
from splitppo.v1.worker_pb2 import CommandResult
from tests.support.call_log import CallLog, Stream
from tests.support.scores import make_scores

NUM_PROMPTS = 6


def make_config(run_dir: Path, **changes: Any) -> Config:
    """Returns the configuration of a small run; `changes` are keys such as run__total_steps=3."""
    tree: dict[str, Any] = {
        "run": {"dir": str(run_dir), "total_steps": 3},
        "data": {"train_files": "train.jsonl", "train_batch_size": 2, "max_response_length": 4},
        "rollout": {"n": 2, "stream_groups": 1},
        "algorithm": {"rollout_correction": {"bypass_mode": False}},
        "actor": {"model": "models/policy"},
        "evaluation": {"val_before_train": False},
        "tracking": {"trackers": [], "sample_freq": -1, "report": False},
    }
    for key, value in changes.items():
        section = tree
        *parents, leaf = key.split("__")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return validate(tree, "test")


def make_table(num_prompts: int = NUM_PROMPTS) -> PromptBatch:
    """Returns prompts of one to three tokens, from two data sources in turn."""
    rows = [
        PromptRow(f"row {row}", f"prompt {row}", "ab"[row % 2], f"truth {row}", {"row": row})
        for row in range(num_prompts)
    ]
    ids = [list(range(1, 2 + row % 3)) for row in range(num_prompts)]
    prompts = Column.from_rows(ids, spec_of("prompts").dtype)
    return PromptBatch(np.arange(num_prompts), prompts, tuple(str(row.prompt) for row in rows), tuple(rows))


def make_prompts(config: Config, table: PromptBatch | None = None) -> PromptDataset:
    """Returns training prompts, by default those of `make_table`; an epoch has three steps of two prompts."""
    table = make_table() if table is None else table
    return PromptDataset(table, batch_size=config.data.draw_size, seed=config.run.seed, shuffle=True)


def plain_display() -> Display:
    """Returns a display whose output is discarded."""
    return open_display(io.StringIO())


class FakeClient(WorkerClient):
    """A client of any role, with a command queue, slots, checkpoints, and a clock that counts events of the log.

    Attributes:
        num_ids: of each call for log-probs of teachers.
        finds_top_tokens: whether these calls also add columns of the most likely tokens.
    """

    has_step = True

    def __init__(self, log: CallLog) -> None:  # not the client's: there is no channel
        self.log = log
        self.num_ids: list[int] = []
        self.finds_top_tokens = False
        self.traffic = Traffic()
        self.committed_step = 0
        self.puts: list[tuple[int, frozenset[str]]] = []
        self._slots: dict[bytes, Batch] = {}
        self._turn = asyncio.Lock()

    async def put_batch(self, slot: Slot, batch: Batch) -> None:
        self.puts.append((slot.step, frozenset(batch.columns) - {"recorded"}))  # that is for the record
        self.traffic += Traffic(bytes_sent=batch.num_bytes, transfer_s=1e-6)
        self._add(slot, batch)

    async def get_batch(self, slot: Slot, columns: Sequence[str]) -> Batch:
        batch = self._slot(slot).select(columns)
        self.traffic += Traffic(bytes_received=batch.num_bytes, transfer_s=1e-6)
        return batch

    async def save_checkpoint(self, *, base_step: int, with_hf_model: bool = False) -> CommandReply:
        reply = await self._run("save_checkpoint", base_step, base_step, lambda: None)
        reply.result.manifest_sha256 = f"{self.role} {base_step}"
        return reply

    async def compute_ref_log_probs(self, slot: Slot, *, base_step: int) -> CommandReply:
        return await self._compute("ref_log_probs", -0.2, slot, base_step)

    async def compute_reward_scores(self, slot: Slot, *, base_step: int) -> CommandReply:
        """Returns as scores a tenth of the number of tokens."""

        def compute() -> None:
            lengths = self._slot(slot)["reward_tokens"].lengths
            self._add(slot, Batch.from_rows(rm_scores=[[0.1 * length] for length in lengths]))

        return await self._run("reward_scores", slot.step, base_step, compute)

    async def compute_teacher_log_probs(self, slot: Slot, *, base_step: int, num_ids: int) -> CommandReply:
        """Adds log-probs that fall with the number of a row's teacher; and two likely tokens per token if asked for."""
        self.num_ids.append(num_ids)

        def compute() -> None:
            asked = self._slot(slot)
            responses = asked["responses"].rows()
            numbers = asked["teachers"].values if "teachers" in asked else [0] * len(responses)
            columns: dict[str, Any] = {
                "teacher_log_probs": [-0.3 * (1 + n) * row for n, row in zip(numbers, responses, strict=True)]
            }
            if self.finds_top_tokens:
                columns["teacher_top_ids"] = [np.repeat(row, 2) for row in responses]
                columns["teacher_top_log_probs"] = [np.full(2 * len(row), -1.0) for row in responses]
            self._add(slot, Batch.from_rows(**columns))

        return await self._run("teacher_log_probs", slot.step, base_step, compute)

    async def _compute(self, column: str, scale: float, slot: Slot, base_step: int) -> CommandReply:
        """Runs a call that adds a column of its name, a function of the tokens."""

        def compute() -> None:
            rows = [scale * row for row in self._slot(slot)["responses"].rows()]
            self._add(slot, Batch.from_rows(**{column: rows}))

        return await self._run(column, slot.step, base_step, compute)

    async def _run(
        self,
        name: str,
        step: int,
        base_step: int,
        work: Callable[[], object],
        stream: Stream | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> CommandReply:
        started_s = float(len(self.log.events))

        def checked_work() -> None:
            committed = self.committed_step if self.has_step else base_step
            assert base_step == committed, f"{self.role}.{name}: {base_step=}, {committed=}"
            work()

        await self.log.run(f"{self.role}.{name}", step, self._turn, checked_work, stream)
        finished_s = float(len(self.log.events))
        step = self.committed_step
        result = CommandResult(metrics=metrics, committed_step=step, policy_version=step)
        return CommandReply(result, started_s, finished_s)

    def _commit(self, step: int) -> None:
        self.committed_step = step

    def _slot(self, slot: Slot) -> Batch:
        return self._slots[slot.SerializeToString()]

    def _add(self, slot: Slot, batch: Batch) -> None:
        stored = self._slots.get(slot.SerializeToString())
        if stored is None and (parts := self._parts(slot)):
            stored = join_parts(parts)
        self._slots[slot.SerializeToString()] = batch if stored is None else stored.merge(batch)

    def _parts(self, slot: Slot) -> list[Batch]:
        """Returns the batches that were put to the parts of a whole slot, in their order."""
        if slot.kind not in (SLOT_KIND_EXPERIENCE, SLOT_KIND_SHARE) or slot.part:
            return []
        slots = [part_of(slot, part).SerializeToString() for part in range(1, NUM_PROMPTS + 1)]
        return [self._slots[name] for name in slots if name in self._slots]


def part_of(slot: Slot, part: int) -> Slot:
    """Returns the slot of a part of a whole slot."""
    return Slot(kind=slot.kind, step=slot.step, part=part)


class FakeSampler(FakeClient, SamplingClient):
    """A client of a group that samples: the seeds of a prompt say how long its response is.

    Attributes:
        rollout_offsets: by step, the error of the rollout backend's log-probs in nats; 0 in other steps.
        sync_s: by committed step, the seconds for which its first generation reports to have loaded the weights.
        slept: the number of generations after which the backend slept.
    """

    def __init__(self, log: CallLog) -> None:
        super().__init__(log)
        self.sampling: list[tuple[Slot, SamplingParams]] = []
        self.rollout_offsets: dict[int, float] = {}
        self.sync_s: dict[int, float] = {}
        self.slept = 0

    async def generate(
        self,
        slot: Slot,
        sampling: SamplingParams,
        *,
        base_step: int,
        num_parts: int = 1,
        max_step_tokens: int = 0,
        sleep_after: bool = False,
        on_part: Callable[[int], None] = lambda _: None,
        conversation: conversation_pb2.Conversation | None = None,
        on_turns: Callable[[TurnsEnded], None] = lambda _: None,
    ) -> CommandReply:
        """Generates in parts; a part is in the log as ("ready", "actor.part", part), or "rollout.part"."""
        self.sampling.append((slot, sampling))
        self.slept += sleep_after

        async def stream() -> None:
            answers = self._answers(self._slot(slot), slot.step, sampling, max_step_tokens)
            by_length = np.argsort(answers["responses"].lengths, kind="stable")
            for part, places in enumerate(map(np.sort, self._parts_of(by_length, num_parts)), start=1):
                await self.log.ready(f"{self.role}.part", part)
                rows = answers.take(places).merge(Batch.from_rows(places=places[:, None].tolist()))
                self._slots[part_of(slot, part).SerializeToString()] = rows
                on_part(part)

        def answer() -> None:
            answers = self._answers(self._slot(slot), slot.step, sampling, max_step_tokens)
            self._slots[slot.SerializeToString()] = answers

        name = "validate" if slot.kind == SLOT_KIND_EVALUATION else "generate"
        timings = {"timing_s/update_weights": self.sync_s.pop(base_step)} if base_step in self.sync_s else {}
        return await self._run(name, slot.step, base_step, answer, stream if num_parts > 1 else None, metrics=timings)

    def _parts_of(self, rows: NDArray[np.int64], num_parts: int) -> list[NDArray[np.int64]]:
        """Returns the rows of each part; `rows` are in the order in which they end."""
        return np.array_split(rows, num_parts)

    def _answers(self, asked: Batch, step: int, sampling: SamplingParams, max_step_tokens: int) -> Batch:
        """Returns the rows of a generation, each cut after `max_step_tokens` (0: none) behind its begun tokens."""
        rows = [
            (prompt, [seed], np.arange(1, 2 + seed % sampling.max_response_length))
            for prompt, seeds in zip(asked["prompts"].rows(), asked["seeds"].rows(), strict=True)
            for seed in seeds
        ]
        prompts, seeds, whole = zip(*rows, strict=True)
        begun = asked["begun_log_probs"].rows() if "begun_log_probs" in asked else [np.empty(0)] * len(whole)
        ends = [len(had) + max_step_tokens if max_step_tokens else None for had in begun]
        responses = [tokens[:end] for tokens, end in zip(whole, ends, strict=True)]
        offset = self.rollout_offsets.get(step, 0.0)
        sampled = [
            np.concatenate([had, -0.1 * tokens[len(had) :] + offset])
            for had, tokens in zip(begun, responses, strict=True)
        ]
        answers = Batch.from_rows(prompts=prompts, seeds=seeds, responses=responses, rollout_log_probs=sampled)
        if "images" in asked:
            of_prompts = np.repeat(np.arange(asked.num_rows), asked["seeds"].lengths)
            answers = answers.merge(asked.select(["images", "image_sizes"]).take(of_prompts))
        if not max_step_tokens:
            return answers
        goes_on = [[len(tokens) < len(all_tokens)] for tokens, all_tokens in zip(responses, whole, strict=True)]
        return answers.merge(Batch.from_rows(unfinished=goes_on))


class FakeActor(FakeSampler, ActorClient):
    """A client of the actor: log-probs are functions of the tokens.

    Attributes:
        published: (version, keep_from) of each call of `publish_weights`.
        terms: by step, the terms that the update was called with.
        entropies: by step, the entropy that the update measures.
    """

    role = "actor"

    def __init__(self, log: CallLog) -> None:
        super().__init__(log)
        self.published: list[tuple[int, int]] = []
        self.updates: list[tuple[int, bool]] = []
        self.terms: dict[int, LossTerms | None] = {}
        self.total_steps: list[int] = []
        self.entropies: dict[int, float] = {}

    async def publish_weights(self, *, base_step: int, keep_from: int, save_hf_model: bool = False) -> CommandReply:
        self.published.append((base_step, keep_from))
        reply = await self._run("publish_weights", base_step, base_step, lambda: None)
        reply.result.manifest_sha256 = manifest_of(base_step)
        return reply

    async def compute_log_probs(self, slot: Slot, *, base_step: int) -> CommandReply:
        return await self._compute("old_log_probs", -0.1, slot, base_step)

    async def update(
        self,
        slot: Slot,
        *,
        base_step: int,
        total_steps: int = 0,
        terms: LossTerms | None = None,
        advance_only: bool = False,
    ) -> CommandReply:
        self.updates.append((slot.step, advance_only))
        self.total_steps.append(total_steps)
        self.terms[slot.step] = terms
        metrics = {"actor/pg_loss": 0.5}
        if slot.step in self.entropies:
            metrics["actor/entropy"] = self.entropies[slot.step]
        return await self._run("update", slot.step, base_step, lambda: self._commit(slot.step), metrics=metrics)


def manifest_of(version: int) -> str:
    """Returns the sha256 by which a `FakeActor` names a published version."""
    return f"manifest of {version}"


class FakeCritic(FakeClient, CriticClient):
    """A client of the critic: values are a function of the tokens."""

    role = "critic"

    def __init__(self, log: CallLog) -> None:
        super().__init__(log)
        self.total_steps: list[int] = []
        self.num_epochs: list[int] = []

    async def compute_values(self, slot: Slot, *, base_step: int) -> CommandReply:
        return await self._compute("values", 0.25, slot, base_step)

    async def update(self, slot: Slot, *, base_step: int, total_steps: int = 0, num_epochs: int = 0) -> CommandReply:
        self.total_steps.append(total_steps)
        self.num_epochs.append(num_epochs)
        return await self._run(
            "update", slot.step, base_step, lambda: self._commit(slot.step), metrics={"critic/vf_loss": 0.25}
        )


class FakeReward(FakeClient, RewardClient):
    """A client of the reward group, which has no step."""

    role = "reward"
    has_step = False


MAX_REWARD_LENGTH = 4
VOCAB_SIZE = 50


class FakeScorer(Scorer):
    """A scorer: the score of a response is its length."""

    def __init__(self, log: CallLog) -> None:  # not the scorer's: nothing is decoded
        self.log = log
        vocabulary = {str(token): token for token in range(VOCAB_SIZE)}
        self.tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "0")))
        self.examined: list[int] = []
        self.asked_functions: list[bool] = []
        self.failure: Failure | None = None  # of every response
        self.have_ended = True  # all responses
        self._num_calls = 0
        self._turn = asyncio.Lock()

    @property
    def data_sources(self) -> frozenset[str]:
        return frozenset("a")

    @property
    def max_reward_length(self) -> int | None:
        return MAX_REWARD_LENGTH

    async def reward_rows(
        self, prompts: PromptBatch, rollouts: Batch, conversations: Sequence[Conversation] = ()
    ) -> Batch:
        """Returns the tokens of prompts and responses, cut to the last ones if there are too many."""
        rows = zip(rollouts["prompts"].rows(), rollouts["responses"].rows(), strict=True)
        return Batch.from_rows(reward_tokens=[np.concatenate(row)[-MAX_REWARD_LENGTH:] for row in rows])

    async def score(
        self,
        prompts: PromptBatch,
        rollouts: Batch,
        conversations: Sequence[Conversation] = (),
        *,
        num_examine: int,
        asks_functions: bool = True,
        limit: FailureLimit | None = None,
    ) -> Scores:
        """Scores responses, without `asks_functions` as an environment does; `scorer.score` is in the log with the
        number of the call in place of the step.
        """
        self._num_calls += 1
        self.examined.append(num_examine)
        self.asked_functions.append(asks_functions)
        rows, lengths_B = prompts.rows, rollouts["responses"].lengths.astype(np.float32)
        has_scorer_B = np.array([row.data_source == "a" for row in rows])
        scores = make_scores(
            np.where(has_scorer_B, lengths_B, np.float32(0.0)),
            rule_scores=np.where(has_scorer_B, lengths_B, np.float32(np.nan)),
            has_eos=np.full(len(rows), self.have_ended),
            data_sources=objects(row.data_source for row in rows),
            prompt_indices=prompts.row_indices,
            places=objects(row.place for row in rows),
            failures=objects(self.failure for _ in rows),
            conversations=objects(conversations or [None] * len(rows)),
            texts=objects(Text("", f"answer {number}", row.ground_truth) for number, row in enumerate(rows)),
        )
        return await self.log.run("scorer.score", self._num_calls, self._turn, lambda: scores)
