"""Dynamic sampling: rounds of sampling until a step has enough groups from which it can learn.

Yu et al., 2025 (DAPO), section 3.2: a group whose samples all have the same score has no advantage, so that the policy
learns nothing from it. P prompts, n samples of each.

A round samples and scores the responses to one batch of prompts. This module decides which groups of a round are kept,
whether there is another round, and when to give up.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.data.prompts import NO_ROWS, Answered, PromptBatch
from controller.ppo.masked_stats import Float64s
from controller.ppo.scores import Scores, is_numeric
from rewards.returned import LARGEST
from splitppo.batch import Batch, concatenate
from splitppo.config import ConfigError
from splitppo.config.subsections.filter_groups import SCORE_METRICS, FilterGroupsConfig

_NUM_NAMED_VALUES = 4


class TooFewSampleGroups(Exception):
    """Dynamic sampling found too few groups whose samples differ to fill a step; the message is one sentence."""


@dataclass(frozen=True, eq=False)
class Groups:
    """P prompts with P x n rollouts and the rollouts' scores before any penalty, ordered by prompt, then sample."""

    prompts: PromptBatch
    rollouts: Batch
    scores: Scores

    def take(self, places: NDArray[np.int64]) -> "Groups":
        """Selects some prompts by their indices, and returns them with their rollouts and scores."""
        num_samples = self.rollouts.num_rows // self.prompts.num_prompts
        rows = (places[:, None] * num_samples + np.arange(num_samples)).reshape(-1)
        return Groups(self.prompts.take(places), self.rollouts.take(rows), self.scores.take(rows))


class KeptGroups:
    """Collects the groups that a step keeps in the rounds of dynamic sampling, until it has `num_prompts` groups.

    Groups beyond `num_prompts` are not used. `rounds_per_epoch` rounds take each prompt once. `answered` has all
    prompts that were taken, with the scores of their responses.
    """

    def __init__(self, config: FilterGroupsConfig, num_prompts: int, step: int, *, rounds_per_epoch: int) -> None:
        self._config = config
        self._num_prompts = num_prompts
        self._step = step
        self._rounds_per_epoch = max(1, rounds_per_epoch)
        self._kept: list[Groups] = []  # for each round
        self.answered: list[Answered] = []
        self._alike: Counter[float] = Counter()  # the number of groups by the value that all of their samples have
        self._num_barren = 0  # the last rounds in a row in which no group was kept

    @property
    def is_full(self) -> bool:
        """True if enough groups are kept for the step."""
        return self._num_kept >= self._num_prompts

    @property
    def num_rounds(self) -> int:
        """The number of rounds of dynamic sampling (batches of prompts) that the step has needed so far."""
        return len(self.answered)

    @property
    def drawn_rows(self) -> NDArray[np.int64]:
        """The row indices, in the data files, of all prompts that were taken for the step so far."""
        return np.concatenate([NO_ROWS, *(prompts.row_indices for prompts, _ in self.answered)])

    def add(self, groups: Groups) -> None:
        """Adds those groups of a round of sampling whose responses differ in the metric; only counts the others.

        Raises:
            ConfigError: the scorer returns no such field.
        """
        values_Pn = metric_values(groups.scores, self._config.metric).reshape(groups.prompts.num_prompts, -1)
        # The standard deviation would not do: for equal numbers it need not be exactly 0.
        is_alike_P = values_Pn.min(axis=1) == values_Pn.max(axis=1)
        self._alike.update(values_Pn[is_alike_P, 0].tolist())
        self._kept.append(groups.take(np.flatnonzero(~is_alike_P)))
        self.answered.append((groups.prompts, groups.scores.scores))
        self._num_barren = self._num_barren + 1 if is_alike_P.all() else 0

    def check(self) -> None:
        """Checks that dynamic sampling may take one more batch of prompts for the step.

        Raises:
            TooFewSampleGroups: the step has taken as many batches of prompts as it may, or a whole data epoch without
                any group to keep.
        """
        limit = self._config.max_num_gen_batches
        key = "algorithm.filter_groups.max_num_gen_batches"
        if limit and self.num_rounds >= limit:
            raise TooFewSampleGroups(self._why(f"{limit} rounds ({key})", f"raise {key} or data.gen_batch_size"))
        if not limit and self._num_barren >= self._rounds_per_epoch:
            after = "a whole data epoch without any group that differs"
            raise TooFewSampleGroups(self._why(after, "take other prompts (data.train_files, data.filters)"))

    def _why(self, after: str, advice: str) -> str:
        """Returns the message of TooFewSampleGroups: how many groups were kept and dropped, and why.

        `after` says after how much work, and `advice` names the keys that would help. The most common values are named
        one by one, the rest together.
        """
        named = self._alike.most_common(_NUM_NAMED_VALUES)
        values = ", ".join(f"all at {value:g}: {count}" for value, count in named)
        if num_others := len(self._alike) - len(named):
            values += f", at {num_others} other values: {self._num_dropped - sum(dict(named).values())}"
        return (
            f"step {self._step} cannot be filled: after {after} it has {self._num_kept} of"
            f" {self._num_prompts} prompts (data.train_batch_size); {self._num_dropped} were dropped because their"
            f" samples are alike in {self._config.metric!r} ({values}); {advice}, or raise rollout.n, or set"
            " algorithm.filter_groups.enable=false and data.gen_batch_size=null"
        )

    def metrics(self) -> dict[str, float]:
        """Returns the metrics train/num_gen_batches and training/filter_groups/... about kept and dropped groups."""
        groups = "training/filter_groups"
        num_drawn = self._num_kept + self._num_dropped
        return {
            "train/num_gen_batches": float(self.num_rounds),
            f"{groups}/evicted_samples": float(self._num_dropped),
            f"{groups}/evicted_right": float(sum(count for value, count in self._alike.items() if value >= 1.0)),
            f"{groups}/evicted_wrong": float(sum(count for value, count in self._alike.items() if value <= 0.0)),
            f"{groups}/discarded_surplus_samples": float(self._num_kept - self._num_prompts),
            f"{groups}/share_kept": self._num_kept / num_drawn,
        }

    def first(self) -> Groups:
        """Returns the groups that the step learns from: the first `num_prompts` that were kept."""
        kept = Groups(
            PromptBatch.join([groups.prompts for groups in self._kept]),
            concatenate([groups.rollouts for groups in self._kept]),
            Scores.join([groups.scores for groups in self._kept]),
        )
        return kept.take(np.arange(self._num_prompts))

    @property
    def _num_kept(self) -> int:
        return sum(groups.prompts.num_prompts for groups in self._kept)

    @property
    def _num_dropped(self) -> int:
        return self._alike.total()


