"""The source of scores for code answers: each is run in a sandbox of its own, taken from those that wait, warm."""

import asyncio
import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Self, TypeVar

from rewards.code.bubblewrap import HINT, NoSandbox, own_uid
from rewards.code.cases import Cases, parse_cases, program_of
from rewards.code.limits import CODE_LIMIT, Limits
from rewards.code.sandbox import Outcome, Sandbox
from rewards.samples import Failure, Sample, Scored
from splitppo.config import CodeConfig, ConfigError
from splitppo.config.threads import permitted_cores, whole_cores

log = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_ATTEMPTS = 3  # of a program whose sandbox ended before it gave anything
# Longer than a look at what it uses takes to come around.
_TRIAL = ("import time\ntime.sleep(0.1)\nprint(int(input()) + 1)", Cases("stdin", ("1",), ("2",)))


# The samples of a prompt come one after the other.
_parsed = lru_cache(maxsize=64)(parse_cases)


class CodeSandboxes:
    """Runs the program of each response against the test cases of its row.

    The score is 1 where all tests are passed, else 0; with `reward.code.continuous` the share of those that are. A
    response without a program, or one whose program passes a limit, scores 0.

    Raises:
        ConfigError: on entering: no sandbox can be started here, and `reward.code.unsafe` does not allow to go without.
    """

    def __init__(self, config: CodeConfig) -> None:
        self._config = config
        self._limits = Limits(
            cpu_s=config.timeout_s,
            memory_bytes=config.memory_mb << 20,
            max_processes=config.max_processes,
            output_bytes=config.max_output_bytes,
        )
        is_auto = config.num_sandboxes == "auto"
        self._num_sandboxes = whole_cores(permitted_cores()) if is_auto else int(config.num_sandboxes)
        self._numbers = itertools.count()
        self._warm: deque[Sandbox] = deque()
        self._stop = threading.Event()
        # Sandboxes end with the threads that have started them: these live as long as this source.
        self._threads = ThreadPoolExecutor(self._num_sandboxes, thread_name_prefix="sandbox")

    async def __aenter__(self) -> Self:
        """Shows that a sandbox runs a program and can be watched, then fills the pool."""
        try:
            await self._in_thread(self._try_out)
        except NoSandbox as error:
            await self.__aexit__()
            hint = "" if self._config.unsafe else f" ({HINT})"
            raise ConfigError(f"code answers cannot be run here: {error}{hint}") from error
        if self._config.unsafe:
            log.warning(
                "reward.code.unsafe: programs of the model run WITHOUT a sandbox, with the rights of this process: they"
                " can read its files and reach its network"
            )
        await asyncio.gather(*(self._in_thread(self._add_warm) for _ in range(self._num_sandboxes)))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends all sandboxes, also those in the middle of a program."""
        self._stop.set()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        while self._warm:
            self._warm.pop().__exit__()

    async def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """One result per sample; its field `code_limit` names the limit that a program has passed."""
        results = await asyncio.gather(*(self._in_thread(self._score_one, sample) for sample in samples))
        passed = Counter(limit for scored in results if (limit := scored.extra.get(CODE_LIMIT)))
        if passed:
            counts = ", ".join(f"{count} {limit}" for limit, count in passed.items())
            log.info("%d of %d code answers passed a limit: %s", passed.total(), len(results), counts)
        return results

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _score_one(self, sample: Sample) -> Scored:
        try:
            truth = sample.ground_truth
            cases = _parsed(truth) if isinstance(truth, str) else parse_cases(truth)
        except ValueError as error:
            return Scored(0.0, failure=Failure.ERROR, message=f"reward_model.ground_truth: {error}")
        program = program_of(sample.response)
        outcome = Outcome() if program is None else self._run(program, cases)
        if outcome.error:
            return Scored(0.0, failure=Failure.CRASH, message=outcome.error)
        share = 0.0 if outcome.limit else sum(outcome.passed) / len(cases.inputs)
        extra = {CODE_LIMIT: outcome.limit and outcome.limit.value}
        if self._config.continuous:
            return Scored(share, {**extra, "acc": float(share == 1.0)})
        return Scored(float(share == 1.0), extra)

    def _run(self, program: str, cases: Cases) -> Outcome:
        """Runs a program; again where its sandbox ended without a word, which no program can bring about alone.

        Raises:
            RuntimeError: it is not the program's fault: no sandbox can be started any more.
        """
        for _ in range(_MAX_ATTEMPTS):
            outcome = self._attempt(program, cases)
            if not outcome.error or self._stop.is_set():
                return outcome
        try:
            self._try_out()
        except NoSandbox as error:
            raise RuntimeError(f"code answers cannot be run any more: {error}") from error
        return outcome

    def _attempt(self, program: str, cases: Cases) -> Outcome:
        try:
            with self._take() as sandbox:
                return sandbox.run(program, cases, self._stop, runs_all=self._config.continuous)
        except (OSError, NoSandbox) as error:
            return Outcome(error=f"no sandbox could be started: {error}")

    def _take(self) -> Sandbox:
        """A sandbox for one program; the next one starts meanwhile."""
        self._add_warm()
        while True:
            sandbox = self._warm.popleft()
            if sandbox.is_alive or not self._warm:
                return sandbox
            sandbox.__exit__()

    def _add_warm(self) -> None:
        uid = own_uid(next(self._numbers))
        self._warm.append(Sandbox(self._limits, uid, is_confined=not self._config.unsafe))

    def _try_out(self) -> None:
        """NoSandbox, with the reason, if a sandbox does not run a program or cannot be watched."""
        program, cases = _TRIAL
        try:
            with Sandbox(self._limits, own_uid(next(self._numbers)), is_confined=not self._config.unsafe) as sandbox:
                outcome, is_watched = sandbox.run(program, cases, self._stop), sandbox.is_watched
        except (OSError, ValueError) as error:
            raise NoSandbox(str(error)) from error
        if outcome.passed != (True,):
            raise NoSandbox(outcome.error or "a program that adds 1 to its input does not give the sum")
        if not is_watched:
            raise NoSandbox("what a sandbox uses cannot be read from /proc/PID/task/TID/children and /proc/PID/root")
