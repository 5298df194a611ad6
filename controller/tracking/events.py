"""The events of a run: what happens in it. `Recorder.emit` tells each of them once, to every sink."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from controller.tracking.step_record import StepRecord
from controller.validation.result import ValidationResult
from controller.workers.clients import WorkerClient
from splitppo.rpc.errors import Place
from splitppo.run_folder.images import ImagesOf
from splitppo.run_folder.spans import Span
from splitppo.v1 import worker_pb2


@dataclass(frozen=True)
class Started:
    """The run is sure to go on, after step `resumed_at`; `changes` are the keys that differ from the last start.

    `tokenizer` is the policy's. `images_of` has what returns the images of a prompt: "train", and maybe "val".
    """

    tokenizer: tokenizers.Tokenizer
    total_steps: int
    resumed_at: int
    changes: Sequence[str]
    images_of: Mapping[str, ImagesOf] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupsUp:
    """All worker groups answer; those with another instance id than before were started since.

    `restored_step` is the step to which a run goes back after a loss; None if no step is repeated.
    """

    clients: Sequence[WorkerClient]
    restored_step: int | None = None


@dataclass(frozen=True)
class Progressed:
    """A worker group is so far with a command."""

    role: str
    method: str
    progress: worker_pb2.Progress


@dataclass(frozen=True)
class GroupLost:
    """A group is lost; `pause` is the seconds before it is started again, or a sentence that says why it is not."""

    place: Place
    cause: str
    pause: float | str


@dataclass(frozen=True)
class RolloutRestarted:
    """The rollout group is there again after its loss; no step is done again."""

    cause: str


@dataclass(frozen=True)
class Restored:
    """All roles have the weights of `step`, 0 for the initial models, and the run goes on from there.

    Attributes:
        last_kept: the last step of which anything stays; -1 for a run that begins, of which nothing does.
        num_repeated: how many complete steps are done again.
        metrics: those of `step` in its checkpoint, if it has one: the run may have been killed before it wrote them.
        timeline: the spans of the run that stay, with those of the restore.
        cut: the spans of steps that are done again.
    """

    step: int
    last_kept: int
    num_repeated: int
    metrics: Mapping[str, float] | None
    timeline: Sequence[Span]
    cut: Sequence[Span]


@dataclass(frozen=True)
class StepBegun:
    """A step has begun; an earlier one may still be open."""

    step: int


@dataclass(frozen=True)
class StepDone:
    """Both updates of a step have ended."""

    record: StepRecord
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class LineComplete:
    """A step is done and, if it has a checkpoint, so is this; the same holds of all steps before it.

    Attributes:
        samples: a few of its responses, as rows of texts and score.
        completed_s: when its updates had ended, in unix seconds.
    """

    step: int
    metrics: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]]
    completed_s: float


@dataclass(frozen=True)
class Validated:
    """The policy of a step was validated. `split` is the name of the folder of its responses.

    `line` has the metrics of a validation that belongs to no open step, and has a line of its own; else None.
    """

    step: int
    validation: ValidationResult
    split: str
    line: Mapping[str, float] | None


@dataclass(frozen=True)
class CheckpointCommitted:
    """The checkpoint of a step is complete, so many seconds after it was begun."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Worked:
    """Work that belongs to no open step, e.g. the end of a checkpoint."""

    spans: Sequence[Span]


@dataclass(frozen=True)
class Closing:
    """The training has ended, and what was started is being closed."""


@dataclass(frozen=True)
class Ended:
    """The run ends for this reason, with this exit status; `why` is the sentence by which it failed, if it did.

    No event follows.
    """

    reason: str
    exit_status: int
    why: str | None = None


Event = (
    Started
    | GroupsUp
    | Progressed
    | GroupLost
    | RolloutRestarted
    | Restored
    | StepBegun
    | StepDone
    | LineComplete
    | Validated
    | CheckpointCommitted
    | Worked
    | Closing
    | Ended
)
# Gets every event of a run, in their order. What a sink raises ends the run.
Sink = Callable[[Event], None]
