"""Dynamic sampling without its calls: which groups of samples are kept, when a step is full, why it never will be.

Yu et al., 2025 (DAPO), section 3.2: a group whose samples all have the same score has no advantage, so it only thins
the batch out. P prompts, n samples of each.
"""

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.data.prompts import Answered, PromptBatch
from controller.ppo.masked_stats import Float32s, Float64s
from controller.rollout.results import ScoredResponses, is_numeric
from controller.rollout.stream import StreamPart
from controller.workers.actor_client import ActorClient
from splitppo.batch import Batch, concatenate
from splitppo.config import ConfigError
from splitppo.config.filter_groups import SCORE_METRICS, FilterGroupsConfig
from splitppo.v1.batch_pb2 import Slot

_NUM_NAMED_VALUES = 4


class GroupsRanOut(Exception):
    """A step cannot be filled with groups worth learning from; the message is one sentence."""


@dataclass(frozen=True, eq=False)
class _Generation:
    """What was kept of a generation, and all that it drew."""

    prompts: PromptBatch
    rollouts: Batch
    scored: ScoredResponses
    drawn: PromptBatch
    scores: Float32s


class KeptGroups:
    """The groups of a step, generation by generation, until there are `num_prompts`; what is over is cut.

    `generations_per_epoch` draw each prompt once.
    """

    def __init__(self, config: FilterGroupsConfig, num_prompts: int, step: int, *, generations_per_epoch: int) -> None:
        self._config = config
        self._num_prompts = num_prompts
        self._step = step
        self._generations_per_epoch = max(1, generations_per_epoch)
        self._generations: list[_Generation] = []
        self._alike: Counter[float] = Counter()  # groups by the value that all of their samples have
        self._num_barren = 0  # generations without any group that differs, the last ones

    @property
    def is_full(self) -> bool:
        return self._num_kept >= self._num_prompts

    @property
    def num_generations(self) -> int:
        return len(self._generations)

    @property
    def drawn_rows(self) -> NDArray[np.int64]:
        """Row indices of all prompts that were drawn so far."""
        return np.concatenate([np.empty(0, np.int64), *(one.drawn.row_indices for one in self._generations)])

    def add(self, prompts: PromptBatch, rollouts: Batch, scored: ScoredResponses) -> None:
        """Keeps the groups of a generation that differ in the metric.

        There are P prompts, and P x n rollouts and scores, ordered by prompt, then sample; scores without any penalty.

        Raises:
            ConfigError: the scorer has no such field.
        """
        values_Pn = metric_values(scored, self._config.metric).reshape(prompts.num_prompts, -1)
        # Never by their deviation: that of equal numbers need not be exactly 0.
        is_alike_P = values_Pn.min(axis=1) == values_Pn.max(axis=1)
        self._alike.update(values_Pn[is_alike_P, 0].tolist())
        kept = np.flatnonzero(~is_alike_P)
        rows = (kept[:, None] * values_Pn.shape[1] + np.arange(values_Pn.shape[1])).reshape(-1)
        generation = _Generation(prompts.take(kept), rollouts.take(rows), scored.take(rows), prompts, scored.scores)
        self._generations.append(generation)
        self._num_barren = 0 if len(kept) else self._num_barren + 1

    def check(self) -> None:
        """Whether another generation may help.

        Raises:
            GroupsRanOut: there were as many as are allowed, or a whole data epoch in which all groups were alike.
        """
        limit, key = self._config.max_num_gen_batches, "algorithm.filter_groups.max_num_gen_batches"
        if limit and self.num_generations >= limit:
            raise GroupsRanOut(self._why(f"{limit} generations ({key})", f"raise {key} or data.gen_batch_size"))
        if not limit and self._num_barren >= self._generations_per_epoch:
            raise GroupsRanOut(
                self._why(
                    "a whole data epoch without any group that differs",
                    "take other prompts (data.train_files, data.filters)",
                )
            )

    def _why(self, after: str, advice: str) -> str:
        named = self._alike.most_common(_NUM_NAMED_VALUES)
        values = ", ".join(f"all at {value:g}: {count}" for value, count in named)
        if len(self._alike) > len(named):
            values += (
                f", at {len(self._alike) - len(named)} other values: {self._num_dropped - sum(dict(named).values())}"
            )
        return (
            f"step {self._step} cannot be filled: after {after} it has {self._num_kept} of"
            f" {self._num_prompts} prompts (data.train_batch_size); {self._num_dropped} were dropped because their"
            f" samples are alike in {self._config.metric!r} ({values}); {advice}, or raise rollout.n, or set"
            " algorithm.filter_groups.enable to false"
        )

    def metrics(self) -> dict[str, float]:
        """train/num_gen_batches, training/filter_groups/...: of all groups that were drawn."""
        groups, num_drawn = "training/filter_groups", self._num_kept + self._num_dropped
        return {
            "train/num_gen_batches": float(self.num_generations),
            f"{groups}/evicted_samples": float(self._num_dropped),
            f"{groups}/evicted_right": float(sum(count for value, count in self._alike.items() if value >= 1.0)),
            f"{groups}/evicted_wrong": float(sum(count for value, count in self._alike.items() if value <= 0.0)),
            f"{groups}/discarded_surplus_samples": float(self._num_kept - self._num_prompts),
            f"{groups}/share_kept": self._num_kept / num_drawn,
        }

    def rollouts(self, actor: ActorClient, slot: Slot) -> "KeptRollouts":
        """The first `num_prompts` groups, as the rollouts of the step that `slot` is of."""
        prompts = PromptBatch.join([one.prompts for one in self._generations])
        rollouts = concatenate([one.rollouts for one in self._generations])
        num_samples = rollouts.num_rows // prompts.num_prompts
        rows = np.arange(self._num_prompts * num_samples)
        return KeptRollouts(
            actor,
            slot,
            prompts.take(np.arange(self._num_prompts)),
            rollouts.take(rows),
            ScoredResponses.join([one.scored for one in self._generations]).take(rows),
            [(one.drawn, one.scores) for one in self._generations],
        )

    @property
    def _num_kept(self) -> int:
        return sum(one.prompts.num_prompts for one in self._generations)

    @property
    def _num_dropped(self) -> int:
        return self._alike.total()


