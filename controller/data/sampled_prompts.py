"""Selects training prompts in the order of a user's sampler class, whose state every checkpoint stores."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from controller.data.prompts import Answered, PromptBatch, PromptDataset, PromptSource
from splitppo.config import ConfigError, DataConfig
from splitppo.user_file import describe, load_from_file


class SampledPrompts:
    """Takes training prompts from a user's sampler class; docs/extending/prompts.md has an example of each kind.

        Sampler(data_source=rows, data_config=config.data, seed=run.seed)

        order(epoch)                           returns the indices of a data epoch, from 0; a pure function
    or  next_batch(num_prompts)                returns the indices of the next step
        state_dict(), load_state_dict(state)   its state, as JSON
        update(indices, scores)                optional, after each step: indices [P] and scores [P, samples]

    With `order`, an incomplete batch at the end of an epoch is left out. With `next_batch`, the number of prompts in an
    epoch is the number of rows.

    Raises (here, and from every method):
        ConfigError: the class cannot be loaded, fails, or returns something else than indices of rows.
    """

    def __init__(
        self, table: PromptBatch, config: DataConfig, *, seed: int, state: Mapping[str, Any] | None = None
    ) -> None:
        self.table = table
        self._config = config
        self._seed = seed
        self._name = f"{config.sampler.class_name} of {config.sampler.class_path}"
        self._sampler = self._make()
        self._has_state = hasattr(self._sampler, "next_batch")
        self._epoch: int = state["epoch"] if state else 0
        self._position: int = state["position"] if state else 0
        if self._has_state and state:
            own = json.dumps(state["sampler"])  # a copy: the sampler may change what it is given
            self._call("load_state_dict", lambda: self._sampler.load_state_dict(json.loads(own)))
        self._order = [] if self._has_state else self._order_of(self._epoch)

    def num_steps(self, num_epochs: int) -> int:
        """Returns the number of training steps in the first data epochs; incomplete batches do not count."""
        size = self._config.draw_size
        if self._has_state:
            return num_epochs * self.table.num_prompts // size
        return sum(len(self._order_of(epoch)) // size for epoch in range(num_epochs))

    def epoch_of(self, step: int) -> int:  # noqa: ARG002 - of PromptSource
        return self._epoch

    def batch_at(self, step: int) -> PromptBatch:  # noqa: ARG002 - of PromptSource
        """Asks the user's sampler for the next batch of prompts and returns them; the argument `step` is ignored."""
        return self.table.take(np.array(self._next_indices(), np.int64))

    def state_after(self, answered: Sequence[Answered]) -> Mapping[str, Any]:
        """Passes the scores of each batch, [prompts, samples], to the user's sampler; returns its new state as JSON."""
        for prompts, scores_B in answered if hasattr(self._sampler, "update") else ():
            self._call(
                "update", partial(self._sampler.update, prompts.row_indices, scores_B.reshape(prompts.num_prompts, -1))
            )
        return self._state()

    def restored(self, state: Mapping[str, Any] | None) -> Self:
        return type(self)(self.table, self._config, seed=self._seed, state=state)

    def check_repeats(self) -> None:
        """Checks that a user's sampler, made anew or restored from its state, selects the same prompts again.

        Raises:
            ConfigError: the prompts differ, so that a run could not be resumed.
        """
        first = self._next_indices()
        state = self._state()
        second = self._next_indices()
        for how, other, due in (
            ("made again, it does not begin", self.restored(None), first),
            ("restored, it does not go on", self.restored(state), second),
        ):
            if (indices := other.batch_at(1).row_indices.tolist()) != due:
                raise ConfigError(
                    f"data.sampler: a run with {self._name} could not be resumed: {how} with the same indices;"
                    f" expected {_shown(due)}, got {_shown(indices)}"
                )

    def _make(self) -> Any:
        """Loads the user's class and makes the sampler; ConfigError unless it has one of the two sets of methods.

        These are `order` alone, or `next_batch` with `state_dict` and `load_state_dict`. Only the latter may have
        `update`.
        """
        path = self._config.sampler.class_path
        name = self._config.sampler.class_name
        assert path is not None
        assert name is not None
        make = load_from_file(path, name, path_key="data.sampler.class_path", name_key="data.sampler.class_name")
        rows = self.table.rows
        config = self._config
        seed = self._seed
        made = self._call("the constructor", lambda: make(data_source=rows, data_config=config, seed=seed))
        with_state = [name for name in ("next_batch", "state_dict", "load_state_dict") if hasattr(made, name)]
        is_stateful = len(with_state) == 3
        is_pure = hasattr(made, "order") and not with_state and not hasattr(made, "update")
        if not (is_stateful or is_pure):
            has = [name for name in ("order", *with_state, "update") if hasattr(made, name)]
            raise ConfigError(
                f"data.sampler: {self._name} has {', '.join(has) or 'none of its methods'}; expected order, or"
                " next_batch, state_dict and load_state_dict, and only with these update"
            )
        return made

    def _next_indices(self) -> list[int]:
        """Returns the row indices of the next batch, and moves epoch and position past it.

        A sampler with state goes on without end, so that its epochs are counted in rows taken. With `order`, rows at
        the end of an epoch that fill no batch are left out.
        """
        size = self._config.draw_size
        num_rows = self.table.num_prompts
        if self._has_state:
            if self._position >= num_rows:
                self._epoch = self._epoch + 1
                self._position = self._position - num_rows
            indices = self._checked("next_batch", lambda: self._sampler.next_batch(size))
        else:
            if self._position + size > len(self._order):
                self._epoch = self._epoch + 1
                self._position = 0
                self._order = self._order_of(self._epoch)
            indices = self._order[self._position : self._position + size]
        if len(indices) != size:
            given = f"{len(indices)} indices in data epoch {self._epoch}"
            raise ConfigError(f"data.sampler: {self._name} gave {given}, expected {self._config.draw_key} ({size})")
        self._position += size
        return indices

    def _order_of(self, epoch: int) -> list[int]:
        return self._checked(f"order({epoch})", lambda: self._sampler.order(epoch))

    def _checked(self, what: str, call: Callable[[], Any]) -> list[int]:
        """Returns the indices of the user's `call`; ConfigError, which names it by `what`, if one is no row."""
        indices = self._call(what, lambda: list(call()))
        num_rows = self.table.num_prompts
        for index in indices:
            if not isinstance(index, int | np.integer) or isinstance(index, bool) or not 0 <= index < num_rows:
                raise ConfigError(
                    f"data.sampler: {self._name} gave {index!r} at {what}; expected an index of the {num_rows} training"
                    f" rows, 0 to {num_rows - 1}"
                )
        return [int(index) for index in indices]

    def _state(self) -> dict[str, Any]:
        """Returns epoch, position and the sampler's state, as JSON would return them (no tuples)."""
        own = None
        if self._has_state:
            own = self._call("state_dict", lambda: json.loads(json.dumps(self._sampler.state_dict())))
        return {"epoch": self._epoch, "position": self._position, "sampler": own}

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        """Calls the user's code; whatever it raises becomes a ConfigError, which names the call by `what`."""
        try:
            return call()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"data.sampler: {self._name} failed at {what}: {describe(error)}") from error


def _shown(indices: list[int]) -> str:
    return f"{indices[:8]}"[:-1] + (", ...]" if len(indices) > 8 else "]")


def open_prompt_source(config: DataConfig, table: PromptBatch, *, seed: int) -> PromptSource:
    """Makes the source of training prompts: a user's sampler, which is tried first, or an order by seed and epoch."""
    if config.sampler.class_path is not None:
        SampledPrompts(table, config, seed=seed).check_repeats()
        return SampledPrompts(table, config, seed=seed)
    return PromptDataset(
        table, config.draw_size, seed, shuffle=config.shuffle, weights=config.train_weights, batch_key=config.draw_key
    )
