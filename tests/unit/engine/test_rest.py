"""Weights at rest: the device is free of them, and every result has the same bits as without rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from services.engine import parallel
from services.engine.frozen_model import FrozenModel
from services.engine.rest import Rest, values_at_rest
from splitppo.file_lock import any_lock
from tests.support.engines import CPU, forward_of, loss_of, make_batch, make_engine, silent
from tests.support.models import save_policy
from tests.support.ranks import RunRanks, rank_processes

pytestmark = pytest.mark.slow

AT_REST = {"param_offload": True, "optimizer_offload": True}
BATCH = make_batch(11, num_mini_batches=2, ppo_epochs=2)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def run_ranks() -> Iterator[RunRanks]:
    with rank_processes(3) as run:
        yield run


def num_bytes(tensors: Any) -> int:
    """The memory that tensors have on their device."""
    return sum(parallel.local(tensor.detach()).untyped_storage().nbytes() for tensor in tensors)


def test_tensors_at_rest_have_no_memory_and_wake_with_their_values() -> None:
    weight = torch.arange(12.0)
    other, view = torch.arange(3, dtype=torch.bfloat16), weight[4:8].view(2, 2).T
    expected = [tensor.clone() for tensor in (weight, other, view)]

    rest = Rest(lambda: [weight, other, view], CPU, is_on=True)

    assert num_bytes([weight, other]) == 0
    for tensor, values in zip((weight, other, view), expected, strict=True):
        assert torch.equal(values_at_rest(tensor, rest.copies), values)
    with rest.awake(), rest.awake():
        assert rest.copies == {}
        for tensor, values in zip((weight, other, view), expected, strict=True):
            assert torch.equal(tensor, values)
    assert num_bytes([weight, other]) == 0


def test_a_copy_keeps_its_memory_and_is_written_only_after_a_change() -> None:
    weight = torch.zeros(3)
    rest = Rest(lambda: [weight], CPU, is_on=True)
    (copy,) = rest.copies.values()
    with rest.awake():
        weight.fill_(5.0)  # against the rules, to see that nobody copies it
    with rest.awake():
        assert weight.tolist() == [0.0] * 3
        with rest.awake(changes=True):
            weight.fill_(7.0)
    assert [*map(id, rest.copies.values())] == [id(copy)]
    assert copy.view(torch.float32).tolist() == [7.0] * 3


def test_copies_of_many_sizes_take_little_more_memory_than_the_tensors() -> None:
    tensors = [torch.full((size,), size, dtype=torch.float32) for size in (70_000, 1, 0, 3_001, 50_000, 17, 40_000)]
    tensors += [tensors[0].to(torch.bfloat16), torch.tensor(3.0)]
    expected = [tensor.clone() for tensor in tensors]
    num_bytes_before = num_bytes(tensors)

    rest = Rest(lambda: tensors, CPU, is_on=True)

    pieces = {copy.untyped_storage().data_ptr(): copy.untyped_storage().nbytes() for copy in rest.copies.values()}
    assert sum(pieces.values()) < 1.3 * num_bytes_before
    for tensor, values in zip(tensors, expected, strict=True):
        assert torch.equal(values_at_rest(tensor, rest.copies), values)
    with rest.awake():
        assert all(torch.equal(tensor, values) for tensor, values in zip(tensors, expected, strict=True))


def test_a_block_that_fails_leaves_the_tensors_at_rest() -> None:
    weight = torch.ones(3)
    rest = Rest(lambda: [weight], CPU, is_on=True)
    with pytest.raises(ZeroDivisionError), rest.awake(changes=True):
        raise ZeroDivisionError
    assert num_bytes([weight]) == 0
    with rest.awake():
        assert weight.tolist() == [1.0] * 3


def test_without_the_key_nothing_moves() -> None:
    weight = torch.ones(3)
    rest = Rest(lambda: [weight], CPU, is_on=False)
    with rest.awake(changes=True):
        weight.fill_(2.0)
    rest.rest()
    assert rest.copies == {}
    assert weight.tolist() == [2.0] * 3


def everything(folder: Path, output: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Every command of an engine once or more on this rank: the results, and the memory on the device after each."""
    rank = parallel.rank()
    engine = make_engine(folder, ppo_epochs=2, ppo_max_token_len_per_gpu=64, **settings)
    batch = BATCH.take(range(rank, BATCH.num_rows, parallel.num_ranks()))
    forward, loss = forward_of("policy"), loss_of("policy")
    facts: dict[str, Any] = {"memory": []}

    def note(name: str, fact: Any) -> None:
        facts[name] = fact
        facts["memory"].append((name, num_bytes(engine.model.parameters())))

    note("initial", engine.compute_weights_digest())
    note("metrics", engine.update(batch, forward, loss, progress=silent).metrics)
    computed = engine.compute(batch, forward, outputs=["log_probs"], progress=silent)
    note("log_probs", computed["log_probs"].values.tolist())
    with engine.gathered() as model, torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7]])).logits.float().sum().item()
    note("logits", logits)
    kept = dict(engine.whole_weights(torch.float32))
    note("published", {name: weight.double().sum().item() for name, weight in kept.items()})
    saved = engine.save_checkpoint(output, b"state", with_hf_model=True)
    note("updated", engine.compute_weights_digest())
    note(
        "next metrics", engine.update(batch, forward, loss, progress=silent).metrics
    )  # while the save is being written
    note("next", engine.compute_weights_digest())
    note("saved", saved.result(60))
    note("extra", engine.load_checkpoint(output))
    note("loaded", engine.compute_weights_digest())
    note("replayed metrics", engine.update(batch, forward, loss, progress=silent).metrics)
    note("replayed", engine.compute_weights_digest())
    engine.load_checkpoint(None)
    note("reloaded", engine.compute_weights_digest())
    if rank == 0:
        assert facts["saved"] == facts["updated"] == facts["loaded"]
    assert facts["replayed"] == facts["next"] != facts["updated"]
    assert facts["initial"] == facts["reloaded"]
    return facts


