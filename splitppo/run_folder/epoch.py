"""`controller.epoch`: the id of a run, and the number of the last start of its controller.

The number is the fencing token of every call: workers refuse those of a controller that no longer has the folder.
"""

import json
from contextlib import suppress
from pathlib import Path

from splitppo.atomic_write import write_atomically
from splitppo.config_error import ConfigError
from splitppo.plain_file import read_plain
from splitppo.run_folder.logs import CONTROLLER_LOG, LOGS

EPOCH_FILE = "controller.epoch"
_MAX_EPOCH = 2**63 - 1  # on the wire


def write_epoch(record: Path, run_id: str, epoch: int) -> None:
    """Writes the file."""
    write_atomically(record, json.dumps({"run_id": run_id, "epoch": epoch}))


def newest_epoch(record: Path) -> int | None:
    """Reads the number of the last start; None without the file, or if it does not say one."""
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        return int(json.loads(read_plain(record))["epoch"])
    return None


def read_epoch(record: Path) -> tuple[str, int]:
    """Reads the run id and the number of the last start from the file, which exists.

    Raises:
        ConfigError: the file lacks one of them. The file is not made anew, because workers refuse an epoch
            lower than before.
    """
    content = read_plain(record)
    with suppress(ValueError, TypeError, KeyError):
        stored = json.loads(content)
        run_id = stored["run_id"]
        epoch = stored["epoch"]
        if run_id and isinstance(run_id, str) and isinstance(epoch, int) and 0 < epoch < _MAX_EPOCH:
            return run_id, epoch
    got = repr(content[:80].decode(errors="replace")) if content else "an empty file"
    raise ConfigError(
        f'{record}: expected {{"run_id": "...", "epoch": N}}, got {got}; write into it the last run id and epoch that'
        f" {record.parent / LOGS / CONTROLLER_LOG} names, since workers refuse an epoch that goes back"
    )
