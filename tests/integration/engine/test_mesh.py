"""Four ranks on gloo hold a model in every mesh and strategy, and learn what one process learns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from services.engine import parallel
from services.engine.export import export
from services.engine.frozen_model import FrozenModel
from services.engine.model.weights import Kind
from services.engine.strategies import fsdp2
from services.engine.train_engine import TrainEngine
from services.engine.weights_digest import weights_digest
from splitppo.balance import partition
from tests.support.engines import (
    CPU,
    forward_of,
    gradients,
    loss_of,
    make_batch,
    make_engine,
    relative_error,
    silent,
    weights,
)
from tests.support.models import save_policy
from tests.support.ranks import RunRanks

BATCH = make_batch(24, num_mini_batches=2)
# Number of ranks, and keys of the model's section.
Layout = tuple[int, Mapping[str, Any]]
LAYOUTS: Mapping[str, Layout] = {
    "1x4": (4, {"fsdp_size": -1}),
    "2x2": (4, {"fsdp_size": 2}),
    "4x1": (4, {"fsdp_size": 1}),
    "ddp on 2": (2, {"strategy": "ddp"}),
    "ddp on 4": (4, {"strategy": "ddp"}),
}
TOKENS = torch.tensor([[5, 6, 7]])
KINDS: tuple[Kind, ...] = ("policy", "value")
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


def engine_of(policy: Path, kind: Kind, **settings: Any) -> TrainEngine:
    """An engine with several micro-batches in each mini-batch."""
    return make_engine(policy, kind, **{"ppo_micro_batch_size_per_gpu": 2, **settings})


def own_rows() -> np.ndarray:
    """The rows of this rank."""
    costs = (BATCH["prompts"].lengths + BATCH["responses"].lengths).astype(float)
    return partition(costs, parallel.num_ranks())[parallel.rank()]


def arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Tensors as they go from process to process."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def tensors(of: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in of.items()}


def moments(engine: TrainEngine) -> dict[str, Tensor]:
    """The whole state of the optimizer, by parameter and moment."""
    return {
        f"{name}.{moment}": parallel.full(tensor).clone()
        for name, parameter in engine.model.named_parameters()
        for moment, tensor in engine.optimizer.state[parameter].items()
    }


def learn(policy: Path, kind: Kind, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """On a rank: a gradient, an update, and a checkpoint after it."""
    engine = engine_of(policy, kind, **settings)
    batch = BATCH.take(own_rows())
    learned: dict[str, Any] = {"gradients": arrays(gradients(engine, batch))}
    learned["metrics"] = engine.update(batch, forward_of(kind), loss_of(kind), progress=silent).metrics
    learned["digest"] = engine.compute_weights_digest()
    learned["weights"], learned["moments"] = arrays(weights(engine)), arrays(moments(engine))
    learned["parameters"] = {type(parameter.data) for parameter in engine.model.parameters()}
    learned["saved"] = engine.save_checkpoint(folder, b"state", with_hf_model=True).result(60)
    return learned


Learned = Callable[[str, Kind], tuple[list[dict[str, Any]], Path]]


@pytest.fixture(scope="module")
def learned(run: RunRanks, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """Lets ranks learn in a layout, once; returns what each has learned, and the folder of their checkpoint."""

    @functools.cache
    def learn_in(layout: str, kind: Kind) -> tuple[list[dict[str, Any]], Path]:
        num_ranks, settings = LAYOUTS[layout]
        folder = tmp_path_factory.mktemp("learned") / "checkpoint"
        return run(num_ranks, learn, policy, kind, settings, folder), folder

    return learn_in


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_and_its_norm_are_those_of_one_rank(learned: Learned, policy: Path, layout: str, kind: Kind) -> None:
    alone = engine_of(policy, kind)
    expected = gradients(alone, BATCH)
    metrics = alone.update(BATCH, forward_of(kind), loss_of(kind), progress=silent).metrics
    for rank in learned(layout, kind)[0]:
        assert relative_error(tensors(rank["gradients"]), expected) <= 1e-6
        assert rank["metrics"]["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-6)
        assert relative_error(tensors(rank["weights"]), weights(alone)) <= 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_end_with_the_same_weights_and_the_same_layout_ends_so_again(
    learned: Learned, run: RunRanks, policy: Path, tmp_path: Path, layout: str
) -> None:
    num_ranks, settings = LAYOUTS[layout]
    ranks, _ = learned(layout, "policy")
    again = run(num_ranks, learn, policy, "policy", settings, tmp_path / "again")
    assert {rank["digest"] for rank in (*ranks, *again)} == {ranks[0]["digest"]}
    assert [rank["saved"] for rank in again] == [ranks[0]["digest"], *[""] * (num_ranks - 1)]


def load(policy: Path, kind: Kind, settings: Mapping[str, Any], folder: Path) -> tuple[Arrays, Arrays, bytes]:
    """On a rank: the weights, moments and state of a checkpoint."""
    engine = engine_of(policy, kind, **settings)
    state = engine.load_checkpoint(folder)
    return arrays(weights(engine)), arrays(moments(engine)), state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("saved_in", "loaded_in"),
    [
        ("2x2", "1x4"),
        ("ddp on 4", "2x2"),
        *(
            pytest.param(*each, marks=pytest.mark.extended)
            for each in (("1x4", "2x2"), ("4x1", "ddp on 2"), ("2x2", "ddp on 4"))
        ),
    ],
)
def test_a_checkpoint_moves_between_meshes_and_strategies_bit_for_bit(
    learned: Learned, run: RunRanks, policy: Path, saved_in: str, loaded_in: str, kind: Kind
) -> None:
    [saved, *_], folder = learned(saved_in, kind)
    num_ranks, settings = LAYOUTS[loaded_in]
    for loaded, loaded_moments, state in run(num_ranks, load, policy, kind, settings, folder):
        assert state == b"state"
        for actual, expected in ((loaded, saved["weights"]), (loaded_moments, saved["moments"])):
            assert actual.keys() == expected.keys()
            assert all(np.array_equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_replicas_is_exported_like_any_other(learned: Learned, tmp_path: Path, layout: str) -> None:
    [rank, *_], folder = learned(layout, "policy")
    export(folder, tmp_path / "exported")
    for made in (folder / "huggingface", tmp_path / "exported"):
        assert weights_digest(AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)) == rank["digest"]


def test_a_checkpoint_holds_every_weight_of_replicas_once(learned: Learned) -> None:
    def num_bytes(layout: str) -> int:
        return sum(file.stat().st_size for file in learned(layout, "policy")[1].glob("*.distcp"))

    # Each piece of a tensor has a header: fewer pieces, fewer bytes.
    assert num_bytes("4x1") < num_bytes("2x2") < num_bytes("1x4")
    assert num_bytes("ddp on 4") <= num_bytes("4x1")


def test_ddp_holds_plain_weights(learned: Learned) -> None:
    assert {DTensor} == learned("4x1", "policy")[0][0]["parameters"]
    assert {Tensor} == learned("ddp on 4", "policy")[0][0]["parameters"]


def learn_large(
    policy: Path, settings: Mapping[str, Any], keep_gathered_bytes: int
) -> tuple[Arrays, Arrays, np.ndarray]:
    """On a rank: gradients, published weights and logits of a model that is too large to stay gathered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp2, "KEEP_GATHERED_BYTES", keep_gathered_bytes)
        engine = engine_of(policy, "policy", **settings)
        for name, parameter in engine.model.named_parameters() if keep_gathered_bytes else ():
            parameter.requires_grad_("norm" in name)  # as with adapters: few weights are trained, and they fit
        made = gradients_of_trained(engine)
        with engine.gathered() as model, torch.no_grad():
            logits = model(TOKENS).logits.numpy()
        return made, arrays(dict(engine.whole_weights(torch.float32))), logits


