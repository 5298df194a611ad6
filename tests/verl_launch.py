"""The least that a launch of verl's says, and when it is read."""

from __future__ import annotations

from datetime import UTC, datetime

NOW = datetime(2026, 8, 9, tzinfo=UTC)
BASE = (
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "data.train_batch_size=512",
    "actor_rollout_ref.model.path=my/model",
    "trainer.total_training_steps=200",
)
