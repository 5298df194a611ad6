"""The responses that a run has begun and not learned from yet, and the file that stores them in a checkpoint.

P prompts with n responses each, ordered by prompt, then sample. A version is the number of the step whose weights have
sampled a token. stored_rollouts.py has the form of the file.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from controller.data.prompts import NO_ROWS, PromptBatch
from controller.step.stored_rollouts import (
    Arrays,
    check_prompts,
    parse_rollouts,
    prompts_of_rows,
    serialise_rollouts,
    stored_column,
)
from splitppo.batch import Batch, Column, concatenate
from splitppo.columns import spec_of

Places = NDArray[np.int64]

_COLUMNS = ("seeds", "responses", "rollout_log_probs")  # what is stored of the rollouts, beside the prompts
_KEY = "rollout.max_step_tokens"


@dataclass(frozen=True, eq=False)
class RolloutPool:
    """Prompts with their responses, finished or not, in the order in which the prompts were drawn. It is immutable.

    Attributes:
        num_samples: n, the number of responses to each prompt.
        prompts: the P prompts.
        epochs: [P] int64, the data epoch in which each prompt was drawn, from 0.
        rollouts: P x n rows: prompts, seeds, responses, rollout_log_probs.
        unfinished: [P x n] bool, True for a response that goes on.
        versions: int64, pairs of numbers for each response: a version, and the number of tokens that it has sampled.
    """

    num_samples: int
    prompts: PromptBatch
    epochs: NDArray[np.int64]
    rollouts: Batch
    unfinished: NDArray[np.bool_]
    versions: Column

    @classmethod
    def begun(cls, prompts: PromptBatch, epochs: NDArray[np.int64], seeds: NDArray[np.int64], num_samples: int) -> Self:
        """Returns a pool of prompts whose responses have no token yet; `seeds` are those of the responses."""
        num_rows = prompts.num_prompts * num_samples
        none = np.zeros(num_rows, np.int32)
        columns = {
            "prompts": prompts.repeated(num_samples).prompts,
            "seeds": Column(seeds, np.ones(num_rows, np.int32)),
            "responses": Column(np.empty(0, spec_of("responses").dtype), none),
            "rollout_log_probs": Column(np.empty(0, spec_of("rollout_log_probs").dtype), none),
        }
        versions = Column(np.empty(0, np.int64), none)
        return cls(num_samples, prompts, epochs, Batch(num_rows, columns), np.ones(num_rows, np.bool_), versions)

    @classmethod
    def empty(cls, table: PromptBatch, num_samples: int) -> Self:
        """Returns a pool without prompts; `table` has the training prompts."""
        return cls.begun(table.take(NO_ROWS), NO_ROWS, NO_ROWS, num_samples)

    @property
    def num_prompts(self) -> int:
        return self.prompts.num_prompts

    @property
    def num_unfinished(self) -> int:
        """The number of responses that go on."""
        return int(self.unfinished.sum())

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all responses so far."""
        return len(self.rollouts["responses"].values)

    @property
    def complete(self) -> Places:
        """The places of the prompts whose responses have all ended, the one that was drawn first in front."""
        return np.flatnonzero(~self.unfinished.reshape(-1, self.num_samples).any(axis=1))

    def with_drawn(self, drawn: "RolloutPool") -> "RolloutPool":
        """Returns a pool that also has the prompts of `drawn`, at its end."""
        return RolloutPool(
            self.num_samples,
            PromptBatch.join([self.prompts, drawn.prompts]),
            np.concatenate([self.epochs, drawn.epochs]),
            concatenate([self.rollouts, drawn.rollouts]),
            np.concatenate([self.unfinished, drawn.unfinished]),
            _joined(self.versions, drawn.versions),
        )

    def take(self, places: Places) -> "RolloutPool":
        """Returns a pool with the prompts at these places alone, in this order."""
        rows = (places[:, None] * self.num_samples + np.arange(self.num_samples)).reshape(-1)
        return RolloutPool(
            self.num_samples,
            self.prompts.take(places),
            self.epochs[places],
            self.rollouts.take(rows),
            self.unfinished[rows],
            self.versions.take(rows),
        )

    def without(self, places: Places) -> "RolloutPool":
        """Returns a pool without the prompts at these places."""
        return self.take(np.setdiff1d(np.arange(self.num_prompts), places))

    def asked(self) -> tuple[PromptBatch, Batch]:
        """Returns the prompts of the unfinished responses, and the input of the RPC Generate with which these go on.

        There is a row for each of them. Before the first token there is one for each prompt, with all of its seeds, as
        without partial rollouts: the engine gets the same rows, and computes each prompt once.
        """
        n = self.num_samples
        if self.num_tokens == 0:
            seeds = Column(self.rollouts["seeds"].values, np.full(self.num_prompts, n, np.int32))
            return self.prompts, Batch(self.num_prompts, {"prompts": self.prompts.prompts, "seeds": seeds})
        unfinished = np.flatnonzero(self.unfinished)
        rows = self.rollouts.take(unfinished)
        begun = {"begun_responses": rows["responses"], "begun_log_probs": rows["rollout_log_probs"]}
        asked = rows.select(["prompts", "seeds"]).merge(Batch(rows.num_rows, begun))
        return self.prompts.take(unfinished // n), asked

    def grown(self, sampled: Batch, version: int) -> "RolloutPool":
        """Returns a pool in which the unfinished responses have grown, by tokens that `version` has sampled.

        `sampled` has a row for each of these: responses and rollout_log_probs with the tokens from before, and
        `unfinished`.
        """
        rows = np.flatnonzero(self.unfinished)
        order = np.arange(self.rollouts.num_rows)
        order[rows] = self.rollouts.num_rows + np.arange(len(rows))  # these come from `sampled`
        before = self.rollouts.take(rows)
        after = before.merge(sampled.select(["responses", "rollout_log_probs"]))
        num_new = after["responses"].lengths - before["responses"].lengths
        runs = np.stack([np.full(len(rows), version), num_new], axis=1).astype(np.int64)
        new_runs = Column(runs.reshape(-1), np.full(len(rows), 2, np.int32))
        versions = self.versions.take(rows).followed_by(new_runs)
        unfinished = self.unfinished.copy()
        unfinished[rows] = sampled["unfinished"].values.astype(np.bool_)
        return replace(
            self,
            rollouts=concatenate([self.rollouts, after]).take(order),
            unfinished=unfinished,
            versions=_joined(self.versions, versions).take(order),
        )

    def token_versions(self) -> Column:
        """Returns the version that has sampled each token of each response."""
        runs = self.versions.values.reshape(-1, 2)  # a version, and how many tokens it has sampled
        return Column(np.repeat(runs[:, 0], runs[:, 1]), self.rollouts["responses"].lengths)


@dataclass(frozen=True, eq=False)
class UnlearnedPrompts:
    """All prompts that were taken from the run's order, and that no step has learned from yet.

    Attributes:
        pool: the prompts that were drawn, with their responses.
        undrawn: the prompts of the last batch of the order that were not drawn yet.
        undrawn_epoch: the data epoch of these, from 0.
    """

    pool: RolloutPool
    undrawn: PromptBatch
    undrawn_epoch: int = 0

    @classmethod
    def none(cls, table: PromptBatch, num_samples: int) -> Self:
        """Returns what there is before the first step; `table` has the training prompts."""
        return cls(RolloutPool.empty(table, num_samples), table.take(NO_ROWS))

    @property
    def num_prompts(self) -> int:
        """The number of prompts, with and without responses."""
        return self.pool.num_prompts + self.undrawn.num_prompts

    def serialise(self) -> bytes:
        """Converts prompts and responses into bytes, the content of a safetensors file."""
        pool = self.pool
        columns = {f"rollouts.{name}": pool.rollouts[name] for name in _COLUMNS}
        columns |= {
            "versions": pool.versions,
            "prompts": pool.prompts.prompts,
            "undrawn.prompts": self.undrawn.prompts,
        }
        arrays: dict[str, NDArray[Any]] = {
            "row_indices": pool.prompts.row_indices,
            "epochs": pool.epochs,
            "unfinished": pool.unfinished,
            "undrawn.row_indices": self.undrawn.row_indices,
        }
        others = {"num_samples": pool.num_samples, "undrawn_epoch": self.undrawn_epoch}
        return serialise_rollouts(arrays, columns, others)

    @classmethod
    def parse(cls, content: bytes, table: PromptBatch) -> Self:
        """Parses a file that `serialise` has made; `table` has the training prompts.

        Raises:
            ConfigError: another version has written the file, or the training prompts have changed since.
        """
        return parse_rollouts(content, lambda arrays, others: cls._of(arrays, table, **others))

    @classmethod
    def _of(cls, arrays: Arrays, table: PromptBatch, *, num_samples: int, undrawn_epoch: int) -> Self:
        prompts = prompts_of_rows(arrays["row_indices"], table)
        check_prompts(stored_column(arrays, "prompts"), prompts, _KEY)
        undrawn = prompts_of_rows(arrays["undrawn.row_indices"], table)
        check_prompts(stored_column(arrays, "undrawn.prompts"), undrawn, _KEY)
        columns = {name: stored_column(arrays, f"rollouts.{name}") for name in _COLUMNS}
        columns = {"prompts": prompts.repeated(num_samples).prompts, **columns}
        pool = RolloutPool(
            num_samples,
            prompts,
            arrays["epochs"],
            Batch(len(arrays["unfinished"]), columns),
            arrays["unfinished"],
            stored_column(arrays, "versions"),
        )
        return cls(pool, undrawn, undrawn_epoch)


def _joined(first: Column, second: Column) -> Column:
    """Returns a column with the rows of `first`, then those of `second`."""
    return Column(np.concatenate([first.values, second.values]), np.concatenate([first.lengths, second.lengths]))