def gradients_of_trained(engine: TrainEngine) -> Arrays:
    batch = BATCH.take(own_rows())
    [mini_batch, _] = engine.plan_update(batch)
    engine.accumulate_gradients(batch, mini_batch, forward_of("policy"), loss_of("policy"))
    assert len(mini_batch.micro_batches) > 1
    return arrays(
        {
            name: parallel.full(parameter.grad).clone()
            for name, parameter in engine.model.named_parameters()
            if parameter.requires_grad
        }
    )


@pytest.mark.parametrize("keep_gathered_bytes", [0, 4096], ids=["all trained", "few trained"])
@pytest.mark.parametrize("layout", ["1x4", "2x2"])
def test_a_model_too_large_to_stay_gathered_learns_the_same(
    run: RunRanks, policy: Path, layout: str, keep_gathered_bytes: int
) -> None:
    num_ranks, settings = LAYOUTS[layout]
    alone = engine_of(policy, "policy")
    expected, whole = gradients(alone, BATCH), arrays(weights(alone))
    logits = alone.model(TOKENS).logits.detach().numpy()
    for made, published, seen in run(num_ranks, learn_large, policy, settings, keep_gathered_bytes):
        assert (made.keys() == expected.keys()) == (keep_gathered_bytes == 0)
        assert relative_error(tensors(made), {name: expected[name] for name in made}) <= 1e-6
        assert all(np.array_equal(published[name], whole[name]) for name in whole)
        np.testing.assert_allclose(seen, logits, atol=1e-5)


