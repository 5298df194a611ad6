"""The work of each phase, and its seconds on another number of devices than it was measured on."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from controller.planner.measured import Measurement

# Of what takes turns completely.
_MAX_SLOWDOWN = 2.0
_ByPlace = dict[tuple[str, int], list[tuple[float, float]]]


@dataclass(frozen=True)
class PhaseTimes:
    """The times of one phase: seconds by number of devices; those of the controller's machine are by 0."""

    seconds: Mapping[int, float]

    def on(self, num_devices: int) -> tuple[float, str]:
        """Returns (seconds, the law that they come from; empty: measured).

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


def phase_times(measurements: Sequence[Measurement]) -> tuple[dict[str, PhaseTimes], float]:
    """(times by phase, slowdown) of all runs together.

    A phase that takes w seconds alone takes t = w + s (1 - 1 / slowdown) if s of them are shared: actor and critic work
    at the same time, and on one machine they may wait for its memory or its cores. The slowdown is fitted by least
    squares, within phases, to runs that share different parts of their time: schedules, or places of the reference.
    Where no two do, it is 1: what was measured is taken as it is.
    """
    by_place: _ByPlace = defaultdict(list)
    for measurement in measurements:
        for name, seconds in measurement.phase_s.items():
            by_place[name, measurement.device_count_of(name)].append((seconds, measurement.shared_s[name]))
    lost = _lost_share(by_place)
    times: dict[str, dict[int, float]] = defaultdict(dict)
    for (name, devices), runs in by_place.items():
        times[name][devices] = fmean(seconds - lost * shared for seconds, shared in runs)
    return {name: PhaseTimes(by_devices) for name, by_devices in times.items()}, 1.0 / (1.0 - lost)


def _lost_share(by_place: _ByPlace) -> float:
    """Returns 1 - 1 / slowdown: of shared time, the part in which nothing gets done."""
    together = spread = 0.0
    for runs in by_place.values():
        deviations = np.array(runs) - np.mean(runs, axis=0)
        together += float(deviations[:, 0] @ deviations[:, 1])
        spread += float(deviations[:, 1] @ deviations[:, 1])
    return min(max(together / spread, 0.0), 1.0 - 1.0 / _MAX_SLOWDOWN) if spread > 0.0 else 0.0
