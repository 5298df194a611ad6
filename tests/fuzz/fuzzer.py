"""Sends inputs to a real service and checks that it stays alive, quick, unchanged, and of the same size."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from numpy.typing import NDArray

from splitppo.manifest import read_manifest
from splitppo.rpc.bearer_tokens import BearerTokens
from splitppo.rpc.credentials import PLAINTEXT
from splitppo.v1 import batch_pb2, worker_pb2
from tests.fuzz import tcp
from tests.fuzz.commands import SYNC
from tests.fuzz.inputs import ENDLESS, HEALTH, PUT, REFLECTION, Input, Inputs, Target
from tests.fuzz.services import COMMITTED, Service
from tests.integration.runtime.client import Client, experience, result
from tests.support.certificates import TOKEN
from tests.support.groups import is_alive, wait_until

MAX_GROWTH_BYTES = 50 << 20
# A call that takes this long hangs; the service's own limit for a slow sender is far below.
HANG_S = 20.0
NUM_THREADS = 4
TCP_SHARE = 0.02
_MAX_ANSWERS = 100
_PARTS = itertools.count()
# What a service may say to a caller who is wrong, or too many; any other status would be a bug of ours.
ALLOWED = frozenset(
    (
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.CANCELLED,  # by ourselves
        grpc.StatusCode.UNAVAILABLE,  # a LoadCheckpoint has overtaken it
    )
)


@dataclass(frozen=True)
class Standing:
    """The state that must not change; in a group that trains nothing, scores or log-probs stand for the weights."""

    committed_step: int
    weights_sha256: str
    ledger_sha256: str
    instance_id: str


@dataclass
class FuzzOutcome:
    """The results of the inputs.

    Attributes:
        codes: number of calls by (method, status code).
        batches: number of batches that were put before a command, by status code.
        connections: number of bare connections by (kind, end).
        failures: what must never happen, in words.
        growth_bytes: of rank 0's memory.
    """

    codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    batches: Counter[str] = field(default_factory=Counter)
    connections: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    growth_bytes: int = 0
    wall_s: float = 0.0

    @property
    def num_inputs(self) -> int:
        return self.codes.total() + self.connections.total()

    def __str__(self) -> str:
        lines = [f"{self.num_inputs} inputs in {self.wall_s:.0f} s, memory of rank 0 {self.growth_bytes / 1e6:+.1f} MB"]
        for method in sorted({method for method, _ in self.codes}):
            codes = sorted((code, number) for (of, code), number in self.codes.items() if of == method)
            lines.append(f"  {method:<50} " + ", ".join(f"{code} {number}" for code, number in codes))
        lines.append(
            f"  {'batches of commands':<50} " + ", ".join(f"{code} {n}" for code, n in sorted(self.batches.items()))
        )
        for (kind, end), number in sorted(self.connections.items()):
            lines.append(f"  TCP, {kind}: {end} {number}")
        lines += [f"FAILED: {failure}" for failure in self.failures[:20]]
        return "\n".join(lines)


def prepare(service: Service) -> Target:
    """Two updates and a checkpoint where something is trained, so that there is something to lose."""
    client = service.client
    steps = (1, 2) if service.trains else ()
    if service.manifest_sha256:
        result(client.sync(COMMITTED, service.manifest_sha256, base_step=-1))
    for step in steps:
        rows = {name: [[0.5], [-0.25]] for name in ("advantages", "values", "returns")}
        client.put(experience(step), prompts=[[3], [4]], responses=[[5], [6]], **rows)
        result(client.update(step, request_id=f"before-{step}"))
        result(client.save(step))
    nonce = "nonce-of-the-fuzzer"
    (service.run_dir / nonce).touch()
    digest = client.handshake(nonce=nonce).config_digest
    return Target(service.role, client.run_id, client.epoch, client.status().committed_step, digest, nonce)


def standing(service: Service) -> Standing:
    """Weights, step and ledger, as the service itself says and saves them."""
    client = service.client
    step = client.status().committed_step
    if not service.trains:
        numbers = (_scores(client) if service.role == "reward" else _log_probs(client)).tobytes()
        return Standing(step, hashlib.sha256(numbers).hexdigest(), "", client.status().instance_id)
    result(client.save(step))
    saved = read_manifest(service.run_dir / "checkpoints" / f"global_step_{step}" / service.role)
    weights_sha256 = client.digest(step)
    assert weights_sha256 == saved.weights_sha256
    return Standing(step, weights_sha256, saved.ledger_sha256, client.status().instance_id)


def _scores(client: Client) -> NDArray[np.float32]:
    client.put(experience(1), reward_tokens=[[3, 4, 5], [6]])
    result(client.compute_reward_scores(experience(1)))
    scores: NDArray[np.float32] = client.get(experience(1), "rm_scores")["rm_scores"].values
    return scores


def _log_probs(client: Client) -> NDArray[np.float32]:
    slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=COMMITTED, part=next(_PARTS))
    client.put(slot, prompts=[[3, 4, 5], [6]], seeds=[[1], [2]])
    result(client.generate(slot, base_step=COMMITTED, max_response_length=8))
    log_probs: NDArray[np.float32] = client.get(slot, "rollout_log_probs")["rollout_log_probs"].values
    return log_probs


def fuzz(service: Service, num_inputs: int, seed: int) -> FuzzOutcome:
    """Sends `num_inputs` inputs and reports."""
    inputs = Inputs(prepare(service), seed)
    before, pid = standing(service), service.group.pids[0]
    outcome = FuzzOutcome()
    fewer = min(200, num_inputs // 10)  # buffers and pools are filled
    _attack(service, inputs, num_inputs=fewer, seed=seed - 1, outcome=FuzzOutcome())
    memory, started_s = _memory_bytes(pid), time.monotonic()
    _attack(service, inputs, num_inputs=num_inputs, seed=seed, outcome=outcome)
    outcome.wall_s = time.monotonic() - started_s
    if not is_alive(pid):
        outcome.failures.append("rank 0 has died")
        return outcome
    outcome.growth_bytes = _memory_bytes(pid) - memory
    if outcome.growth_bytes > MAX_GROWTH_BYTES:
        outcome.failures.append(f"rank 0 has grown by {outcome.growth_bytes} bytes")
    after = standing(service)
    if after != before:
        outcome.failures.append(f"the service has changed: {before} before, {after} now")
    _check_it_still_works(service, outcome)
    return outcome


def _check_it_still_works(service: Service, outcome: FuzzOutcome) -> None:
    """The last update is still the last one, and the next one can be made."""
    client = service.client
    wait_until(lambda: client.status().state == worker_pb2.WORKER_STATE_IDLE, what="idle")
    if service.trains and not result(client.update(2, base_step=1, request_id="before-2")).replayed:
        outcome.failures.append("the ledger has lost the last update")
    if service.manifest_sha256:
        result(client.sync(COMMITTED, service.manifest_sha256, base_step=COMMITTED))
    client.put(experience(4), prompts=[[1]], responses=[[1]])
    if client.get(experience(4), "prompts")["prompts"].num_rows != 1:
        outcome.failures.append("a batch that was put is not there")


def _attack(service: Service, inputs: Inputs, *, num_inputs: int, seed: int, outcome: FuzzOutcome) -> None:
    """Some threads, each with a channel of its own."""
    lock, numbers = threading.Lock(), itertools.count()

    def run() -> None:
        with PLAINTEXT.channel(service.group.address, grpc) as channel:
            while (index := next(numbers)) < num_inputs:
                draw = random.Random(f"{seed}-{index}-tcp")
                if draw.random() < TCP_SHARE:
                    kind, content = tcp.bare_bytes(draw)
                    end = tcp.send(service.group.address, content)
                    with lock:
                        outcome.connections[kind, end] += 1
                    continue
                sent = inputs[index]
                started_s = time.monotonic()
                for messages in sent.before:
                    put = Input(PUT, "before a command", messages)
                    code, _ = _call(channel, put)
                    with lock:
                        outcome.batches[code.name] += 1
                code, details = _call(channel, sent)
                with lock:
                    outcome.codes[_shown(sent), code.name] += 1
                    is_wrong = code not in ALLOWED or (sent.must_fail and code is grpc.StatusCode.OK)
                    if is_wrong and not _is_fair(sent, code):
                        outcome.failures.append(f"input {index} ({sent.kind}, {sent.method}): {code.name}: {details}")
                    if time.monotonic() - started_s > HANG_S:
                        outcome.failures.append(f"input {index} ({sent.kind}, {sent.method}) hung")

    threads = [threading.Thread(target=run) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _is_fair(sent: Input, code: grpc.StatusCode) -> bool:
    """Changed bytes of a chunk, and a version with another digest, are lost data; health and reflection are gRPC's."""
    if code is grpc.StatusCode.DATA_LOSS:
        return sent.method in (PUT, SYNC)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return not sent.messages
    return code is grpc.StatusCode.UNKNOWN and sent.method.startswith((HEALTH, REFLECTION))


