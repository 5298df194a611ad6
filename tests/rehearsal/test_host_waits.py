"""The host waits for the device where it is told here, as often as it is told here, and nowhere else.

While the host waits, it prepares no work, and the device then stands still. A new line in a table below needs a reason.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from services.actor.losses.actor_loss import actor_loss
from services.critic.losses import critic_loss
from services.engine.train_engine import TrainEngine
from services.rollout.hf_backend.backend import HfRollout
from services.rollout.protocol import Sampling
from services.rollout.stopping import StopRule
from splitppo.batch import Batch
from splitppo.config import ActorConfig
from splitppo.config.sections.models import CriticConfig
from tests.support.engines import MAX_RESPONSE, forward_of, make_batch, silent, with_old_log_probs
from tests.support.groups import PROJECT
from tests.support.models import save_policy, save_value_model
from tests.support.roles import prompts

PRETENDED = "REHEARSAL_LIBRARY" in os.environ
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not PRETENDED, reason="needs the pretended CUDA device: make rehearse-gpu"),
]
DEVICE = torch.device("cuda", 0)
TO_HOST, TO_DEVICE = "copy to the host", "copy to the device from pageable memory"
REDUCE = "services/engine/parallel.py reduce_array"
NUM_STEPS = 2
# With all columns that the losses read; what the old values are counts for nothing here.
BATCH = with_old_log_probs(make_batch(24, num_mini_batches=NUM_STEPS))
BATCH = BATCH.merge(Batch(BATCH.num_rows, {"values": BATCH["returns"]}))

# Of an update: (what the host does, where) -> how often in an update, and how often in each optimizer step.
UPDATE = {
    # Mini-batches and micro-batches are agreed on by all ranks; tokens and FLOPs of all ranks are metrics.
    (TO_DEVICE, REDUCE): (6, 0),
    (TO_HOST, REDUCE): (6, 0),
    # Metrics, once they are whole.
    (TO_HOST, "services/engine/token_metrics.py reduce_metrics"): (1, 0),
    # Whether the gradient is finite decides if there is a step.
    ("aten::_local_scalar_dense", "services/engine/parallel.py _squared_norm"): (0, 1),
}
# Memory that moments are stepped on in is used again; weights rest when they have arrived in main memory.
OFFLOADED = {
    ("synchronize a stream", "services/engine/optimizer.py BucketedAdamW.step"): (0, 2),
    ("synchronize the device", "services/engine/rest.py Rest.rest"): (1, 0),
}
# Of a forward pass over all rows, whatever their micro-batches are.
FORWARD = {
    (TO_DEVICE, REDUCE): 1,
    (TO_HOST, REDUCE): 1,
    (TO_HOST, "services/engine/inference.py compute_columns"): 1,
}
# Of one decoding step of the backend hf, for rows of different lengths.
DECODING_STEP = {
    (TO_DEVICE, "services/rollout/hf_backend/backend.py HfRollout._sample"): 1,
    # Positions, and how much of each row is padding.
    (TO_DEVICE, "services/rollout/hf_backend/decoding.py DecodedRows._on_device"): 2,
    # transformers asks whether the mask hides anything.
    ("aten::_local_scalar_dense", "services/rollout/hf_backend/decoding.py DecodedRows._forward"): 1,
    # Tokens and their log-probs: the host decides which rows have ended.
    (TO_HOST, "services/rollout/hf_backend/backend.py HfRollout._sample"): 2,
}


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"policy": save_policy(folder / "policy"), "value": save_value_model(folder / "value")}


def engine_of(models: dict[str, Path], kind: Any, max_tokens: int, **keys: Any) -> TrainEngine:
    section = ActorConfig if kind == "policy" else CriticConfig
    settings = {"model": str(models[kind]), "dtype": "bf16", "ppo_max_token_len_per_gpu": max_tokens, **keys}
    config = section.model_validate(settings)
    return TrainEngine(config, kind=kind, seed=1, max_response_length=MAX_RESPONSE, device=DEVICE)


def waits_of(run: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """The waits of a call, but for those of the first one: what is made for good, is made then."""
    from pretended_cuda.host_waits import counted

    run()
    with counted(PROJECT) as found:
        run()
    return found


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize(
    ("keys", "further"),
    [
        ({}, {}),
        ({"dtype": "fp32"}, {}),
        ({"gradient_checkpointing": True, "lora_rank": 4}, {}),
        ({"param_offload": True, "optimizer_offload": True}, OFFLOADED),
    ],
    ids=["bf16", "fp32", "lora", "offloaded"],
)
@pytest.mark.parametrize("max_tokens", [64, 256])
def test_an_update_waits_as_often_whatever_the_number_of_micro_batches(
    models: dict[str, Path], kind: Any, keys: dict[str, Any], further: dict[Any, Any], max_tokens: int
) -> None:
    engine = engine_of(models, kind, max_tokens, **keys)
    loss = actor_loss(engine.config) if kind == "policy" else critic_loss(engine.config)
    found = waits_of(lambda: engine.update(BATCH, forward_of(kind), loss, progress=silent))
    assert found == {what: once + NUM_STEPS * a_step for what, (once, a_step) in (UPDATE | further).items()}


@pytest.mark.parametrize(("kind", "output"), [("policy", "log_probs"), ("value", "values")])
@pytest.mark.parametrize("max_tokens", [64, 256])
def test_a_forward_pass_waits_as_often_whatever_the_number_of_micro_batches(
    models: dict[str, Path], kind: Any, output: str, max_tokens: int
) -> None:
    engine = engine_of(models, kind, max_tokens)
    found = waits_of(lambda: engine.compute(BATCH, forward_of(kind), outputs=[output], progress=silent))
    assert found == FORWARD


def test_a_decoding_step_waits_for_what_the_host_decides(models: dict[str, Path]) -> None:
    engine = engine_of(models, "policy", 256)
    rollout = HfRollout(engine.gathered, stop_rule=StopRule(()), max_batch_size=64, device=DEVICE)

    def sample(num_tokens: int) -> Counter[tuple[str, str]]:
        sampling = Sampling(1.0, 1.0, 0, num_tokens)
        return waits_of(lambda: [*rollout.generate(prompts(), sampling, lambda: False)])

    assert sample(5) - sample(3) == {what: 2 * times for what, times in DECODING_STEP.items()}
