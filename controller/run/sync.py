"""The command `python -m controller sync RUN_DIR`: sends trackers the steps that they lack, after the run has ended."""

from collections.abc import Sequence
from pathlib import Path

from controller.tracking.trackers.process import check_trackers, run_of, start
from splitppo.config import ConfigError, load_config
from splitppo.file_lock import try_lock
from splitppo.machine.children.ending import end
from splitppo.machine.children.tree import kill_tree
from splitppo.plain_file import open_plain
from splitppo.run_folder.epoch import EPOCH_FILE, read_epoch
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics


def sync(run_dir: Path, names: Sequence[str], timeout_s: float) -> str | None:
    """Sends the steps, samples and report of a run folder to the trackers (W&B, MLflow, ...) that lack them.

    Args:
        run_dir: the run folder; the command writes into `trackers/` and `logs/`, the trackers' clients write into
            folders of their own.
        names: the trackers; by default those of the run's configuration. Other trackers get the whole run.
        timeout_s: the longest time that sending may take, in seconds.

    Returns:
        One sentence when everything is sent; None if something could not be sent, which is on standard output then.

    Raises:
        ConfigError: this is no run folder; a step cannot be read; the trackers are being fed by another process; or a
            tracker cannot be used from this machine.
    """
    record = run_dir / EPOCH_FILE
    if not record.is_file() or not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} is no run folder: expected config.yaml and controller.epoch in it")
    changes = [f"tracking.flush_timeout_s={timeout_s}", *([f"tracking.trackers=[{','.join(names)}]"] if names else [])]
    config = load_config(run_dir / "config.yaml", changes, is_stored=True)
    check_trackers(config.tracking)
    read_metrics(run_dir / METRICS_FILE)
    (run_dir / "trackers").mkdir(exist_ok=True)
    with open_plain(run_dir / "trackers" / "lock", "ab") as lock:
        if not try_lock(lock):
            raise ConfigError(f"{run_dir}: its trackers are being fed by another process")
    process = start(config.tracking, run_of(config, run_dir, read_epoch(record)[0]), output=None)
    try:
        process.communicate()
    except KeyboardInterrupt:
        end(process, kill=kill_tree)
        raise
    return None if process.returncode else f"{run_dir}: {', '.join(config.tracking.trackers)} have everything"
