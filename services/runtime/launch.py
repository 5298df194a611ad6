"""Runs one rank of a service, from the parsing of the command line over the command loop to the exit of the process."""

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import torch
import torch.distributed as dist

from services.runtime.command import Command, Effect
from services.runtime.context import Members, RankContext
from services.runtime.failures.device import device_watch
from services.runtime.failures.heartbeat import Activity, Heartbeat, start_limit
from services.runtime.failures.peer_watch import PeerWatch
from services.runtime.group.command_line import parse
from services.runtime.group.process_group import (
    Launch,
    introduce,
    join_group,
    place_process,
    use_expandable_segments,
)
from services.runtime.group.refusal import report_refusal
from services.runtime.logs import set_up_logging, show_progress_on_stderr
from services.runtime.ranks.checkpoint_commands import CheckpointCommands, no_checkpoint_commands
from services.runtime.ranks.control_channel import ControlChannel
from services.runtime.ranks.follower import Follower
from services.runtime.ranks.leader import Leader
from services.runtime.role import CheckpointedRole, Program, Role
from services.runtime.rpc.server import Server
from services.runtime.signals import drain_on_signal, hold_lifeline, ignore_signals
from services.runtime.state.batch_store import BatchStore
from services.runtime.state.ledger import Ledger
from services.runtime.state.worker import Worker
from splitppo import failpoints
from splitppo.config import Config, ConfigError, load_config
from splitppo.config.batch_plan import batch_plan
from splitppo.config.compiled import check_compiler
from splitppo.config.section import RoleName
from splitppo.config.threads import crowding_of_group, threads_of_rank
from splitppo.config_error import sentence_of
from splitppo.logs import FILE_ONLY
from splitppo.machine.cores import permitted_cores
from splitppo.rpc.credentials import PLAINTEXT, Credentials, load_server_credentials
from splitppo.rpc.errors import Place, WireError
from splitppo.run_folder.end_reason import BAD_INPUT_EXIT, write_end_reason
from splitppo.run_folder.processes import Group, Rank, announcement

log = logging.getLogger(__name__)

_FAILED = 1
_INTERRUPTED = 130


def run_service(program: Program) -> NoReturn:
    """Runs one rank of a service; the process exits with the status from `run`, or with 3 if its launcher has ended."""
    code = run(program)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # os._exit leaves out the clean-up of libraries, which takes seconds and may wait for ranks that are gone.
    os._exit(code)


def run(program: Program, arguments: Sequence[str] | None = None) -> int:
    """Runs one rank until its group ends; returns 0 (drained), 1 (failed), 2 (bad input: a sentence on stderr) or 130.

    `arguments` are those of the command line (None: of this process). 130 stands for a KeyboardInterrupt.
    """
    role_name = program.role_name
    try:
        options = parse(role_name, arguments)
        config = load_config(options.config, options.overrides)
        plan = batch_plan(config)
        config.services.of(role_name)  # refuses a group that the run does not have
        program.check_config(config)
        check_compiler(config, role_name)
        if not options.check:
            _serve(program, config, lifeline=options.lifeline)
        elif int(os.environ.get("RANK", "0")) == 0:
            load_server_credentials(config.services, role_name)
            sys.stdout.write(f"{_describe(role_name, config)}\n{plan}\n")
            for line in program.check_models(role_name, config):
                sys.stdout.write(f"{line}\n")
    except (ValueError, OSError) as error:
        _say_once(sentence_of(error))
        return BAD_INPUT_EXIT
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception:
        log.exception("this rank failed outside of any command")
        return _FAILED
    return 0


def _describe(role_name: RoleName, config: Config) -> str:
    """Says in one line what a group of this role is: model, processes, devices, address."""
    service = config.services.of(role_name)
    where = f"GPUs {list(service.devices)}" if service.devices else "the CPU"
    model = config.model_of(role_name).model
    machines = f" of each of {service.nnodes} machines" if service.nnodes > 1 else ""
    ranks = f"{service.num_processes} processes on {where}{machines}"
    return f"{role_name}: {model}, {ranks}, listening on {service.bind}"