def assert_same_without_memory(with_rest: dict[str, Any], without: dict[str, Any]) -> None:
    assert {kept for _, kept in with_rest.pop("memory")} == {0}
    assert all(kept for _, kept in without.pop("memory"))
    assert with_rest == without


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.extended), {"gradient_checkpointing": True}],
    ids=["plain", "checkpointing"],
)
def test_one_rank_has_the_same_bits_and_no_memory_at_rest(policy: Path, tmp_path: Path, settings) -> None:
    without = everything(policy, tmp_path / "without", settings)
    assert_same_without_memory(everything(policy, tmp_path / "with", {**settings, **AT_REST}), without)


@pytest.mark.parametrize(
    ("num_ranks", "dtype"),
    [
        (3, "bf16"),
        *(pytest.param(*each, marks=pytest.mark.extended) for each in [(1, "bf16"), (2, "fp32"), (2, "bf16")]),
    ],
)
def test_ranks_have_the_same_bits_and_no_memory_at_rest(
    run_ranks: RunRanks, policy: Path, tmp_path: Path, num_ranks: int, dtype: str
) -> None:
    settings = {"dtype": dtype, "gradient_checkpointing": True}
    without = run_ranks(num_ranks, everything, policy, tmp_path / "without", settings)
    with_rest = run_ranks(num_ranks, everything, policy, tmp_path / "with", {**settings, **AT_REST})
    for facts in zip(with_rest, without, strict=True):
        assert_same_without_memory(*facts)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    engine = make_engine(save_policy(tmp_path / "tied", tie_word_embeddings=True), **AT_REST)
    engine.update(make_batch(), forward_of("policy"), loss_of("policy"), progress=silent)
    with engine.weights.awake():
        assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight


def test_a_save_that_has_not_begun_to_write_gets_the_weights_of_its_time(policy: Path, tmp_path: Path) -> None:
    lock = tmp_path / "writer.lock"
    engine = make_engine(policy, writer_locks=[lock], **AT_REST)
    step = {"forward": forward_of("policy"), "loss": loss_of("policy"), "progress": silent}
    engine.update(make_batch(), **step)
    digest = engine.compute_weights_digest()
    with any_lock([lock]):
        saved = engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False)
        engine.compute(make_batch(), forward_of("policy"), outputs=["log_probs"], progress=silent)  # wakes, and rests
        assert not saved.done()
    engine.update(make_batch(), **step)
    assert saved.result(30) == digest != engine.compute_weights_digest()


def reference(folder: Path, *, param_offload: bool) -> tuple[list[float], int]:
    """Log-probs of a frozen model, computed twice, and its memory afterwards."""
    model = FrozenModel(make_engine(folder, param_offload=param_offload, dtype="bf16").config, device=CPU)
    outputs = [
        model.compute(BATCH, forward_of("policy"), outputs=["log_probs"], progress=silent)["log_probs"].values.tolist()
        for _ in range(2)
    ]
    assert outputs[0] == outputs[1]
    return outputs[0], num_bytes(model.model.parameters())


def references(folder: Path) -> None:
    """Compares a frozen model at rest with one that stays on the device."""
    at_rest, staying = (reference(folder, param_offload=param_offload) for param_offload in (True, False))
    assert at_rest[0] == staying[0]
    assert at_rest[1] == 0 < staying[1]
    dist.barrier()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_frozen_model_computes_the_same_and_rests(run_ranks: RunRanks, policy: Path, num_ranks: int) -> None:
    run_ranks(num_ranks, references, policy)
