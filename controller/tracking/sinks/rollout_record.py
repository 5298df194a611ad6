"""Writes the parquet files of the responses of a run: `rollouts/{train,val}/{step}.parquet`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from controller.tracking.events import Event, Restored, Started, StepDone, Validated
from controller.tracking.step_record import StepRecord
from splitppo.config import Config
from splitppo.run_folder.rollout_store import RolloutStore

_BYTES_PER_GB = 1e9


class Submit(Protocol):
    """Hands a job, with its name, to the thread that records; a large one is left out if the thread is far behind."""

    def __call__(self, name: str, job: Callable[[], None], *, is_large: bool = False) -> None:
        """Hands a job over."""


class RolloutRecord:
    """The sink of the rollouts. The thread that records makes the files, out of the arrays of a step."""

    def __init__(self, config: Config, folder: Path, submit: Submit) -> None:
        self._config = config
        self._store = RolloutStore(folder / "rollouts", config.tracking.rollouts.max_gb * _BYTES_PER_GB)
        self._submit = submit
        self._tokenizer: tokenizers.Tokenizer | None = None

    def receive(self, event: Event) -> None:
        """Writes the responses of a step or a validation; removes those of steps that are done again."""
        match event:
            case Started():
                self._tokenizer = event.tokenizer
            case Restored():
                self._submit("the way back", partial(self._store.cut_back, event.last_kept))
            case StepDone():
                self._put_step(event.record)
            case Validated():
                self._put_validation(event)

    def _put_step(self, record: StepRecord) -> None:
        step = record.step
        config = self._config.at_step(step)
        tokenizer = self._tokenizer
        num_shown = config.tracking.num_shown(step)

        def content(files: Any) -> Any:
            if config.tracking.rollouts.enable:
                return files.train_file(record, config, tokenizer)
            return files.shown_file(record.scores, step, num_shown=num_shown, num_samples=config.rollout.n)

        self._put(f"step {step}", "train", step, content, num_shown)

    def _put_validation(self, event: Validated) -> None:
        config = self._config
        validation = event.validation
        num_shown = config.tracking.num_shown(0)

        def content(files: Any) -> Any:
            if config.tracking.rollouts.enable:
                return files.val_file(validation, config, event.step)
            num_samples = config.evaluation.n
            return files.shown_file(validation.scores, event.step, num_shown=num_shown, num_samples=num_samples)

        self._put(f"the validation after step {event.step}", event.split, event.step, content, num_shown)

    def _put(self, name: str, split: str, step: int, content: Callable[[Any], Any], num_shown: int) -> None:
        """Has a file written, whose content `content` makes with the module `rollout_file`, unless it has no rows."""

        def put() -> None:
            from controller.tracking.record import rollout_file  # slow to import

            self._store.put(split, step, content(rollout_file))

        if self._config.tracking.rollouts.enable or num_shown:
            self._submit(name, put, is_large=True)
