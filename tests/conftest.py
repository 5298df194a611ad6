"""Rules for every test: if the environment variable CI is set, a test that is skipped has failed.

A skip looks like success, so that a machine on which nothing can run would be green. What may be skipped there is
listed here, by test and by reason. Without the data sets no test is run there at all. Tests that start processes have
the mark `slow` by their folder.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from splitppo.machine.heavy_imports import heavy_imports
from tests.support import datasets

TESTS = Path(__file__).parent

# (start of the node id, start of the reason): nobody is told of these.
MAY_BE_SKIPPED_IN_CI = (
    # A container may be allowed to mount file systems and yet not to make networks.
    ("tests/integration/runs/test_dropped_network.py::", "network namespaces "),
    ("tests/integration/runs/test_two_hosts.py::", "network namespaces "),
    # Where no engine can be had; .ci/run lists it.
    ("tests/deployment/", "no deployment here: "),
    ("tests/slurm/", "no Slurm here: "),
    # On pretended GPUs, which have no compiler of kernels.
    ("tests/gpu/", "torch.compile needs Triton"),
)

# One worker runs them, so that groups which take half a minute each, and runs on them, are made once.
ON_ONE_WORKER = {
    "tests/integration/runs/": "bad_luck code doctor dropped_network dynamic_sampling external judge max_restarts "
    "partial_rollouts placement rank_counts record recovery refusals resume rollout_group schedules shares staleness "
    "two_hosts validation",
    "tests/vllm/": "conversations engine rollout_group",
}

# Folders of tests whose kind is to compute and no more; a file of theirs that takes seconds has the mark `slow` itself.
FAST = ("golden", "property", "style", "unit")

# A busy machine fails no property; with CI set, Hypothesis has a profile of its own that is like this one.
settings.register_profile("patient", deadline=None)

_SKIPPED = pytest.StashKey[dict[str, str]]()
_DESELECTED = pytest.StashKey[Counter[str]]()
# Marks of tests that a target of make leaves out, and what runs them.
RUN_BY = {
    "extended": "make test-slow, or name their files",
    "docker": "make test-deploy, or name their files",
    "vllm": "VLLM=1",
    "gpu": "pytest -m gpu on a GPU, make rehearse-gpu without",
}


def is_ci() -> bool:
    """Returns True in a run that somebody relies on without looking."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def pytest_configure(config: pytest.Config) -> None:
    if not is_ci():
        settings.load_profile("patient")
    elif reason := datasets.absence():
        raise pytest.UsageError(reason)
    config.stash[_SKIPPED] = {}
    config.stash[_DESELECTED] = Counter()
    config.pluginmanager.register(_Skips(config.stash[_SKIPPED]), "skips")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """All tests of a file come to one worker, and so do those of the files of a folder in `ON_ONE_WORKER`."""
    from xdist.scheduler import LoadFileScheduling  # machines on which tests/gpu is run may lack it

    class FilesTogether(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return next((folder for folder in ON_ONE_WORKER if file in together(folder)), file)

    return FilesTogether(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is slow by its kind, before pytest chooses by marks."""
    for item in items:
        if is_slow_by_kind(item.path):
            item.add_marker("slow")


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Counts the tests that are left out, by the first of the marks `RUN_BY` that they have.

    With -k nothing is counted: its tests were chosen by their names.
    """
    for item in items:
        if item.config.option.keyword:
            return
        if mark := next((mark for mark in RUN_BY if item.get_closest_marker(mark)), None):
            item.config.stash[_DESELECTED][mark] += 1


def is_slow_by_kind(file: Path) -> bool:
    """Returns True for a file of tests that start processes."""
    return file.is_relative_to(TESTS) and file.relative_to(TESTS).parts[0] not in FAST


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Tests import what ranks do, as fast as they; later searches for garbage leave out what that has made."""
    with heavy_imports():
        return (yield)


def together(folder: str) -> list[str]:
    """Returns the files of a folder of `ON_ONE_WORKER`."""
    return [f"{folder}test_{name}.py" for name in ON_ONE_WORKER[folder].split()]


class _Skips:
    """Notes every test and every module that was skipped, or that may fail, and why."""

    def __init__(self, skipped: dict[str, str]) -> None:
        self._skipped = skipped

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if hasattr(report, "wasxfail"):
            self._skipped[report.nodeid] = f"expected to fail: {report.wasxfail}"
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._skipped[report.nodeid] = reason.removeprefix("Skipped: ")


def _not_agreed_to(config: pytest.Config) -> Iterator[tuple[str, str]]:
    for test, reason in config.stash[_SKIPPED].items():
        if not any(test.startswith(start) and reason.startswith(why) for start, why in MAY_BE_SKIPPED_IN_CI):
            yield test, reason


def pytest_sessionfinish(session: pytest.Session) -> None:
    if is_ci() and session.exitstatus == pytest.ExitCode.OK and any(_not_agreed_to(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for mark, number in sorted(config.stash[_DESELECTED].items()):
        terminalreporter.write_line(f"left out: {number} tests marked {mark} ({RUN_BY[mark]})")
    skipped = list(_not_agreed_to(config)) if is_ci() else []
    if skipped:
        terminalreporter.section("skipped, which fails in CI", red=True)
        for test, reason in skipped:
            terminalreporter.write_line(f"{test}: {reason}")
        terminalreporter.write_line(f"{len(skipped)} skipped; what may be is in tests/conftest.py", red=True)


@pytest.fixture(autouse=True)
def _logging_is_as_before() -> Iterator[None]:
    """A run in this process sets logging up; afterwards its display may be closed."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
    root.setLevel(level)
