"""Commands of the roles, in and out of order: their rows, and the parameters of the work.

Every case puts its rows first, into a slot that is hardly used by another one, so that the command finds what was meant
for it. An Update never finds rows that are in order: NaN or infinity is in its advantages or returns.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from google.protobuf.message import Message

from splitppo.batch import Batch
from splitppo.v1 import (
    actor_pb2,
    batch_pb2,
    critic_pb2,
    reference_pb2,
    reward_model_pb2,
    rollout_pb2,
    teacher_pb2,
    worker_pb2,
)
from tests.support.batch_streams import encode
from tests.support.models import POSITIONS, VOCABULARY

Role = Literal["actor", "critic", "reward", "rollout"]
Rows = dict[str, list[Any]]
ACTOR, CRITIC = "/splitppo.v1.ActorService", "/splitppo.v1.CriticService"
ROLLOUT = "/splitppo.v1.RolloutService"
SYNC = f"{ROLLOUT}/SyncWeights"
# Of whichever group hosts the models: here actor and critic the reference, critic and reward group the others.
REF_LOG_PROBS = "/splitppo.v1.ReferenceService/ComputeRefLogProbs"
REWARD_SCORES = "/splitppo.v1.RewardModelService/ComputeRewardScores"
TEACHER = "/splitppo.v1.TeacherService/ComputeTeacherLogProbs"
MAX_RESPONSE_LENGTH = 8
TEACHER_TOP_K = 4
NOT_FINITE = (math.nan, math.inf, -math.inf)

# Columns that a command reads beside prompts; the first of an Update is the one that is never in order.
_COLUMNS = {
    "Generate": ("seeds",),
    "ComputeLogProbs": ("responses",),
    "ComputeRefLogProbs": ("responses",),
    "ComputeTeacherLogProbs": ("responses", "teachers"),
    "ComputeValues": ("responses",),
    f"{ACTOR}/Update": ("advantages", "responses", "old_log_probs", "ref_log_probs", "rollout_is_weights"),
    f"{CRITIC}/Update": ("returns", "responses", "values"),
}
# Values that are no more or less than allowed, and such as are: (field of the sampling, in order, wrong).
_SAMPLING: Sequence[tuple[str, Sequence[float], Sequence[float]]] = (
    ("temperature", (0.0, 0.01, 1.0, 1e30, 3.4e38), (-1.0, -0.01, 1e-3, 1e-30, 1e-38, 1e-45, *NOT_FINITE)),
    ("top_p", (1.0, 0.5, 1e-30, 1e-45), (0.0, -1.0, 1.5, 1e30, *NOT_FINITE)),
    ("top_k", (0, 1, 3, 10_000, (1 << 31) - 1), (-1, -(1 << 31))),
    ("max_response_length", (1, MAX_RESPONSE_LENGTH, 100), (0, -1, POSITIONS, 1 << 30, (1 << 31) - 1, -(1 << 31))),
)


@dataclass(frozen=True)
class Case:
    """A command and what is put before it.

    Attributes:
        method: full name of the RPC.
        what: what is wrong with it; empty: nothing.
        batches: for PutBatch, one after the other, all to the slot of the request.
        request: of the command.
    """

    method: str
    what: str
    batches: Sequence[tuple[batch_pb2.BatchHeader, Sequence[batch_pb2.BatchChunk]]]
    request: Message


def make_case(draw: random.Random, role: Role, header: worker_pb2.CommandHeader, committed_step: int) -> Case:
    """Any command of a role, whose header is in order."""
    methods = {
        "actor": (f"{ACTOR}/Generate", f"{ACTOR}/ComputeLogProbs", f"{ACTOR}/Update", REF_LOG_PROBS),
        "critic": (f"{CRITIC}/ComputeValues", f"{CRITIC}/Update", REWARD_SCORES, REF_LOG_PROBS, TEACHER),
        "reward": (REWARD_SCORES, TEACHER),
        "rollout": (f"{ROLLOUT}/Generate",),
    }
    method = draw.choice(methods[role])
    if method.endswith("Update"):
        return _update(draw, method, header, committed_step)
    faults = _SEQUENCE_FAULTS if method == REWARD_SCORES else _FAULTS
    rows = _sequences(draw) if method == REWARD_SCORES else _rows(draw, method)
    what = draw.choice(list(faults)) if draw.random() < 0.5 else ""
    slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=committed_step, part=draw.randrange(1 << 31))
    if method.endswith("Generate"):
        request, how = _generate(draw, header, slot, may_be_wrong=not what)
    else:
        request, how = _compute(method, header, slot), ""
    if method == TEACHER:
        how = _ask_teachers(draw, request, rows, may_be_wrong=not what)
    if what:
        faults[what](draw, rows)
    return Case(method, what or how, _batches(draw, rows, request.slot), request)


def command_requests(
    draw: random.Random, role: Role, header: worker_pb2.CommandHeader, slot: batch_pb2.Slot
) -> dict[str, Message]:
    """A request for each command of a role, that works on whatever its slot holds."""
    if role == "reward":
        return {method: _compute(method, header, slot) for method in (REF_LOG_PROBS, REWARD_SCORES, TEACHER)}
    if role == "critic":
        values = f"{CRITIC}/ComputeValues"
        return {
            **{method: _compute(method, header, slot) for method in (values, REF_LOG_PROBS, REWARD_SCORES, TEACHER)},
            f"{CRITIC}/Update": critic_pb2.CriticUpdateRequest(header=header, slot=slot),
        }
    generate, _ = _generate(draw, header, slot)
    if role == "rollout":
        digest = draw.choice(("", "0" * 64, f"{draw.getrandbits(256):064x}", "../" * 20, "x" * 5000))
        version = draw.choice((0, 1, 2, 3, -1, 1 << 62, -(1 << 63)))
        sync = rollout_pb2.SyncWeightsRequest(header=header, version=version, manifest_sha256=digest)
        return {f"{ROLLOUT}/Generate": generate, SYNC: sync}
    publish = actor_pb2.PublishWeightsRequest(header=header, keep_from=draw.choice((0, 2, 1 << 62, -(1 << 63))))
    log_probs = f"{ACTOR}/ComputeLogProbs"
    return {
        f"{ACTOR}/Generate": generate,
        **{method: _compute(method, header, slot) for method in (log_probs, REF_LOG_PROBS, TEACHER)},
        f"{ACTOR}/Update": actor_pb2.ActorUpdateRequest(header=header, slot=slot),
        f"{ACTOR}/PublishWeights": publish,
    }


# Requests: (request, what is wrong with it).


def _generate(
    draw: random.Random, header: worker_pb2.CommandHeader, slot: batch_pb2.Slot, *, may_be_wrong: bool = True
) -> tuple[Any, str]:
    sampling = {name: draw.choice(good) for name, good, _ in _SAMPLING}
    wrong = ""
    if may_be_wrong and draw.random() < 0.7:
        wrong, _, bad = draw.choice(_SAMPLING)
        sampling[wrong] = draw.choice(bad)
    num_parts = draw.choice((0, 0, 0, 1))
    if may_be_wrong and not wrong and draw.random() < 0.5:
        wrong, num_parts = "num_parts", draw.choice((-1, 2, 1000, (1 << 31) - 1, -(1 << 31)))
    params, sleep_after = actor_pb2.SamplingParams(**sampling), draw.random() < 0.5
    request = actor_pb2.GenerateRequest(
        header=header, slot=slot, sampling=params, num_parts=num_parts, sleep_after=sleep_after
    )
    return request, wrong


def _compute(method: str, header: worker_pb2.CommandHeader, slot: batch_pb2.Slot) -> Any:
    """A request with nothing but header and slot."""
    kind: Any = {
        f"{ACTOR}/ComputeLogProbs": actor_pb2.ComputeLogProbsRequest,
        f"{CRITIC}/ComputeValues": critic_pb2.ComputeValuesRequest,
        REF_LOG_PROBS: reference_pb2.ComputeRefLogProbsRequest,
        REWARD_SCORES: reward_model_pb2.ComputeRewardScoresRequest,
        TEACHER: teacher_pb2.ComputeTeacherLogProbsRequest,
    }[method]
    return kind(header=header, slot=slot)


def _ask_teachers(draw: random.Random, request: Any, rows: Rows, *, may_be_wrong: bool) -> str:
    """Sets the number of ids, and two teachers' numbers; returns what is wrong with them."""
    wrong = draw.choice(("num_ids", "teachers", "")) if may_be_wrong else ""
    bad = (0, -1, TEACHER_TOP_K - 1, len(VOCABULARY) + 1, (1 << 31) - 1, -(1 << 31))
    request.num_ids = draw.choice(bad if wrong == "num_ids" else (TEACHER_TOP_K, len(VOCABULARY)))
    rows["teachers"] = [[draw.choice((0, 1))] for _ in rows["prompts"]]
    if wrong == "teachers":
        rows["teachers"][-1] = draw.choice(([2], [-1], [(1 << 31) - 1], [], [0, 0]))
    return wrong


