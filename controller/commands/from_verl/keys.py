"""The table that maps every key of verl's PPO trainer to a SplitPPO key; docs/from-verl.md is made from the table."""

from controller.commands.from_verl.keys_data import DATA_ROWS
from controller.commands.from_verl.keys_distillation import DISTILLATION_ROWS
from controller.commands.from_verl.keys_models import MODEL_ROWS
from controller.commands.from_verl.keys_rollout import ROLLOUT_ROWS
from controller.commands.from_verl.keys_run import RUN_ROWS
from controller.commands.from_verl.row import NO_DEFAULT, Row

ROWS: tuple[Row, ...] = (*RUN_ROWS, *DATA_ROWS, *DISTILLATION_ROWS, *MODEL_ROWS, *ROLLOUT_ROWS)

# The defaults of verl that a translation depends on.
VERL_DEFAULTS = {row.key: row.default for row in ROWS if row.default is not NO_DEFAULT} | {
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
    "reward.reward_model.enable": False,
    "reward.reward_model.enable_resource_pool": False,
    "reward.reward_model.nnodes": 0,
    "reward.reward_model.n_gpus_per_node": 8,
    "distillation.nnodes": 0,
    "distillation.n_gpus_per_node": 8,
}

# The keys whose value is a mapping that is taken as a whole.
SECTIONS = tuple(row.key for row in ROWS if row.is_section)


def row_of(key: str) -> Row | None:
    """Finds the first row of the table of verl's keys that matches a key; None if verl's PPO trainer lacks the key."""
    return next((row for row in ROWS if row.matches(key)), None)
