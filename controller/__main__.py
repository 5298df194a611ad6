"""`python -m controller --config FILE [key.path=value ...]`: runs PPO; `--check` only validates and prints the plan.

`python -m controller doctor --config FILE`: finds what is wrong with a run and its groups, and says what to do.
`python -m controller play --config FILE`: holds one conversation with an environment, by hand or by the model.
`python -m controller plan RUN_DIR`: predicts the time of a step of that run on other devices, schedules and placements.
`python -m controller sync RUN_DIR`: sends trackers the steps that they lack, after the run has ended.
`python -m controller from-verl SCRIPT_OR_YAML`: translates a verl run into the keys of this project.
"""

import argparse
import asyncio
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from splitppo.machine.children.ending import keep_exit_codes
from splitppo.our_commands import missing_package

try:
    from splitppo.config import Config, ConfigError, load_config
    from splitppo.config.batch_plan import batch_plan
    from splitppo.config.idle_policy import idle_policy
    from splitppo.config.phase_plan import phase_plan
    from splitppo.config.precision import fp32_on_gpus
    from splitppo.config.threads import crowding
    from splitppo.config_error import did_you_mean, sentence_of
    from splitppo.machine.cores import permitted_cores
    from splitppo.machine.standard_streams import open_standard_streams
    from splitppo.printable import printable
except ModuleNotFoundError as missing:
    sys.stderr.write(f"error: {missing_package(missing.name)}\n")
    sys.exit(1)

Command = Callable[[list[str]], int]


def main(arguments: list[str] | None = None) -> int:
    """Runs a command of the controller; returns the exit status: 0 completed, 1 failed, 2 bad input, 130 interrupted.

    `arguments` are those of the command line by default. The command `splitppo`, which a wheel installs, calls `main`.
    """
    _set_up_process()
    try:
        sys.path[:0] = {str(Path.cwd())}.difference(sys.path)  # as `python -m` does, also for the command `splitppo`
        command, own_arguments = _chosen(sys.argv[1:] if arguments is None else arguments)
        return command(own_arguments)
    except ConfigError as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"error: {sentence_of(error)}\n")
        return 1
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {missing_package(error.name)}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _set_up_process() -> None:
    """Makes standard streams that always take text, and exit codes that stay, before anything else runs."""
    open_standard_streams()
    keep_exit_codes()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what the terminal's encoding lacks ends no run


def _chosen(arguments: list[str]) -> tuple[Command, list[str]]:
    """Returns the command that the first argument names, and its own arguments; without a name, `_run`.

    Raises:
        ConfigError: there is no command of this name.
    """
    commands: dict[str, Command] = {
        "doctor": _doctor,
        "play": _play,
        "plan": _plan,
        "sync": _sync,
        "from-verl": _from_verl,
    }
    first = arguments[0] if arguments else ""
    if first in commands:
        return commands[first], arguments[1:]
    if first and not first.startswith("-") and "=" not in first:
        expected = f"expected one of {', '.join(commands)}, or --config FILE for a run"
        raise ConfigError(f"unknown command {first!r}: {expected}{did_you_mean(first, commands)}")
    return _run, arguments


def _parser(command: str, description: str, *, takes_config: bool = False) -> argparse.ArgumentParser:
    prog = f"python -m controller {command}".rstrip()
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False, description=description)
    if takes_config:
        parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML configuration of the run")
        parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="changes to the configuration")
    return parser


# Each command imports what it needs when it is called, so that a mistake is reported before the rest is loaded.


def _run(arguments: list[str]) -> int:
    """Trains, or with `--check` only checks the inputs: the action of `python -m controller` without a command."""
    parser = _parser("", str(__doc__), takes_config=True)
    parser.add_argument(
        "--check", action="store_true", help="check config, models, data, rewards; print batch plan and memory; exit"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="with --check: also keys at their defaults")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(options.config, options.overrides)
    from controller.conversations.checks import with_server_tools

    config = with_server_tools(config)
    if options.check:
        return _check(config, with_defaults=options.verbose)
    from controller.session import run_session

    return run_session(config)


