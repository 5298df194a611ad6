"""Sets up the controller's log: records go to a file in the run folder, and to the display above its live panel."""

import logging
from pathlib import Path

from controller.tracking.display import Display
from splitppo.run_folder.logs import CONTROLLER_LOG, LOGS, LogFile


class _DisplayHandler(logging.Handler):
    def __init__(self, display: Display) -> None:
        super().__init__(logging.INFO)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "file_only", False):
            self._display.line(self.format(record))


def log_to(run_dir: Path, display: Display) -> None:
    """Sends log records from INFO on to `logs/controller_0.log` and to the display, and nowhere else."""
    handlers: list[logging.Handler] = [
        LogFile(run_dir / LOGS / CONTROLLER_LOG),
        _DisplayHandler(display),
    ]
    logging.raiseExceptions = False  # a full disk must not fill the terminal with tracebacks
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=line, handlers=handlers, force=True)
