"""What a rank sets for its process group and its GPU, shown without either."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from services.actor import rank as actor_rank
from services.critic import rank as critic_rank
from services.rollout import rank as rollout_rank
from services.runtime.group.process_group import Launch, join_group, use_expandable_segments
from services.runtime.ranks.row_group import RowGroup
from splitppo.config.section import RoleName
from tests.support.engines import CPU
from tests.support.roles import context_of

ACTOR = {"model": "some/model"}
ALONE = Launch(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node=0,
    restart="0",
    store_host="127.0.0.1",
    store_port=0,
    hosts_store=True,
)


@pytest.fixture
def group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    join_group(ALONE, HashStore(), "actor", context_of("actor", actor=ACTOR).config, CPU)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_what_nccl_does_after_an_error_is_left_to_torch() -> None:
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


@pytest.mark.usefixtures("group_of_one")
def test_groups_of_rows_must_divide_all_ranks() -> None:
    with pytest.raises(ValueError, match="2 ranks each share their rows: expected a divisor of 1 ranks"):
        RowGroup(0, 2)


@pytest.fixture(autouse=True)
def without_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


ROLLOUT_GROUP = {"rollout": {"num_processes": 1}}
ENGINE_OF_TWO = {"rollout": {"backend": "vllm", "vllm": {"tensor_model_parallel_size": 2}}}
TWO_RANKS = {"num_processes": 2}


@pytest.mark.parametrize(
    ("role", "sections", "grows"),
    [
        ("actor", {}, True),
        ("critic", {}, True),
        ("actor", {"rollout": {"backend": "vllm"}}, True),
        ("actor", {**ENGINE_OF_TWO, "services": {"actor": TWO_RANKS}}, False),
        ("critic", {**ENGINE_OF_TWO, "services": {"actor": TWO_RANKS}}, True),
        ("actor", {**ENGINE_OF_TWO, "services": {"actor": TWO_RANKS, "rollout": TWO_RANKS}}, True),
        ("rollout", {"services": ROLLOUT_GROUP}, False),
    ],
)
def test_memory_grows_where_micro_batches_have_ever_other_shapes(
    role: RoleName, sections: dict[str, Any], grows: bool
) -> None:
    program = {"actor": actor_rank, "critic": critic_rank, "rollout": rollout_rank}[role].PROGRAM
    assert program.memory_grows(context_of(role, actor=ACTOR, **sections).config) == grows


@pytest.mark.parametrize("name", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_has_told_the_allocator_holds(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    told = list[str]()
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    if name:
        monkeypatch.setenv(name, "max_split_size_mb:512")
    use_expandable_segments()
    assert told == ([] if name else ["expandable_segments:True"])
