"""Writes the parquet files of the responses of a run: `rollouts/{train,val}/{step}.parquet`.

What the critic alone has read is in files of its own, `rollouts/critic/{step}.jsonl`, and so are the images of
prompts, `rollouts/images/{name}`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from controller.ppo.scores import Scores
from controller.tracking.events import Event, Restored, Started, StepDone, Validated
from controller.tracking.record.choice import choose
from controller.tracking.step_record import StepRecord
from splitppo.config import Config
from splitppo.run_folder import critic_texts
from splitppo.run_folder.images import ImagesOf, KeepImages, no_images
from splitppo.run_folder.rollout_store import RolloutStore
from splitppo.run_folder.samples import folder_of_shown

_BYTES_PER_GB = 1e9


class Submit(Protocol):
    """Hands a job, with its name, to the thread that records; a large one is left out if the thread is far behind."""

    def __call__(self, name: str, job: Callable[[], None], *, is_large: bool = False) -> None:
        """Hands a job over."""


class RolloutRecord:
    """The sink of the rollouts. The thread that records makes the files, out of the arrays of a step."""

    def __init__(self, config: Config, folder: Path, submit: Submit) -> None:
        self._config = config
        self._folder = folder / "rollouts"
        self._store = RolloutStore(folder / "rollouts", config.tracking.rollouts.max_gb * _BYTES_PER_GB)
        self._submit = submit
        self._tokenizer: tokenizers.Tokenizer | None = None
        self._images_of: Mapping[str, ImagesOf] = {}

    def receive(self, event: Event) -> None:
        """Writes the responses of a step or a validation; removes those of steps that are done again."""
        match event:
            case Started():
                self._tokenizer = event.tokenizer
                self._images_of = event.images_of
            case Restored():
                self._submit("the way back", partial(self._store.cut_back, event.last_kept))
                self._submit("the way back", partial(critic_texts.cut_back, self._folder, event.last_kept))
            case StepDone():
                self._put_step(event.record)
            case Validated():
                self._put_validation(event)

    def _put_step(self, record: StepRecord) -> None:
        """Has the responses of a step written: all with their tokens, if `tracking.rollouts` is enabled.

        Else only those that trackers show in this step, if any.
        """
        step = record.step
        config = self._config.at_step(step)
        name = f"step {step}"
        if config.tracking.rollouts.enable:
            tokenizer = self._tokenizer
            keep_images = self._keeping_images("train")
            self._put(name, "train", step, lambda files: files.train_file(record, config, tokenizer, keep_images))
            if record.privileged is not None and tokenizer is not None:
                self._submit(name, lambda: self._write_critic_texts(record, config, tokenizer), is_large=True)
        else:
            shown = record.scores.first(config.tracking.num_shown(step))
            self._put_shown(name, "train", step, shown, config.rollout.n)

    def _write_critic_texts(self, record: StepRecord, config: Config, tokenizer: tokenizers.Tokenizer) -> None:
        """Writes what the critic alone has read, as its tokens say it, of the responses whose tokens are recorded."""
        assert record.privileged is not None, "the caller asks"
        tokens = record.privileged.rows()
        chosen = np.flatnonzero(choose(record.tokens.numbers, record.scores, config, record.step)).tolist()
        texts = {row: tokenizer.decode(tokens[row].tolist(), skip_special_tokens=False) for row in chosen}
        critic_texts.write_critic_texts(self._folder, record.step, texts)

    def _put_validation(self, event: Validated) -> None:
        """Has the responses of a validation written: all with `tracking.rollouts`, else those that trackers show."""
        config = self._config
        step = event.step
        validation = event.validation
        name = f"the validation after step {step}"
        if config.tracking.rollouts.enable:
            keep_images = self._keeping_images("val")
            self._put(name, event.split, step, lambda files: files.val_file(validation, config, step, keep_images))
        else:
            shown = validation.scores.first(config.tracking.num_shown(0))
            self._put_shown(name, event.split, step, shown, config.evaluation.n)

    def _put_shown(self, name: str, split: str, step: int, shown: Scores, num_samples: int) -> None:
        """Has the responses written that trackers show, if there are any, where nothing is recorded."""
        if shown.num_rows:
            keep_images = self._keeping_images("train" if split == "train" else "val")
            folder = folder_of_shown(split)
            self._put(name, folder, step, lambda files: files.shown_file(shown, step, num_samples, keep_images))

    def _keeping_images(self, table: str) -> KeepImages:
        """Returns what keeps the images of a prompt of a table, "train" or "val", and returns their names."""
        images_of = self._images_of.get(table)
        if images_of is None:
            return no_images

        def keep(prompt: int) -> list[str]:
            images = images_of(prompt)
            for name, file in images:
                self._store.put_image(name, file)
            return [name for name, _ in images]

        return keep

    def _put(self, name: str, split: str, step: int, content: Callable[[Any], Any]) -> None:
        """Has a file written, whose content `content` makes with the module `rollout_file`."""

        def put() -> None:
            from controller.tracking.record import rollout_file  # slow to import

            self._store.put(split, step, content(rollout_file))

        self._submit(name, put, is_large=True)
