"""The run folder: who owns it, and which config it belongs to.

One controller at a time holds the folder (a file lock); each start raises the epoch, the fencing token that every
call carries, so that a controller that lost the folder can change nothing any more.
"""

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

import yaml

from controller.run.checkpoint_store import CheckpointStore
from controller.tracking.step_file import METRICS_FILE, read_metrics
from controller.workers.client import WorkerClient
from splitppo.atomic_write import write_atomically
from splitppo.config import CodeConfig, Config, ConfigError, dump_config
from splitppo.config.load import validate
from splitppo.config.reference_placement import keep_reference
from splitppo.config.renamed_keys import with_renamed_keys
from splitppo.config.streaming import keep_stream_groups, resolve_stream_groups
from splitppo.config.threads import keep_threads, permitted_cores, resolve_threads

NONCE_PREFIX = "nonce-"
_LOCK_FILE = "controller.lock"
# How long those who ask whether the folder is held are waited for.
_MAX_QUESTION_S = 5.0
_POLL_INTERVAL_S = 0.01
# Keys that say how long, where and how often, but not what is computed: they may differ from the stored config.
_MICRO_BATCH_KEYS = ("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")
_OF_A_MODEL = (*_MICRO_BATCH_KEYS, "use_remove_padding")
MUTABLE_KEYS = {
    *(f"run.{key}" for key in ("dir", "name", "total_steps", "total_epochs", "stop_after_step", "schedule", "resume")),
    *(f"{model}.{key}" for model in ("actor", "critic", "reward_model") for key in _OF_A_MODEL),
    *("actor.gradient_checkpointing", "critic.gradient_checkpointing"),
    "rollout.max_batch_size",
    *(f"reward.{key}" for key in ("num_workers", "timeout_s", "num_examine", "max_error_rate")),
    *(f"reward.judge.{key}" for key in ("url", "concurrency", "timeout_s", "retries", "backoff_s", "api_key_env")),
    *(f"reward.code.{key}" for key in CodeConfig.model_fields if key != "continuous"),
    *("placement", "evaluation", "checkpoint", "tracking", "services", "debug"),
}


@dataclass(frozen=True)
class Lease:
    """What a controller holds while it owns the folder."""

    run_id: str
    epoch: int
    nonce: str


def is_held(run_dir: Path) -> bool:
    """Whether a controller holds the folder now. One that starts while this is asked waits for a moment."""
    try:
        with (run_dir / _LOCK_FILE).open() as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nobody ever held it
        return False
    return False


def _hold(lock_file: TextIO) -> None:
    """Takes the lock of a controller; BlockingIOError where another one has it. Who asks by `is_held` is waited for."""
    deadline = time.monotonic() + _MAX_QUESTION_S
    while True:
        try:
            return fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # there is no room beside a controller
        fcntl.flock(lock_file, fcntl.LOCK_UN)
        time.sleep(_POLL_INTERVAL_S)


