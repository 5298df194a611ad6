"""Groups that are started from outside: the controller's handshake with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from controller.workers.worker_groups import WorkerGroups
from splitppo import __version__
from splitppo.config import ConfigError
from splitppo.rpc.errors import WrongState
from splitppo.rpc.software_version import why_versions_differ
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
