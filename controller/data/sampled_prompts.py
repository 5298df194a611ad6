"""Prompts in the order of a user's sampler, whose position is saved with every checkpoint."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from controller.data.prompts import PromptBatch
from splitppo.config import ConfigError, DataConfig
from splitppo.config.user_file import describe, load_from_file


class SampledPrompts:
    """The prompts that a user's sampler names, one data epoch after the other; docs/extending.md says what one is.

        Sampler(data_source=rows, data_config=config.data, seed=run.seed)
        iter(sampler)                        the indices of an epoch
        set_epoch(epoch)                     before each epoch, from 0, where it has this
        state_dict(), load_state_dict(d)     where it keeps its own position: then iter() goes on behind it
        update(indices, scores)              after each step, where it has this
        len(sampler)                         indices of an epoch, for run.total_epochs

    What an epoch has left over for a batch is left out. A sampler without a state must give the same order whenever it
    is asked for the same epoch; that one with a state goes on where it was is tried once, when the run is prepared.

    Raises (here, and from every method):
        ConfigError: the class cannot be loaded, fails, gives something else than indices of rows, or does not repeat.
    """

    def __init__(
        self,
        table: PromptBatch,
        config: DataConfig,
        *,
        seed: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.table = table
        self._config = config
        self._seed = seed
        self._name = f"{config.sampler.class_name} of {config.sampler.class_path}"
        self._sampler = self._make()
        self._has_state = hasattr(self._sampler, "state_dict")
        self._epoch: int = state["epoch"] if state else 0
        self._position: int = state["position"] if state else 0
        self._indices = self._begin_epoch(state)

    @property
    def steps_per_epoch(self) -> int | None:
        if not hasattr(self._sampler, "__len__"):
            return None
        num_indices: int = self._call("__len__", lambda: len(self._sampler))
        return num_indices // self._config.train_batch_size

    def epoch_of(self, step: int) -> int:  # noqa: ARG002 - of PromptSource
        return self._epoch

    def batch_at(self, step: int) -> PromptBatch:  # noqa: ARG002 - of PromptSource
        """The prompts that come next."""
        return self.table.take(np.array(self._next_batch(), np.int64))

    def state_after(self, prompts: PromptBatch, scores_B: NDArray[np.float32]) -> Mapping[str, Any]:
        """The sampler hears the scores, [prompts, samples], and its position is taken."""
        if hasattr(self._sampler, "update"):
            indices, scores = prompts.row_indices, scores_B.reshape(prompts.num_prompts, -1)
            self._call("update", lambda: self._sampler.update(indices, scores))
        return self._state()

    def restored(self, state: Mapping[str, Any] | None) -> Self:
        return type(self)(self.table, self._config, seed=self._seed, state=state)

    def check_repeats(self) -> None:
        """Tries whether a new sampler begins the same, and whether a restored one goes on the same."""
        first, state = self._next_batch(), self._state()
        second = self._next_batch()
        for how, other, due in (
            ("made again, it does not begin", self.restored(None), first),
            ("restored, it does not go on", self.restored(state), second),
        ):
            if (found := other.batch_at(1).row_indices.tolist()) != due:
                raise ConfigError(
                    f"data.sampler: a run with {self._name} could not be resumed: {how} with the same indices;"
                    f" expected {_shown(due)}, got {_shown(found)}"
                )

    def _make(self) -> Any:
        path, name = self._config.sampler.class_path, self._config.sampler.class_name
        assert path is not None
        assert name is not None
        make = load_from_file(path, name, path_key="data.sampler.class_path", name_key="data.sampler.class_name")
        made = self._call(
            "the constructor", lambda: make(data_source=self.table.rows, data_config=self._config, seed=self._seed)
        )
        if hasattr(made, "state_dict") != hasattr(made, "load_state_dict"):
            raise ConfigError(f"data.sampler: {self._name} needs both state_dict and load_state_dict, or neither")
        if hasattr(made, "update") and not hasattr(made, "state_dict"):
            raise ConfigError(f"data.sampler: {self._name} has update, and so needs state_dict and load_state_dict")
        return made

    def _begin_epoch(self, state: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """The indices of the epoch, those behind `state` where there is one."""

        def begin() -> Iterator[Any]:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(self._epoch)
            if state is not None and self._has_state:
                self._sampler.load_state_dict(state["sampler"])
            return iter(self._sampler)

        indices = self._call("beginning an epoch", begin)
        return indices if self._has_state else islice(indices, self._position, None)

    def _next_batch(self) -> list[int]:
        size = self._config.train_batch_size
        if len(batch := self._take(size)) < size:
            self._epoch, self._position = self._epoch + 1, 0
            self._indices = self._begin_epoch()
            if len(batch := self._take(size)) < size:
                raise ConfigError(
                    f"data.sampler: {self._name} gave {len(batch)} indices in data epoch {self._epoch}, fewer than"
                    f" data.train_batch_size ({size})"
                )
        self._position += size
        return batch

    def _take(self, number: int) -> list[int]:
        found = self._call("the next index", lambda: list(islice(self._indices, number)))
        num_rows = self.table.num_prompts
        for index in found:
            if not isinstance(index, int | np.integer) or isinstance(index, bool) or not 0 <= index < num_rows:
                raise ConfigError(
                    f"data.sampler: {self._name} gave {index!r}; expected an index of the {num_rows} training rows,"
                    f" 0 to {num_rows - 1}"
                )
        return [int(index) for index in found]

    def _state(self) -> dict[str, Any]:
        own = self._call("state_dict", self._own_state) if self._has_state else None
        return {"epoch": self._epoch, "position": self._position, "sampler": own}

    def _own_state(self) -> Any:
        """As it will be read back: JSON has no tuples, and its keys are text."""
        return json.loads(json.dumps(self._sampler.state_dict()))

    def _call(self, what: str, call: Any) -> Any:
        try:
            return call()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"data.sampler: {self._name} failed at {what}: {describe(error)}") from error


def _shown(indices: list[int]) -> str:
    return f"{indices[:8]}"[:-1] + (", ...]" if len(indices) > 8 else "]")
