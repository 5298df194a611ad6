"""The smallest launch script of verl, its translation, and the configuration that a run reads from that."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from controller.commands.from_verl.command import read_settings, translated_yaml
from controller.commands.from_verl.translation import Finding, Translation, translate
from splitppo.config import Config, load_config

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

NOW = datetime(2026, 8, 9, tzinfo=UTC)
BASE = (
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "data.train_batch_size=512",
    "actor_rollout_ref.model.path=my/model",
    "trainer.total_training_steps=200",
)


def translated(
    tmp_path: Path, *overrides: str, gpus: tuple[int, int] | None = None, drop: tuple[str, ...] = ()
) -> Translation:
    return translate(read_settings(Path("-"), (*BASE, *overrides), {}, NOW), gpus=gpus, drop=drop)


def config_of(
    tmp_path: Path, *overrides: str, gpus: tuple[int, int] | None = None, drop: tuple[str, ...] = ()
) -> Config:
    """Returns the configuration that a run reads from the written file."""
    translation = translated(tmp_path, *overrides, gpus=gpus, drop=drop)
    assert translation.stopping == []
    file = tmp_path / "my.yaml"
    file.write_text(translated_yaml(translation, "run.sh"))
    return load_config(file)


def finding(translation: Translation, key: str) -> Finding:
    return next(finding for finding in translation.findings if finding.key == key)