def _update(draw: random.Random, method: str, header: worker_pb2.CommandHeader, committed_step: int) -> Case:
    """Always refused: for its first column, for another fault, or for its step."""
    step = committed_step + 1
    what = draw.choice(("not finite", "not finite", "step", *_FAULTS))
    rows = _rows(draw, method)
    wrong_value(draw, rows, (_COLUMNS[method][0],))
    if what in _FAULTS:
        _FAULTS[what](draw, rows)
    slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=step, part=draw.randrange(1, 1025))
    batches = _batches(draw, rows, slot)
    if what == "step":
        slot = batch_pb2.Slot(kind=draw.choice((1, 2, 3, 4, 5)), step=draw.choice((0, -1, step - 1, step + 1, 1 << 62)))
    if method.startswith(CRITIC):
        return Case(method, what, batches, critic_pb2.CriticUpdateRequest(header=header, slot=slot))
    advance_only = what == "step" and draw.random() < 0.5
    terms = None if draw.random() < 0.5 else _loss_terms(draw)
    request = actor_pb2.ActorUpdateRequest(header=header, slot=slot, advance_only=advance_only, loss_terms=terms)
    return Case(method, what, batches, request)


def _loss_terms(draw: random.Random) -> actor_pb2.LossTerms:
    """In order or not: the update is refused in any case."""
    coefficients = (0.0, -0.0, 0.01, -0.01, 1e308, 5e-324, *NOT_FINITE)
    return actor_pb2.LossTerms(
        loss_mode=draw.choice(("vanilla", "vanila", "", "__init__", "\x00", "v" * 100_000)),
        entropy_coeff=draw.choice(coefficients),
        use_kl_loss=draw.random() < 0.5,
        kl_loss_coef=draw.choice(coefficients),
        teacher_coef=draw.choice((None, *coefficients)),
        phase=draw.choice(("", "cool", "\n" * 100, "p" * 100_000)),
    )


