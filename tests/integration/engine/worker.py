"""What each rank of a group does that trains tiny models; it writes the results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from services.engine import parallel
from services.engine.exchange import Publisher
from services.engine.frozen_model import FrozenModel
from services.engine.strategies import fsdp2
from services.engine.token_metrics import MetricLimit
from services.reward.role import RewardRole
from splitppo.balance import partition
from splitppo.batch import Batch
from splitppo.config.subsections.policy_loss import LOSS_MODES
from tests.support.engines import (
    CPU,
    draw_new_head,
    forward_of,
    gradients,
    keep_tokens_of,
    loss_of,
    make_batch,
    make_engine,
    silent,
    weights,
    with_old_log_probs,
    with_policy_loss,
)
from tests.support.roles import context_of, teacher_columns

# The teacher of each row, and rows of both ranks: mixed; only of one teacher, that without a response among them; none.
NUMBERS = (0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 1)
DIVISIONS = (
    ([0, 1, 2, 6, 9], [3, 4, 5, 7, 8, 10]),
    ([1, 2, 4, 7, 10, 0], [3, 5, 6, 8, 9]),
    ([], list(range(11))),
)


def main(models: Path, output: Path) -> None:
    """Computes outputs, gradients, updates and checkpoints of a policy and a value model."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    whole = make_batch(11, num_mini_batches=2, ppo_epochs=2)
    costs = (whole["prompts"].lengths + whole["responses"].lengths).astype(float)
    parts = partition(costs, num_ranks)
    rows = parts[rank]
    batch = whole.take(rows)
    facts: dict[str, object] = {}
    tensors: dict[str, object] = {}
    for kind, outputs in (("policy", ["log_probs", "entropy"]), ("value", ["values"])):
        settings = {"ppo_max_token_len_per_gpu": 64, "ppo_epochs": 2}
        forward, loss = forward_of(kind), loss_of(kind)
        engine = make_engine(models / "policy", kind, writer_locks=[output / "writer.lock"], **settings)
        facts[f"{kind}/initial_digest"] = engine.compute_weights_digest()
        computed = engine.compute(batch, forward, outputs=outputs, progress=silent)
        tensors[f"{kind}/compute/{rank}"] = {name: column.rows() for name, column in computed.items()}
        tensors[f"{kind}/gradients"] = gradients(engine, batch)
        first = batch.take([0]) if rank == 0 else batch.take([])
        tensors[f"{kind}/gradients_of_one_row"] = gradients(engine, first) if num_ranks > 1 else {}
        if kind == "policy":
            every_policy_loss(engine, whole, rows, facts, tensors)
        facts[f"{kind}/metrics"] = engine.update(batch, forward, loss, progress=silent).metrics
        saved = engine.save_checkpoint(output / kind, f"state of {kind}".encode() * (rank + 1), with_hf_model=True)
        tensors[f"{kind}/saved_weights"] = weights(engine)
        facts[f"{kind}/saved_digest"] = engine.compute_weights_digest()
        tensors[f"{kind}/saved_optimizer"] = moments(engine)
        engine.update(batch, forward, loss, progress=silent)  # in place, while the save is being written
        tensors[f"{kind}/next_weights"] = weights(engine)
        facts[f"{kind}/next_digest"] = engine.compute_weights_digest()
        saved.result(60)
        engine.load_checkpoint(None)
        draw_new_head(engine)
        facts[f"{kind}/reloaded_initial_digest"] = engine.compute_weights_digest()
        facts[f"{kind}/extra"] = engine.load_checkpoint(output / kind).decode()
        facts[f"{kind}/reloaded_digest"] = engine.compute_weights_digest()
        engine.update(batch, forward, loss, progress=silent)
        facts[f"{kind}/replayed_digest"] = engine.compute_weights_digest()
        if kind == "policy":
            facts["generated"] = generate_alone(engine, rank)
            facts["digest_after_generation"] = engine.compute_weights_digest()
            reference = FrozenModel(engine.config, device=CPU)
            tensors[f"reference/{rank}"] = reference.compute(batch, forward, outputs=outputs, progress=silent)[
                "log_probs"
            ].rows()
        sparse = keep_tokens_of(whole, int(parts[0][0])).take(rows)
        engine.load_checkpoint(None)
        draw_new_head(engine)
        facts[f"{kind}/sparse_metrics"] = engine.update(sparse, forward, loss, progress=silent).metrics
        facts[f"{kind}/sparse_digest"] = engine.compute_weights_digest()
        tensors[f"{kind}/sparse_weights"] = weights(engine)
    with pytest.MonkeyPatch.context() as patch:  # as for a model that is too large to stay gathered
        patch.setattr(fsdp2, "KEEP_GATHERED_BYTES", 0)
        large = make_engine(models / "policy", ppo_max_token_len_per_gpu=64, ppo_epochs=2)
        tensors["large/gradients"] = gradients(large, batch)
        facts["large/generated"] = generate_alone(large, rank)
        large.update(batch, forward_of("policy"), loss_of("policy"), progress=silent)
        tensors["large/weights"] = weights(large)
        bf16 = make_engine(models / "policy", dtype="bf16", ppo_max_token_len_per_gpu=64, ppo_epochs=2)
        tensors["bf16/gradients"] = gradients(bf16, batch)
        computed = bf16.compute(batch, forward_of("policy"), outputs=["log_probs"], progress=silent)["log_probs"]
        tensors[f"bf16/{rank}"] = computed.rows()
        facts["bf16/initial_digest"] = bf16.compute_weights_digest()
        publisher = Publisher(output / "weights", bf16.model, bf16.whole_weights, torch.bfloat16, CPU)
        publisher.publish("run", 0, 0, silent)
        if rank == 0:
            publisher.save_hf_model(0, {}, models / "policy", output / "bf16")
        reference = FrozenModel(bf16.config, device=CPU)
        computed = reference.compute(batch, forward_of("policy"), outputs=["log_probs"], progress=silent)["log_probs"]
        tensors[f"bf16_reference/{rank}"] = computed.rows()
    tensors["taught"] = taught(models, whole, rank)
    facts["rows"] = rows.tolist()
    torch.save(tensors, output / f"tensors_{rank}.pt")
    (output / f"facts_{rank}.json").write_text(json.dumps(facts))


