"""Holds the tokens of a step's responses as flat arrays, and computes one number per response from them.

B responses, N tokens of responses, one row after the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from controller.ppo.experience import Experience
from controller.ppo.kl import clamp_log_ratio, k3
from controller.ppo.masked_stats import Float32s, Float64s, Mask
from splitppo.splitmix import GAMMA, splitmix64

Int64s = NDArray[np.int64]
Numbers = Mapping[str, NDArray[Any]]  # one number per response by column; NaN where there is none

# The lists of the record by the columns of a batch.
OF_BATCH = {
    "old": "old_log_probs",
    "ref": "ref_log_probs",
    "rollout": "rollout_log_probs",
    "value": "values",
    "ret": "returns",
    "advantage": "advantages",
}
_GRAM = 4  # tokens; repetition is the share of repeated pieces of this length


@dataclass(frozen=True, eq=False)
class StepTokens:
    """The response tokens of a step, and the names of the record for their numbers.

    Attributes:
        ids: [N] int32, token ids.
        lengths: [B] int32, the number of tokens of each response.
        prompt_lengths: [B] int32.
        counts: [N] bool, the tokens that the policy sampled, and not its environment.
        learned: [N] bool, the tokens that the models learn from.
        lists: [N] float32 by name: old, ref, rollout (log-probs), value, ret, advantage, reward; those of this run.
    """

    ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    prompt_lengths: NDArray[np.int32]
    counts: Mask
    learned: Mask
    lists: Mapping[str, Float32s]

    @classmethod
    def of(cls, experience: Experience) -> Self:
        """Takes the tokens of an experience, without copies."""
        batch = experience.batch
        responses = experience.batch["responses"]
        lists = {name: batch[column].values for name, column in OF_BATCH.items() if column in batch}
        if "rollout" in lists and lists["rollout"] is lists.get("old"):
            del lists["rollout"]  # the algorithm takes the ones for the others, so that they cannot differ
        counted = experience.counted
        return cls(
            responses.values,
            responses.lengths,
            batch["prompts"].lengths,
            counted.values,
            experience.learned.values,
            {**lists, "reward": experience.rewards.values},
        )

    @cached_property
    def row_of(self) -> Int64s:
        """[N], the index of each token's response."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def places(self) -> Int64s:
        """[N], the index of each token in its response."""
        starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        return np.arange(len(self.ids)) - np.repeat(starts, self.lengths)

    def difference(self, one: str, other: str) -> Float64s | None:
        """Returns [N] differences of two lists, 0 for tokens that do not count; None if the run lacks one of them."""
        if one not in self.lists or other not in self.lists:
            return None
        return np.where(self.counts, np.subtract(self.lists[one], self.lists[other], dtype=np.float64), 0.0)

    def sums(self, values_N: NDArray[Any]) -> Float64s:
        """Sums numbers of tokens by response, [B]."""
        return np.asarray(np.bincount(self.row_of, values_N, len(self.lengths)), np.float64)

    def means(self, values_N: NDArray[Any], mask_N: Mask) -> Float64s:
        """Averages numbers of the tokens that a mask marks by response, [B]; NaN for a response without one."""
        counts_B = self.sums(mask_N)
        means_B = self.sums(np.where(mask_N, values_N, 0.0)) / np.maximum(counts_B, 1.0)
        return np.where(counts_B > 0, means_B, np.nan)

    def ends(self, values_N: NDArray[Any]) -> tuple[Float64s, Float64s]:
        """Returns the numbers of each response's first and last token that counts, both [B]; NaN without one."""
        first_B = np.full(len(self.lengths), np.nan)
        last_B = np.full(len(self.lengths), np.nan)
        counted = np.flatnonzero(self.counts)
        first_B[self.row_of[counted[::-1]]] = values_N[counted[::-1]]
        last_B[self.row_of[counted]] = values_N[counted]
        return first_B, last_B

    @cached_property
    def numbers(self) -> Numbers:
        """The columns of the record that follow from the tokens alone; one number per response each."""
        columns: dict[str, NDArray[Any]] = {
            "length": self.lengths,
            "prompt_length": self.prompt_lengths,
            "learned": self.sums(self.learned).astype(np.int32),
            "reward": self.sums(self.lists["reward"]),
            "return_first": self.ends(self.lists["ret"])[0],
            "advantage_sum": self.sums(self.lists["advantage"]),
            "repetition": self._repetition(),
            "text_hash": self._text_hashes(),
        }
        if (d_N := self.difference("old", "ref")) is not None:
            columns |= {"kl": self.means(d_N, self.counts), "k3": self.means(k3(clamp_log_ratio(d_N)), self.counts)}
        if (d_N := self.difference("old", "rollout")) is not None:
            columns["mismatch"] = self.means(np.abs(d_N), self.counts)
        if "value" in self.lists:
            columns["value_first"], columns["value_last"] = self.ends(self.lists["value"])
            errors_N = np.subtract(self.lists["value"], self.lists["ret"], dtype=np.float64)
            columns["value_error"] = np.sqrt(self.means(errors_N**2, self.learned))
        return columns

    def _repetition(self) -> Float64s:
        """Computes the share of each response's pieces of four tokens that it has had before, [B]; 0 if it is short."""
        starts = np.flatnonzero(self.places + _GRAM <= np.repeat(self.lengths, self.lengths))
        hashes = splitmix64(self.row_of[starts].astype(np.uint64))
        for offset in range(_GRAM):
            hashes = splitmix64(hashes ^ self.ids[starts + offset].astype(np.uint64))
        _, firsts = np.unique(hashes, return_index=True)
        num_pieces_B = np.bincount(self.row_of[starts], minlength=len(self.lengths))
        num_unique_B = np.bincount(self.row_of[starts[firsts]], minlength=len(self.lengths))
        return np.asarray(1.0 - num_unique_B / np.maximum(num_pieces_B, 1)) * (num_pieces_B > 0)

    def _text_hashes(self) -> Int64s:
        """Computes a number for each response's token ids, [B]: equal for equal responses, in every run."""
        hashes_N = splitmix64(self.ids.astype(np.uint64) + self.places.astype(np.uint64) * GAMMA)
        sums_B = np.zeros(len(self.lengths), np.uint64)
        rows = np.flatnonzero(self.lengths)
        if len(rows):
            starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
            sums_B[rows] = np.add.reduceat(hashes_N, starts[rows])
        return sums_B.view(np.int64)