# Rows.


def _rows(draw: random.Random, method: str) -> Rows:
    """Rows that a command takes."""
    columns = _COLUMNS.get(method) or _COLUMNS[method.rpartition("/")[2]]
    num_rows = draw.choice((1, 2, 4, 4, 7))
    lengths = [draw.randint(1, MAX_RESPONSE_LENGTH) for _ in range(num_rows)]
    made: dict[str, Callable[[int], Any]] = {
        "seeds": lambda length: [draw.choice((0, 1, -(1 << 63), (1 << 63) - 1))] * 2,
        "responses": lambda length: [draw.randrange(len(VOCABULARY)) for _ in range(length)],
    }
    prompts = [[draw.randrange(len(VOCABULARY)) for _ in range(draw.randint(1, 20))] for _ in range(num_rows)]
    return {
        "prompts": prompts,
        **{
            name: [made.get(name, lambda length: [draw.uniform(-3, 3) for _ in range(length)])(n) for n in lengths]
            for name in columns
        },
    }


def _sequences(draw: random.Random) -> Rows:
    """Rows that the reward model takes: whole sequences, without prompts or responses."""
    num_rows = draw.choice((1, 2, 4, 7))
    return {
        "reward_tokens": [
            [draw.randrange(len(VOCABULARY)) for _ in range(draw.choice((1, 2, 20, POSITIONS)))]
            for _ in range(num_rows)
        ]
    }


