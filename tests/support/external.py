"""Groups with `services.launch: external`, which controllers do not start or end, so that many runs share them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import yaml

from splitppo.config.sections.debug import DebugConfig
from splitppo.failpoints import FOLDER, fired_mark
from tests.support.groups import Group, free_address
from tests.support.runs import EACH_STEP, Controller, RunFolder, started

# What a new run in the same folder keeps: the groups' announcements and logs, and the fencing token, which only rises.
_KEPT = {"services", "logs", "controller.epoch", "controller.lock"}


class ExternalGroups:
    """The actor's and the critic's group, and the rollout group of `config`, each at an address that a restart keeps.

    Args:
        config: the configuration of every run on the groups; its section `debug` is for the groups only.
        run_dir: the run folder that all runs use, one after the other.
        services: keys of the section `services`.

    Attributes:
        is_lent: True if a test has the run folder for itself.
    """

    def __init__(self, config: dict[str, Any], run_dir: Path, **services: Any) -> None:
        roles = ("actor", "critic", *(["rollout"] if "rollout" in config["services"] else []))
        addresses = {role: free_address() for role in roles}
        placement: dict[str, Any] = {role: {"bind": address, "address": address} for role, address in addresses.items()}
        for role in placement:
            placement[role] |= config["services"].get(role, {})
        section = {**config["services"], "launch": "external", **placement, **services}
        theirs = {**config, "run": {**config["run"], "dir": str(run_dir)}, "services": section}
        self.config = {key: value for key, value in theirs.items() if key != "debug"}
        self.folder = RunFolder(run_dir)
        self.is_lent = False
        self._failpoints = DebugConfig.model_validate(config.get("debug", {})).failpoints
        self._config_file = run_dir.with_suffix(".services.yaml")
        self._config_file.parent.mkdir(parents=True, exist_ok=True)
        self._config_file.write_text(yaml.safe_dump(theirs))
        self._theirs = theirs
        self._groups = {role: self._start(role) for role in addresses}

    @property
    def instance_ids(self) -> list[str]:
        """The instance ids of the groups that serve now."""
        return [group.instance_id for group in self._groups.values()]

    def wait_ready(self) -> ExternalGroups:
        """Waits until all groups take calls."""
        for group in self._groups.values():
            group.wait_ready()
        return self

    def restart(self, role: str) -> None:
        """Kills a group and starts it again."""
        self._groups[role].stop()
        self._groups[role] = self._start(role).wait_ready()

    @contextmanager
    def with_rollout_group(self) -> Iterator[Group]:
        """Starts a rollout group, with which runs sample until the `with` block ends."""
        address = free_address()
        section = {"bind": address, "address": address, "threads": 1}
        without, self._config_file = (self.config, self._config_file), self._config_file.with_suffix(".rollout.yaml")
        services = {**self.config["services"], "rollout": section}
        self.config = {**self.config, "services": services}
        self._config_file.write_text(yaml.safe_dump({**self._theirs, "services": services}))
        group = self._start("rollout")
        try:
            yield group.wait_ready()
        finally:
            group.stop()
            self.config, self._config_file = without

    def stop(self) -> None:
        """Ends at once all processes that still run."""
        for group in self._groups.values():
            group.stop()

    def _start(self, role: str) -> Group:
        num_processes = self.config["services"][role].get("num_processes", 1)
        return Group(f"services.{role}", self._config_file, self.folder.path, role, num_processes=num_processes)

    def empty(self, armed: Iterable[str] = ()) -> None:
        """Empties the run folder for a new run.

        Args:
            armed: the points whose failpoints may fire in the new run; the others count as fired already.
        """
        for entry in self.folder.path.iterdir():
            if entry.name not in _KEPT:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        marks = self.folder.path / FOLDER
        marks.mkdir()
        for point in self._failpoints.keys() - set(armed):
            for failpoint in self._failpoints[point]:
                (marks / fired_mark(point, failpoint)).touch()

    def put_back(self, earlier: RunFolder) -> RunFolder:
        """Restores the run folder from a copy that `keep` has made, so that the next run goes on from there."""
        self.empty()
        ignored = shutil.ignore_patterns("controller.epoch")  # the groups have seen a later epoch
        shutil.copytree(earlier.path, self.folder.path, dirs_exist_ok=True, ignore=ignored)
        return self.folder

    def keep(self, copy: Path) -> RunFolder:
        """Copies the folder of the run that has just ended, for tests and for `put_back`."""
        ignored = shutil.ignore_patterns("services", "controller.lock")
        return RunFolder(shutil.copytree(self.folder.path, copy, ignore=ignored))

    def completed(self, copy: Path, *overrides: str) -> RunFolder:
        """Makes a run in an empty run folder; returns a copy of it, as `keep` does."""
        self.empty()
        with self.started(*overrides) as controller:
            controller.complete()
        return self.keep(copy)

    def resumed(self, before: str, after: str) -> RunFolder:
        """Makes a run that stops after step 2, and goes on in new processes, each part with an override of its own."""
        self.empty()
        with self.started(before, EACH_STEP, "run.stop_after_step=2") as first:
            first.complete()
        self.stop()
        self._groups = {role: self._start(role) for role in self._groups}
        self.wait_ready()
        with self.started(after, EACH_STEP) as second:
            second.complete()
        assert "resumed after step 2" in second.output
        return self.folder

    def started(self, *overrides: str, **options: Any) -> AbstractContextManager[Controller]:
        """Starts a controller of these groups; options as for `Controller`."""
        return started(self.config, self.folder.path, *overrides, **options)


@contextmanager
def external_groups(config: dict[str, Any], run_dir: Path, **services: Any) -> Iterator[ExternalGroups]:
    """Starts groups, and ends them afterwards."""
    groups = ExternalGroups(config, run_dir, **services)
    try:
        yield groups.wait_ready()
    finally:
        groups.stop()