class RunFolder:
    """The folder of one run, held for the life of this object (a context manager).

    Once it is held, `config` has no `auto` any more that is the controller's to resolve.

    Raises:
        ConfigError: another controller is alive in the folder, it belongs to another config, it holds a run and
            `run.resume` is `disable`, or it cannot be read or written.
    """

    def __init__(self, config: Config) -> None:
        self.path = config.run.dir
        self.config_file = self.path / "config.yaml"
        self.checkpoints = CheckpointStore(self.path / "checkpoints")
        self.config = config
        self.lease = Lease("", 0, "")
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        with self._errors_named(), ExitStack() as lock:
            for folder in ("logs", "services", "checkpoints"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            lock_file = lock.enter_context((self.path / _LOCK_FILE).open("a+"))
            try:
                _hold(lock_file)
            except BlockingIOError:
                raise ConfigError(f"run.dir: another controller is running in {self.path}") from None
            self._check_config()
            self.lease = self._take_lease()
            self._lock = lock.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Leaves the folder to the next controller, which removes what cannot be removed now."""
        with self._lock, suppress(OSError):
            (self.path / self.lease.nonce).unlink(missing_ok=True)

    def resolve(self) -> Config:
        """The config that a run would be started with, for whoever does not hold the folder."""
        with self._errors_named():
            return self._resolved(self._stored())

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            reason = error.strerror or error
            raise ConfigError(f"run.dir: cannot use the run folder {self.path}: {reason}{where}") from error

    def _check_config(self) -> None:
        """Refuses a run that this config does not belong to, then resolves and stores the config."""
        stored = self._stored()
        self.config = self._resolved(stored)
        if stored is not None:
            if self.config.run.resume == "disable":
                advice = "remove it, choose another folder, or set run.resume=auto"
                raise ConfigError(f"run.dir: {self.path} holds a run already; {advice}")
            differences = _differences(self._with_later_keys(stored), yaml.safe_load(dump_config(self.config)))
            if lines := "\n".join(f"  {key}: {old!r} in the folder, {new!r} now" for key, old, new in differences):
                raise ConfigError(f"run.dir: {self.path} belongs to a run with another config:\n{lines}")
        write_atomically(self.config_file, dump_config(self.config))

    def _with_later_keys(self, stored: Any) -> Any:
        """The stored config with the defaults of keys that its version did not have; as it is where it had others."""
        with suppress(ConfigError):
            return yaml.safe_load(dump_config(validate(stored, str(self.config_file))))
        return stored

    def _resolved(self, stored: Any) -> Config:
        config = self.config
        if stored is not None:
            with suppress(ConfigError):  # of another version: then its keys are compared, and nothing of it is kept
                used = validate(stored, str(self.config_file))
                config = keep_stream_groups(keep_reference(keep_threads(config, used), used), used)
        return resolve_threads(resolve_stream_groups(config), permitted_cores())

    def _stored(self) -> Any:
        """The config of the run that the folder holds; None where no step was recorded or saved: nothing to protect."""
        has_history = bool(read_metrics(self.path / METRICS_FILE) or self.checkpoints.steps())
        if not has_history or not self.config_file.exists():
            return None
        try:
            stored = yaml.safe_load(self.config_file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"run.dir: {self.config_file} is not valid YAML: {reason}") from error
        if not isinstance(stored, dict):
            raise ConfigError(f"run.dir: {self.config_file} is no configuration: expected a mapping, got {stored!r}")
        return with_renamed_keys(stored)

    def _take_lease(self) -> Lease:
        """Raises the fencing token; the run id is made once per folder."""
        record = self.path / "controller.epoch"
        run_id, epoch = secrets.token_hex(8), 0
        if record.exists():
            stored = json.loads(record.read_text(encoding="utf-8"))
            run_id, epoch = stored["run_id"], stored["epoch"]
        for left_by_a_crash in self.path.glob(f"{NONCE_PREFIX}*"):
            left_by_a_crash.unlink()
        lease = Lease(run_id, epoch + 1, f"{NONCE_PREFIX}{secrets.token_hex(8)}")
        write_atomically(record, json.dumps({"run_id": lease.run_id, "epoch": lease.epoch}))
        write_atomically(self.path / lease.nonce, "")
        return lease

    def write_processes(self, clients: Iterable[WorkerClient]) -> None:
        """Writes processes.json: every process of every group, and where it is reached."""
        columns = ("role", "rank", "pid", "host", "address", "instance_id")
        rows = [
            (client.role, process.rank, process.pid, process.host, client.address, client.worker.instance_id)
            for client in clients
            for process in client.worker.processes
        ]
        controller = ("controller", 0, os.getpid(), os.uname().nodename, None, None)  # nobody calls it
        content = [dict(zip(columns, row, strict=True)) for row in (*rows, controller)]
        write_atomically(self.path / "processes.json", json.dumps(content, indent=2))


def _differences(stored: Any, resolved: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, stored value, new value) of every leaf that differs and must not."""
    if path in MUTABLE_KEYS:
        return
    if isinstance(stored, dict) and isinstance(resolved, dict):
        for key in {**stored, **resolved}:
            yield from _differences(stored.get(key), resolved.get(key), f"{path}.{key}".lstrip("."))
    elif stored != resolved:
        yield path, stored, resolved
