"""The entry point of every rank of a service: from the command line to the loop, and out again."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from services.shell.activity import Activity
from services.shell.collectives import ControlChannel
from services.shell.commands import Role
from services.shell.context import RankContext, RoleName
from services.shell.dispatcher import Leader
from services.shell.failure import FailureWatch
from services.shell.follower import Follower
from services.shell.group import Launch, introduce, join_group, place_process
from services.shell.ledger import Ledger
from services.shell.lifecycle import Lifecycle
from services.shell.logs import FILE_ONLY, set_up_logging, show_progress_on_stderr
from services.shell.server import Server
from services.shell.signals import drain_on_signal, hold_lifeline, ignore_signals
from services.shell.slots import SlotStore
from services.shell.watchdog import Watchdog, start_limit
from services.shell.worker import Worker
from splitppo import failpoints
from splitppo.config import Config, ConfigError, load_config
from splitppo.config.plan import batch_plan
from splitppo.config.threads import crowding_of_group, permitted_cores, threads_of_rank
from splitppo.rpc.errors import WireError
from splitppo.rpc.security import PLAINTEXT, load_credentials

log = logging.getLogger(__name__)

BuildRole = Callable[[RankContext], Role]
CheckConfig = Callable[[Config], None]
_FAILED, _BAD_INPUT, _INTERRUPTED = 1, 2, 130


def run_service(
    role_name: RoleName,
    build_role: BuildRole,
    arguments: Sequence[str] | None = None,
    *,
    check_config: CheckConfig | None = None,
) -> NoReturn:
    """Runs one rank of a service until the group is drained or fails, and leaves the process.

    Exit codes: 0 drained, 1 failed, 2 bad input (one sentence on stderr, from one rank), 3 the launcher has gone.

    Args:
        role_name: which sections of the configuration it reads.
        build_role: called once on every rank when the process groups stand; ValueError and OSError are the user's
            mistakes.
        arguments: default: the command line.
        check_config: the role's own checks, called on every rank before the group is joined, and with --check; it
            raises ConfigError.
    """
    code = run(role_name, build_role, arguments, check_config=check_config)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the clean-up of libraries, which takes seconds and may wait for ranks that are gone.
    os._exit(code)


def run(
    role_name: RoleName,
    build_role: BuildRole,
    arguments: Sequence[str] | None = None,
    *,
    check_config: CheckConfig | None = None,
) -> int:
    """`run_service` up to its exit code."""
    try:
        options = _parse(role_name, arguments)
        config = load_config(options.config, options.overrides)
        plan = batch_plan(config)
        if role_name == "critic" and not config.uses_critic:
            raise ConfigError(f"algorithm.adv_estimator {config.algorithm.adv_estimator!r} uses no critic")
        if check_config is not None:
            check_config(config)
        if not options.check:
            _serve(role_name, config, build_role, lifeline=options.lifeline)
        elif int(os.environ.get("RANK", "0")) == 0:
            load_credentials(config.services.security, role_name)
            sys.stdout.write(f"{_describe(role_name, config)}\n{plan}\n")
    except (ValueError, OSError) as error:
        _say_once(" ".join(str(error).split()))
        return _BAD_INPUT
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception:
        log.exception("this rank failed outside of any command")
        return _FAILED
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {' '.join(self.format_usage().split())}")


def _parse(role_name: RoleName, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog=f"services.{role_name}", description=f"One rank of the {role_name} service.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="replaces a value of the file")
    parser.add_argument("--check", action="store_true", help="validate the configuration and exit")
    parser.add_argument("--lifeline", action="store_true", help="exit at once when standard input ends")
    return parser.parse_intermixed_args(arguments)


def _describe(role_name: RoleName, config: Config) -> str:
    service = getattr(config.services, role_name)
    where = f"GPUs {list(service.devices)}" if service.devices else "the CPU"
    model = getattr(config, role_name).model
    return f"{role_name}: {model}, {service.num_processes} processes on {where}, listening on {service.bind}"


def _serve(role_name: RoleName, config: Config, build_role: BuildRole, *, lifeline: bool) -> None:
    launch = Launch.from_environment()
    set_up_logging(role_name, launch.rank, config.run.dir)
    if lifeline:
        hold_lifeline()
    failpoints.arm(config.debug, config.run.dir, role_name, launch.rank)
    # What rank 0 serves with; the others open no port.
    credentials = load_credentials(config.services.security, role_name) if launch.rank == 0 else PLAINTEXT
    service = getattr(config.services, role_name)
    cores = permitted_cores()  # the group's, before this rank is bound to its own
    num_threads = threads_of_rank(service, launch.local_world_size, cores)
    device = place_process(launch, service, num_threads)
    warning = crowding_of_group(role_name, service, launch.local_world_size, cores)
    if warning and launch.local_rank == 0 and config.services.launch == "external":  # else the controller says it
        log.warning("%s", warning)
    with start_limit(config.services.start_timeout_s):
        store = launch.connect_store()
        context = join_group(launch, store, role_name, config, device)
        members = introduce(launch, store)
    failure = FailureWatch(context, launch.connect_store(may_host=False), members.processes, members.same_node)
    failure.start()
    limits = config.services
    activity = Activity(limits.start_timeout_s, limits.progress_timeout_s)
    watchdog_store = launch.connect_store(may_host=False)
    Watchdog(
        launch.rank, launch.world_size, watchdog_store, activity, failure, limit_s=limits.progress_timeout_s
    ).start()
    if launch.world_size != service.num_processes:
        log.warning(
            "%d ranks, but services.%s.num_processes is %d", launch.world_size, role_name, service.num_processes
        )
    placed = f"rank {launch.rank} of {launch.world_size} on {device}, {num_threads} threads"
    log.info("%s: building the %s", placed, role_name)
    role = build_role(context)
    ledger, slots = Ledger(), SlotStore()
    lifecycle = Lifecycle(role, context, ledger, slots)
    commands = [*role.commands(), *lifecycle.commands()]
    channel = ControlChannel(launch.rank, launch.world_size, context.control_group)
    parts_channel = ControlChannel(launch.rank, launch.world_size, context.parts_group)
    activity.idle()
    if launch.rank == 0:
        worker = Worker(context, role.role, role.num_parameters, members.processes, ledger, slots)
        leader = Leader(commands, channel, failure, worker, parts_channel=parts_channel, activity=activity)
        server = Server(worker, commands, service.bind, config.services.security, credentials)
        if credentials == PLAINTEXT:
            log.warning(
                "neither services.security.tls nor a token is set: any user of this machine can give orders to the %s",
                role_name,
            )
        _lead(leader, server, worker, failure)
    else:
        ignore_signals()
        show_progress_on_stderr()
        Follower(commands, channel, failure, parts_channel=parts_channel, activity=activity).serve()
    log.info("leaving")
    dist.destroy_process_group()


def _lead(leader: Leader, server: Server, worker: Worker, failure: FailureWatch) -> None:
    """Rank 0: serves until drained, announced in `<run.dir>/services/<role>.json`."""
    config, role_name = worker.context.config, worker.context.role_name
    announcement = config.run.dir / "services" / f"{role_name}.json"
    announcement.parent.mkdir(parents=True, exist_ok=True)
    announcement.unlink(missing_ok=True)
    address = server.start()

    def answer_and_stop(error: WireError) -> None:
        worker.mark_failed(error)
        server.stop()
        with suppress(OSError):  # whoever reads it finds nobody there
            announcement.unlink(missing_ok=True)

    failure.on_failure(answer_and_stop)
    drain_on_signal(worker.drain)
    _announce(announcement, address, worker)
    show_progress_on_stderr()
    log.info("ready on %s, instance %s", address, worker.instance_id)
    leader.serve()
    announcement.unlink(missing_ok=True)
    server.stop()


def _announce(path: Path, address: str, worker: Worker) -> None:
    """Writes who serves where, for whoever started the group; atomically."""
    content = {
        "role": worker.context.role_name,
        "address": address,
        "instance_id": worker.instance_id,
        "processes": [{"rank": one.rank, "pid": one.pid, "host": one.host} for one in worker.processes],
    }
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
    temporary.replace(path)


def _say_once(sentence: str) -> None:
    """Prints what the user must change, on one rank of the group, and logs it on all."""
    if logging.getLogger().hasHandlers():
        log.error("%s", sentence, extra=FILE_ONLY)
    if _is_first_to_say():
        sys.stderr.write(f"error: {sentence}\n")


def _is_first_to_say() -> bool:
    """Whether no other rank has said it: the first one to fail must, torchrun ends the others."""
    rank = os.environ.get("RANK", "0")
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    with suppress(RuntimeError, ConfigError):
        return Launch.from_environment().connect_store(may_host=False).add("said", 1) == 1
    return rank == "0"
