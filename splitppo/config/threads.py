"""Compute threads of each rank, where `services.*.threads` is `auto`, and whether there are more than cores.

A function of configuration, device type and permitted cores, never of measured load: the cores are divided between the
ranks that may compute on them. The controller and the scoring processes (`reward.num_workers`) are not counted.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from pathlib import Path

from splitppo.config.schema import Config
from splitppo.config.services import ServiceConfig

# A rank that computes on a GPU only feeds it: more threads than this find nothing to do.
MAX_GPU_THREADS = 8
_Groups = Mapping[str, ServiceConfig]  # of this machine, by role


@dataclass(frozen=True)
class PermittedCores:
    """What a process may use of the machine."""

    indices: frozenset[int]  # of its affinity
    quota: Fraction | None = None  # CPU time that its cgroups grant, in cores; None: no limit

    def of(self, service: ServiceConfig) -> frozenset[int]:
        """Those that the ranks of a group may compute on."""
        return frozenset(service.cpus) or self.indices


def permitted_cores(root: Path = Path("/")) -> PermittedCores:
    """What this process, and all that it starts, may use; `root` is where /proc and /sys are found."""
    return PermittedCores(frozenset(os.sched_getaffinity(0)), min(_quotas(root), default=None))


def whole_cores(cores: PermittedCores) -> int:
    """Whole cores, at least one."""
    return _whole(len(cores.indices), cores.quota)


def resolve_threads(config: Config, cores: PermittedCores) -> Config:
    """`config` with numbers in place of `auto`, where the controller starts the groups.

    Groups that others start (`services.launch: external`) know their own cores: they resolve it themselves.
    """
    return config if config.services.launch == "external" else _with_threads(config, _automatic(_groups(config), cores))


def keep_threads(config: Config, stored: Config) -> Config:
    """`config` of a resumed run with the numbers that it has been using, by its `stored` one, in place of `auto`.

    Results on a CPU may depend on the number of threads, so another machine changes nothing; another placement
    (services.launch, num_processes, devices, cpus) is another configuration, and is resolved anew.
    """
    used = {role: service.threads for role, service in _groups(stored).items()}
    return _with_threads(config, used) if _placement(config) == _placement(stored) else config


def threads_of_rank(service: ServiceConfig, num_ranks: int, cores: PermittedCores) -> int:
    """Threads of each of a group's `num_ranks` ranks on this machine, where there is no other group."""
    alone = {"": service.model_copy(update={"num_processes": num_ranks})}
    return _automatic(alone, cores)[""] if service.threads == "auto" else service.threads


def crowding(config: Config, cores: PermittedCores) -> str | None:
    """One sentence if the groups of a resolved `config` have more threads than the controller has cores, else None."""
    return None if config.services.launch == "external" else _crowding(_groups(config), cores)


def crowding_of_group(role: str, service: ServiceConfig, num_ranks: int, cores: PermittedCores) -> str | None:
    """As `crowding`, of the ranks of one group on this machine."""
    threads = threads_of_rank(service, num_ranks, cores)
    return _crowding({role: service.model_copy(update={"num_processes": num_ranks, "threads": threads})}, cores)


def _groups(config: Config) -> _Groups:
    return {role: config.services.of(role) for role in config.roles}


def _placement(config: Config) -> object:
    keys = {"num_processes", "devices", "cpus"}
    return config.services.launch, {role: group.model_dump(include=keys) for role, group in _groups(config).items()}


def _with_threads(config: Config, threads: Mapping[str, int | str]) -> Config:
    changed = {
        role: service.model_copy(update={"threads": threads[role]})
        for role, service in _groups(config).items()
        if service.threads == "auto"
    }
    return config.model_copy(update={"services": config.services.model_copy(update=changed)})


def _automatic(groups: _Groups, cores: PermittedCores) -> dict[str, int]:
    """By role: an equal share of each core for every rank that may compute on it, in whole threads, at least one."""
    ranks_on: Counter[int] = Counter()
    for group in groups.values():
        ranks_on.update(dict.fromkeys(cores.of(group), group.num_processes))
    granted = Fraction(1) if cores.quota is None else min(Fraction(1), cores.quota / len(ranks_on))
    threads = {}
    for role, group in groups.items():
        share = max(1, floor(granted * sum(Fraction(1, ranks_on[core]) for core in cores.of(group))))
        threads[role] = min(share, MAX_GPU_THREADS) if group.devices else share
    return threads


def _whole(num_indices: int, quota: Fraction | None) -> int:
    return num_indices if quota is None else min(num_indices, max(1, floor(quota)))


def _crowding(groups: _Groups, cores: PermittedCores) -> str | None:
    threads = {role: int(group.threads) for role, group in groups.items()}
    everybody = frozenset[int]().union(*map(cores.of, groups.values()))
    num_cores = _whole(len(everybody), cores.quota)
    for roles, available in [(list(groups), num_cores), *(([role], len(cores.of(groups[role]))) for role in groups)]:
        total = sum(threads[role] * groups[role].num_processes for role in roles)
        if total <= available:
            continue
        better = _automatic(groups, cores)
        counted = [f"{groups[role].num_processes} x services.{role}.threads ({threads[role]})" for role in roles]
        lower = [f"services.{role}.threads to {better[role]}" for role in roles if threads[role] > better[role]]
        price = "wait for each other, which can take several times as long" if lower else "take turns"
        advice = f"set {' and '.join(lower)}" if lower else "lower services.*.num_processes, or permit more cores"
        return f"{' + '.join(counted)} = {total} threads compute on {available} permitted cores and {price}: {advice}"
    return None


def _quotas(root: Path) -> Iterator[Fraction]:
    """The CPU time that each cgroup above this process grants, in cores; cgroup v2 and v1."""
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            hierarchies, files = [mounted], ["cpu.max"]
        elif "cpu" in controllers.split(","):
            hierarchies, files = [mounted / controllers, mounted / "cpu"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        group = Path(path.strip("/"))
        # Of the group and all that hold it; one that a container cannot see has no files.
        for folder in (hierarchy / name for hierarchy in hierarchies for name in (group, *group.parents)):
            numbers = " ".join(_text(folder / file) for file in files).split()
            # Microseconds in every period; `max` and -1 are no limit.
            if len(numbers) == 2 and all(number.isdigit() and int(number) for number in numbers):
                yield Fraction(int(numbers[0]), int(numbers[1]))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