def learn_with_frozen(policy: Path, kind: Kind, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """On a rank: whole gradients and weights of a model in which some weights of each layer, and one layer, learn not.

    The model does not stay gathered, and learns on after a checkpoint that it loads again.
    """
    settings = {"freeze": [r"\.self_attn\.", r"layers\.0\."], "gradient_checkpointing": True, **settings}
    batch = BATCH if "ulysses_sequence_parallel_size" in settings else BATCH.take(own_rows())
    facts: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp2, "KEEP_GATHERED_BYTES", 0)
        engine = engine_of(policy, kind, **settings)
        facts["gradients"] = arrays(gradients(engine, batch))
        facts["before"] = arrays(weights(engine))
        for _ in range(2):
            engine.update(batch, forward_of(kind), loss_of(kind), progress=silent)
        facts["after"] = arrays(weights(engine))
        moving = [weight for weight in engine.model.parameters() if weight.requires_grad]
        facts["is_lean"] = {*engine.optimizer.state} == {*moving}
        engine.save_checkpoint(folder, b"", with_hf_model=False).result(60)
        again = engine_of(policy, kind, **settings)
        again.load_checkpoint(folder)
        for some in (engine, again):
            some.update(batch, forward_of(kind), loss_of(kind), progress=silent)
        facts["digests"] = engine.compute_weights_digest(), again.compute_weights_digest()
    return facts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (2, {}),
        (4, {"fsdp_size": 2, "dtype": "bf16"}),
        (2, {"strategy": "ddp"}),
        (2, {"ulysses_sequence_parallel_size": 2}),
        pytest.param(2, {"strategy": "ddp", "dtype": "bf16"}, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_ranks_leave_frozen_weights_as_they_are_and_learn_the_others_as_one_rank_does(
    run: RunRanks, policy: Path, tmp_path: Path, kind: Kind, num_ranks: int, settings: Mapping[str, Any]
) -> None:
    expected = gradients(engine_of(policy, kind), BATCH)
    frozen = {name for name in expected if ".self_attn." in name or ".layers.0." in name}
    bound = 0.1 if settings.get("dtype") == "bf16" else 1e-6
    for facts in run(num_ranks, learn_with_frozen, policy, kind, settings, tmp_path / "checkpoint"):
        made = tensors(facts["gradients"])
        assert made.keys() == expected.keys() - frozen
        assert relative_error(made, {name: expected[name] for name in made}) <= bound
        for name, before in facts["before"].items():
            assert np.array_equal(facts["after"][name], before) == (name in frozen), name
        assert facts["is_lean"]
        assert len({*facts["digests"]}) == 1


def learn_in_bf16(policy: Path, settings: Mapping[str, Any]) -> tuple[Arrays, str, list[np.ndarray], np.ndarray]:
    """On a rank: gradients in bf16 and initial weights, and its rows' log-probs under a reference of the group."""
    engine = engine_of(policy, "policy", dtype="bf16", **settings)
    digest, rows = engine.compute_weights_digest(), own_rows()
    reference = FrozenModel(engine.config, device=CPU, strategy=engine.strategy)
    computed = reference.compute(BATCH.take(rows), forward_of("policy"), outputs=["log_probs"], progress=silent)
    return arrays(gradients(engine, BATCH.take(rows))), digest, computed["log_probs"].rows(), rows


@pytest.mark.parametrize("layout", ["2x2", "ddp on 2"])
def test_bf16_computes_near_fp32_on_fp32_weights_and_a_reference_is_held_like_the_policy(
    run: RunRanks, policy: Path, layout: str
) -> None:
    num_ranks, settings = LAYOUTS[layout]
    alone = engine_of(policy, "policy")
    expected = gradients(alone, BATCH)
    log_probs = alone.compute(BATCH, forward_of("policy"), outputs=["log_probs"], progress=silent)["log_probs"].rows()
    for made, digest, reference, rows in run(num_ranks, learn_in_bf16, policy, settings):
        assert digest == alone.compute_weights_digest()
        assert {array.dtype for array in made.values()} == {np.dtype(np.float32)}
        assert 1e-6 < relative_error(tensors(made), expected) <= 0.1
        for row, values in zip(rows, reference, strict=True):
            np.testing.assert_allclose(values, log_probs[row], atol=0.05)


def refuse(policy: Path) -> str:
    """On a rank: the error of a mesh that does not fit the group."""
    with pytest.raises(ValueError) as refused:
        engine_of(policy, "policy", fsdp_size=2)
    return str(refused.value)


def test_a_group_that_has_other_ranks_than_the_configuration_says_is_refused(run: RunRanks, policy: Path) -> None:
    said = "fsdp_size (2) must divide the number of ranks (3), or be -1"
    assert run(3, refuse, policy) == [said] * 3
