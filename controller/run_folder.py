"""The run folder: who owns it, which config it belongs to, where a run resumes.

One controller at a time holds the folder (a file lock); each start raises the epoch, the fencing token that every
call carries, so that a controller that lost the folder can change nothing any more.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError

from controller.checkpoints import STATE, CheckpointStore
from controller.files import write_atomically
from controller.launcher import Endpoint
from controller.run_state import RunState
from controller.trackers import METRICS_FILE, read_metrics
from splitppo.config import Config, ConfigError, dump_config
from splitppo.config.load import validate
from splitppo.config.threads import keep_threads, permitted_cores, resolve_threads
from splitppo.manifest import DamagedCheckpoint

log = logging.getLogger(__name__)

# Keys that say how long, where and how often, but not what is computed: they may differ from the stored config.
MUTABLE_KEYS = (
    "run.dir",
    "run.name",
    "run.total_steps",
    "run.stop_after_step",
    "run.schedule",
    "run.resume",
    "actor.ppo_micro_batch_size_per_gpu",
    "actor.ppo_max_token_len_per_gpu",
    "actor.use_remove_padding",
    "actor.gradient_checkpointing",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    "critic.use_remove_padding",
    "critic.gradient_checkpointing",
    "rollout.max_batch_size",
    "reward.num_workers",
    "reward.timeout_s",
    "reward.num_examine",
    "evaluation",
    "checkpoint",
    "tracking",
    "services",
    "debug",
)


@dataclass(frozen=True)
class Claim:
    """What a controller holds while it owns the folder."""

    run_id: str
    epoch: int
    nonce: str


class RunFolder:
    """The folder of one run, claimed for the life of this object (a context manager).

    Attributes:
        config: what the run is started with; once the folder is claimed, without any `auto` that is the controller's to
            resolve.

    Raises:
        ConfigError: another controller is alive in the folder, it belongs to another config, it holds a run and
            `run.resume` is `disable`, or it cannot be read or written.
    """

    def __init__(self, config: Config) -> None:
        self.path = config.run.dir
        self.checkpoints = CheckpointStore(self.path / "checkpoints")
        self.config = config
        self._lock = -1
        self._named_step: int | None = None
        self.claim = Claim("", 0, "")

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    def __enter__(self) -> Self:
        self._lock = self._open()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(f"run.dir: another controller is running in {self.path}") from None
        try:
            self._check_config()
            self._take_epoch()
        except OSError as error:
            os.close(self._lock)
            raise self._unusable(error) from error
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Leaves the folder to the next controller, which removes what cannot be removed now."""
        try:
            with suppress(OSError):
                (self.path / self.claim.nonce).unlink(missing_ok=True)
        finally:
            os.close(self._lock)

    def _open(self) -> int:
        """Makes the folder; returns the descriptor of its lock file."""
        try:
            for folder in ("", "logs", "services", "checkpoints"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            return os.open(self.path / "controller.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> ConfigError:
        where = f" ({error.filename})" if error.filename else ""
        return ConfigError(f"run.dir: cannot use the run folder {self.path}: {error.strerror or error}{where}")

    def _check_config(self) -> None:
        """Refuses a run that this config does not belong to, then resolves and stores the config."""
        stored = self._stored()
        self.config = self._resolved(stored)
        if stored is not None:
            if self.config.run.resume == "disable":
                raise ConfigError(
                    f"run.dir: {self.path} holds a run already; remove it, choose another folder, or set"
                    " run.resume=auto"
                )
            resolved = yaml.safe_load(dump_config(self.config))
            if differences := list(_differences(stored, resolved)):
                lines = "\n".join(f"  {key}: {old!r} in the folder, {new!r} now" for key, old, new in differences)
                raise ConfigError(f"run.dir: {self.path} belongs to a run with another config:\n{lines}")
        write_atomically(self.config_file, dump_config(self.config))

    def resolve(self) -> Config:
        """The config that a run would be started with, for whoever claims nothing.

        Raises:
            ConfigError: the folder cannot be read.
        """
        try:
            return self._resolved(self._stored())
        except OSError as error:
            raise self._unusable(error) from error

    def _resolved(self, stored: Any) -> Config:
        config = self.config
        if stored is not None:
            with suppress(ConfigError):  # of another version: then its keys are compared, and nothing of it is kept
                config = keep_threads(config, validate(stored, str(self.config_file)))
        return resolve_threads(config, permitted_cores())

    def _stored(self) -> Any:
        """The config of the run that the folder holds; None: no step was recorded or saved here.

        A start that failed before leaves nothing to protect.
        """
        has_history = bool(read_metrics(self.path / METRICS_FILE) or self.checkpoints.steps())
        if not has_history or not self.config_file.exists():
            return None
        try:
            stored = yaml.safe_load(self.config_file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(
                f"run.dir: {self.config_file} is not valid YAML: {' '.join(str(error).split())}"
            ) from error
        if not isinstance(stored, dict):
            raise ConfigError(f"run.dir: {self.config_file} is no configuration: expected a mapping, got {stored!r}")
        return stored

    def _take_epoch(self) -> None:
        """Raises the fencing token; the run id is made once per folder."""
        record = self.path / "controller.epoch"
        run_id, epoch = secrets.token_hex(8), 0
        if record.exists():
            stored = json.loads(record.read_text(encoding="utf-8"))
            run_id, epoch = stored["run_id"], stored["epoch"]
        for left_by_a_crash in self.path.glob("nonce-*"):
            left_by_a_crash.unlink()
        self.claim = Claim(run_id, epoch + 1, f"nonce-{secrets.token_hex(8)}")
        write_atomically(record, json.dumps({"run_id": run_id, "epoch": epoch + 1}))
        write_atomically(self.path / self.claim.nonce, "")

    def resume_step(self) -> int:
        """The checkpointed step that this run starts from; 0 is the initial model. What a crash has left is removed.

        Raises:
            ConfigError: `run.resume` names a folder that is no complete checkpoint, or a damaged one.
        """
        for step in self.checkpoints.remove_leftovers():
            log.warning("removed the checkpoint of step %d: COMMITTED is missing, it was never completed", step)
        resume = self.config.run.resume
        if resume == "disable":
            return 0
        if resume == "auto":
            return self.newest_whole_step()
        try:
            self._named_step = self.checkpoints.adopt(Path(resume))
        except DamagedCheckpoint as error:
            raise self._damaged(error) from error
        return self._named_step

    def newest_whole_step(self) -> int:
        """As `CheckpointStore.newest_whole_step`; ConfigError if it comes to a damaged one that `run.resume` names."""
        return self.checkpoints.newest_whole_step(self.refuse_if_named)

    def refuse_if_named(self, step: int, error: DamagedCheckpoint) -> None:
        """Who asks for one checkpoint by its folder (`run.resume`) gets no other one: ConfigError."""
        if step == self._named_step:
            raise self._damaged(error) from error

    def _damaged(self, error: DamagedCheckpoint) -> ConfigError:
        return ConfigError(f"run.resume: the checkpoint {self.config.run.resume} is damaged: {error}")

    def load_state(self, step: int) -> RunState:
        """The controller's part of the checkpoint of `step`; 0 is the state before the first step.

        Raises:
            ConfigError: it cannot be read, or another version of the controller has written it.
        """
        if step == 0:
            return RunState.initial(self.config)
        with self._usable(step):
            return RunState.model_validate(self.checkpoints.read_state(step))

    def load_metrics(self, step: int) -> Mapping[str, float] | None:
        """The metrics of the checkpointed step; None for step 0. Errors as for `load_state`."""
        with self._usable(step):
            return self.checkpoints.read_metrics(step) if step > 0 else None

    @contextmanager
    def _usable(self, step: int) -> Iterator[None]:
        """Whatever is wrong with the controller's part of a checkpoint is one sentence."""
        try:
            yield
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc'])) or 'the state'}: {first['msg']}"
        except KeyError as error:
            reason = f"{error} is missing"
        except (DamagedCheckpoint, TypeError) as error:
            reason = str(error)
        else:
            return
        folder = self.checkpoints.folder(step)
        raise ConfigError(
            f"the checkpoint {folder} cannot be used, its {STATE} is not what this version writes: {reason}"
        )

    def write_processes(self, endpoints: Iterable[Endpoint]) -> None:
        """Writes processes.json: every process of every group, and where it is reached."""
        rows: list[dict[str, Any]] = [
            {
                "role": endpoint.role,
                "rank": process["rank"],
                "pid": process["pid"],
                "host": process["host"],
                "address": endpoint.address,
                "instance_id": endpoint.instance_id,
            }
            for endpoint in endpoints
            for process in endpoint.processes
        ]
        controller = {"role": "controller", "rank": 0, "pid": os.getpid(), "host": os.uname().nodename}
        rows.append({**controller, "address": None, "instance_id": None})  # nobody calls it
        write_atomically(self.path / "processes.json", json.dumps(rows, indent=2))


def _differences(stored: Any, resolved: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, stored value, new value) of every leaf that differs and must not."""
    if path in MUTABLE_KEYS:
        return
    if isinstance(stored, dict) and isinstance(resolved, dict):
        for key in {**stored, **resolved}:
            yield from _differences(stored.get(key), resolved.get(key), f"{path}.{key}".lstrip("."))
    elif stored != resolved:
        yield path, stored, resolved
