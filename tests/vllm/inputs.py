"""Prompts and experience of the ranks that sample with vLLM, and their responses as lists."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from splitppo.batch import Batch
from tests.support.image_rows import make_image_batch
from tests.support.seeds import shifted

NUM_PROMPTS = 12
# The images of each prompt; some prompts are text alone.
IMAGES_OF_PROMPTS = ((0,), (), (1, 2), (3,), (2, 0, 2), (1,), (), (0, 3))


def make_prompts(num_prompts: int = NUM_PROMPTS, num_samples: int = 1, *, prefix: int = 0, seed: int = 0) -> Batch:
    """Random prompts of 1 to 20 tokens, behind a shared prefix of so many."""
    rng = np.random.default_rng(shifted(seed))
    shared = rng.integers(3, 50, prefix)
    prompts = [np.concatenate([shared, rng.integers(3, 50, rng.integers(1, 20))]) for _ in range(num_prompts)]
    seeds = rng.integers(0, 2**62, (num_prompts, num_samples))
    return Batch.from_rows(prompts=prompts, seeds=list(seeds))


def make_prompts_with_images(folder: Path, num_samples: int = 3) -> Batch:
    """The same prompts for every step, with images of several sizes, for the model of a folder."""
    rows = make_image_batch(folder, IMAGES_OF_PROMPTS).select(["prompts", "images", "image_sizes"])
    seeds = np.random.default_rng(shifted(0)).integers(0, 2**62, (rows.num_rows, num_samples))
    return rows.merge(Batch.from_rows(seeds=list(seeds)))


def make_experience(seed: int) -> Batch:
    """Rows to learn from, the same on every rank."""
    rng = np.random.default_rng(shifted(seed))
    responses = [rng.integers(3, 50, 8) for _ in range(8)]
    return Batch.from_rows(
        prompts=[rng.integers(3, 50, 5) for _ in responses],
        responses=responses,
        advantages=[rng.normal(size=8) for _ in responses],
    )


def lists(rollouts: Batch) -> list[list[int]]:
    return [row.tolist() for row in rollouts["responses"].rows()]
