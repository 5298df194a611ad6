"""Scales the measured seconds of each phase of a step to other numbers of devices."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from controller.planner.measured import Measurement

# Two groups that never work at the same time take twice as long.
_MAX_SLOWDOWN = 2.0
_ByPlace = dict[tuple[str, int], list[tuple[float, float]]]


@dataclass(frozen=True)
class PhaseTimes:
    """The measured seconds of one phase by number of devices; 0 devices stands for the controller's machine."""

    seconds: Mapping[int, float]

    def on(self, num_devices: int) -> tuple[float, str]:
        """Predicts the seconds of this phase on `num_devices` devices; returns (seconds, name of the scaling law).

        The name is "" if the phase was measured on this number of devices, or runs on the controller's machine.

        1/n    measured on one number n of devices:   t n / num_devices              all work is divided
        a+b/n  measured on several:                   fixed + divided / num_devices  least squares, neither below 0
                                                                                     (Amdahl, 1967)
        """
        if 0 in self.seconds:
            return self.seconds[0], ""
        if num_devices in self.seconds:
            return self.seconds[num_devices], ""
        if len(self.seconds) == 1:
            ((measured_devices, measured_s),) = self.seconds.items()
            return measured_s * measured_devices / num_devices, "1/n"
        shares = np.array([1.0 / devices for devices in self.seconds])
        times = np.array(list(self.seconds.values()))
        divided, fixed = np.polyfit(shares, times, 1)
        if divided < 0.0:
            divided, fixed = 0.0, times.mean()
        elif fixed < 0.0:
            divided, fixed = (times @ shares) / (shares @ shares), 0.0
        return float(fixed + divided / num_devices), "a+b/n"


def phase_times(measurements: Sequence[Measurement]) -> tuple[dict[str, PhaseTimes], float]:
    """Fits the seconds of each phase to all measured runs together; returns (times by phase, slowdown).

    A phase that takes w seconds alone takes t = w + s (1 - 1 / slowdown) if actor and critic both work in s of them: on
    one machine they may wait for its memory or its cores. The slowdown is fitted by least squares, within phases, to
    runs with different shared times, because of their schedules or hosts of the reference. If no two runs differ, the
    slowdown is 1, and measured times are taken as they are.
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
    """Fits 1 - 1 / slowdown: the share of time that is lost while actor and critic work at the same time."""
    together = spread = 0.0
    for runs in by_place.values():
        deviations = np.array(runs) - np.mean(runs, axis=0)
        together += float(deviations[:, 0] @ deviations[:, 1])
        spread += float(deviations[:, 1] @ deviations[:, 1])
    return min(max(together / spread, 0.0), 1.0 - 1.0 / _MAX_SLOWDOWN) if spread > 0.0 else 0.0
