"""Collects facts about a run from outside: its folder, disk and credentials, and all worker groups at the same time."""

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from controller.commands.doctor.facts import Facts, Finding, GroupFacts, RunFacts
from controller.commands.doctor.probe import examine
from controller.models.shape import Kind, UnknownShape, read_model_shape
from controller.run.checkpoint_store import CheckpointStore
from controller.run.folder import NONCE_PREFIX, RunFolder, differences, is_held
from controller.workers.worker_groups import configured_addresses
from splitppo.config import Config, ConfigError, load_config
from splitppo.config.batch_plan import batch_plan
from splitppo.config.section import RoleName, TrainedRoleName
from splitppo.config.worker_digest import worker_digest, worker_sections
from splitppo.machine.children.tree import is_stopped
from splitppo.rpc.bearer_tokens import BearerTokens
from splitppo.rpc.credentials import Credentials, load_credentials, load_server_credentials
from splitppo.run_folder.epoch import EPOCH_FILE, newest_epoch
from splitppo.run_folder.processes import PROCESSES_FILE, Group, announcement, read_processes
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics
from splitppo.run_folder.summary import Summary

# Bytes per parameter: fp32 weights and both moments of AdamW; a Hugging Face folder has the weights again.
_CHECKPOINT_BYTES = 12
_HF_BYTES = 4
# While the actor publishes a version, the one that the rollout group holds is still there.
_NUM_VERSIONS = 2


async def examine_run(config: Config) -> Facts:
    """Collects all facts about a run that take only seconds to find out.

    Raises:
        ConfigError: the configuration or the run folder cannot be used.
    """
    batch_plan(config)
    if config.services.launch == "local" and not config.run.dir.is_dir():
        raise ConfigError(f"run.dir: there is no run folder {config.run.dir}, so no run was started with it")
    config = RunFolder(config).resolve()
    facts = Facts(_run_facts(config), time.time())
    credentials = _credentials(config, facts)
    for role, address in _addresses(config, facts).items():
        group = facts.groups[role] = GroupFacts(address, worker_digest(config, role))
        if not group.address:
            group.failure_code = "not_announced"
            group.failure = f"it has not announced itself in {announcement(config.run.dir, role)}"
        group.stopped_pids = _stopped_pids(config.run.dir, role)
    if credentials is not None:
        await _examine_groups(facts, credentials)
        _compare_configs(config, facts)
    is_local = config.services.launch == "local"
    if is_local and not facts.run.controller_runs and not any(group.status for group in facts.groups.values()):
        facts.groups = {}
        facts.notes.append(
            f"no run is live in {config.run.dir}, so there are no groups to ask (services.launch: local)"
        )
    if awaited := [role for role, group in facts.groups.items() if facts.run.is_awaited(group)]:
        facts.notes.append(f"the run is starting: waiting for {' and '.join(awaited)}; {config.run.dir}/logs say more")
    facts.run.is_live = bool(facts.groups)
    return facts


async def _examine_groups(facts: Facts, credentials: Credentials) -> None:
    """Asks all groups that have an address at the same time; their answers stand in `facts.groups`.

    Groups show that they have the same run folder by a file in it that was made just now. If the file was gone before
    the end, their answers about it mean nothing and are dropped.
    """
    asked = [group for group in facts.groups.values() if group.address]
    if not asked:
        return
    turn = asyncio.Lock()
    with _nonce(Path(facts.run.dir), facts) as nonce:
        await asyncio.gather(*(examine(group, credentials, nonce.name if nonce else "", turn) for group in asked))
        if nonce and not nonce.exists():  # a controller that started meanwhile has removed the file
            for group in asked:
                if group.diagnosis is not None:
                    group.diagnosis = replace(group.diagnosis, shares_run_dir=None)


