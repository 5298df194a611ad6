"""Locks the folder of a run for one controller at a time, and checks and stores the run's configuration in it.

Each start of a controller raises the epoch, which every call carries as a fencing token: workers refuse the calls of a
controller that no longer has the folder.
"""

import errno
import fcntl
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from pydantic import ValidationError

from controller.run.checkpoint_store import CheckpointStore, named_step
from controller.run.training_rows import ROWS_FILE, TrainingRows
from controller.workers.clients import Caller
from splitppo.atomic_write import write_atomically
from splitppo.config import Config, ConfigError, config_tree, dump_config
from splitppo.config.keys import may_change
from splitppo.config.load import read_tree, validate, with_renamed_keys
from splitppo.config.resolve import resolve_run
from splitppo.config.rules.table import check_rules
from splitppo.config.shown import is_secret, secret_keys
from splitppo.config_error import config_errors
from splitppo.file_lock import try_lock
from splitppo.machine.cores import permitted_cores
from splitppo.plain_file import check_plain, open_plain, read_plain
from splitppo.run_folder.epoch import EPOCH_FILE, read_epoch, write_epoch
from splitppo.run_folder.logs import CONTROLLER_LOG, LOGS
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics
from splitppo.run_folder.trace import TRACE_FILE
from splitppo.secret_names import HIDDEN

log = logging.getLogger(__name__)

NONCE_PREFIX = "nonce-"
_LOCK_FILE = "controller.lock"
# The longest time for which a starting controller waits until `is_held` in other processes has given the lock back.
_MAX_QUESTION_S = 5.0
_POLL_INTERVAL_S = 0.01
_MCP_TOOLS = "rollout.multi_turn.mcp_tools."


def check_folder(path: Path) -> None:
    """Raises OSError if this process can neither make this folder nor write into it; makes nothing."""
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
    if not os.access(nearest, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))


def check_weights_folder(config: Config) -> None:
    """Raises ConfigError if ranks here could not make the folder of the published weights, where a key names one."""
    publishes = "rollout" in config.sampling_roles or config.checkpoint.weights_save_freq
    if not publishes or not config.rollout.sync_dir:
        return
    try:
        check_folder(config.weights_folder)
    except OSError as error:
        raise ConfigError(f"rollout.sync_dir: cannot use the folder: {error.strerror}: {error.filename}") from error


def is_held(run_dir: Path) -> bool:
    """Returns True if a controller has locked the run folder. Locks it briefly; a controller that starts then waits."""
    try:
        with open_plain(run_dir / _LOCK_FILE) as lock_file:
            return not try_lock(lock_file, shared=True)
    except OSError:  # no controller has ever held the folder
        return False


def _hold(lock_file: BinaryIO) -> bool:
    """Locks the run folder for this controller, and returns True; returns False if another controller has locked it."""
    deadline = time.monotonic() + _MAX_QUESTION_S
    while not try_lock(lock_file):
        if time.monotonic() > deadline or not try_lock(lock_file, shared=True):  # a controller excludes also this lock
            return False
        fcntl.flock(lock_file, fcntl.LOCK_UN)
        time.sleep(_POLL_INTERVAL_S)
    return True


