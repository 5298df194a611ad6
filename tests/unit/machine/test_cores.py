"""The cores that a process may use, also with the quota of its cgroups."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import pytest

from splitppo.machine.cores import PermittedCores, permitted_cores


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        pytest.param({}, None, id="no cgroups"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None, id="v2, no limit"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, "1.5", id="v2"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/job/step/cpu.max": "400000 100000\n",
            },
            "2",
            id="v2, the group above grants less",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/not/to/be/seen\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"},
            "3",
            id="v2, the names of the host in a container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:memory:/a\n3:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            "2.5",
            id="v1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "3:cpuacct,cpu:/\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000\n",
            },
            "2",
            id="v1, under the short name, beside v2",
        ),
    ],
)
def test_the_quota_is_the_smallest_that_a_cgroup_above_the_process_grants(
    tmp_path: Path, files: dict[str, str], quota: str | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    expected = None if quota is None else Fraction(quota)
    assert permitted_cores(tmp_path) == PermittedCores(frozenset(os.sched_getaffinity(0)), expected)


@pytest.mark.parametrize(("quota", "whole"), [(None, 4), ("2.5", 2), ("1/2", 1), ("9", 4)])
def test_whole_cores_are_those_of_the_quota_at_least_one_and_no_more_than_there_are(
    quota: str | None, whole: int
) -> None:
    assert PermittedCores(frozenset(range(4)), None if quota is None else Fraction(quota)).num_whole == whole