def _serve(program: Program, config: Config, *, lifeline: bool) -> None:
    """Joins the torchrun group, builds the role, and takes part in commands until the group is drained."""
    launch = Launch.from_environment()
    role_name = program.role_name
    # The controller stores stderr of the groups that it starts beside the log files: every line would be there twice.
    set_up_logging(role_name, launch.rank, config.run.dir, to_stderr=not lifeline)
    if lifeline:
        hold_lifeline()
    failpoints.arm(config.debug, config.run.dir, role_name, launch.rank)
    # Rank 0 alone serves; the other ranks open no port.
    credentials = load_server_credentials(config.services, role_name) if launch.rank == 0 else PLAINTEXT
    device = _place(program, launch, config)
    failpoints.hit("start", 0)
    with start_limit(config.services.start_timeout_s):
        store = launch.connect_store()
        context = join_group(launch, store, role_name, config, device)
        members = introduce(launch, store)
    activity = Activity(config.services.start_timeout_s, config.services.progress_timeout_s)
    failure, heartbeat = _watch_ranks(launch, context, members, activity)
    role = _build(program, context, failure)
    commands, ledger = _commands_of(program, role, context)
    channel = ControlChannel(context.world_size, context.control_group)
    side_channel = ControlChannel(context.world_size, context.side_group)
    activity.idle()
    if context.rank == 0:
        worker = _worker(role, context, members, commands, ledger)
        _lead(Leader(worker, channel, side_channel, failure, activity), credentials, heartbeat)
    else:
        ignore_signals()
        show_progress_on_stderr()
        Follower(commands, channel, side_channel, failure, activity).serve()
    log.info("leaving")
    dist.destroy_process_group()


def _place(program: Program, launch: Launch, config: Config) -> torch.device:
    """Binds this rank to its CPU cores and GPU, returns the device; warns of too few cores or a wrong rank count."""
    role_name = program.role_name
    service = config.services.of(role_name)
    cores = permitted_cores()  # the group's, before this rank is bound to its own
    num_threads = threads_of_rank(service, launch.local_world_size, cores)
    device = place_process(launch, role_name, service, num_threads)
    if device.type == "cuda" and program.memory_grows(config):
        use_expandable_segments()
    warning = crowding_of_group(role_name, service, launch.local_world_size, cores)
    if warning and launch.local_rank == 0 and config.services.launch == "external":  # else the controller says it
        log.warning("%s", warning)
    if launch.world_size != service.num_processes:
        wanted = f"services.{role_name}.num_processes is {service.num_processes}"
        log.warning("%d ranks, but %s", launch.world_size, wanted)
    return device


def _watch_ranks(
    launch: Launch, context: RankContext, members: Members, activity: Activity
) -> tuple[PeerWatch, Heartbeat]:
    """Starts to watch the other ranks: whether their processes live, and whether they get on with their work."""
    failure = PeerWatch(context, launch.connect_store(may_host=False), members)
    failure.start()
    heartbeat = Heartbeat(
        context.rank,
        context.world_size,
        launch.connect_store(may_host=False),
        activity,
        failure,
        limit_s=context.config.services.progress_timeout_s,
        device=device_watch(context.device),
    )
    heartbeat.start()
    return failure, heartbeat


def _build(program: Program, context: RankContext, failure: PeerWatch) -> Role:
    """Builds the role on this rank. Bad input is raised; any other error ends the group."""
    device = context.device
    which = f" ({device_watch(device)().name})" if device.type == "cuda" else ""
    placed = f"rank {context.rank} of {context.world_size} on {device}{which}, {torch.get_num_threads()} threads"
    log.info("%s: building the %s", placed, program.role_name)
    try:
        failpoints.hit("load", 0)
        return program.build(context)
    except (ValueError, OSError) as bad_input:
        failure.leave(bad_input)
        raise
    except Exception as error:  # noqa: BLE001 - the other ranks and the log get every error
        failure.end_group(error, Place(method="build"))


