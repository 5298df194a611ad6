"""A rollout group on one CUDA device, with the backend that samples with a whole copy of the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.actor.role import ActorRole
from services.rollout.role import RolloutRole
from splitppo.batch import Batch
from tests.support.models import save_policy
from tests.support.roles import call, context_of, generate_request, prompts, publish, sync

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda", 0)


def sampled(rollout: RolloutRole, *, sleep_after: bool) -> Batch:
    made = call(rollout, "Generate", generate_request(sleep_after=sleep_after), prompts()).columns
    assert made is not None
    return made


def test_a_copy_that_rests_gives_its_memory_back_takes_new_weights_and_samples_the_same(tmp_path: Path) -> None:
    model = save_policy(tmp_path / "policy", hidden_size=256, intermediate_size=512)
    sections = {
        "actor": {"model": str(model)},
        "rollout": {"n": 3, "share": 0.5, "sync_dir": str(tmp_path)},
        "services": {"rollout": {}},
    }
    actor = ActorRole(replace(context_of("actor", **sections), device=DEVICE))
    rollout = RolloutRole(replace(context_of("rollout", **sections), device=DEVICE))
    manifest = publish(actor, 0)
    sync(rollout, 0, manifest)
    expected = sampled(rollout, sleep_after=False)
    awake = torch.cuda.memory_allocated(DEVICE)

    again = sampled(rollout, sleep_after=True)

    assert awake - torch.cuda.memory_allocated(DEVICE) >= 4 * rollout.num_parameters
    sync(rollout, 0, manifest)
    assert awake - torch.cuda.memory_allocated(DEVICE) >= 4 * rollout.num_parameters
    for made in (again, sampled(rollout, sleep_after=False)):
        assert made["responses"].values.tolist() == expected["responses"].values.tolist()
