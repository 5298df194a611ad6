"""What conversations of several turns cost an engine: replies that are waited for, slow tools, many open ones.

    python -m benchmarks.turns [--only hf tools open] [--rounds 5]

hf: the backend hf on one thread, a random Qwen2 in fp32, 64 responses of three turns in a batch of 32. A stop token,
once in fifty, or 64 tokens end a turn; a reply has 8 tokens and is there at once. Generates with 0 and with 32 reply
steps take turns. Nothing waits for the clock, so the CPU time is measured, which other work on the machine changes
least; the ratio is the median of those within the rounds.

tools: an engine that sleeps 18 ms in each decoding step and has places for 256 responses. 512 responses have four turns
of 150 tokens (log-normal, sigma 1), and a reply takes 0.3 s (the same). One Generate with conversations and 0 reply
steps is compared with rounds: a Generate for each turn of all responses, then all their tools at the same time.

open: 2,000 responses wait for replies at the same time, in an engine that does not sleep: the CPU time of all, and of
the decoding steps of one response that does not wait.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.rollout import HEAD_DIM, NUM_KV_HEADS, NUM_STOP_TOKENS, VOCABULARY, random_rows
from services.rollout.hf_backend.backend import HfRollout
from services.rollout.open_turns import RankTurns
from services.rollout.protocol import DecodingStep, OpenTurns, Response, Sampling, begin_responses
from services.rollout.stopping import StopRule
from services.runtime.command import CommandProgress
from splitppo.batch import Array, Batch
from splitppo.v1 import actor_pb2, conversation_pb2
from splitppo.v1.conversation_pb2 import ReplyRequest, TurnReply, TurnsEnded

REPLY_TOKENS = 8
LONGEST = 1 << 16
HF_ROWS = 64
HF_PLACES = 32
HF_TURNS = 3
HF_TURN_TOKENS = 64
HF_HIDDEN = 256
HF_LAYERS = 4
REPLY_STEPS = (0, 32)
ROWS = 512
PLACES = 256
TURNS = 4
STEP_S = 0.018
MEAN_TOKENS = 150
MEAN_TOOL_S = 0.3
OPEN_ROWS = 2000
OPEN_TOKENS = 8
OPEN_STEPS = 4000

Generate = Callable[..., Iterator[DecodingStep]]


class Tools(CommandProgress):
    """The progress of a Generate whose turns are answered: each reply comes so many seconds after the turn's end.

    Attributes:
        delays_PT: seconds by place and turn; the reply to the last turn ends the response at once.
        most_open: the most turns that waited for a reply at the same time.
    """

    def __init__(self, delays_PT: Array) -> None:
        super().__init__("benchmark", (), lambda *_: None, lambda: False)
        self._delays_PT = delays_PT
        self._coming: list[tuple[float, int, TurnReply]] = []
        self._number = itertools.count()
        self.most_open = 0

    def send(self, message: bytes) -> None:
        for turn in TurnsEnded.FromString(message).turns:
            if turn.is_last:
                continue
            ends = turn.turn == self._delays_PT.shape[1]
            due_s = time.perf_counter() + (0.0 if ends else self._delays_PT[turn.place, turn.turn - 1])
            tokens = () if ends else (1,) * REPLY_TOKENS
            reply = TurnReply(place=turn.place, turn=turn.turn, tokens=tokens, is_last=ends)
            # The number decides between replies of the same time.
            heapq.heappush(self._coming, (due_s, next(self._number), reply))
        self.most_open = max(self.most_open, len(self._coming))

    def receive(self, timeout_s: float) -> Sequence[bytes]:
        if timeout_s and self._coming:
            time.sleep(max(0.0, min(timeout_s, self._coming[0][0] - time.perf_counter())))
        there = []
        while self._coming and self._coming[0][0] <= time.perf_counter():
            there.append(heapq.heappop(self._coming)[-1])
        return [ReplyRequest(replies=there).SerializeToString()] if there else []


@dataclass
class SleepingEngine:
    """A rollout backend that sleeps in every decoding step, and samples turns of given lengths.

    Attributes:
        lengths: tokens by seed of the response and turn.
        places: responses that are decoded together; others wait.
        step_s: seconds of a decoding step.
    """

    lengths: Array
    places: int
    step_s: float
    _left: dict[int, int] = field(default_factory=dict)  # tokens of the current turn, by index of the response

    def generate(
        self,
        rows: Batch,
        _sampling: Sampling,
        _is_cancelled: Callable[[], bool],
        open_turns: OpenTurns | None = None,
        turn: int = 0,
    ) -> Iterator[DecodingStep]:
        """Samples responses; see `RolloutBackend.generate`. `turn` (from 0) of each response is the first one."""
        queue = deque(begin_responses(rows))
        running: list[Response] = []
        ended: list[Response] = []
        while queue or running or ended or (open_turns is not None and open_turns.any_open):
            started_s = time.perf_counter()
            while queue and len(running) < self.places:
                response = queue.popleft()
                running.append(response)
                self._left[response.index] = self.lengths[response.seed, turn + len(response.replies)]
            for response in running:
                response.extend((1,), (0.0,))
                self._left[response.index] -= 1
            over = [response for response in running if not self._left[response.index]]
            if running:
                time.sleep(max(0.0, started_s + self.step_s - time.perf_counter()))
            running = [response for response in running if self._left[response.index]]
            yield DecodingStep(0, 1, ended if open_turns else over, over if open_turns else ())
            ended = []
            if open_turns is not None:
                for response, reply in open_turns.due(is_idle=not queue and not running):
                    if reply.is_last:
                        ended.append(response)
                    else:
                        response.observe(reply)
                        queue.append(response)


def converse(
    generate: Generate,
    rows: Batch,
    tools: Tools,
    *,
    reply_steps: int = 0,
    max_turn_length: int = 0,
    clock: Callable[[], float] = time.process_time,
) -> tuple[int, float]:
    """Samples conversations; returns the number of sampled tokens, and seconds of this clock."""
    request = actor_pb2.GenerateRequest(
        sampling=actor_pb2.SamplingParams(max_response_length=LONGEST),
        conversation=conversation_pb2.Conversation(reply_steps=reply_steps, max_turn_length=max_turn_length),
    )
    rows = rows.merge(Batch.from_rows(places=[[place] for place in range(rows.num_rows)]))
    open_turns = RankTurns(request, tools)
    started_s = clock()
    num_tokens = 0
    for step in generate(rows, Sampling(1.0, 1.0, 0, LONGEST), tools.is_cancelled, open_turns):
        open_turns.announce(step)
        num_tokens += sum(int(response.mask.sum()) for response in step.ended)
    return num_tokens, clock() - started_s


def seeded_rows(num_rows: int) -> Batch:
    """Returns rows of one token whose seeds count from 0."""
    return Batch.from_rows(prompts=[[1]] * num_rows, seeds=[[place] for place in range(num_rows)])


def log_normal(rng: np.random.Generator, mean: float, shape: tuple[int, int]) -> Array:
    """Draws numbers with this mean, and sigma 1."""
    return np.exp(rng.normal(np.log(mean) - 0.5, 1.0, shape))


def measure_hf(rounds: int) -> None:
    """Prints the seconds of Generates of the backend hf by reply steps, and their ratio."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HF_HIDDEN,
        intermediate_size=3 * HF_HIDDEN,
        num_hidden_layers=HF_LAYERS,
        num_attention_heads=HF_HIDDEN // HEAD_DIM,
        num_key_value_heads=NUM_KV_HEADS,
    )
    model = Qwen2ForCausalLM(config).eval()
    stop_rule = StopRule(range(1, NUM_STOP_TOKENS + 1))
    backend = HfRollout(lambda: nullcontext(model), stop_rule, max_batch_size=HF_PLACES, device=torch.device("cpu"))
    rng = np.random.default_rng(0)
    seconds: dict[int, list[float]] = {steps: [] for steps in REPLY_STEPS}
    for number in range(rounds + 1):
        rows = random_rows(rng, HF_ROWS)
        for reply_steps in REPLY_STEPS if number % 2 else reversed(REPLY_STEPS):
            tools = Tools(np.zeros((HF_ROWS, HF_TURNS)))
            num_tokens, taken_s = converse(
                backend.generate, rows, tools, reply_steps=reply_steps, max_turn_length=HF_TURN_TOKENS
            )
            if number:  # the first round warms up
                seconds[reply_steps].append(taken_s)
    for reply_steps in REPLY_STEPS:
        print(f"hf, {reply_steps} reply steps: {statistics.median(seconds[reply_steps]):.2f} s for {num_tokens} tokens")
    ratios = sorted(waited / prompt for prompt, waited in zip(*seconds.values(), strict=True))
    print(
        f"  {REPLY_STEPS[1]} / {REPLY_STEPS[0]}: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


def measure_tools() -> None:
    """Prints tokens per second with slow tools: conversations against a Generate for each turn of all responses."""
    rng = np.random.default_rng(0)
    lengths_PT = np.maximum(1, log_normal(rng, MEAN_TOKENS, (ROWS, TURNS)).astype(int))
    delays_PT = log_normal(rng, MEAN_TOOL_S, (ROWS, TURNS))
    engine = SleepingEngine(lengths_PT, PLACES, STEP_S)
    rows = seeded_rows(ROWS)
    num_tokens, taken_s = converse(engine.generate, rows, Tools(delays_PT), clock=time.perf_counter)
    print(f"tools, conversations: {taken_s:.1f} s, {num_tokens / taken_s:.0f} tokens/s", flush=True)
    started_s = time.perf_counter()
    for turn in range(TURNS):
        for _ in engine.generate(rows, Sampling(1.0, 1.0, 0, LONGEST), lambda: False, turn=turn):
            pass
        if turn < TURNS - 1:
            time.sleep(delays_PT[:, turn].max())
    rounds_s = time.perf_counter() - started_s
    tools_s = delays_PT[:, :-1].max(axis=0).sum()
    print(f"tools, rounds: {rounds_s:.1f} s, {num_tokens / rounds_s:.0f} tokens/s, {tools_s:.1f} s of them for tools")
    print(f"  conversations / rounds, tokens/s: {rounds_s / taken_s:.2f}", flush=True)


def measure_open() -> None:
    """Prints what many open conversations cost for each turn, and for each decoding step of one other response."""
    delays_PT = np.full((OPEN_ROWS, 2), 1.0)
    for reply_steps in REPLY_STEPS:
        engine = SleepingEngine(np.full((OPEN_ROWS, 2), OPEN_TOKENS), OPEN_ROWS, 0.0)
        tools = Tools(delays_PT)
        _, cpu_s = converse(engine.generate, seeded_rows(OPEN_ROWS), tools, reply_steps=reply_steps)
        print(
            f"open, {reply_steps} reply steps: {tools.most_open} conversations at the same time,"
            f" {1e6 * cpu_s / (2 * OPEN_ROWS):.0f} us of CPU per turn of {OPEN_TOKENS} tokens"
        )
    lengths_PT = np.full((OPEN_ROWS, 2), 1)
    lengths_PT[0] = OPEN_STEPS // 2
    engine = SleepingEngine(lengths_PT, OPEN_ROWS, 0.0)
    tools = Tools(np.where(lengths_PT > 1, 0.0, 2.0))
    _, cpu_s = converse(engine.generate, seeded_rows(OPEN_ROWS), tools)
    print(f"  one response of {OPEN_STEPS} tokens beside them: {1e3 * cpu_s / OPEN_STEPS:.2f} ms of CPU per step")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("hf", "tools", "open"), default=("hf", "tools", "open"))
    parser.add_argument("--rounds", type=int, default=5, help="of hf")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "hf" in options.only:
        measure_hf(options.rounds)
    if "tools" in options.only:
        measure_tools()
    if "open" in options.only:
        measure_open()


if __name__ == "__main__":
    main()
