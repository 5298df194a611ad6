"""Scores code answers: a pool of runner processes, each of which runs one program at a time in a sandbox."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

from rewards.code.bubblewrap import HINT, NoSandbox
from rewards.code.limits import CODE_LIMIT, num_sandboxes, wall_s
from rewards.process import ProcessEnded, WorkerProcess
from rewards.samples import Failure, Sample, Scored
from rewards.source import FailureLimit
from splitppo.config import ConfigError
from splitppo.config.subsections.code import CodeConfig

log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3  # to score a sample whose runner ends
_START_LIMIT_S = 120.0
_GRACE_S = 60.0  # added to the time that three attempts of a runner may take
_EXIT_LIMIT_S = 10.0


class CodeSandboxes:
    """Scores responses by running their programs against the test cases of their rows, in several processes.

    The score is 1 if all tests pass, else 0; with `reward.code.continuous` it is the share of the tests that pass. The
    score is 0 if the response has no program, or if the program exceeds a limit.

    Raises:
        ConfigError: on entering: no sandbox can be started here, and `reward.code.unsafe` is not set.
    """

    def __init__(self, config: CodeConfig) -> None:
        self._config = config
        self._timeout_s = _MAX_ATTEMPTS * wall_s(config) + _GRACE_S
        self._runners = [
            WorkerProcess("rewards.code.runner:serve", (config,), json.loads, _START_LIMIT_S)
            for _ in range(num_sandboxes(config))
        ]
        self._is_open = True
        self._free: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        for runner in self._runners:
            self._free.put_nowait(runner)

    async def __aenter__(self) -> Self:
        """Starts the runner processes; waits until each reports that it can run and watch programs in sandboxes."""
        started = await asyncio.gather(*map(self._start, self._runners), return_exceptions=True)
        if error := next(filter(None, started), None):
            await self.__aexit__()
            hint = "" if self._config.unsafe else f" ({HINT})"
            raise ConfigError(f"code answers cannot be run here: {error}{hint}") from error
        if self._config.unsafe:
            log.warning(
                "reward.code.unsafe: programs of the model run WITHOUT a sandbox, with the rights of this process: they"
                " can read its files and reach its network"
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends all runner processes and sandboxes, also in the middle of a program."""
        self._is_open = False
        await asyncio.gather(*(runner.end(_EXIT_LIMIT_S) for runner in self._runners))

    async def _start(self, runner: WorkerProcess) -> None:
        """Starts one runner process; raises NoSandbox, with the reason, if the runner cannot run programs."""
        if not self._is_open:
            raise NoSandbox("the run is ending")
        try:
            report = await runner.load()
        except (TimeoutError, ProcessEnded) as error:
            reason = f"it {error}" if str(error) else f"no answer within {_START_LIMIT_S:g} s"
            raise NoSandbox(f"the process that runs programs does not start: {reason}") from error
        _checked(report)

    async def score(self, samples: Sequence[Sample], limit: FailureLimit) -> list[Scored]:
        """Scores code answers; returns one result per sample, whose field `code_limit` is the exceeded limit or None.

        Raises:
            RuntimeError: no sandbox can be started any more.
        """
        tasks = [asyncio.ensure_future(self._score_one(sample, limit)) for sample in samples]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        exceeded = Counter(passed for scored in results if (passed := scored.extra.get(CODE_LIMIT)))
        if exceeded:
            counts = ", ".join(f"{count} {passed}" for passed, count in exceeded.items())
            log.info("%d of %d code answers exceeded a limit: %s", exceeded.total(), len(results), counts)
        return results

    async def _score_one(self, sample: Sample, limit: FailureLimit) -> Scored:
        result = await self._try(sample, limit)
        limit.add([sample], [result])
        return result

    async def _try(self, sample: Sample, limit: FailureLimit) -> Scored:
        """Runs a program on the next free runner; if the runner ends by it, on others, `_MAX_ATTEMPTS` times in all.

        A program that no runner survives, or that a runner does not answer about, has score 0. RuntimeError: no sandbox
        starts. Nothing is run after too many failures of a batch (`limit`).
        """
        for _ in range(_MAX_ATTEMPTS):
            runner = await self._free.get()
            try:
                return limit.not_scored() if limit.is_exceeded else await self._run(runner, sample)
            except NoSandbox as error:
                raise RuntimeError(f"code answers cannot be run any more: {error}") from error
            except TimeoutError:
                return Scored(0.0, failure=Failure.TIMEOUT, message="the process that runs programs does not answer")
            except ProcessEnded as error:
                log.warning("a process that runs programs is replaced: it %s", error)
            finally:
                self._free.put_nowait(runner)
        return Scored(0.0, failure=Failure.CRASH, message=f"the process that runs programs ended {_MAX_ATTEMPTS} times")

    async def _run(self, runner: WorkerProcess, sample: Sample) -> Scored:
        """Runs a program on a runner, which is started first if it is new, and returns its score."""
        if not runner.is_loaded:
            await self._start(runner)
        reply = _checked(await runner.ask((sample.response, sample.ground_truth), self._timeout_s))
        failure = reply.pop("failure", None)
        return Scored(**reply, failure=failure and Failure(failure))


def _checked(reply: dict[str, Any]) -> dict[str, Any]:
    """Returns the reply of a runner process; raises NoSandbox if the reply says why it cannot run programs."""
    if reason := reply.get("reason"):
        raise NoSandbox(reason)
    return reply