class RunFolder:
    """The folder of one run, with the run's configuration; as a context manager locks the folder for this controller.

    Inside the context, `config` has the values that the controller has chosen for keys with `auto`, and `changes` has a
    line for each key that has another value than at the last start.

    Raises:
        ConfigError: another controller runs in the folder; the folder belongs to another config; the folder has a run
            and `run.resume` is `disable`; or the folder cannot be read or written.
    """

    def __init__(self, config: Config) -> None:
        self.path = config.run.dir
        self.config_file = self.path / "config.yaml"
        self.checkpoints = CheckpointStore(self.path / "checkpoints")
        self.config = config
        self._made: list[Path] = []  # the run folder and those above it that this start has made
        self._published_by = [config]  # this start and the last one
        self.changes: list[str] = []
        self._config_before = b""
        self._has_run = False  # a run with at least one step was in the folder before this start
        self.lease = Caller("", 0)
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        """Makes and locks the folder, checks its configuration, and raises the epoch; the lock is kept until `release`.

        A folder that this start has made is removed again if the check fails.
        """
        missing = [folder for folder in (self.path, *self.path.absolute().parents) if not folder.exists()]
        with self._errors_named(), ExitStack() as lock:
            for name in (LOGS, "services", "checkpoints"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
            lock_file = lock.enter_context(open_plain(self.path / _LOCK_FILE, "a+b"))
            if not _hold(lock_file):
                raise self._held_by_another()
            if not (self.path / EPOCH_FILE).exists():  # else another controller has started here meanwhile
                self._made = missing
            try:
                for file in (self.path / TRACE_FILE, *self.path.glob("rollouts/*/*.jsonl")):
                    check_plain(file)  # before groups are started, which takes long
                self._check_config()
                self.lease = self._take_lease()
            except (ConfigError, OSError):
                self.remove_if_new()
                raise
            self.checkpoints.run_id = self.lease.run_id
            self._lock = lock.pop_all()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, ConfigError):
            self.remove_if_new()
        self.release()

    def release(self) -> None:
        """Unlocks the run folder and removes this start's nonce file. The next controller removes nonces left over."""
        with self._lock, suppress(OSError):
            (self.path / self.lease.nonce).unlink(missing_ok=True)

    def remove_if_new(self) -> None:
        """Removes the folder of a start that is refused, and what it made above, if there was none before this start.

        A folder stays in which groups that somebody else has started write their logs.
        """
        logs = (self.path / LOGS).glob("*")
        is_used = self.config.services.launch == "external" and any(log.name != CONTROLLER_LOG for log in logs)
        if not self._made or is_used:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # another run may have its folder there by now
            for parent in self._made[1:]:
                parent.rmdir()
        self._made = []

    def remove_published_weights(self) -> None:
        """Removes the versions of the policy that this start and the last one have published, as far as possible."""
        for folder in {config.weights_folder_of(self.lease.run_id) for config in self._published_by}:
            with suppress(OSError):  # nor can it be removed if it is a link, or holds something else
                for version in folder.glob("version_*"):
                    shutil.rmtree(version, ignore_errors=True)
                folder.rmdir()

    def put_config_back(self) -> None:
        """Restores the config.yaml of the previous start, because this start has trained nothing."""
        if self._config_before:
            write_atomically(self.config_file, self._config_before)

    def resolve(self) -> Config:
        """Returns the configuration with which the run would start now, with `auto` resolved; needs no lock.

        Raises:
            ConfigError: the run could not start: its folder cannot be made or written, or `run.resume` names no
                checkpoint, or a value that is kept does not fit the others.
        """
        if (resume := self.config.run.resume) not in ("auto", "disable"):
            named_step(Path(resume))
        with self._errors_named():
            check_folder(self.path)
            stored = self._stored()
            used = self._used(stored)
            resolved = resolve_run(self.config, used, permitted_cores())
            try:
                return self._checked(resolved)
            except ConfigError:
                if stored is not None:  # a key that was changed explains more than the rule that it breaks
                    self._refuse_changed(self._differences(resolved, stored, used))
                raise

    def check(self) -> Config:
        """Returns what `resolve` returns; ConfigError also where a start would be refused for the run in the folder.

        So it is if a controller runs there, or if this start may not resume the run.
        """
        self.config = self.resolve()
        stored = self._stored()
        self._has_run = stored is not None
        if is_held(self.path):
            raise self._held_by_another()
        self._changes(stored, self._used(stored))
        return self.config

    def check_rows(self, rows: TrainingRows) -> None:
        """Checks that the run in the folder, if there is one, began with these training rows.

        A run of a version that did not describe them may have any. Call `check`, or enter the context, before.

        Raises:
            ConfigError: it began with others.
        """
        file = self.path / ROWS_FILE
        if not (self._has_run and file.exists()):
            return
        with config_errors(ValidationError, OSError, before=f"run.dir: cannot use {file}: "):
            before = TrainingRows.model_validate_json(read_plain(file))
        if changed := rows.changed_from(before):
            raise ConfigError(
                f"run.dir: {self.path} belongs to a run with other rows of {changed}: put them back as they were;"
                f" {self.checkpoints.way_to_others('rows')}"
            )

    def keep_rows(self, rows: TrainingRows) -> None:
        """Checks the training rows as `check_rows`, and stores what later starts compare theirs with."""
        self.check_rows(rows)
        with self._errors_named():
            write_atomically(self.path / ROWS_FILE, rows.model_dump_json(indent=1) + "\n")

    def _held_by_another(self) -> ConfigError:
        return ConfigError(f"run.dir: another controller is running in {self.path}")

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Turns an OSError inside the `with` into a ConfigError that names the run folder, and the file if known."""
        try:
            yield
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            reason = error.strerror or error
            raise ConfigError(f"run.dir: cannot use the run folder {self.path}: {reason}{where}") from error

    def _check_config(self) -> None:
        """Resolves `auto` and writes config.yaml; ConfigError if the folder has a run with another configuration."""
        stored = self._stored()
        self._has_run = stored is not None
        used = self._used(stored)
        if stored is None and self.config.run.resume == "disable":  # a run that made no step may have recorded some
            shutil.rmtree(self.path / "episodes", ignore_errors=True)
        self.config = resolve_run(self.config, used, permitted_cores())
        is_copied = used is not None and used.run.dir != self.config.run.dir  # the other folder's run may go on
        self._published_by = [self.config] if used is None or is_copied else [self.config, used]
        self.changes = self._changes(stored, used)
        self._config_before = read_plain(self.config_file) if stored is not None else b""
        found = secret_keys(self.config)
        if found:
            log.warning(
                "%s has %s, which looks like a secret: others cannot read the file; better let your code take it from"
                " an environment variable",
                self.config_file,
                ", ".join(found),
            )
        write_atomically(self.config_file, dump_config(self.config), is_private=bool(found))

    def _changes(self, stored: Any, used: Config | None) -> list[str]:
        """Returns a line for each key that has another value than in the folder; ConfigError if one may not change."""
        if stored is None:
            return []
        if self.config.run.resume == "disable":
            advice = "remove it, choose another folder, or set run.resume=auto"
            raise ConfigError(f"run.dir: {self.path} holds a run already; {advice}")
        lines = self._differences(self.config, stored, used)
        self._refuse_changed(lines)
        self._checked(self.config)
        return list(lines.values())

    def _differences(self, config: Config, stored: Any, used: Config | None) -> dict[str, str]:
        """Returns a line for each key that has another value in `config` than in the folder, by key."""
        before = stored if used is None else config_tree(used)
        changed = differences(before, config_tree(config))
        return {key: _line(key, old, new) for key, old, new in changed}

    def _refuse_changed(self, lines: Mapping[str, str]) -> None:
        """Raises ConfigError if one of these keys may not have another value than in the folder."""
        if refused := "\n".join(f"  {line}" for key, line in lines.items() if not may_change(key)):
            way = self.checkpoints.way_to_others("keys")
            raise ConfigError(f"run.dir: {self.path} belongs to a run with another config:\n{refused}\n{way}")

    def _checked(self, config: Config) -> Config:
        """Returns `config`; ConfigError if values that a resumed run keeps break a rule between keys."""
        kept = f"with the values of {self.config_file}, which a resumed run keeps"
        with config_errors(ValueError, before=f"run.dir: {kept}, "):
            check_rules(config)
        return config

    def _used(self, stored: Any) -> Config | None:
        """Parses the stored configuration of the folder's run, with defaults for keys that its version did not have.

        Returns None without a run, or if this version refuses a key of the run's version: then no value is kept.
        """
        with suppress(ConfigError):
            return None if stored is None else validate(stored, str(self.config_file))
        return None

    def _stored(self) -> Any:
        """Reads the config.yaml of the folder's run as a mapping; None if no step is in metrics or checkpoints."""
        has_history = bool(read_metrics(self.path / METRICS_FILE) or self.checkpoints.steps())
        if not has_history or not self.config_file.exists():
            return None
        with config_errors(ConfigError, before="run.dir: "):
            return with_renamed_keys(read_tree(self.config_file, is_stored=True))

    def _take_lease(self) -> Caller:
        """Writes files with run id, epoch (raised by 1) and nonce, which identify this start; returns the three."""
        record = self.path / EPOCH_FILE
        run_id = secrets.token_hex(8)
        epoch = 0
        if record.exists():
            run_id, epoch = read_epoch(record)
        for left_by_a_crash in self.path.glob(f"{NONCE_PREFIX}*"):
            left_by_a_crash.unlink()
        lease = Caller(run_id, epoch + 1, nonce=f"{NONCE_PREFIX}{secrets.token_hex(8)}")
        write_epoch(record, lease.run_id, lease.epoch)
        write_atomically(self.path / lease.nonce, "")
        return lease


def _line(key: str, old: Any, new: Any) -> str:
    """Returns what the user reads of a changed key: its old and its new value, or None where it has none.

    The value of a secret is hidden. A tool of an MCP server is told as new or gone, not with its whole schema.
    """
    server, _, tool = key.removeprefix(_MCP_TOOLS).partition(".")
    if key.startswith(_MCP_TOOLS) and tool and ".function" not in tool:
        return f"{_MCP_TOOLS}{server}: the tool {tool} of the server {server} is {'new' if old is None else 'gone'}"
    if is_secret(key):
        return f"{key}: {HIDDEN} in the folder, another value now"
    return f"{key}: {old!r} in the folder, {new!r} now"


def differences(stored: Any, resolved: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted key, stored value, new value) for every key in which two configurations differ."""
    if isinstance(stored, dict) and isinstance(resolved, dict):
        for key in {**stored, **resolved}:
            yield from differences(stored.get(key), resolved.get(key), f"{path}.{key}".lstrip("."))
    elif stored != resolved:
        yield path, stored, resolved
