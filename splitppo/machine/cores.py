"""Finds the CPU cores that a process may use: its affinity, and the CPU time that its cgroups grant."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from pathlib import Path

from splitppo.machine.cgroups import cgroup_folders, text_of


@dataclass(frozen=True)
class PermittedCores:
    """The CPU cores that a process may use.

    Attributes:
        indices: the indices of the cores of the process's affinity.
        quota: the CPU time that its cgroups grant, as a number of cores; None: no limit.
    """

    indices: frozenset[int]
    quota: Fraction | None = None

    @property
    def num_whole(self) -> int:
        """The number of whole CPU cores that the process may use, at least 1."""
        num_cores = len(self.indices)
        return num_cores if self.quota is None else min(num_cores, max(1, floor(self.quota)))


def permitted_cores(root: Path = Path("/")) -> PermittedCores:
    """Reads the CPU cores that this process, and all processes that it starts, may use.

    `root` is the folder that holds /proc and /sys.
    """
    return PermittedCores(frozenset(os.sched_getaffinity(0)), min(_quotas(root), default=None))


def _quotas(root: Path) -> Iterator[Fraction]:
    """Yields the CPU time that each cgroup of this process grants, as a number of cores; cgroup v2 and v1."""
    for folder in cgroup_folders("cpu", root):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            numbers = " ".join(text_of(folder / file) for file in files).split()
            # The numbers are microseconds of CPU time, and of a period; `max` and -1 mean no limit.
            if len(numbers) == 2 and all(number.isdigit() and int(number) for number in numbers):
                yield Fraction(int(numbers[0]), int(numbers[1]))