def _check(config: Config, *, with_defaults: bool) -> int:
    """Checks all inputs of a run that need no worker group; prints the resolved configuration and its plans."""
    from controller.memory.gpus import check_devices, visible_gpus
    from controller.memory.plan import memory_plan
    from controller.preflight import load_inputs, try_inputs
    from controller.run.folder import RunFolder
    from splitppo.config.shown import shown_config
    from splitppo.machine.host_memory import host_memory

    inputs = load_inputs(config)
    tried = asyncio.run(try_inputs(config, inputs))
    folder = RunFolder(config)
    config = inputs.with_last_step(folder.check())
    if not config.evaluation.val_only:
        folder.check_rows(inputs.training_rows(config))
    if warning := crowding(config, permitted_cores()):
        sys.stderr.write(f"warning: {warning}\n")
    gpus = visible_gpus(config)
    memory = memory_plan(config, gpus, host_memory().total, image_bytes=inputs.image_bytes)
    if memory.misfit:
        raise ConfigError(memory.misfit)
    run = "\n  ".join([f"run: {config.last_step} steps", *phase_plan(config)])
    shown = shown_config(config, with_defaults=with_defaults)
    sys.stdout.write(f"{shown}\n{batch_plan(config)}\n{inputs.image_report}{tried}{run}\n{memory}\n")
    for warning in filter(None, (fp32_on_gpus(config), idle_policy(config))):
        sys.stderr.write(f"warning: {warning}\n")
    check_devices(config, gpus)  # after the plan, which is of use also on a machine that is not to run it
    return 0


def _play(arguments: list[str]) -> int:
    """Runs `play`, which holds one conversation; returns 0, or 1 if it failed; unusable input is a ConfigError."""
    from controller.commands.play.command import DESCRIPTION, play

    return play(_parser("play", DESCRIPTION, takes_config=True), arguments)


def _plan(arguments: list[str]) -> int:
    """Runs `plan`, which predicts the time of a step; returns 0. An unusable folder or number is a ConfigError."""
    parser = _parser("plan", "Predicts the step of other layouts.")
    parser.add_argument(
        "run_dir", type=Path, nargs="+", metavar="RUN_DIR", help="run folder; more of them: other numbers of devices"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="devices in all; default: those of the first run")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    options = parser.parse_args(arguments)
    from controller.commands.planner.report import run_plan

    sys.stdout.write(run_plan(options.run_dir, options.gpus, as_json=options.json))
    return 0


def _sync(arguments: list[str]) -> int:
    """Runs `sync`, which sends trackers missing steps; returns 0, or 1 if some were not sent; may raise ConfigError."""
    parser = _parser("sync", "Sends trackers what they lack.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run folder")
    parser.add_argument("--to", nargs="+", default=[], metavar="TRACKER", help="default: the trackers of the run")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="how long it may take")
    options = parser.parse_args(arguments)
    from controller.run.sync import sync

    done = sync(options.run_dir, options.to, options.timeout)
    sys.stdout.write(f"{done}\n" if done else "")
    return 0 if done else 1


def _doctor(arguments: list[str]) -> int:
    """Runs `doctor`, which diagnoses a run; returns 0 if it is healthy, 1 if not; an unusable config is ConfigError."""
    asks = "Asks every group of a run for its state, without disturbing it; prints faults and advice."
    parser = _parser("doctor", asks, takes_config=True)
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(options.config, options.overrides)
    # The findings have what gRPC would log of failed handshakes. gRPC reads this variable when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from controller.commands.doctor.examination import examine_run
    from controller.commands.doctor.findings import find
    from controller.commands.doctor.report import as_json, as_text

    facts = asyncio.run(examine_run(config))
    findings = find(facts)
    sys.stdout.write(as_json(facts, findings) if options.json else as_text(facts, findings))
    return 1 if findings else 0


def _from_verl(arguments: list[str]) -> int:
    """Runs `from-verl`, which translates a verl run; returns 0, 1 if the user must decide first, 2 for bad input."""
    translates = "Translates a verl configuration; a launch script runs in a sandbox, and trains nothing."
    parser = _parser("from-verl", translates)
    from controller.commands.from_verl.command import from_verl

    return from_verl(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
