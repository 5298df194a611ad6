"""A user's sampler: its order, its state in the checkpoint, and a sentence for every mistake before the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.data.sampled_prompts import SampledPrompts
from splitppo.config import ConfigError, DataConfig
from tests.support.fake_services import make_table
from tests.support.user_samplers import WORST

NUM_ROWS, BATCH_SIZE = 7, 3

SAMPLERS = '''
import itertools
import random
import sys


class ByEpoch:
    """Backwards in every second epoch."""

    def __init__(self, data_source, data_config, seed):
        self.num_rows = len(data_source)

    def order(self, epoch):
        return range(self.num_rows)[:: -1 if epoch % 2 else 1]


class Growing(ByEpoch):
    """A batch more in each epoch."""

    def order(self, epoch):
        return (list(range(self.num_rows)) * 2)[: 3 * (1 + epoch)]


class Shuffled:
    """A sampler with its own random numbers, whose state it saves."""

    def __init__(self, data_source, data_config, seed):
        self.num_rows, self.random, self.left = len(data_source), random.Random(seed), []

    def next_batch(self, num_prompts):
        if len(self.left) < num_prompts:
            self.left = self.random.sample(range(self.num_rows), self.num_rows)
        return [self.left.pop() for _ in range(num_prompts)]

    def state_dict(self):
        version, numbers, gauss = self.random.getstate()
        return {"left": self.left, "random": [version, list(numbers), gauss]}

    def load_state_dict(self, state):
        version, numbers, gauss = state["random"]
        self.left = state["left"]
        self.random.setstate((version, tuple(numbers), gauss))


class Unseeded(ByEpoch):
    calls = sys.__dict__.setdefault("calls_of_unseeded", itertools.count())  # it outlives an import of this file

    def order(self, epoch):
        first = next(self.calls)  # never the order of the call before
        return [(first + place) % self.num_rows for place in range(self.num_rows)]


class Forgetful(Shuffled):
    def load_state_dict(self, state):
        pass


class TooFew(Shuffled):
    def next_batch(self, num_prompts):
        return [0, 1]


class Short(ByEpoch):
    def order(self, epoch):
        return [0, 1]


class TooFar(ByEpoch):
    def order(self, epoch):
        return [5, 6, 7]


class Words(ByEpoch):
    def order(self, epoch):
        return "abc"


class Fails(ByEpoch):
    def order(self, epoch):
        raise RuntimeError("no more\\nluck")


class Refuses:
    def __init__(self, data_source):
        pass


class Nothing:
    def __init__(self, data_source, data_config, seed):
        pass


class HalfAState(ByEpoch):
    def state_dict(self):
        return {}


class DeafUpdate(ByEpoch):
    def update(self, indices, scores):
        pass


class Unwritable(Shuffled):
    def state_dict(self):
        return {"left": {1, 2}}
'''


@pytest.fixture
def config(tmp_path: Path) -> Any:
    (tmp_path / "sampler.py").write_text(SAMPLERS + WORST)

    def make(name: str) -> DataConfig:
        sampler = {"class_path": str(tmp_path / "sampler.py"), "class_name": name}
        return DataConfig(train_files=("x",), train_batch_size=BATCH_SIZE, sampler=sampler)

    return make


def prompts(config: DataConfig, state: Any = None, seed: int = 1) -> SampledPrompts:
    return SampledPrompts(make_table(NUM_ROWS), config, seed=seed, state=state)


def steps(source: SampledPrompts, num_steps: int) -> list[tuple[list[int], int, Any]]:
    """(indices, data epoch, state afterwards as JSON) of the next steps; a response's score is its row's index."""
    found = []
    for step in range(1, num_steps + 1):
        batch = source.batch_at(step)
        scores_B = np.repeat(batch.row_indices, 2).astype(np.float32)
        epoch, state = source.epoch_of(step), source.state_after([(batch, scores_B)])
        found.append((batch.row_indices.tolist(), epoch, json.loads(json.dumps(state))))
    return found


def test_a_function_of_the_epoch_gives_its_order_and_what_is_left_of_an_epoch_is_left_out(config: Any) -> None:
    taken = [(indices, epoch) for indices, epoch, _ in steps(prompts(config("ByEpoch")), 5)]
    assert taken == [([0, 1, 2], 0), ([3, 4, 5], 0), ([6, 5, 4], 1), ([3, 2, 1], 1), ([0, 1, 2], 2)]


@pytest.mark.parametrize(("name", "num_steps"), [("ByEpoch", 6), ("Growing", 1 + 2 + 3), ("Shuffled", 3 * 7 // 3)])
def test_the_steps_of_three_epochs_are_counted(config: Any, name: str, num_steps: int) -> None:
    source = prompts(config(name))
    assert source.num_steps(3) == num_steps
    assert [epoch for _, epoch, _ in steps(source, num_steps + 1)][-2:] == [2, 3]


@pytest.mark.parametrize("name", ["ByEpoch", "Growing", "Shuffled", "Worst"])
def test_restored_after_any_step_it_goes_on_as_if_nothing_had_happened(config: Any, name: str) -> None:
    source = prompts(config(name))
    source.check_repeats()
    whole = steps(prompts(config(name)), 9)
    for done in range(1, 9):
        state = whole[done - 1][2]
        for _ in range(2):  # a run may go back to the same checkpoint again
            assert steps(source.restored(state), 9 - done) == whole[done:], done
    assert steps(source.restored(None), 9) == whole


def test_a_sampler_gets_the_seed_and_hears_the_scores(config: Any) -> None:
    first, other = (steps(prompts(config("Shuffled"), seed=seed), 3) for seed in (1, 2))
    assert [step[0] for step in first] != [step[0] for step in other]
    # Row r scores r. After two steps rows 0 to 5 have 1 + r; row 6 has nothing yet.
    assert [step[0] for step in steps(prompts(config("Worst")), 3)] == [[0, 1, 2], [3, 4, 5], [6, 0, 1]]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Absent", "key 'data.sampler.class_name': .*sampler.py has no class or function 'Absent'"),
        ("Refuses", "Refuses of .* failed at the constructor: TypeError: .*unexpected keyword argument 'data_config'"),
        ("Nothing", "Nothing of .* has none of its methods; expected order, or next_batch, state_dict and"),
        ("HalfAState", "HalfAState of .* has order, state_dict; expected order, or next_batch"),
        (
            "DeafUpdate",
            "DeafUpdate of .* has order, update; expected order, or next_batch.* and only with these update",
        ),
        ("Unseeded", "Unseeded of .*could not be resumed: made again, it does not begin with the same indices"),
        ("Forgetful", "Forgetful of .*could not be resumed: restored, it does not go on with the same indices"),
        ("Short", r"Short of .* gave 2 indices in data epoch 1, expected data.train_batch_size \(3\)"),
        ("TooFew", r"TooFew of .* gave 2 indices in data epoch 0, expected data.train_batch_size \(3\)"),
        ("TooFar", r"TooFar of .* gave 7 at order\(0\); expected an index of the 7 training rows, 0 to 6"),
        ("Words", r"Words of .* gave 'a' at order\(0\); expected an index of the 7 training rows"),
        ("Fails", r"Fails of .* failed at order\(0\): RuntimeError: no more luck"),
        ("Unwritable", "Unwritable of .* failed at state_dict: TypeError: .*set is not JSON serializable"),
    ],
)
def test_a_sampler_that_a_run_could_not_be_resumed_with_is_refused(config: Any, name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        prompts(config(name)).check_repeats()
    assert "\n" not in str(caught.value)
