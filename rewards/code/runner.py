"""A child process of the controller that scores code answers, one after the other.

The controller starts several of these processes, which also parse test cases and compare outputs. A runner first shows
that a sandbox runs a program and can be watched, and reports that in JSON. Then it answers each pair of response and
ground truth in JSON. It ends when its socket to the controller is closed, also in the middle of a program.
"""

import json
import pickle
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Self

from rewards.channel import Channel
from rewards.code.bubblewrap import NoSandbox
from rewards.code.cases import Cases, parse_cases, program_of
from rewards.code.limits import CODE_LIMIT, Limit
from rewards.code.sandbox import ProgramOutcome, Sandbox
from rewards.samples import Failure
from splitppo.config.subsections.code import CodeConfig

_MAX_ATTEMPTS = 3  # to run a program whose sandbox ends without an answer


# The responses to a prompt come one after the other, and have the same test cases.
_parsed = lru_cache(maxsize=8)(parse_cases)


class Runner:
    """Scores code answers: runs the program of each response in a sandbox against the test cases of its row.

    Args:
        config: the section `reward.code`.
        lifeline: a file descriptor on which poll reports a hang-up when the controller has ended.

    Raises:
        NoSandbox: on entering: a sandbox does not run a program, or cannot be watched.
    """

    def __init__(self, config: CodeConfig, lifeline: int) -> None:
        self._config = config
        self._lifeline = lifeline
        self._warm: Sandbox | None = None

    def __enter__(self) -> Self:
        try_out(self._config)
        self._warm = Sandbox(self._config)
        return self

    def __exit__(self, *_: object) -> None:
        if self._warm is not None:
            self._warm.__exit__()

    def score(self, response: str, ground_truth: Any) -> dict[str, Any]:
        """Runs the program of a response against its test cases; returns the fields of a `Scored` as JSON values.

        Raises:
            NoSandbox: no sandbox can be started any more, whatever the program.
            EOFError: the controller has ended.
        """
        try:
            cases = _parsed(ground_truth) if isinstance(ground_truth, str) else parse_cases(ground_truth)
        except ValueError as error:
            return _failed(Failure.ERROR, f"reward_model.ground_truth: {error}")
        program = program_of(response)
        outcome = ProgramOutcome() if program is None else self._run(program, cases)
        if outcome.error:
            return _failed(Failure.CRASH, outcome.error)
        share = 0.0 if outcome.limit else sum(outcome.passed) / len(cases.inputs)
        extra: dict[str, Any] = {CODE_LIMIT: outcome.limit and outcome.limit.value}
        if self._config.continuous:
            return {"score": share, "extra": {**extra, "acc": float(share == 1.0)}}
        return {"score": float(share == 1.0), "extra": extra}

    def _run(self, program: str, cases: Cases) -> ProgramOutcome:
        """Runs a program in a sandbox; tries again in another sandbox if the sandbox ends without an answer.

        If no attempt gets an answer although other sandboxes can be started, the program itself has ended the
        sandboxes.
        """
        for _ in range(_MAX_ATTEMPTS):
            try:
                with self._take() as sandbox:
                    outcome = sandbox.run(program, cases, runs_all=self._config.continuous, lifeline=self._lifeline)
            except (OSError, NoSandbox) as error:
                outcome = ProgramOutcome(error=f"no sandbox could be started: {error}")
            if not outcome.error:
                return outcome
        try_out(self._config)
        return ProgramOutcome(limit=Limit.PROCESSES) if outcome.is_started else outcome

    def _take(self) -> Sandbox:
        """Returns a started sandbox for one program, and starts another, so that the next program need not wait."""
        warm = self._warm
        self._warm = None
        self._warm = Sandbox(self._config)
        return warm or Sandbox(self._config)


def try_out(config: CodeConfig) -> None:
    """Checks that a sandbox can run a program and be watched; raises NoSandbox with the reason if not."""
    cases = Cases("stdin", inputs=("1",), expected=("2",))
    try:
        with Sandbox(config) as sandbox:
            outcome = sandbox.run("print(int(input()) + 1)", cases)
            is_watched = sandbox.is_watched
    except (OSError, ValueError) as error:
        raise NoSandbox(str(error)) from error
    if outcome.passed != (True,):
        raise NoSandbox(outcome.error or "a program that adds 1 to its input does not give the sum")
    if not is_watched:
        raise NoSandbox("the resources of a sandbox cannot be read from /proc/PID/task/TID/children and /proc/PID/root")


def _failed(failure: Failure, message: str) -> dict[str, Any]:
    return {"score": 0.0, "failure": failure.value, "message": message}


def serve(channel: Channel, config: CodeConfig) -> None:
    """Reports that sandboxes work, then scores code answers until the controller has ended.

    If a sandbox cannot be started, the last answer is the reason.
    """
    sys.set_int_max_str_digits(0)  # of test cases

    def answer(fields: Mapping[str, Any]) -> None:
        channel.send(json.dumps(fields).encode())

    try:
        with Runner(config, channel.fileno()) as runner:
            answer({})
            while True:
                answer(runner.score(*pickle.loads(channel.receive())))  # noqa: S301 - from the controller
    except NoSandbox as error:
        answer({"reason": str(error)})
