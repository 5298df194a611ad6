"""Scales the measured seconds of each phase of a step to other numbers of devices."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from controller.commands.planner.measured import Measurement, rows_of

# Two groups that never work at the same time take twice as long.
_MAX_SLOWDOWN = 2.0
# Runs of which a phase shares almost the same part of its time say nothing of the slowdown, but much of the machine.
_MIN_SPREAD = 0.25
# The share of a generation that does not depend on the number of responses, if no two runs show it: with 3.2 M
# parameters on one thread, half of the responses took 0.57 to 0.63 of the seconds of all.
ASSUMED_FIXED = 0.2
GENERATIONS = ("gen", "gen_rollout")
# (phase, devices, rows): (seconds, shared seconds) of each run.
_ByPlace = dict[tuple[str, int, float], list[tuple[float, float]]]


@dataclass(frozen=True)
class PhaseTimes:
    """The measured seconds of one phase by number of devices; 0 devices stands for the controller's machine.

    `fixed` is the share of the seconds that does not depend on the number of rows; None if nobody has measured it. It
    matters for generations alone, because no other phase is divided between groups.
    """

    seconds: Mapping[int, float]
    fixed: float | None = None

    def factor(self, rows: float) -> float:
        """Returns the seconds of a part of the rows (0 to 1) / the seconds of all: fixed + (1 - fixed) x rows."""
        fixed = ASSUMED_FIXED if self.fixed is None else self.fixed
        return fixed + (1.0 - fixed) * rows

    def on(self, num_devices: int) -> tuple[float, str]:
        """Predicts the seconds of this phase on `num_devices` devices; returns (seconds, name of the scaling law).

        The name is "" if the phase was measured on this number of devices, or runs on the controller's machine.

        1/n    measured on one number n of devices:   t n / num_devices              all work is divided
        a+b/n  measured on several:                   fixed + divided / num_devices  least squares, neither below 0
                                                                                     (Amdahl, 1967)
        """
        if (known := self.seconds.get(0, self.seconds.get(num_devices))) is not None:
            return known, ""
        if len(self.seconds) == 1:
            ((measured_devices, measured_s),) = self.seconds.items()
            return measured_s * measured_devices / num_devices, "1/n"
        shares = np.array([1.0 / devices for devices in self.seconds])
        times = np.array(list(self.seconds.values()))
        divided, fixed = np.polyfit(shares, times, 1)
        if divided < 0.0:
            divided = 0.0
            fixed = times.mean()
        elif fixed < 0.0:
            divided = (times @ shares) / (shares @ shares)
            fixed = 0.0
        return float(fixed + divided / num_devices), "a+b/n"


def phase_times(measurements: Sequence[Measurement]) -> tuple[dict[str, PhaseTimes], float]:
    """Fits the seconds of each phase to all measured runs together; returns (times by phase, slowdown).

    A phase that takes w seconds alone takes t = w + s (1 - 1 / slowdown) if another group works, too, in s of them: on
    one machine they may wait for its memory or its cores. The slowdown is fitted by least squares, within phases, to
    runs with different shared times, because of their schedules or hosts of the reference. If no two runs differ, the
    slowdown is 1, and measured times are taken as they are.

    The times of both generations are those of all rows. If one of them was not measured on a number of devices, its
    times there are those of the other one.
    """
    by_place: _ByPlace = defaultdict(list)
    for measurement in measurements:
        rows = rows_of(measurement.config, measurement.share)
        for name, seconds in measurement.phase_s.items():
            place = (name, measurement.device_count_of(name), rows.get(name, 1.0))
            by_place[place].append((seconds, measurement.shared_s[name]))
    lost = _lost_share(by_place)
    alone = {place: fmean(seconds - lost * shared for seconds, shared in runs) for place, runs in by_place.items()}
    fixed = _fixed_share(alone)
    found: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (name, devices, part), seconds in alone.items():
        found[name][devices].append(seconds / PhaseTimes({}, fixed).factor(part))
    times = {name: {devices: fmean(of) for devices, of in by.items()} for name, by in found.items()}
    if generations := [times[name] for name in GENERATIONS if name in times]:
        first = generations[0]
        last = generations[-1]
        times |= {"gen": last | first, "gen_rollout": first | last}
    return {name: PhaseTimes(by_devices, fixed) for name, by_devices in times.items()}, 1.0 / (1.0 - lost)


def _fixed_share(alone: Mapping[tuple[str, int, float], float]) -> float | None:
    """Fits the part of generation that does not depend on the number of rows, as a share of the seconds of all rows.

    On one number of devices, t = a + b rows by least squares gives a / (a + b). None if nowhere one measured generation
    has twice the rows of another: smaller differences say more about the machine than about rows.
    """
    by_devices: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for (name, devices, rows), seconds in alone.items():
        if name in GENERATIONS:
            by_devices[devices].append((rows, seconds))
    fitted = []
    for runs in by_devices.values():
        rows_R, seconds_R = np.array(runs).T
        if rows_R.max() >= 2.0 * rows_R.min():
            per_row, constant = np.polyfit(rows_R, seconds_R, 1)
            fitted.append(min(max(float(constant / (constant + per_row)), 0.0), 1.0))
    return fmean(fitted) if fitted else None


def _lost_share(by_place: _ByPlace) -> float:
    """Fits the share of time that a phase loses while other groups work, too: 1 - 1 / slowdown.

    The model is seconds = alone + lost x shared, by least squares over all places: `shared` are the seconds of a run in
    which other groups worked, too. Each place has its own `alone`, which drops out of deviations from the means of the
    place. Places whose runs overlap about equally say nothing; without any others, nothing is lost.
    """
    covariance = 0.0
    variance = 0.0
    for runs in by_place.values():
        shares = [shared / seconds for seconds, shared in runs]
        if max(shares) - min(shares) < _MIN_SPREAD:
            continue
        deviations = np.array(runs) - np.mean(runs, axis=0)
        covariance += float(deviations[:, 0] @ deviations[:, 1])
        variance += float(deviations[:, 1] @ deviations[:, 1])
    return min(max(covariance / variance, 0.0), 1.0 - 1.0 / _MAX_SLOWDOWN) if variance > 0.0 else 0.0
