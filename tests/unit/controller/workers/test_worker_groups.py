"""The controller's handshake with groups, and the reasons that groups leave behind when they end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from controller.workers.local_group import GroupFailed
from controller.workers.worker_groups import WorkerGroups
from splitppo import __version__
from splitppo.config import ConfigError
from splitppo.rpc.errors import NotIntroduced, PeerDied, Place, Unavailable, WireError, WrongState
from splitppo.rpc.software_version import why_versions_differ
from splitppo.run_folder.end_reason import write_end_reason
from splitppo.v1 import worker_pb2
from tests.support.fake_services import make_config
from tests.support.fake_worker import CALLER, Connect, FakeWorker


def older_worker() -> FakeWorker:
    """One that compares no versions, as an older one may."""
    worker = FakeWorker()
    worker.greeting.software_version = "0.0.9"
    return worker


def newer_worker() -> FakeWorker:
    """One that refuses this controller."""
    greeting = worker_pb2.HandshakeRequest(protocol_version=99, software_version=__version__)
    return FakeWorker(refusals=[WrongState(why_versions_differ("this worker", "the controller", greeting))])


@pytest.mark.parametrize(
    ("make_worker", "shown"),
    [(older_worker, "the actor at 127.0.0.1:"), (newer_worker, "actor, Handshake: the controller has version")],
    ids=["the controller refuses", "the worker refuses"],
)
async def test_another_version_ends_the_run_at_the_first_handshake_with_one_sentence(
    connect: Connect, tmp_path: Path, make_worker: Callable[[], FakeWorker], shown: str
) -> None:
    worker = make_worker()
    services = {"services__launch": "external", "algorithm__adv_estimator": "grpo"}
    config = make_config(tmp_path, **services, services__actor__address=(await connect(worker)).address)
    groups = WorkerGroups(config, tmp_path / "config.yaml", CALLER, lambda *_: None)
    try:
        with pytest.raises(ConfigError) as refused:
            await groups.connect()
    finally:
        await groups.close()
    sentence = str(refused.value)
    assert sentence.startswith(shown)
    assert sentence.endswith(": install the same version, or run the same image, on both sides")
    assert ("0.0.9" in sentence or "protocol 99" in sentence, "\n" in sentence) == (True, False)
    assert not groups.can_recover(refused.value)
    assert len(worker.requests) == 1


@pytest.mark.parametrize(
    ("learns", "shown"),
    [
        ({"lora_rank": 2}, "actor: adapters with 10 trained parameters beside a model of 1,000"),
        ({"freeze": ["embed"]}, "actor: 10 of 1,000 parameters learn, actor.freeze holds the others"),
    ],
    ids=["adapters", "frozen"],
)
async def test_the_log_says_how_many_parameters_learn(
    connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture, learns: dict[str, object], shown: str
) -> None:
    caplog.set_level(logging.INFO)
    worker = FakeWorker()
    worker.greeting.num_trainable_parameters = 10
    worker.greeting.num_parameters = 1000
    services = {"services__launch": "external", "algorithm__adv_estimator": "grpo"}
    address = (await connect(worker)).address
    learned = {f"actor__{name}": value for name, value in learns.items()}
    config = make_config(tmp_path, **services, **learned, services__actor__address=address)
    groups = WorkerGroups(config, tmp_path / "config.yaml", CALLER, lambda *_: None)
    try:
        await groups.connect()
    finally:
        await groups.close()
    assert shown in caplog.messages


INSTANCE = "this instance"
REASON = "rank 1 on two failed: torchrun has ended there; the group ends"
ACTOR = Place(role="actor", rank=0, step=4, method="SaveCheckpoint")


@pytest.fixture
async def groups(connect: Connect, tmp_path: Path) -> AsyncIterator[WorkerGroups]:
    """One group, the actor's, which the controller has met as INSTANCE."""
    worker = FakeWorker()
    worker.greeting.instance_id, worker.greeting.software_version = INSTANCE, __version__
    services = {"services__launch": "external", "algorithm__adv_estimator": "grpo"}
    config = make_config(tmp_path, **services, services__actor__address=(await connect(worker)).address)
    groups = WorkerGroups(config, tmp_path / "config.yaml", CALLER, lambda *_: None)
    await groups.connect()
    yield groups
    await groups.close()


@pytest.mark.parametrize("error", [Unavailable("failed to connect", ACTOR), NotIntroduced("who is there?", ACTOR)])
async def test_a_group_that_is_gone_when_it_is_called_has_left_its_reason(
    groups: WorkerGroups, tmp_path: Path, error: WireError
) -> None:
    assert await groups.end_reason(error) is None
    write_end_reason(tmp_path, "actor", INSTANCE, REASON)
    assert await groups.end_reason(error) == REASON


async def test_the_reason_of_another_instance_or_group_is_not_this_groups(groups: WorkerGroups, tmp_path: Path) -> None:
    write_end_reason(tmp_path, "actor", "another instance", REASON)
    assert await groups.end_reason(Unavailable("failed to connect", ACTOR)) is None
    write_end_reason(tmp_path, "actor", INSTANCE, REASON)
    assert await groups.end_reason(Unavailable("failed to connect", Place(role="critic"))) is None
    assert (
        await groups.end_reason(GroupFailed("the actor group ended at start; last lines of its log", role="actor"))
        is None
    )


async def test_a_group_that_has_answered_with_its_reason_is_not_quoted_twice(
    groups: WorkerGroups, tmp_path: Path
) -> None:
    write_end_reason(tmp_path, "actor", INSTANCE, REASON)
    assert await groups.end_reason(PeerDied(REASON, ACTOR)) is None


@dataclass
class FakeGroup:
    """One that is not asked to end, or has."""

    how: str | None

    async def how_it_ended(self) -> str | None:
        return self.how


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unavailable("the group has ended", Place(role="critic", rank=0)), "critic rank 0 was ended by SIGKILL"),
        (Unavailable("failed to connect", Place(role="critic", method="Update")), "critic rank 0 was ended by SIGKILL"),
        (Unavailable("it is starting", ACTOR), None),
        (PeerDied("a peer rank died: rank 1, pid 7", Place(role="critic")), None),
        (GroupFailed("the critic group ended at start (rank 0 was ended by SIGKILL)", role="critic"), None),
    ],
)
async def test_a_group_that_could_not_say_why_it_ends_has_the_reason_that_its_torchrun_knows(
    groups: WorkerGroups, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str | None
) -> None:
    local = {"actor": FakeGroup(None), "critic": FakeGroup("critic rank 0 was ended by SIGKILL")}
    monkeypatch.setattr(groups, "_launcher", SimpleNamespace(groups=local))
    assert await groups.end_reason(error) == reason
    monkeypatch.undo()
