"""The record of a step's conversations: which responses have answers of their own, and what a repeated step gets."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from controller.sampling.talk import Talk
from controller.step.rollouts import SampledRollouts
from environments.messages import Answer
from environments.record import Record
from rewards.samples import Scored
from splitppo.rpc.errors import Place, Unavailable
from tests.support.talking import TalkingRollout
from tests.unit.controller.sampling.test_talk import Run, says, user


class Random:
    """An environment that says and gives another number each time; counts the answers that it was asked for."""

    def __init__(self, first: int = 0) -> None:
        self.numbers = itertools.count(first)
        self.num_asked = 0

    def __call__(self, row: Mapping[str, Any], seed: int) -> Iterator[Answer]:
        def answer(**fields: Any) -> Answer:
            self.num_asked += 1
            number = next(self.numbers)
            return Answer(**{"messages": user(str(number % 10)), "reward": float(number), **fields})

        yield answer()
        yield answer()
        yield answer(messages=(), is_over=True, final={"score": 0.5})


def recorded(folder: Path, environment: Random, **keys: Any) -> Run:
    run = Run(folder, environment, says(5, 6), **keys)
    run.change(record=Record(folder / "episodes"))
    return run


async def test_a_step_that_is_repeated_learns_from_the_same_conversations(tmp_path: Path) -> None:
    first, again = Random(), Random(1000)
    rollouts, conversations = await recorded(tmp_path, first).rollouts()
    assert first.num_asked == 12
    same_rollouts, same = await recorded(tmp_path, again, num_parts=2).rollouts()
    assert again.num_asked == 0
    for name, column in rollouts.columns.items():
        assert np.array_equal(column.values, same_rollouts[name].values)
        assert np.array_equal(column.lengths, same_rollouts[name].lengths)
    assert same == conversations
    scores = [one.added_to(Scored(0.0), 10) for one in same]
    assert scores == [one.added_to(Scored(0.0), 10) for one in conversations]
    assert len({one.turn_rewards for one in conversations}) == 4  # also of the two samples of a prompt


async def test_greedy_responses_and_candidates_have_answers_of_their_own(tmp_path: Path) -> None:
    environment = Random()
    run = recorded(tmp_path, environment)
    await run.rollouts()
    await SampledRollouts.greedy(run.step, run.prompts).generate()
    assert environment.num_asked == 12 + 6
    rows = np.empty(0, np.int64)
    await SampledRollouts.of_candidates(run.step, run.prompts, number=1, earlier=rows).generate()
    await SampledRollouts.of_candidates(run.step, run.prompts, number=2, earlier=run.prompts.row_indices).generate()
    assert environment.num_asked == 18 + 24
    lines = [json.loads(line) for line in (tmp_path / "episodes" / "3.jsonl").read_text().splitlines()]
    assert len(lines) == len({line["response"] for line in lines}) == 4 + 2 + 8
    await SampledRollouts.greedy(run.step, run.prompts).generate()
    assert environment.num_asked == 42


async def test_what_belongs_to_no_step_is_not_written(tmp_path: Path) -> None:
    run = recorded(tmp_path, Random())
    talk = Talk.about(run.step.sampling.environments, run.prompts, run_seed=1, step=0)
    assert talk is not None
    async with talk:
        pass
    assert not (tmp_path / "episodes").exists()


async def test_a_lost_group_samples_again_what_it_was_told(tmp_path: Path) -> None:
    environment = Random()
    run = recorded(tmp_path, environment, services__rollout={})

    class LostOnce(TalkingRollout):
        async def get_batch(self, slot: Any, columns: Any) -> Any:
            if not self.restarts:
                raise Unavailable("gone", Place(role="rollout"))
            return await super().get_batch(slot, columns)

    rollout = LostOnce(run.actor.log)
    rollout.speak = says(5, 6)  # type: ignore[method-assign]
    run.sample_by(rollout)
    _, conversations = await run.rollouts()
    assert len(rollout.restarts) == 1
    assert [one.lost for one in conversations] == [""] * 4
    assert environment.num_asked == 12
