"""The one table: what becomes of every key of verl's PPO trainer. Translation and docs/from-verl.md are made of it."""

from controller.from_verl.keys_data import DATA_ROWS
from controller.from_verl.keys_models import MODEL_ROWS
from controller.from_verl.keys_rollout import ROLLOUT_ROWS
from controller.from_verl.keys_run import RUN_ROWS
from controller.from_verl.row import NO_DEFAULT, Row

ROWS: tuple[Row, ...] = (*RUN_ROWS, *DATA_ROWS, *MODEL_ROWS, *ROLLOUT_ROWS)

# Of verl, as far as a run here depends on them.
VERL_DEFAULTS = {row.key: row.default for row in ROWS if row.default is not NO_DEFAULT} | {
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "reward.reward_model.enable": False,
    "reward.reward_model.enable_resource_pool": False,
    "reward.reward_model.nnodes": 0,
    "reward.reward_model.n_gpus_per_node": 8,
}

# Mappings that are taken as a whole.
SECTIONS = tuple(row.key for row in ROWS if row.is_section)


def row_of(key: str) -> Row | None:
    """Returns the first row that matches; None if neither verl's PPO trainer nor this table knows the key."""
    return next((row for row in ROWS if row.matches(key)), None)
