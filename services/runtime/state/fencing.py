"""Remembers the controller that a service works for (run id and newest epoch), and refuses older controllers."""

import threading
from pathlib import Path

from splitppo.rpc.errors import InvalidArgument, NotIntroduced, StaleEpoch, WrongState
from splitppo.run_folder.epoch import newest_epoch


class FencingToken:
    """The run id and epoch of the controller that a service obeys; a newer epoch takes over. Thread-safe."""

    def __init__(self, epoch_file: Path | None = None) -> None:
        self._epoch_file = epoch_file
        self._lock = threading.Lock()
        self._run_id = ""
        self.epoch = 0  # before the first handshake

    def take(self, run_id: str, epoch: int) -> bool:
        """Accepts the controller that calls Handshake; returns True if that controller replaces an older one.

        Raises:
            InvalidArgument: no run id, or an epoch below 1.
            StaleEpoch: a newer controller has introduced itself here, or has claimed the run folder.
            WrongState: another run already has this epoch.
        """
        if not run_id or epoch < 1:
            raise InvalidArgument(f"a handshake needs a run id and an epoch from 1 on, got {run_id!r} and {epoch}")
        with self._lock:
            newest = max(self.epoch, self._epoch_of_folder())
            if epoch < newest:
                raise StaleEpoch(f"controller epoch {epoch} is over, epoch {newest} has taken over")
            if epoch == self.epoch and run_id != self._run_id:
                raise WrongState(f"epoch {epoch} belongs to run {self._run_id!r}, not to {run_id!r}")
            takes_over = 0 < self.epoch < epoch
            self._run_id = run_id
            self.epoch = epoch
            return takes_over

    def check(self, run_id: str, epoch: int) -> None:
        """Checks that a call comes from the controller that this service works for.

        Raises:
            StaleEpoch: the call comes from an older controller.
            NotIntroduced: no controller has introduced itself since the service started.
            WrongState: the call comes from another controller, which has not introduced itself.
        """
        with self._lock:
            if not self.epoch:
                raise NotIntroduced("this service has just started and knows no controller: call Handshake first")
            if epoch < self.epoch:
                raise StaleEpoch(f"controller epoch {epoch} is over, epoch {self.epoch} has taken over")
            if epoch > self.epoch or run_id != self._run_id:
                raise WrongState(
                    f"run {run_id!r}, epoch {epoch} must call Handshake first;"
                    f" this service knows run {self._run_id!r}, epoch {self.epoch}"
                )

    def _epoch_of_folder(self) -> int:
        """Reads the newest claimed epoch from the run folder; 0 without a readable epoch file."""
        return (newest_epoch(self._epoch_file) if self._epoch_file else None) or 0