def taught(models: Path, whole: Batch, rank: int) -> list[dict[str, list[np.ndarray]]]:
    """The columns that this rank computes for its rows in each division of them, in a group with two teachers."""
    role, batch, found = teachers(models), with_teachers(whole), []
    for parts in DIVISIONS:
        columns = teacher_columns(role, batch.take(np.array(parts[rank], np.int64)), is_of_rank=True)
        found.append({name: column.rows() for name, column in columns.columns.items()})
    return found


def teachers(models: Path) -> RewardRole:
    """A group that hosts two teachers and nothing else."""
    section = {"model": str(models / "policy"), "models": {"b": str(models / "second")}, "signal": "top_k", "top_k": 3}
    actor = {"model": str(models / "policy")}
    return RewardRole(context_of("reward", actor=actor, teacher=section, placement={"teacher": "reward"}))


def with_teachers(batch: Batch) -> Batch:
    """The rows with the numbers of their teachers."""
    return batch.merge(Batch.from_rows(teachers=[[number] for number in NUMBERS]))


def every_policy_loss(engine, whole, rows, facts: dict[str, object], tensors: dict[str, object]) -> None:
    """Gradients by each of them, and an update that ends early; no weight is changed."""
    for loss_mode in LOSS_MODES:
        prepared, loss = with_policy_loss(with_old_log_probs(whole), loss_mode, ppo_epochs=2)
        tensors[f"gradients_by/{loss_mode}"] = gradients(engine, prepared.take(rows), loss)
    still = make_engine(Path(engine.config.model), ppo_max_token_len_per_gpu=64, ppo_epochs=2, lr=0.0, weight_decay=0.0)
    forward, loss = forward_of("policy"), loss_of("policy")
    mean = still.update(whole.take(rows), forward, loss, progress=silent).metrics["nll"]  # of both mini-batches
    limit = MetricLimit("nll", mean)
    facts["stopped"] = still.update(whole.take(rows), forward, loss, progress=silent, stop_above=limit).metrics


def moments(engine) -> dict[str, torch.Tensor]:
    """Whole optimizer state by parameter and moment."""
    return {
        f"{name}.{moment}": parallel.full(tensor).clone()
        for name, parameter in engine.model.named_parameters()
        for moment, tensor in engine.optimizer.state[parameter].items()
    }


def generate_alone(engine, rank: int) -> list[int]:
    """Greedy tokens; each rank decodes another number of them, which would hang if weights were gathered per call."""
    with engine.gathered() as model, torch.no_grad():
        tokens = model.generate(
            torch.tensor([[5, 6, 7]]),
            attention_mask=torch.ones(1, 3, dtype=torch.long),
            min_new_tokens=4 + 3 * rank,
            max_new_tokens=4 + 3 * rank,
            do_sample=False,
        )
    return tokens[0, :7].tolist()
