"""The group of the actor alone, started for one conversation with the weights of a run's last checkpoint."""

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from controller.run.checkpoint_store import CheckpointStore
from controller.run.folder import RunFolder
from controller.run.restore import RestorePoint
from controller.workers.clients import ActorClient
from controller.workers.concurrency import run_watched
from controller.workers.worker_groups import WorkerGroups
from splitppo.config import Config, ConfigError, config_tree
from splitppo.config.load import validate

# What the actor's group reads of a configuration, and what is left of some sections.
_SECTIONS = ("run", "data", "rollout", "actor", "services")
_OF_A_STEP = ("staleness", "max_step_tokens", "overcommit", "share", "stream_groups", "check_freq")
_NOT_OF_ROLLOUT = (*_OF_A_STEP, "sync_dir", "vllm", "backend")
_NOT_OF_ACTOR = ("policy_loss", "use_kl_loss", "kl_loss_coef")
_NOT_OF_SERVICES = ("critic", "reward", "rollout")


@asynccontextmanager
async def actor_group(config: Config) -> AsyncIterator[tuple[ActorClient, int]]:
    """Starts the actor's group, and gives its client and the step of its weights; ends the group afterwards.

    The weights are those of the checkpoint that `run.resume` names, or of the newest one in the run folder, or else
    those of `actor.model`. The run folder is left as it is: the group gets one of its own, beside it, which is removed.
    The policy's own model samples (rollout.backend hf).

    Raises:
        ConfigError: there is a mistake in the configuration, or the checkpoint cannot be used.
        GroupFailed, WireError: the group does not come up, or is lost.
    """
    if config.services.launch == "external":
        raise ConfigError("services.launch is external: play starts the actor's group itself, expected local")
    folder = Path(tempfile.mkdtemp(prefix=".play-", dir=_nearest(config.run.dir)))
    try:
        with RunFolder(_of_actor_alone(config, folder / "run", _resumed(config))) as run:
            point = RestorePoint(run.config, run.checkpoints)
            groups = WorkerGroups(run.config, run.config_file, run.lease, lambda *_: None)
            try:
                await groups.launch()
                workers = await groups.connect()
                await run_watched(point.restore(groups), groups.watch())
                yield workers.actor, point.step
            finally:
                await groups.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _nearest(run_dir: Path) -> Path:
    """Returns the nearest folder above a run folder that exists: there, files of a checkpoint can be linked."""
    return next(folder for folder in run_dir.absolute().parents if folder.is_dir())


def _resumed(config: Config) -> str:
    """Returns the checkpoint that `run.resume` names, else the newest one of the run folder; disable: there is none.

    A configuration that a run was begun with may have `disable`: it says nothing about what the run has learned since.
    """
    if config.run.resume not in ("auto", "disable"):
        return config.run.resume
    store = CheckpointStore(config.run.dir / "checkpoints")
    step = store.latest_step()
    return str(store.folder(step)) if step else "disable"


def _of_actor_alone(config: Config, folder: Path, resume: str) -> Config:
    """Returns a configuration with the same policy that starts no other group, and trains nothing."""
    tree = config_tree(config)
    sections = {name: tree[name] for name in _SECTIONS}
    for name, left_out in (("rollout", _NOT_OF_ROLLOUT), ("actor", _NOT_OF_ACTOR), ("services", _NOT_OF_SERVICES)):
        sections[name] = {key: value for key, value in sections[name].items() if key not in left_out}
    sections["run"] |= {"dir": str(folder), "resume": resume}
    sections["algorithm"] = {"adv_estimator": "reinforce_plus_plus"}
    return validate(sections, "play")
