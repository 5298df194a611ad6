"""The finished rollouts of a step, sampled before the step begins, and the file that stores them in a checkpoint.

stored_rollouts.py has the form of the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from numpy.typing import NDArray

from controller.conversations.conversation import Conversation
from controller.data.images import IMAGE_SIZES, IMAGES
from controller.data.prompts import Answered, PromptBatch
from controller.ppo.masked_stats import Float32s
from controller.ppo.scores import Scores, Text, objects
from controller.sampling.keep import Groups
from controller.step.stored_rollouts import (
    Arrays,
    check_prompts,
    image_names,
    parse_rollouts,
    prompts_of_rows,
    serialise_rollouts,
    stored_column,
)
from rewards.samples import Failure
from splitppo.batch import Batch

_SCORE_ARRAYS = ("scores", "rule_scores", "has_eos", "has_stopped", "is_truncated", "prompt_indices")
_SCORE_COLUMNS = ("token_scores", "rule_token_scores")


@dataclass(frozen=True)
class Origin:
    """The step that finished rollouts belong to, and the weights and prompts that they were sampled from.

    Attributes:
        step: the step that learns from the rollouts.
        policy_version: the step whose weights have sampled the rollouts.
        epoch: the data epoch of the prompts, from 0.
        metrics: what was measured while the rollouts were sampled.
    """

    step: int
    policy_version: int
    epoch: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class FinishedRollouts:
    """The complete sampled and scored rollouts of one step, which a checkpoint can store for a resumed run.

    Attributes:
        origin: the step of the rollouts, and the weights that have sampled them.
        groups: prompts, rollouts and scores, by prompt, then sample.
        answered: every batch of prompts that the actor answered for the step, with the scores of the responses.
        greedy_scores: [num_prompts], where the estimator needs them as a baseline; else None.
    """

    origin: Origin
    groups: Groups
    answered: Sequence[Answered]
    greedy_scores: Float32s | None = None

    def serialise(self) -> bytes:
        """Converts the rollouts into bytes, the content of a safetensors file."""
        groups = self.groups
        scores = self.groups.scores
        arrays: dict[str, NDArray[Any]] = {"row_indices": groups.prompts.row_indices}
        arrays |= {f"scores.{name}": getattr(scores, name) for name in _SCORE_ARRAYS}
        of_rollouts = groups.rollouts.plain_columns  # images are those of the prompts, which are in the data files
        columns = {f"rollouts.{name}": column for name, column in of_rollouts.items()}
        columns |= {f"scores.{name}": getattr(scores, name) for name in _SCORE_COLUMNS}
        columns["prompts"] = groups.prompts.prompts
        if scores.model_scores is not None:
            arrays["scores.model_scores"] = scores.model_scores
        if self.greedy_scores is not None:
            arrays["greedy_scores"] = self.greedy_scores
        for number, (prompts, scores_B) in enumerate(self.answered):
            arrays |= {f"answered.{number}.row_indices": prompts.row_indices, f"answered.{number}.scores": scores_B}
        others = {
            "origin": asdict(self.origin),
            "num_answered": len(self.answered),
            "columns": list(of_rollouts),
            "images": None if groups.prompts.images is None else image_names(groups.prompts),
            "responses": [text.response for text in scores.texts],
            "failures": [failure and failure.value for failure in scores.failures],
            "messages": scores.messages.tolist(),
            "extra": scores.extra.tolist(),
            "conversations": [one and asdict(one) for one in scores.conversations],
            "own_prompts": [
                text.prompt if one and one.own_prompt else None
                for one, text in zip(scores.conversations, scores.texts, strict=True)
            ],
        }
        return serialise_rollouts(arrays, columns, others)

    @classmethod
    def parse(cls, content: bytes, table: PromptBatch) -> Self:
        """Parses a file that `serialise` has made, and returns the rollouts; `table` has the training prompts.

        Raises:
            ConfigError: another version has written the file, or the training prompts have changed since.
        """
        return parse_rollouts(content, lambda arrays, others: cls._of(arrays, others, table))

    @classmethod
    def _of(cls, arrays: Arrays, others: Mapping[str, Any], table: PromptBatch) -> Self:
        """Makes the rollouts from a file's arrays and its JSON (`others`); the texts of prompts come from `table`.

        Raises:
            ConfigError: the tokens of a prompt are others than those of its row in `table`.
        """
        prompts = prompts_of_rows(arrays["row_indices"], table)
        columns = {name: stored_column(arrays, f"rollouts.{name}") for name in others["columns"]}
        rollouts = Batch(len(columns["prompts"].lengths), columns)
        # Not `rollouts.prompts`: an environment may have put its opening messages into these.
        check_prompts(stored_column(arrays, "prompts"), prompts, "rollout.staleness 1", others.get("images"))
        if prompts.images is not None:
            prompts_B = prompts.repeated(rollouts.num_rows // prompts.num_prompts)
            rollouts = rollouts.merge(prompts_B.columns.select([IMAGES, IMAGE_SIZES]))
        answered = [
            (prompts_of_rows(arrays[f"answered.{number}.row_indices"], table), arrays[f"answered.{number}.scores"])
            for number in range(others["num_answered"])
        ]
        groups = Groups(prompts, rollouts, _scores(arrays, others, table))
        return cls(Origin(**others["origin"]), groups, answered, arrays.get("greedy_scores"))


def _scores(arrays: Arrays, others: Mapping[str, Any], table: PromptBatch) -> Scores:
    """Makes the scores from the arrays and the JSON of a file; prompts and data sources are those of `table`."""
    rows = table.take(arrays["scores.prompt_indices"])
    own_prompts = others.get("own_prompts") or [None] * len(rows.texts)  # of an earlier release: none
    prompts = [text if own is None else own for own, text in zip(own_prompts, rows.texts, strict=True)]
    texts = zip(prompts, others["responses"], rows.rows, strict=True)
    numbers: dict[str, Any] = {name: arrays[f"scores.{name}"] for name in _SCORE_ARRAYS}
    numbers |= {name: stored_column(arrays, f"scores.{name}") for name in _SCORE_COLUMNS}
    return Scores(
        **numbers,
        model_scores=arrays.get("scores.model_scores"),
        data_sources=objects(row.data_source for row in rows.rows),
        places=objects(row.place for row in rows.rows),
        failures=objects(None if value is None else Failure(value) for value in others["failures"]),
        messages=objects(others["messages"]),
        extra=objects(others["extra"]),
        conversations=objects(fields and Conversation(**fields) for fields in others["conversations"]),
        texts=objects(Text(prompt, response, row.ground_truth) for prompt, response, row in texts),
    )