async def keep_differing(kept: KeptGroups, sample_round: Callable[[int, NDArray[np.int64]], Awaitable[Groups]]) -> None:
    """Samples round after round until enough groups are kept.

    `sample_round` samples and scores the round of a number, from 1; it gets the row indices of all prompts that were
    taken before, so that a prompt that comes again gets other seeds.

    Raises:
        TooFewSampleGroups: see `KeptGroups.check`.
    """
    while not kept.is_full:
        kept.check()
        kept.add(await sample_round(kept.num_rounds + 1, kept.drawn_rows))


def metric_values(scores: Scores, metric: str) -> Float64s:
    """Returns for each sample the metric that dynamic sampling compares within a group, [P x n] float64.

    The value of a response whose scorer or environment failed is 0. If a scorer returns no "acc", for instance because
    it returns a plain number, the response's score counts, like in validation.

    Raises:
        ConfigError: a scorer returns no such numeric field, or a number in it that is not finite or too large.
    """
    values_B = scores.scores.astype(np.float64)
    if metric in SCORE_METRICS:
        return values_B
    facts = zip(scores.extra, scores.failures, scores.conversations, strict=True)
    for row, (extra, failure, conversation) in enumerate(facts):
        value: object = extra.get(metric)
        has_failed = failure is not None or (conversation is not None and conversation.lost)
        if value is None and (has_failed or metric == "acc"):
            continue
        whose = f"algorithm.filter_groups.metric: the scorer of data_source {scores.data_sources[row]!r} gives"
        if isinstance(value, int | float) and not is_numeric(value):
            expected = f"a finite number of at most {LARGEST:g}"
            raise ConfigError(f"{whose} {value} in the field {metric!r}; expected {expected}")
        if not is_numeric(value):
            expected = ", ".join((*SCORE_METRICS, *(name for name, other in extra.items() if is_numeric(other))))
            raise ConfigError(f"{whose} no numeric field {metric!r}; expected one of {expected}")
        values_B[row] = value
    return values_B