def _compare_configs(config: Config, facts: Facts) -> None:
    """Adds to a worker group's facts the configuration keys in which the group differs from `config`.

    Only groups that run with the configuration in the run folder can be compared.
    """
    with suppress(ConfigError):
        stored = load_config(RunFolder(config).config_file, is_stored=True)
        for role, group in facts.groups.items():
            if group.status is not None and group.status.config_digest == worker_digest(stored, role):
                different = differences(worker_sections(stored, role), worker_sections(config, role))
                shown = {key: f"{key} is {there!r} there, {here!r} here" for key, there, here in different}
                group.config_differences = [shown[key] for key in sorted(shown)]


@contextmanager
def _nonce(run_dir: Path, facts: Facts) -> Iterator[Path | None]:
    """Makes an empty file in the run folder, removed after the `with` block; yields its path, None if writing fails.

    A worker group that does not see the file does not share the folder. A failure is noted in the facts as a mistake.
    """
    nonce = run_dir / f"{NONCE_PREFIX}{secrets.token_hex(8)}"
    try:
        nonce.touch()
    except OSError as error:
        sentence = f"nothing can be written into the run folder {run_dir}: {error.strerror}"
        advice = "mount the storage that controller and groups share, or correct run.dir"
        facts.mistakes.append(Finding("run_folder", "run", sentence, advice))
    try:
        yield nonce if nonce.exists() else None
    finally:
        with suppress(OSError):
            nonce.unlink(missing_ok=True)


def _addresses(config: Config, facts: Facts) -> dict[RoleName, str]:
    """Returns the address of each worker group, from the configuration or as announced in the run folder.

    The address of a group that has not announced itself is empty. If the groups are on another machine, this is a
    noted in the facts as a mistake, and no address is returned.
    """
    if config.services.launch == "external":
        return configured_addresses(config)
    host = _controllers_host(config.run.dir)
    if facts.run.controller_runs and host not in ("", os.uname().nodename):
        sentence = f"the groups of this run are on {host}, and listen on that machine alone (services.launch: local)"
        facts.mistakes.append(Finding("other_machine", "run", sentence, f"ask the same there, on {host}"))
        return {}
    announced = {role: Group.announced(config.run.dir, role) for role in config.roles}
    return {role: "" if group is None else group.address for role, group in announced.items()}


def _stopped_pids(run_dir: Path, role: RoleName) -> dict[int, int]:
    """Returns the pids, by rank, of the role's processes on this machine that a signal has stopped."""
    here = [process for process in read_processes(run_dir, role) if process.host == os.uname().nodename]
    return {process.rank: process.pid for process in here if is_stopped(process.pid)}


def _controllers_host(run_dir: Path) -> str:
    """Returns the host name of the controller from the run folder's processes.json; "" if no controller is listed."""
    return next((process.host for process in read_processes(run_dir, "controller")), "")


def _credentials(config: Config, facts: Facts) -> Credentials | None:
    """Loads the controller's TLS certificate and token; notes a mistake and returns None if a file cannot be used."""
    security = config.services.security
    token_file = config.run.dir / "services" / "token"
    # Only groups on this machine have their files here.
    for role in config.roles if config.services.launch == "local" and security.tls else ():
        with _mistakes_of(facts, role):
            load_server_credentials(config.services, role)
    credentials = None
    with _mistakes_of(facts, "run"):
        credentials = load_credentials(security, "controller")
        if credentials.tokens is None and config.services.launch == "local" and token_file.exists():
            tokens = BearerTokens.parse(token_file.read_text(encoding="ascii", errors="replace"), str(token_file))
            credentials = replace(credentials, tokens=tokens)
        facts.run.token = credentials.tokens is not None
        if credentials.identity is not None:
            from splitppo.rpc.certificates import valid_until

            facts.run.certificate_ends_unix_s = int(valid_until(credentials.identity).timestamp())
    return credentials


@contextmanager
def _mistakes_of(facts: Facts, about: str) -> Iterator[None]:
    """Notes an error in certificates or tokens as a fault of `about` (a role, or "run"), instead of raising it."""
    try:
        yield
    except (ConfigError, OSError) as error:
        advice = "docs/security.md says how certificates and tokens are made and replaced"
        facts.mistakes.append(Finding("credentials", about, str(error), advice))


