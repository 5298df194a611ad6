"""Free memory and the kernel's count of kills, for cgroups v2 and v1 and for the whole machine."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from splitppo.machine.host_memory import HostMemory, host_memory, num_oom_kills

MACHINE = {"proc/vmstat": "oom_kill 7\noom_kill_x 9\n"}
V2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/memory.max": "1000000\n",
    "sys/fs/cgroup/job/memory.current": "900000\n",
    "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 50000\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.current": "900000\n",
    "sys/fs/cgroup/job/step/memory.events": "oom 3\noom_kill 2\noom_group_kill 0\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/a\n3:cpu:/b\n0::/\n",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "100\n",
    "sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 5\n",
}


@pytest.mark.parametrize(
    ("files", "memory", "num_kills"),
    [
        ({}, None, 0),
        (MACHINE, None, 7),
        (MACHINE | V2, HostMemory(150_000, 1_000_000), 2),
        (MACHINE | V1, None, 4),
    ],
    ids=["no cgroup", "the machine", "cgroup v2, a limit above", "cgroup v1, no limit"],
)
def test_what_leaves_least_counts_and_the_nearest_cgroup_says_who_was_killed(
    tmp_path: Path, files: dict[str, str], memory: HostMemory | None, num_kills: int
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    least = host_memory(tmp_path)
    if memory is None:  # the machine's own
        assert 0 < least.free <= least.total == psutil.virtual_memory().total
    else:
        assert least == memory
    assert num_oom_kills(tmp_path) == num_kills
