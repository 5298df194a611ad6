"""Moments in main memory and in bf16: the bits of torch's AdamW, or right in the mean; the same after a resume."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.engine import parallel
from services.engine.model.adapters import trained_parameters
from services.engine.optimizer import MOMENTS, BucketedAdamW, divide, rounded_stochastically
from services.engine.train_engine import TrainEngine
from services.engine.weights_digest import values_digest
from splitppo.config import ActorConfig
from tests.support.engines import CPU, forward_of, loss_of, make_batch, make_engine, silent
from tests.support.models import save_policy
from tests.support.ranks import RunRanks, rank_processes
from tests.support.seeds import shifted

pytestmark = pytest.mark.slow

BATCH = make_batch(11, num_mini_batches=2, ppo_epochs=2)
SMALL = 4096  # bytes of a bucket, for 512 weights in fp32: less than most weights of the models here have
OFFLOADED, BF16 = {"optimizer_offload": True}, {"optimizer_state_dtype": "bf16"}
LORA = {"lora_rank": 2}
DDP_LORA = {"strategy": "ddp", **LORA}
NUM_RANKS = pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.extended)])
PLACES = {"bf16": BF16, "bf16-offloaded": {**BF16, **OFFLOADED}, "offloaded": OFFLOADED}
MORE_PLACES = [({}, "bf16"), ({}, "offloaded"), (DDP_LORA, "bf16"), (DDP_LORA, "bf16-offloaded")]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def run_ranks() -> Iterator[RunRanks]:
    with rank_processes(2) as run:
        yield run


def engine_of(folder: Path, settings: Mapping[str, Any]) -> TrainEngine:
    """An engine whose gradients are clipped, with small buckets."""
    engine = make_engine(folder, ppo_epochs=2, ppo_max_token_len_per_gpu=64, grad_clip=0.3, **settings)
    parameters = trained_parameters(engine.model)
    engine.optimizer = BucketedAdamW(parameters, engine.config, seed=7, device=CPU, bucket_bytes=SMALL)
    return engine


def update(engine: TrainEngine) -> float:
    rows = range(parallel.rank(), BATCH.num_rows, parallel.num_ranks())
    updated = engine.update(BATCH.take(rows), forward_of("policy"), loss_of("policy"), progress=silent)
    return updated.metrics["grad_norm"]


def state_of(engine: TrainEngine) -> tuple[str, str, set[int]]:
    """The digests of whole weights and moments, and the numbers of steps."""
    states = [engine.optimizer.state[weight] for weight in trained_parameters(engine.model).values()]
    moments = values_digest(parallel.full(state[name]).float() for state in states for name in MOMENTS)
    return engine.compute_weights_digest(), moments, {int(state["step"]) for state in states}


def after_3_updates(folder: Path, settings: Mapping[str, Any]) -> tuple[str, str, set[int]]:
    engine = engine_of(folder, settings)
    assert max(update(engine) for _ in range(3)) > engine.config.grad_clip
    return state_of(engine)


@pytest.mark.parametrize("settings", [{}, LORA, {"dtype": "bf16"}], ids=["full", "lora", "bf16"])
@NUM_RANKS
def test_moments_in_main_memory_give_the_bits_of_those_that_stay(
    run_ranks: RunRanks, policy: Path, num_ranks: int, settings: dict[str, Any]
) -> None:
    offloaded = run_ranks(num_ranks, after_3_updates, policy, {**settings, **OFFLOADED})
    assert offloaded == run_ranks(num_ranks, after_3_updates, policy, settings)
    assert len({digest for digest, _, _ in offloaded}) == 1
    assert offloaded[0][2] == {3 * 4}


def resumed(folder: Path, output: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Any]:
    """States after a checkpoint: of the engine that wrote it and went on, and of a new one that began with it."""
    states, engine = [], engine_of(folder, before)
    update(engine)
    saved = engine.save_checkpoint(output, b"", with_hf_model=False)
    update(engine)  # while the save is being written
    update(engine)
    states.append(state_of(engine))
    saved.result(60)
    engine = engine_of(folder, after)
    engine.load_checkpoint(output)
    update(engine)
    update(engine)
    return [*states, state_of(engine)]


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({}, "bf16-offloaded"),
        (DDP_LORA, "offloaded"),
        *(pytest.param(*each, marks=pytest.mark.extended) for each in MORE_PLACES),
    ],
)
@NUM_RANKS
def test_a_resumed_engine_goes_on_to_the_bit(
    run_ranks: RunRanks, policy: Path, tmp_path: Path, num_ranks: int, place: str, settings: dict[str, Any]
) -> None:
    keys = {**settings, **PLACES[place]}
    of_ranks = run_ranks(num_ranks, resumed, policy, tmp_path / "part", keys, keys)
    for went_on, resumed_state in of_ranks:
        assert went_on == resumed_state == of_ranks[0][0]


@NUM_RANKS
@pytest.mark.parametrize(("before", "after"), [({}, OFFLOADED), (OFFLOADED, {}), (BF16, {**BF16, **OFFLOADED})])
def test_moments_move_by_a_checkpoint(
    run_ranks: RunRanks, policy: Path, tmp_path: Path, num_ranks: int, before: Any, after: Any
) -> None:
    for went_on, resumed_state in run_ranks(num_ranks, resumed, policy, tmp_path / "part", before, after):
        assert went_on == resumed_state


@pytest.mark.parametrize(("before", "after"), [({}, BF16), (BF16, {})], ids=["to bf16", "to fp32"])
def test_a_checkpoint_of_the_other_dtype_is_loaded_and_rounded_to_the_nearest(
    policy: Path, tmp_path: Path, before: Any, after: Any
) -> None:
    saved, loaded = engine_of(policy, before), engine_of(policy, after)
    update(saved)
    saved.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    loaded.load_checkpoint(tmp_path / "part")
    weights = [trained_parameters(engine.model).values() for engine in (saved, loaded)]
    for old, new in zip(*weights, strict=True):
        for moment in MOMENTS:
            kept, found = saved.optimizer.state[old][moment], loaded.optimizer.state[new][moment]
            assert found.dtype == (torch.bfloat16 if after else torch.float32)
            assert torch.equal(found, kept.to(found.dtype))
    update(loaded)
    assert loaded.compute_weights_digest() != saved.compute_weights_digest()


@pytest.mark.parametrize("settings", [OFFLOADED, BF16])
def test_initial_weights_begin_with_a_new_state(policy: Path, settings: dict[str, Any]) -> None:
    engine, digests = make_engine(policy, ppo_epochs=2, **settings), []
    for _ in range(2):
        engine.load_checkpoint(None)
        update(engine)
        digests.append(state_of(engine))
    assert digests[0] == digests[1]


def parameters_of(*sizes: int) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(shifted(3))
    return {f"{size}": nn.Parameter(torch.randn(size, generator=generator)) for size in sizes}


def optimizer_of(parameters: Mapping[str, nn.Parameter], *, seed: int = 1, **keys: Any) -> BucketedAdamW:
    config = ActorConfig.model_validate({"model": "unused", "lr": 1e-2, **keys})
    return BucketedAdamW(parameters, config, seed=seed, device=CPU, bucket_bytes=SMALL)


def give_gradients(parameters: Mapping[str, nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(shifted(step))
    for weight in parameters.values():
        weight.grad = scale * torch.randn(weight.shape, generator=generator)


def test_weights_without_a_gradient_keep_their_values_and_their_step() -> None:
    sizes = (0, 1, 700, 5000, 63)
    offloaded, plain = parameters_of(*sizes), parameters_of(*sizes)
    optimizer = optimizer_of(offloaded, **OFFLOADED)
    expected = torch.optim.AdamW(plain.values(), lr=1e-2, weight_decay=0.01, fused=True)
    for step in range(6):
        for parameters in (offloaded, plain):
            give_gradients(parameters, step)
            for name in {0: ("700", "1"), 1: ("1",), 4: ("5000",)}.get(step, ()):
                parameters[name].grad = None
        optimizer.step()
        expected.step()
        for name, weight in offloaded.items():
            assert torch.equal(weight, plain[name]), (step, name)
            state, state_there = optimizer.state.get(weight, {}), expected.state.get(plain[name], {})
            assert state.keys() == state_there.keys()
            assert all(torch.equal(state[key], state_there[key]) for key in state), (step, name)


@pytest.mark.parametrize("keys", PLACES.values(), ids=PLACES)
def test_a_bucket_is_all_that_a_step_takes_on_the_device(keys: dict[str, Any]) -> None:
    parameters = parameters_of(3000, 100, 20, 511, 2, 513)
    optimizer = optimizer_of(parameters, **keys)
    give_gradients(parameters, 0)
    optimizer.step()  # makes the moments
    with LiveBytes() as live:
        optimizer.step()
    num_bytes_of_scalars = 64 * len(parameters)
    assert SMALL // 2 < live.peak <= SMALL + num_bytes_of_scalars


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            pointer, num_bytes = storage.data_ptr(), storage.nbytes()
            if pointer not in self._users and pointer in given:
                continue
            if not self._users.get(pointer):
                self._users[pointer], self._now = 0, self._now + num_bytes
            self._users[pointer] += 1
            weakref.finalize(tensor, self._drop, pointer, num_bytes)
        self.peak = max(self.peak, self._now)
        return result

    def _drop(self, pointer: int, num_bytes: int) -> None:
        self._users[pointer] -= 1
        if not self._users[pointer]:
            del self._users[pointer]
            self._now -= num_bytes


def tensors_in(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def test_buckets_hold_every_number_once_and_pieces_of_a_weight_begin_at_the_same_places() -> None:
    parameters = parameters_of(700, 1300, 0, 64, 512, 1)
    buckets = [*divide(parameters, 512)]
    assert all(0 < sum(piece.of(piece.weight).numel() for piece in bucket) <= 512 for bucket in buckets)
    for name, weight in parameters.items():
        pieces = [piece for bucket in buckets for piece in bucket if piece.name == name]
        assert [piece.numbers.start for piece in pieces] == [*range(0, weight.numel(), 512)]
        assert torch.equal(torch.cat([weight[:0], *(piece.of(weight) for piece in pieces)]), weight)


def test_rounding_is_unbiased_between_neighbours_and_repeats_with_its_seed() -> None:
    generator = torch.Generator().manual_seed(shifted(0))
    values = torch.cat([torch.randn(200, generator=generator), torch.tensor([1e-30, -3e20, 1.0 + 2**-9, -1e-38])])
    random = torch.Generator().manual_seed(shifted(5))
    draws = torch.stack([rounded_stochastically(values, random) for _ in range(4000)])
    random.manual_seed(shifted(5))
    assert torch.equal(draws[0], rounded_stochastically(values, random))
    down = (values.view(torch.int32) & -(1 << 16)).view(torch.float32)
    gap = ((down.view(torch.int32) + (1 << 16)).view(torch.float32) - down).double()
    share_up = ((draws.double() - down.double()) / gap).mean(0)
    assert set(((draws.double() - down.double()) / gap).unique().tolist()) == {0.0, 1.0}
    assert (share_up - (values.double() - down.double()) / gap).abs().max() < 0.04  # five standard deviations
    exact = torch.tensor([0.0, -0.0, 1.5, -(2.0**-130), 3e38]).bfloat16()
    assert torch.equal(rounded_stochastically(exact.float(), random), exact)


def test_squares_in_bf16_fall_when_gradients_shrink() -> None:
    moments = []
    for keys in ({}, BF16):
        parameters = parameters_of(500)
        optimizer = optimizer_of(parameters, **keys)
        for step in range(500):
            give_gradients(parameters, step, scale=1.0 if step < 50 else 1e-3)
            optimizer.step()
        moments.append(optimizer.state[parameters["500"]]["exp_avg_sq"].double().mean())
    assert float(moments[1] / moments[0]) == pytest.approx(1.0, abs=0.02)  # to the nearest: 1.5


def test_rounding_depends_on_the_seed_and_on_the_step() -> None:
    found = []
    for seed in (1, 2, 1):
        parameters = parameters_of(100)
        optimizer = optimizer_of(parameters, seed=seed, **BF16)
        for _ in range(2):
            give_gradients(parameters, 0)
            optimizer.step()
        found.append(optimizer.state[parameters["100"]]["exp_avg"].clone())
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
