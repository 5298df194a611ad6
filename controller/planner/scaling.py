"""Seconds of a phase on another number of devices than it was measured on."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from controller.planner.measured import PHASES, Measurement


@dataclass(frozen=True)
class PhaseTimes:
    """What is known of one phase: seconds by number of devices; those of the controller's machine are by 0."""

    seconds: dict[int, float]

    def on(self, num_devices: int) -> tuple[float, str]:
        """(seconds, the law that they come from; empty: measured).

        Measured on one number n:   t n / devices                      rows are divided, nothing else
        on several:                 fixed + divided / devices          least squares, neither below 0 (Amdahl, 1967)
        """
        if 0 in self.seconds:
            return self.seconds[0], ""
        if num_devices in self.seconds:
            return self.seconds[num_devices], ""
        if len(self.seconds) == 1:
            ((known, measured_s),) = self.seconds.items()
            return measured_s * known / num_devices, "1/n"
        shares = np.array([1.0 / devices for devices in self.seconds])
        times = np.array(list(self.seconds.values()))
        divided, fixed = np.polyfit(shares, times, 1)
        if divided < 0.0:
            divided, fixed = 0.0, times.mean()
        elif fixed < 0.0:
            divided, fixed = (times @ shares) / (shares @ shares), 0.0
        return float(fixed + divided / num_devices), "a+b/n"


def phase_times(measurements: Iterable[Measurement]) -> dict[str, PhaseTimes]:
    """By phase; of two runs on the same number of devices the first one counts."""
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for measurement in measurements:
        for name in PHASES:
            if name in measurement.phase_s:
                found[name].setdefault(measurement.device_count_of(name), measurement.phase_s[name])
    return {name: PhaseTimes(seconds) for name, seconds in found.items()}
