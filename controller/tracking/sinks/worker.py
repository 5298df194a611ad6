"""Does the work of recording in a thread, one job after the other; no failure and no delay reaches the run."""

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

Job = Callable[[], None]
_MAX_PENDING = 4  # steps and validations whose arrays wait, or are being written
_PAUSE_S = 0.5


class RecordWorker:
    """A thread that does jobs in their order. It starts with the first job, and never keeps the process alive.

    `on_idle` is called in the thread about twice per second, `on_failure` in the thread with the reason why a job has
    failed or was left out.
    """

    def __init__(self, on_idle: Job, on_failure: Callable[[str], None]) -> None:
        self._on_idle = on_idle
        self._on_failure = on_failure
        self._jobs: queue.SimpleQueue[tuple[str, Job, bool] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending = threading.Semaphore(_MAX_PENDING)
        self._is_failing = False

    def submit(self, name: str, job: Job, *, is_large: bool = False) -> None:
        """Hands a job to the thread; `name` says what it records.

        A large job is left out if the thread is some of them behind: memory must not grow.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="record", daemon=True)
            self._thread.start()
        if is_large and not self._pending.acquire(blocking=False):
            self._jobs.put((name, lambda: self._failed(name, "what came before is still being written"), False))
        else:
            self._jobs.put((name, job, is_large))

    def close(self, timeout_s: float) -> None:
        """Waits until all jobs are done, for at most `timeout_s` seconds."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        is_ending = False
        while not is_ending:
            with suppress(queue.Empty):
                item = self._jobs.get(timeout=_PAUSE_S)
                is_ending = item is None
                if item is not None:
                    self._do(*item)
            self._on_idle()

    def _do(self, name: str, job: Job, is_large: bool) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on without it
            self._failed(name, f"{type(error).__name__}: {error}")
        if is_large:
            self._pending.release()

    def _failed(self, name: str, why: str) -> None:
        if not self._is_failing:
            self._is_failing = True
            log.warning("%s could not be recorded: %s; the run goes on, later failures are in events.jsonl", name, why)
        self._on_failure(f"{name}: {why}")
