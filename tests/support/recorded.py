"""Experiences with random numbers, and the tokenizer of bytes that decodes them: what the record is made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from controller.ppo.experience import Experience, assemble_experience
from controller.ppo.scores import Scores, Text, objects
from controller.tracking.step_record import StepRecord
from splitppo.batch import Batch, Column
from splitppo.config import Config
from splitppo.run_folder.columns import SHOWN
from splitppo.run_folder.samples import SAMPLE_COLUMNS, rollouts_file
from tests.support.fake_services import make_config
from tests.support.scores import make_scores
from tests.support.seeds import shifted

FLOATS = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "values")


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer with one token per byte, in the order of its alphabet, and the special token <eos> at the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return backend


def record_config(run_dir: Path, *, num_samples: int = 1, **changes: Any) -> Config:
    """A configuration with `num_samples` responses per prompt."""
    return make_config(run_dir, rollout__n=num_samples, **changes)


def random_experience(
    config: Config, lengths: list[int], *, seed: int = 0, columns: tuple[str, ...] = FLOATS, **of_scores: Any
) -> tuple[Experience, Scores]:
    """Responses of these lengths with random tokens and numbers, and their scores, 0 or 1."""
    random, num_rows = np.random.default_rng(shifted(seed)), len(lengths)
    of_responses = np.array(lengths, np.int32)
    num_tokens = int(of_responses.sum())
    prompts = Column(np.ones(2 * num_rows, np.int32), np.full(num_rows, 2, np.int32))
    drawn = {name: Column(random.standard_normal(num_tokens).astype(np.float32), of_responses) for name in columns}
    ids = Column(random.integers(65, 75, num_tokens).astype(np.int32), of_responses)
    batch = Batch(num_rows, {"prompts": prompts, "responses": ids, **drawn})
    texts = objects(Text(f"prompt {row}", "unused", {"answer": row}) for row in range(num_rows))
    scores = make_scores(random.integers(0, 2, num_rows).astype(np.float32), texts=texts, **of_scores)
    return assemble_experience(config.algorithm, batch, scores, num_samples=config.rollout.n), scores


def record_of(experience: Experience, scores: Scores, step: int = 3, update_columns: Batch | None = None) -> StepRecord:
    """The record of a step that has ended."""
    record = StepRecord(step, 0.0, 1.0, update_columns=update_columns)
    record.experience, record.scores = experience, scores
    return record


def write_samples(run_dir: Path, kind: str, step: int, *rows: Sequence[Any]) -> None:
    """Writes the file of a step's responses with what trackers show of it: rows of SAMPLE_COLUMNS without the split."""
    columns = [name if name != "response" else SHOWN for name in SAMPLE_COLUMNS[1:]]
    table = pa.table({name: [row[place] for row in rows] for place, name in enumerate(columns)})
    file = rollouts_file(run_dir, kind, step)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")  # a file that is there is whole, as in a run
    pq.write_table(table, unfinished)
    unfinished.rename(file)
