"""What the controller pays for a turn of a conversation: python -m benchmarks.conversations [--responses 2000].

All responses of a step are open at the same time, in four turns of 20 tokens each. The environments are real, in
processes of their own; the group that samples is not: it says a turn as soon as the reply to the one before is there.
So the CPU time of this process is that of the controller: tokens to text, text to the environment, its answer to
tokens, rewards. Most of it is what a run spends beside generation, in its own time.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from controller.conversations.environments import Environments
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch
from controller.data.tokenizer import load_tokenizer
from controller.data.turn_tokens import TurnTokens
from controller.sampling.talk import Talk, TurnInbox
from controller.workers.concurrency import gather_calls
from environments.pool import EnvironmentProcesses
from recipes.qwen2_tokenizer import character_tokenizer, save_tokenizer
from splitppo.batch import Column
from splitppo.config.load import validate
from splitppo.v1.batch_pb2 import Slot
from splitppo.v1.conversation_pb2 import Turn, TurnReply, TurnsEnded

NUM_TURNS = 4
TURN_TOKENS = 20
GAME = """
from environments.chat import Step


class Game:
    def reset(self, *, seed):
        self.turn = 0

    def step(self, text):
        self.turn += 1
        return Step(f"you said {len(text)} letters", reward=0.1, done=self.turn == %d)
"""


class InstantSampler:
    """The client of a group that says the next turn of each response at once; `turns` gets it."""

    turns: TurnInbox

    async def reply(self, _slot: object, replies: Iterable[TurnReply]) -> None:
        """Says the turns that follow the replies."""
        self.say((reply.place, reply.turn + 1) for reply in replies if not reply.is_last)

    def say(self, turns: Iterable[tuple[int, int]]) -> None:
        """Says turns, given by place and number, in one event."""
        tokens = range(1, 1 + TURN_TOKENS)
        self.turns.end(TurnsEnded(turns=[Turn(place=p, turn=n, tokens=tokens) for p, n in turns]))


async def measure(num_responses: int, folder: Path) -> tuple[float, float, Counter[int]]:
    """Holds all conversations at the same time; returns CPU seconds, wall seconds, and how many had so many turns."""
    model = folder / "model"
    game = folder / "game.py"
    save_tokenizer(character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 ", ["<eos>"]), model, named_tokens={})
    game.write_text(GAME % NUM_TURNS)
    environments = {"default": {"path": str(game), "name": "Game"}}
    config = validate(
        {
            "run": {"dir": str(folder / "run"), "total_steps": 1},
            "data": {"train_files": "none.jsonl", "train_batch_size": num_responses},
            "rollout": {"multi_turn": {"environments": environments}},
            "actor": {"model": str(model)},
        },
        "benchmark",
    )
    tokenizer = load_tokenizer(str(model))
    places = np.arange(num_responses)
    rows = tuple(PromptRow(f"row {place}", "go", "game", "", {}) for place in places)
    prompts = Column.from_rows([[1, 2]] * num_responses, np.dtype("<i4"))
    asked = PromptBatch(places, prompts, ("go",) * num_responses, rows)
    async with EnvironmentProcesses(config.rollout.multi_turn, config.reward.code, tool_format=None) as processes:
        tokens = TurnTokens(tokenizer, config.rollout.multi_turn.max_observation_length)
        own = Environments(config, processes, tokenizer, tokens)
        sampler: Any = InstantSampler()
        wall_s = time.perf_counter()
        cpu_s = time.process_time()
        talk = Talk.about(own, asked, run_seed=1, step=1)
        assert talk is not None
        async with talk:
            turns = TurnInbox(sampler, Slot(), num_responses)
            sampler.turns = turns
            sampler.say((place, 1) for place in places.tolist())
            conversations = await gather_calls(*(talk.converse(place, place, turns) for place in places.tolist()))
        cpu_s = time.process_time() - cpu_s
        wall_s = time.perf_counter() - wall_s
        return cpu_s, wall_s, Counter(one.num_turns for one in conversations)


def main() -> None:
    """Prints the CPU time of the controller for each turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=2000)
    num_responses = parser.parse_args().responses
    with tempfile.TemporaryDirectory() as folder:
        cpu_s, wall_s, turns = asyncio.run(measure(num_responses, Path(folder)))
    assert turns == {NUM_TURNS: num_responses}, turns
    each_ms = 1e3 * cpu_s / (num_responses * NUM_TURNS)
    print(f"{num_responses} open conversations of {NUM_TURNS} turns: {each_ms:.3f} ms of CPU a turn, {wall_s:.2f} s")


if __name__ == "__main__":
    main()
