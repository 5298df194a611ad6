"""The table of all columns that a batch can have: name, type, kind, and what the values are.

Nothing is guessed about a column: one that is not in the table is refused, in memory and on the wire.
docs/extending/column.md says what else a new column needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

# How many values a row has.
#   per_row            any number: tokens of the row, or seeds
#   shared_per_row     any number; rows that are equal are kept and sent once (`SharedColumn`)
#   one_per_row        one
#   per_token          one for each response token
#   several_per_token  the same number for each response token of the batch, one token after the other
ColumnKind = Literal["per_row", "shared_per_row", "one_per_row", "per_token", "several_per_token"]


@dataclass(frozen=True)
class ColumnSpec:
    """The facts about a column that follow from its name.

    Attributes:
        dtype: the little-endian type in which its values are kept and sent.
        kind: how many values a row has, see `ColumnKind`.
        meaning: what a value is; log-probs and entropies are in nats.
        is_sent: False if the column is made and used inside a group, and never travels between services.
    """

    dtype: np.dtype[Any]
    kind: ColumnKind
    meaning: str
    is_sent: bool = True

    @property
    def is_of_tokens(self) -> bool:
        """True if the column has values for each response token."""
        return self.kind in ("per_token", "several_per_token")

    @property
    def is_shared(self) -> bool:
        """True if rows that are equal are kept and sent once."""
        return self.kind == "shared_per_row"


_INT32 = np.dtype("<i4")
_INT64 = np.dtype("<i8")
_FLOAT32 = np.dtype("<f4")
_UINT8 = np.dtype("u1")

COLUMNS: Mapping[str, ColumnSpec] = {
    "prompts": ColumnSpec(_INT32, "per_row", "token ids of the prompt"),
    "images": ColumnSpec(_UINT8, "shared_per_row", "files of the prompt's images, back to back"),
    "image_sizes": ColumnSpec(_INT32, "shared_per_row", "three per image: bytes of its file, rows, columns of patches"),
    "seeds": ColumnSpec(_INT64, "per_row", "sampling seeds: of the prompt's responses; after Generate the row's own"),
    "responses": ColumnSpec(_INT32, "per_row", "token ids of the response, with the EOS token if there is one"),
    "segments": ColumnSpec(_INT32, "per_row", "for each later segment: where in the response it begins, its context"),
    "begun_responses": ColumnSpec(_INT32, "per_row", "tokens that the response has, after which Generate goes on"),
    "begun_log_probs": ColumnSpec(_FLOAT32, "per_row", "log-probs of these tokens as they were sampled"),
    "unfinished": ColumnSpec(_UINT8, "one_per_row", "1 if Generate has cut the response by max_step_tokens"),
    "privileged_tokens": ColumnSpec(_INT32, "per_row", "token ids that the value model alone reads, first"),
    "response_mask": ColumnSpec(_UINT8, "per_token", "1 if the token counts; without the column every token does"),
    "rollout_log_probs": ColumnSpec(_FLOAT32, "per_token", "log-prob as the rollout backend sampled the token"),
    "old_log_probs": ColumnSpec(_FLOAT32, "per_token", "log-prob by the policy before the update"),
    "ref_log_probs": ColumnSpec(_FLOAT32, "per_token", "log-prob by the reference"),
    "values": ColumnSpec(_FLOAT32, "per_token", "value of the state before the token"),
    "advantages": ColumnSpec(_FLOAT32, "per_token", "advantage, whitened if the estimator wants it"),
    "returns": ColumnSpec(_FLOAT32, "per_token", "what the value is trained towards"),
    "rollout_is_weights": ColumnSpec(_FLOAT32, "per_token", "factor of the token's policy loss"),
    "teachers": ColumnSpec(_INT32, "one_per_row", "number of the row's teacher, from 0, if there are several"),
    "teacher_log_probs": ColumnSpec(_FLOAT32, "per_token", "log-prob by the row's teacher"),
    "teacher_top_ids": ColumnSpec(_INT32, "several_per_token", "ids of the tokens that the teacher finds most likely"),
    "teacher_top_log_probs": ColumnSpec(_FLOAT32, "several_per_token", "log-probs of these tokens by the teacher"),
    "reward_tokens": ColumnSpec(_INT32, "per_row", "ids by the reward model's tokenizer: messages and response"),
    "rm_scores": ColumnSpec(_FLOAT32, "one_per_row", "the reward model's score of the response"),
    "places": ColumnSpec(_INT32, "per_row", "place of a part's row in the whole, from 0; in Generate of all samples"),
    "recorded": ColumnSpec(_UINT8, "one_per_row", "1 if the update returns what the row's last forward computes"),
    "update_log_probs": ColumnSpec(_FLOAT32, "per_row", "log-probs of that forward; none for rows not recorded"),
    "update_entropy": ColumnSpec(_FLOAT32, "per_row", "entropies of that forward, likewise"),
    "segment_of": ColumnSpec(_INT32, "one_per_row", "number of the row that a segment belongs to", is_sent=False),
    "mini_batches": ColumnSpec(_INT32, "per_row", "index of the row's mini-batch in each PPO epoch", is_sent=False),
    "selected_tokens": ColumnSpec(
        _UINT8, "several_per_token", "for each PPO epoch 1 if the loss selects the token", is_sent=False
    ),
}


def spec_of(name: str) -> ColumnSpec:
    """Returns the entry of a column; ValueError if the table has none."""
    if name not in COLUMNS:
        raise ValueError(f"unknown column {name!r}; known: {', '.join(COLUMNS)} (splitppo/columns.py)")
    return COLUMNS[name]