class KeptRollouts:
    """The rollouts that a step has kept, which need not be sampled any more: one part, see `Rollouts`."""

    def __init__(
        self,
        actor: ActorClient,
        slot: Slot,
        prompts: PromptBatch,
        rollouts: Batch,
        scored: ScoredResponses,
        drawn: Sequence[Answered],
    ) -> None:
        self._actor = actor
        self._rollouts = rollouts
        self._drawn = drawn
        self.slot = slot
        self.prompts = prompts
        self.scored: ScoredResponses | None = scored
        self.num_draws = len(drawn)

    @property
    def places(self) -> Sequence[NDArray[np.int64]]:
        return [np.arange(self._rollouts.num_rows)]

    async def generate(self, *, on_generated: Callable[[], None]) -> tuple[Batch, None]:
        """Puts them where the actor would have left them; see `Rollouts`."""
        await self._actor.put_batch(self.slot, self._rollouts.select(("prompts", "responses", "rollout_log_probs")))
        on_generated()
        return self._rollouts.select(("prompts", "responses", "seeds")), None

    async def parts(self) -> AsyncIterator[StreamPart]:
        num_rows = self._rollouts.num_rows
        asked = self.prompts.repeated(num_rows // self.prompts.num_prompts)
        yield StreamPart(self.slot, np.arange(num_rows), asked, self._texts)

    @property
    def order(self) -> NDArray[np.int64]:
        return self.places[0]

    def in_order(self, parts: Iterable[Batch]) -> Batch:
        return concatenate(list(parts))

    def answered(self, scores_B: Float32s) -> Sequence[Answered]:  # noqa: ARG002 - of Rollouts
        """Of every generation, as they were compared: before any penalty."""
        return self._drawn

    @property
    def _texts(self) -> Batch:
        return self._rollouts.select(("prompts", "responses"))


def metric_values(scored: ScoredResponses, metric: str) -> Float64s:
    """[P x n], what groups are compared by.

    A scorer that failed gives 0. One that gives no "acc", e.g. a plain number, is taken by its score, as in validation.

    Raises:
        ConfigError: a scorer has no such numeric field, or no finite number there.
    """
    if metric in SCORE_METRICS:
        return scored.scores.astype(np.float64)
    values = []
    for sample in scored.samples:
        value: object = sample.extra.get(metric)
        if value is None and (sample.failure is not None or metric == "acc"):
            value = sample.score
        if not is_numeric(value):
            known = _numeric_fields(sample.extra)
            raise ConfigError(
                f"algorithm.filter_groups.metric: the scorer of data_source {sample.data_source!r} gives no numeric"
                f" field {metric!r}; expected one of {', '.join((*SCORE_METRICS, *known))}"
            )
        if not math.isfinite(value):
            raise ConfigError(
                f"algorithm.filter_groups.metric: the scorer of data_source {sample.data_source!r} gives {value} in the"
                f" field {metric!r}; expected a finite number"
            )
        values.append(float(value))
    return np.array(values)


def _numeric_fields(extra: Mapping[str, object]) -> list[str]:
    return [name for name, value in extra.items() if is_numeric(value)]
