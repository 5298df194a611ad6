"""Runs that several tests read, made once, and groups that many runs share."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import secure
from tests.support.external import ExternalGroups, external_groups
from tests.support.meetings import ARMED, meetings
from tests.support.runs import EACH_STEP, NUM_LONG_STEPS, NUM_STEPS, SAVED, STALE, Inputs, RunFolder

UNSTREAMED = ("rollout.stream_groups=1", "run.stop_after_step=2")
WITHOUT_TORCH = "tests.integration.runs.controller_without_torch"


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Models, prompts and reward of every run."""
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def config(inputs: Inputs) -> dict[str, Any]:
    """The configuration of every run, without its folder."""
    return inputs.config()


@pytest.fixture(scope="session")
def one_rank(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExternalGroups]:
    """One actor rank and one critic rank, behind mutual TLS and a token, for every run that needs no others."""
    folder = tmp_path_factory.mktemp("external")
    with external_groups({**config, "debug": meetings(NUM_STEPS)}, folder / "run", security=secure(folder)) as groups:
        yield groups


@pytest.fixture
def groups(one_rank: ExternalGroups) -> Iterator[ExternalGroups]:
    """`one_rank`, with an empty run folder, for one test alone."""
    one_rank.empty()
    one_rank.is_lent = True
    yield one_rank
    one_rank.is_lent = False


@pytest.fixture(scope="session")
def two_ranks(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the long runs: two actor ranks."""
    services = {**config["services"], "actor": {"num_processes": 2}}
    return {**config, "run": {"total_steps": NUM_LONG_STEPS}, "services": services}


@pytest.fixture(scope="session")
def completed(
    one_rank: ExternalGroups, two_ranks: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, int], RunFolder]]:
    """Makes undisturbed runs of all steps, by (schedule, num_actor_ranks): NUM_STEPS on one actor rank,
    NUM_LONG_STEPS on two. Only to be read: tests share them. ("gather", 1) is there; a test that has `groups` for
    itself gets no other one on one actor rank.
    """
    with ExitStack() as on_two_ranks:

        @functools.cache
        def on_two() -> ExternalGroups:
            run_dir = tmp_path_factory.mktemp("on_two_ranks") / "run"
            return on_two_ranks.enter_context(
                external_groups({**two_ranks, "debug": meetings(NUM_LONG_STEPS)}, run_dir)
            )

        @functools.cache
        def run(schedule: str, num_actor_ranks: int) -> RunFolder:
            on = one_rank if num_actor_ranks == 1 else on_two()
            assert not on.is_lent, "its run folder is another test's now"
            on.empty(armed=ARMED[schedule])
            module = WITHOUT_TORCH if (schedule, num_actor_ranks) == ("serial", 1) else "controller"
            overrides = [f"run.schedule={schedule}", "checkpoint.save_hf_model=true"]
            with on.started(*overrides, module=module) as controller:
                controller.complete()
            return on.keep(tmp_path_factory.mktemp("completed") / f"{schedule}_{num_actor_ranks}")

        run("gather", 1)
        yield run


@pytest.fixture(scope="session")
def stopped(one_rank: ExternalGroups, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run on one actor rank that was stopped after step 3, with a checkpoint of each step. Only to be copied."""
    one_rank.empty()
    with one_rank.started(EACH_STEP, f"run.stop_after_step={SAVED[-1]}") as controller:
        controller.complete()
    assert controller.folder.committed_steps == SAVED
    return one_rank.keep(tmp_path_factory.mktemp("stopped") / "run")


@pytest.fixture(scope="session")
def unstreamed(one_rank: ExternalGroups, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The first steps, without streaming. Only to be read."""
    assert not one_rank.is_lent, "its run folder is another test's now"
    one_rank.empty()
    with one_rank.started(*UNSTREAMED, "checkpoint.save_hf_model=true") as controller:
        controller.complete()
    return one_rank.keep(tmp_path_factory.mktemp("unstreamed") / "run")


@pytest.fixture(scope="session")
def stale(one_rank: ExternalGroups, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with rollouts of older weights, in which the actor samples. Only to be read."""
    assert not one_rank.is_lent, "its run folder is another test's now"
    one_rank.empty()
    with one_rank.started(*STALE, "run.schedule=serial") as controller:
        controller.complete()
    return one_rank.keep(tmp_path_factory.mktemp("stale") / "run")


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[RunFolder], RunFolder]:
    """Makes a run folder of one's own to go on in; nothing but the paths differs."""

    def copy(folder: RunFolder) -> RunFolder:
        return RunFolder(shutil.copytree(folder.path, tmp_path / folder.path.name))

    return copy