def wrong_value(draw: random.Random, rows: Rows, names: Sequence[str]) -> None:
    """NaN or infinity in one of the columns."""
    row = draw.choice(rows[draw.choice(names)])
    row[draw.randrange(len(row))] = draw.choice(NOT_FINITE)


def _wrong_token(draw: random.Random, rows: Rows) -> None:
    row = draw.choice(rows[draw.choice([name for name in ("prompts", "responses") if name in rows])])
    row[draw.randrange(len(row))] = draw.choice((-1, len(VOCABULARY), (1 << 31) - 1, -(1 << 31)))


def _empty_prompt(draw: random.Random, rows: Rows) -> None:
    rows["prompts"][draw.randrange(len(rows["prompts"]))] = []


def _long_prompt(draw: random.Random, rows: Rows) -> None:
    rows["prompts"][draw.randrange(len(rows["prompts"]))] = [5] * draw.choice((POSITIONS, POSITIONS + 1, 20_000))


def _missing_column(draw: random.Random, rows: Rows) -> None:
    for name in draw.choice((["prompts"], ["responses", "seeds"])):
        rows.pop(name, None)


def _no_rows(draw: random.Random, rows: Rows) -> None:
    for name in rows:
        rows[name] = []


def _ragged(draw: random.Random, rows: Rows) -> None:
    """Numbers that are not one for each token of the responses; seeds, not equally many for each prompt."""
    rows["prompts"].append([1])
    for name in rows.keys() - {"prompts"}:
        rows[name].append([1, 1, 1])
    name = draw.choice([name for name in rows if name not in ("prompts", "responses")] or ["prompts"])
    rows[name][-1] = []


# What may be wrong with the rows of any command.
_FAULTS: dict[str, Callable[[random.Random, Rows], None]] = {
    "token": _wrong_token,
    "empty prompt": _empty_prompt,
    "long prompt": _long_prompt,
    "missing column": _missing_column,
    "no rows": _no_rows,
    "ragged": _ragged,
}


def _wrong_sequence_token(draw: random.Random, rows: Rows) -> None:
    row = draw.choice(rows["reward_tokens"])
    row[draw.randrange(len(row))] = draw.choice((-1, len(VOCABULARY), (1 << 31) - 1, -(1 << 31)))


def _empty_sequence(draw: random.Random, rows: Rows) -> None:
    rows["reward_tokens"][draw.randrange(len(rows["reward_tokens"]))] = []


def _long_sequence(draw: random.Random, rows: Rows) -> None:
    rows["reward_tokens"][draw.randrange(len(rows["reward_tokens"]))] = [5] * draw.choice((POSITIONS + 1, 20_000))


def _no_sequences(draw: random.Random, rows: Rows) -> None:
    rows["prompts"] = rows.pop("reward_tokens")


# The same, of rows of the reward model.
_SEQUENCE_FAULTS: dict[str, Callable[[random.Random, Rows], None]] = {
    "token": _wrong_sequence_token,
    "empty sequence": _empty_sequence,
    "long sequence": _long_sequence,
    "missing column": _no_sequences,
    "no rows": _no_rows,
}


def _batches(
    draw: random.Random, rows: Rows, slot: batch_pb2.Slot
) -> Sequence[tuple[batch_pb2.BatchHeader, Sequence[batch_pb2.BatchChunk]]]:
    """Returns a batch per column aligned with the responses: a single `Batch` would refuse columns that are not."""
    whole = {name: rows[name] for name in ("prompts", "responses", "seeds", "teachers") if name in rows}
    others = [{name: values} for name, values in rows.items() if name not in whole]
    batches = []
    for columns in [whole, *others]:
        if columns:
            header, chunks = encode(
                Batch.from_rows(**{k: [np.array(v) for v in rows] for k, rows in columns.items()}), slot
            )
            batches.append((header, list(chunks)))
    return batches