def _run_facts(config: Config) -> RunFacts:
    """Collects the facts about a run from its folder and its disks; nobody is asked. Unknown ones stay None."""
    run_dir = config.run.dir
    facts = RunFacts(str(run_dir), config.services.launch, tls=config.services.security.tls)
    facts.controller_runs = is_held(run_dir)
    facts.is_starting = facts.controller_runs and facts.launch == "local" and _has_new_epoch(run_dir)
    facts.epoch = newest_epoch(run_dir / EPOCH_FILE)
    if lines := read_metrics(run_dir / METRICS_FILE):
        facts.step = lines[-1]["step"]
        summary = Summary.read(run_dir / "summary.json")
        facts.is_completed = summary is not None and summary.finished and summary.global_step == facts.step
    store = CheckpointStore(run_dir / "checkpoints")
    facts.last_checkpoint_step = store.latest_step() or None
    facts.next_checkpoint_bytes = _size_of_files(store.folder(store.latest_step())) or _size_by_models(config)
    disk = _disk_of(run_dir)
    facts.disk_free_bytes = disk.free
    facts.disk_total_bytes = disk.total
    # A folder of its own may be on the groups' machine alone.
    if "rollout" in config.sampling_roles and (facts.launch == "local" or not config.rollout.sync_dir):
        _add_weights_folder(facts, config)
    return facts


def _add_weights_folder(facts: RunFacts, config: Config) -> None:
    """Adds the facts about the folder by which a rollout group gets its weights; it holds `_NUM_VERSIONS` of them."""
    folder = config.weights_folder
    facts.weights_dir = str(folder)
    facts.weights_free_bytes = _disk_of(folder).free
    num_parameters = _num_parameters(config, ["actor"])
    bytes_there = _size_of_files(folder, "**/version_*/*")
    if num_parameters is not None and bytes_there is not None:
        version_bytes = num_parameters * (2 if config.actor.dtype == "bf16" else 4)
        facts.weights_needed_bytes = max(0, _NUM_VERSIONS * version_bytes - bytes_there)


def _disk_of(folder: Path) -> Any:
    """Returns the disk usage where a folder is, or will be made."""
    return shutil.disk_usage(next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir()))


def _has_new_epoch(run_dir: Path) -> bool:
    """Returns True if a controller is starting: it has taken over the run folder and not yet written processes.json."""
    record = run_dir / EPOCH_FILE
    processes = run_dir / PROCESSES_FILE
    if not record.exists():
        return False
    return not processes.exists() or processes.stat().st_mtime_ns < record.stat().st_mtime_ns


def _size_of_files(folder: Path, pattern: str = "**/*") -> int | None:
    """Returns the size in bytes of all files in a folder that fit; None if one is removed during the count."""
    try:
        return sum(file.stat().st_size for file in folder.glob(pattern) if file.is_file())
    except OSError:
        return None


def _size_by_models(config: Config) -> int | None:
    """Estimates the bytes of a checkpoint from the trained weights; None if the models are not on this machine."""
    num_parameters = _num_parameters(config, config.trained_roles, trained=True)
    if num_parameters is None:
        return None
    return num_parameters * (_CHECKPOINT_BYTES + (_HF_BYTES if config.checkpoint.save_hf_model else 0))


def _num_parameters(config: Config, roles: Iterable[TrainedRoleName], *, trained: bool = False) -> int | None:
    """Counts the (trained) parameters of the models of some roles; None if a model is not on this machine."""
    num_parameters = 0
    for role in roles:
        try:
            kind: Kind = "policy" if role == "actor" else "value"
            shape = read_model_shape(config.model_of(role).model, kind, f"{role}.model")
            as_trained = shape.as_trained(config.trained_model_of(role))
            num_parameters += as_trained.num_trained if trained else shape.num_parameters
        except (UnknownShape, ConfigError):
            return None
    return num_parameters
