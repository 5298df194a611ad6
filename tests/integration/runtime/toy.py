"""A role of plain tensors behind the real runtime: values are functions of the tokens, weights are a counter.

Run by torchrun as `-m tests.integration.runtime.toy`. Its behaviour is steered by the first prompt token of the batch,
and by files in the run folder, so that tests decide when it goes on.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from services.roles.sharding import shard_by_mini_batch, shard_by_tokens
from services.rollout.generation import replies
from services.rollout.open_turns import receive_replies, send_turns
from services.rollout.reply_router import ReplyLimits, ReplyRouter
from services.runtime.command import Command, CommandCancelled, CommandProgress, Effect, Outcome, Rows
from services.runtime.context import RankContext
from services.runtime.launch import run_service
from services.runtime.ranks.sharding import Indices
from services.runtime.role import Program
from splitppo.batch import Batch, Column
from splitppo.v1 import actor_pb2, critic_pb2, worker_pb2
from tests.support.turns import ended_turn

# First token of the first prompt.
BLOCK = 900  # until the file "go" exists in the run folder
BUSY = 905  # likewise, and says all the time that it goes on
RAISE_ON_RANK = 910  # + rank
OUT_OF_MEMORY = 920
FAIL_AFTER_STEP = 930
REFUSED = 940
NO_MEMORY_TO_PREPARE = 945  # rank 0, before the others hear of the command
STREAM = 950  # in NUM_PARTS parts, each when the file "part_<number>" exists, until cancelled
CANCEL_ON_RANK = 960  # + rank, which waits until it is cancelled; the others finish
NUM_PARTS = 3
ROWS_OF_PART = {1: [0, 1, 2], 2: [4], 3: [3, 5, 6]}  # one of two ranks has no row of part 2
# Conversations: every turn of a response has the tokens of `turn_of`, and the turn MAX_TURNS is the last one.
MAX_TURNS = 3
REPLY_LIMITS = ReplyLimits(num_token_ids=1000, max_response_length=30, max_context_length=20, takes_stop_texts=True)


def turn_of(place: int, turn: int) -> list[int]:
    return [place, turn]


class ToyRole:
    """Values are 10 * rank-independent token sums; an update adds the global sum of returns to the weights."""

    role = worker_pb2.ROLE_CRITIC
    num_parameters = 1
    model = "a number"

    def __init__(self, context: RankContext) -> None:
        broken = context.config.run.dir / "broken_model"
        if broken.exists():
            if str(context.rank) in broken.read_text():
                raise OSError("the model folder is broken: no weights")
            dist.barrier(group=context.control_group)
        self._context = context
        self._weights = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self._optimizer: torch.optim.Optimizer | None = None
        self._writer = ThreadPoolExecutor(1)
        self._write(f"alive_{context.rank}", str(os.getpid()))

    def _write(self, name: str, text: str) -> None:
        (self._context.config.run.dir / name).write_text(text)

    def commands(self) -> Sequence[Command]:
        return (
            Command(
                "ComputeValues",
                critic_pb2.ComputeValuesRequest,
                Effect.WRITES_SLOT,
                self._compute_values,
                Rows(
                    columns=("prompts", "responses"),
                    prepare=self._prepare_values,
                    shard=_shard,
                    num_parts=lambda _: NUM_PARTS,
                ),
            ),
            Command(
                "Update",
                critic_pb2.CriticUpdateRequest,
                Effect.TRAINS,
                self._update,
                Rows(
                    columns=("prompts", "responses", "returns"),
                    prepare=self._prepare,
                    shard=shard_by_mini_batch,
                ),
            ),
            Command(
                "Generate",
                actor_pb2.GenerateRequest,
                Effect.WRITES_SLOT,
                self._generate,
                Rows(
                    columns=("prompts",),
                    prepare=lambda _, batch: _with_places(batch),
                    shard=_shard,
                    num_parts=lambda request: request.num_parts,
                ),
                messages=replies(_open_turns),
            ),
        )

    def _prepare(self, request: Any, batch: Batch) -> Batch:
        if batch["prompts"].values[0] == REFUSED:
            raise ValueError("the first token is the one that is refused")
        if batch["prompts"].values[0] == NO_MEMORY_TO_PREPARE:
            raise MemoryError("no room for the rows")
        return batch

    def _prepare_values(self, request: Any, batch: Batch) -> Batch:
        batch = self._prepare(request, batch)
        if batch["prompts"].values[0] != STREAM:
            return batch
        return _with_places(batch)

    def _compute_values(self, request: Any, batch: Batch, progress: CommandProgress) -> Outcome:
        if "places" in batch:
            return self._stream(batch, progress)
        if batch["prompts"].values[0] >= CANCEL_ON_RANK:
            return self._wait_on_rank(int(batch["prompts"].values[0]) - CANCEL_ON_RANK, batch, progress)
        self._misbehave(batch, progress)
        values = self._values(batch)
        progress(batch.num_rows, batch.num_rows, "values")
        return Outcome(values, self._token_metrics(batch))

    def _values(self, batch: Batch) -> Batch:
        rows = [
            row.astype("float32") + 1000 * int(prompt.sum())
            for prompt, row in zip(batch["prompts"].rows(), batch["responses"].rows(), strict=True)
        ]
        return Batch.from_rows(values=rows)

    def _stream(self, batch: Batch, report: CommandProgress) -> Outcome:
        """Parts in the order in which the test lets them end."""
        report(0, 1, "streaming")
        waiting = set(range(1, NUM_PARTS + 1))
        while waiting:
            for part in sorted(waiting):
                self._look_around(report)
                if (self._context.config.run.dir / f"part_{part}").exists():
                    rows = batch.take(np.flatnonzero(np.isin(batch["places"].values, ROWS_OF_PART[part])))
                    report.part_ready(part, self._values(rows).merge(rows.select(["places"])), policy_version=7)
                    waiting.remove(part)
        return Outcome(self._values(batch), policy_version=7)

    def _generate(self, request: Any, batch: Batch, report: CommandProgress) -> Outcome:
        """One response for each row: turns, and the replies to them until one ends the conversation."""
        responses: dict[int, list[int]] = {place: [] for place in batch["places"].values.tolist()}
        ended = [ended_turn(place, 1, turn_of(place, 1)) for place in responses]
        report(0, 1, "talking")
        num_open = len(responses)
        while True:
            for turn in ended:
                responses[turn.place] += turn.tokens
            send_turns(report, ended)
            num_open -= sum(turn.is_last for turn in ended)
            if not num_open:
                break
            self._look_around(report)
            answers = receive_replies(report, 0.05)
            for reply in answers:
                responses[reply.place] += reply.tokens
            num_open -= sum(reply.is_last for reply in answers)
            following = [(reply.place, reply.turn + 1) for reply in answers if not reply.is_last]
            ended = [ended_turn(p, turn, turn_of(p, turn), is_last=turn == MAX_TURNS) for p, turn in following]
        columns = Batch.from_rows(responses=list(responses.values()))
        if request.num_parts > 1:  # all rows are in the first one
            report.part_ready(1, columns.merge(batch.select(["places"])), policy_version=7)
            none = columns.merge(batch.select(["places"])).take(np.arange(0))
            for part in range(2, request.num_parts + 1):
                report.part_ready(part, none, policy_version=7)
        return Outcome(columns, policy_version=7)

    def _wait_on_rank(self, rank: int, batch: Batch, report: CommandProgress) -> Outcome:
        """One rank waits until it is cancelled, the others are done at once."""
        report(0, 1, "waiting")
        while self._context.rank == rank:
            self._look_around(report)
        return Outcome(self._values(batch))

    def _look_around(self, report: CommandProgress) -> None:
        time.sleep(0.01)
        if report.is_cancelled():
            self._write(f"cancelled_{self._context.rank}", "")
            raise CommandCancelled

    def _update(self, request: Any, batch: Batch, progress: CommandProgress) -> Outcome:
        self._misbehave(batch, progress)
        total = torch.tensor([float(batch["returns"].values.sum())], dtype=torch.float64)
        self._all_reduce(total)
        if self._optimizer is None:  # late: its first use imports for seconds
            self._optimizer = torch.optim.SGD([self._weights], lr=1.0)
        self._weights.grad = -total
        self._optimizer.step()
        if batch["prompts"].values[0] == FAIL_AFTER_STEP:
            raise RuntimeError("the second optimizer step failed")
        progress(1, 1, "update")
        return Outcome(None, {"total": float(total)})

    def _token_metrics(self, batch: Batch) -> dict[str, float]:
        tokens = torch.tensor([len(batch["prompts"].values) + len(batch["responses"].values)], dtype=torch.float64)
        all_tokens = tokens.clone()
        self._all_reduce(all_tokens)
        return {"token_share": float(tokens / all_tokens)}

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def _misbehave(self, batch: Batch, progress: CommandProgress) -> None:
        """Does what the largest prompt token of all ranks asks for."""
        order = torch.tensor([int(batch["prompts"].values.max())])
        dist.all_reduce(order, op=dist.ReduceOp.MAX)
        match int(order):
            case token if token == BLOCK:
                progress(0, 1, "blocked")
                self._wait_for(self._context.config.run.dir / "go")
            case token if token == BUSY:
                self._wait_for(self._context.config.run.dir / "go", lambda: progress(0, 1, "blocked"))
            case token if RAISE_ON_RANK <= token < RAISE_ON_RANK + 10:
                progress(0, 1, "forward")
                if self._context.rank == token - RAISE_ON_RANK:
                    raise RuntimeError("a toy has broken")
                self._all_reduce(torch.zeros(1))
            case token if token == OUT_OF_MEMORY:
                raise torch.OutOfMemoryError("no room for 1 TiB")

    def _wait_for(self, file: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
        deadline = time.monotonic() + 60.0
        while not file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{file} never came")
            meanwhile()
            time.sleep(0.01)

    def save_checkpoint(self, directory: Path, service_state: bytes, *, with_hf_model: bool) -> Future[str]:
        snapshot, digest = float(self._weights.detach()), self.compute_weights_digest()

        def write() -> str:
            if (self._context.config.run.dir / "hold_save").exists():
                self._wait_for(self._context.config.run.dir / "release_save")
            if self._context.rank == 0:
                (directory / "weights").write_text(repr(snapshot))
                (directory / "state").write_bytes(service_state)
            return digest

        return self._writer.submit(write)

    def check_checkpoint(self, directory: Path) -> None:
        if not (directory / "state").exists():
            raise ValueError(f"{directory} is torn")

    def load_checkpoint(self, directory: Path | None, progress: object = None) -> bytes:
        with torch.no_grad():
            self._weights.fill_(0.0 if directory is None else float((directory / "weights").read_text()))
        return b"" if directory is None else (directory / "state").read_bytes()

    def compute_weights_digest(self) -> str:
        return hashlib.sha256(self._weights.detach().numpy().tobytes()).hexdigest()


def _open_turns(_request: Any, shares: Sequence[Batch]) -> ReplyRouter:
    return ReplyRouter(REPLY_LIMITS, [dict.fromkeys(share["places"].values.tolist(), 1) for share in shares])


def _with_places(batch: Batch) -> Batch:
    return batch.merge(Batch.from_rows(places=[[place] for place in range(batch.num_rows)]))


def _shard(batch: Batch, num_ranks: int) -> list[Indices]:
    """Returns the rows of each rank; streamed rows go to the ranks in turn."""
    if "places" not in batch:
        return shard_by_tokens(batch, num_ranks)
    return [np.arange(rank, batch.num_rows, num_ranks) for rank in range(num_ranks)]


def values_of(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Column:
    """Returns the answer of ComputeValues."""
    rows = [[1000.0 * sum(p) + token for token in r] for p, r in zip(prompts, responses, strict=True)]
    return Batch.from_rows(values=rows)["values"]


if __name__ == "__main__":
    run_service(Program("critic", ToyRole))