def _commands_of(program: Program, role: Role, context: RankContext) -> tuple[Sequence[Command], Ledger | None]:
    """Returns all commands of a group, and the ledger of its steps; None if the group has no step.

    A role that loads published weights has a ledger, too, at step -1 as long as it has none of them.
    """
    own = role.commands()
    ledger = None
    if isinstance(role, CheckpointedRole):
        ledger = Ledger()
        checkpoints = CheckpointCommands(role, context, ledger).commands()
    else:
        checkpoints = no_checkpoint_commands(context.role_name)
        if any(command.effect is Effect.LOADS for command in own):
            ledger = Ledger(committed_step=-1)  # no weights yet
    return [program.adapt(command, context) for command in (*own, *checkpoints)], ledger


def _worker(
    role: Role, context: RankContext, members: Members, commands: Sequence[Command], ledger: Ledger | None
) -> Worker:
    """Makes the state that rank 0's threads share; a role that trains nothing has no trainable parameters."""
    return Worker(
        context,
        role.role,
        role.num_parameters,
        members.processes,
        ledger,
        BatchStore(context.config.services.max_held_bytes),
        commands,
        num_trainable_parameters=getattr(role, "num_trainable_parameters", 0),
        reads_images=getattr(role, "reads_images", False),
    )


def _lead(leader: Leader, credentials: Credentials, heartbeat: Heartbeat) -> None:
    """Serves gRPC on rank 0 until drained; announces address and processes in `<run.dir>/services/<role>.json`.

    The announcement comes last, when failures are told to callers and signals drain the group. A failure writes its
    reason down, stops the server and removes the announcement.
    """
    worker = leader.worker
    context = leader.worker.context
    services = context.config.services
    bind = services.of(context.role_name).bind
    server = Server(worker, bind, services.security, credentials, heartbeat.vital_signs)
    if credentials == PLAINTEXT:
        risk = f"any user of this machine can give orders to the {context.role_name}"
        log.warning("neither services.security.tls nor a token is set: %s", risk)
    file = announcement(context.config.run.dir, context.role_name)
    file.unlink(missing_ok=True)
    address = server.start()

    def answer_and_stop(error: WireError) -> None:
        worker.mark_failed(error)
        # Before the server stops: a controller without an open call looks here once nothing answers any more.
        write_end_reason(context.config.run.dir, context.role_name, worker.instance_id, error.message)
        server.stop()
        with suppress(OSError):  # a reader of the announcement finds no service at its address
            file.unlink(missing_ok=True)

    leader.failure.on_failure = answer_and_stop
    drain_on_signal(worker.drain)
    ranks = [Rank(process.rank, process.pid, process.host) for process in worker.processes]
    Group(context.role_name, address, worker.instance_id, ranks).announce(context.config.run.dir)
    show_progress_on_stderr()
    log.info("ready on %s, instance %s", address, worker.instance_id)
    leader.serve()
    file.unlink(missing_ok=True)
    server.stop()


def _say_once(sentence: str) -> None:
    """Prints an error in the user's input to stderr and reports it, once per group, by one rank; every rank logs it."""
    if logging.getLogger().hasHandlers():
        log.error("%s", sentence, extra=FILE_ONLY)
    is_first = os.environ.get("RANK", "0") == "0"
    if os.environ.get("WORLD_SIZE", "1") != "1":  # the first rank to fail must print it: torchrun ends the others
        with suppress(RuntimeError, ConfigError):
            is_first = Launch.from_environment().connect_store(may_host=False).add("said", 1) == 1
    if is_first:
        report_refusal(sentence)
        sys.stderr.write(f"error: {sentence}\n")
