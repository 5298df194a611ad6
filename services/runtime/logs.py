"""Sets up the log file of a rank; every log line names the service, the rank, the step and the request id."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from splitppo.run_folder.logs import LOGS, LogFile, log_of_rank

_STDERR_HANDLER = "splitppo-stderr"
_work: ContextVar[str] = ContextVar("work", default="")


@contextmanager
def working_on(step: int, request_id: str) -> Iterator[None]:
    """Adds the step and the request id to the log lines that this thread writes within the `with` block."""
    token = _work.set(f" step {step} {request_id}")
    try:
        yield
    finally:
        _work.reset(token)


def set_up_logging(role_name: str, rank: int, run_dir: Path, *, to_stderr: bool) -> None:
    """Sends the log of this rank to `<run.dir>/logs/{role}_{rank}.log`; with `to_stderr` also warnings to stderr."""
    directory = run_dir / LOGS
    directory.mkdir(parents=True, exist_ok=True)
    to_file = LogFile(directory / log_of_rank(role_name, rank))
    stderr = logging.StreamHandler(sys.stderr)
    stderr.set_name(_STDERR_HANDLER)
    stderr.setLevel(logging.WARNING)
    stderr.addFilter(lambda record: not getattr(record, "file_only", False))
    handlers: list[logging.Handler] = [to_file, stderr] if to_stderr else [to_file]
    form = logging.Formatter(f"%(asctime)s %(levelname)s {role_name} rank {rank}%(work)s %(name)s: %(message)s")
    for handler in handlers:
        handler.setFormatter(form)
        handler.addFilter(_add_work)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)


def show_progress_on_stderr() -> None:
    """Sends log lines of level INFO to stderr, too. Before this call stderr gets warnings and input errors alone."""
    for handler in logging.getLogger().handlers:
        if handler.get_name() == _STDERR_HANDLER:
            handler.setLevel(logging.INFO)


def _add_work(record: logging.LogRecord) -> bool:
    record.work = _work.get()
    return True