def _shown(sent: Input) -> str:
    return "unknown methods" if sent.kind == "unknown method" else sent.method


def _call(channel: grpc.Channel, sent: Input) -> tuple[grpc.StatusCode, str]:
    def messages() -> Iterator[bytes]:
        for index, message in enumerate(sent.messages):
            if index and sent.pause_s:
                time.sleep(sent.pause_s)
            yield message

    call = channel.stream_stream(sent.method)(messages(), metadata=_metadata(sent.metadata), timeout=_timeout_s(sent))
    try:
        if sent.gives_up:
            call.cancel()
        for number, _ in enumerate(call):
            if sent.method in ENDLESS or number > _MAX_ANSWERS:
                call.cancel()
                return grpc.StatusCode.OK, ""
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def _timeout_s(sent: Input) -> float:
    """GRPC's server waits for the message of a unary call as long as its caller does; only the caller's call waits."""
    return 2 * HANG_S if sent.messages else 0.2


def _metadata(kind: str) -> tuple[tuple[str, str | bytes], ...]:
    right, wrong = BearerTokens((TOKEN,)).metadata, BearerTokens(("not-the-token-of-it",)).metadata
    return {
        "right token": right,
        "no token": (),
        "wrong token": wrong,
        "two tokens": (*wrong, *right),
        "odd": (("authorization", "Bearer"), ("x-bin", b"\xff" * 100)),
    }[kind]


def _memory_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
