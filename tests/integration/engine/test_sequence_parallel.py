"""Neighbouring ranks that divide the positions of their rows compute, and learn, what one process does."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.actor.losses.actor_loss import actor_loss
from services.engine import parallel
from services.engine.batching.mini_batches import MiniBatch
from services.engine.frozen_model import FrozenModel
from services.engine.model.forward import policy_forward, reward_forward
from services.engine.model.weights import Kind
from services.engine.strategies import fsdp2
from services.engine.train_engine import TokenLoss, TrainEngine
from splitppo.balance import partition
from splitppo.batch import Batch, Column
from splitppo.config.sections.models import ActorConfig, ComputedModelConfig
from splitppo.config.sections.teacher import TeacherConfig
from splitppo.config.subsections.policy_loss import LOSS_MODES
from tests.support.adapters import OPTIONS, save_adapter
from tests.support.architectures import ARCHITECTURES, save_architecture
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
    with_old_log_probs,
    with_policy_loss,
)
from tests.support.models import VOCABULARY, save_policy, save_reward_model, save_value_model
from tests.support.ranks import RunRanks
from tests.support.seeds import shifted

BATCH = make_batch(24, num_mini_batches=2)
KINDS: tuple[Kind, ...] = ("policy", "value")
OUTPUTS: Mapping[Kind, list[str]] = {"policy": ["log_probs", "entropy"], "value": ["values"]}
SIZE = "ulysses_sequence_parallel_size"
Arrays = dict[str, np.ndarray]

LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "2 together": (2, {SIZE: 2}),
    "2 times 2": (4, {SIZE: 2, "gradient_checkpointing": "selective"}),
    "4 together": (4, {SIZE: 4, "gradient_checkpointing": True}),
    "in a mesh": (4, {SIZE: 2, "fsdp_size": 2, "gradient_checkpointing": True}),
    "ddp": (4, {SIZE: 2, "strategy": "ddp"}),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


def rows_of_group(batch: Batch, together: int) -> np.ndarray:
    """The rows of this rank, which its sequence group of `together` ranks has, too."""
    costs = (batch["prompts"].lengths + batch["responses"].lengths).astype(float)
    return partition(costs, parallel.num_ranks() // together)[parallel.rank() // together]


def own_rows(engine: TrainEngine, batch: Batch = BATCH) -> np.ndarray:
    return rows_of_group(batch, engine.config.ulysses_sequence_parallel_size)


def engine_of(policy: Path, kind: Kind, **settings: Any) -> TrainEngine:
    """An engine with several micro-batches in each mini-batch."""
    return make_engine(policy, kind, **{"ppo_max_token_len_per_gpu": 32, **settings})


def arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def tensors(of: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in of.items()}


def computed(engine: TrainEngine, batch: Batch) -> dict[str, list[np.ndarray]]:
    columns = engine.compute(batch, forward_of(engine.kind), outputs=OUTPUTS[engine.kind], progress=silent)
    return {name: column.rows() for name, column in columns.items()}


def near(found: dict[str, list[np.ndarray]], rows: np.ndarray, expected: dict[str, list[np.ndarray]]) -> None:
    """Asserts that outputs of rows are those of a whole batch, within 1e-5 nats."""
    for name, values in found.items():
        for row, own in zip(rows, values, strict=True):
            np.testing.assert_allclose(own, expected[name][row], atol=1e-5, rtol=0.0)


def learn(policy: Path, kind: Kind, settings: Mapping[str, Any], micro_batches: int) -> dict[str, Any]:
    """On a rank: outputs, a gradient, and an update."""
    engine = engine_of(policy, kind, **settings)
    rows = own_rows(engine)
    batch = BATCH.take(rows)
    mini_batches: list[MiniBatch] = engine.plan_update(batch)
    assert all(len(mini_batch.micro_batches) >= micro_batches for mini_batch in mini_batches)
    learned: dict[str, Any] = {"rows": rows, "outputs": computed(engine, batch)}
    learned["tokens"] = [mini_batch.num_tokens for mini_batch in mini_batches]
    learned["gradients"] = arrays(gradients(engine, batch))
    learned["metrics"] = engine.update(batch, forward_of(kind), loss_of(kind), progress=silent).metrics
    learned["digest"], learned["weights"] = engine.compute_weights_digest(), arrays(weights(engine))
    return learned


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout",
    [pytest.param("2 together", marks=pytest.mark.extended), *(name for name in LAYOUTS if name != "2 together")],
)
def test_outputs_gradients_and_metrics_are_those_of_one_rank(
    run: RunRanks, policy: Path, layout: str, kind: Kind
) -> None:
    num_ranks, settings = LAYOUTS[layout]
    alone = engine_of(policy, kind)
    tokens = [mini_batch.num_tokens for mini_batch in alone.plan_update(BATCH)]
    outputs, expected = computed(alone, BATCH), gradients(alone, BATCH)
    metrics = alone.update(BATCH, forward_of(kind), loss_of(kind), progress=silent).metrics
    of_ranks = {f"tokens_rank_{name}" for name in ("min", "mean", "max")}
    ranks = run(num_ranks, learn, policy, kind, settings, 2)
    for rank in ranks:
        near(rank["outputs"], rank["rows"], outputs)
        assert rank["tokens"] == tokens
        assert relative_error(tensors(rank["gradients"]), expected) <= 1e-6
        assert relative_error(tensors(rank["weights"]), weights(alone)) <= 1e-3
        for name in metrics.keys() - of_ranks:
            assert rank["metrics"][name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-6), name
        assert rank["metrics"]["tokens_rank_mean"] == metrics["tokens_rank_mean"] / num_ranks
    assert len({rank["digest"] for rank in ranks}) == 1


def learn_architectures(models: Path, settings: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """On a rank: outputs and gradient of a policy of each architecture."""
    made = {}
    for name in ARCHITECTURES:
        engine = make_engine(models / name, **settings)
        rows = own_rows(engine)
        made[name] = rows, computed(engine, BATCH.take(rows)), arrays(gradients(engine, BATCH.take(rows)))
    return made


@pytest.fixture(scope="module")
def architectures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("architectures")
    for name in ARCHITECTURES:
        save_architecture(name, folder / name)
    return folder


@functools.cache
def alone_with(folder: Path) -> tuple[dict[str, list[np.ndarray]], dict[str, Tensor]]:
    engine = make_engine(folder)
    return computed(engine, BATCH), gradients(engine, BATCH)


@pytest.mark.parametrize("together", [pytest.param(2, marks=pytest.mark.extended), 4])
def test_every_architecture_learns_the_same_with_fewer_key_value_heads_than_ranks_and_windows(
    run: RunRanks, architectures: Path, together: int
) -> None:
    ranks = run(together, learn_architectures, architectures, {SIZE: together})
    for name in ARCHITECTURES:
        outputs, expected = alone_with(architectures / name)
        for rows, found, made in (rank[name] for rank in ranks):
            near(found, rows, outputs)
            assert relative_error(tensors(made), expected) <= 1e-6, name


def every_loss() -> Iterator[tuple[str, Batch, TokenLoss]]:
    """Every policy loss, and that of a teacher's most likely tokens, with the batch that it reads."""
    for loss_mode in LOSS_MODES:
        yield (loss_mode, *with_policy_loss(with_old_log_probs(BATCH), loss_mode))
    teacher = TeacherConfig.model_validate({"model": "unused", "signal": "top_k", "top_k": 3, "coef": 0.5})
    rng, lengths = np.random.default_rng(shifted(2)), BATCH["responses"].lengths
    ids = np.concatenate([rng.permutation(len(VOCABULARY))[:3] for _ in range(int(lengths.sum()))])
    log_probs = rng.normal(-3.0, 0.5, len(ids)).astype(np.float32)
    columns = {
        "teacher_top_ids": Column(ids.astype(np.int32), lengths * np.int32(3)),
        "teacher_top_log_probs": Column(log_probs, lengths * np.int32(3)),
        "teacher_log_probs": Column(log_probs[::3].copy(), lengths),
    }
    loss = actor_loss(ActorConfig.model_validate({"model": "unused"}), teacher)
    yield "teacher", with_old_log_probs(BATCH).merge(Batch(BATCH.num_rows, columns)), loss


def learn_by_every_loss(policy: Path, settings: Mapping[str, Any]) -> dict[str, Arrays]:
    """On a rank: the gradient of every loss, of one micro-batch: many small ones add up other roundings."""
    engine = make_engine(policy, **settings)
    rows = own_rows(engine)
    return {name: arrays(gradients(engine, batch.take(rows), loss)) for name, batch, loss in every_loss()}


def test_every_loss_has_the_same_gradient(run: RunRanks, policy: Path) -> None:
    alone = make_engine(policy)
    ranks = run(4, learn_by_every_loss, policy, {SIZE: 2})
    for name, batch, loss in every_loss():
        expected = gradients(alone, batch, loss)
        for made in ranks:
            assert relative_error(tensors(made[name]), expected) <= 1e-6, name


def learn_adapters(policy: Path, kind: Kind, options: Mapping[str, Any], settings: Mapping[str, Any]) -> Arrays:
    """On a rank: the gradient of adapters."""
    engine = engine_of(policy, kind, **options, **settings)
    return arrays(gradients(engine, BATCH.take(own_rows(engine))))


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_in_a_mesh_with_checkpointing_have_the_same_gradient(
    run: RunRanks, policy: Path, tmp_path: Path, kind: Kind
) -> None:
    base = policy if kind == "policy" else save_value_model(tmp_path / "value")
    options = {**OPTIONS, "lora_adapter_path": str(save_adapter(tmp_path / "adapter", base, kind))}
    expected = gradients(engine_of(base, kind, **options), BATCH)
    mesh = {SIZE: 2, "fsdp_size": 2, "gradient_checkpointing": True}
    for made in run(4, learn_adapters, base, kind, options, mesh):
        assert relative_error(tensors(made), expected) <= 1e-6


def learn_large(policy: Path, settings: Mapping[str, Any]) -> Arrays:
    """On a rank: the gradient of a model that is too large to stay gathered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp2, "KEEP_GATHERED_BYTES", 0)
        engine = engine_of(policy, "policy", **{SIZE: 2, **settings})
        return arrays(gradients(engine, BATCH.take(own_rows(engine))))


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [({}, 0.0, 1e-6), ({"dtype": "bf16"}, 1e-6, 0.1), ({"dtype": "bf16", "strategy": "ddp"}, 1e-6, 0.1)],
)
def test_large_models_learn_the_same_and_in_bf16_nearly(
    run: RunRanks, policy: Path, settings: Mapping[str, Any], least: float, most: float
) -> None:
    expected = gradients(engine_of(policy, "policy"), BATCH)
    for made in run(4, learn_large, policy, settings):
        assert least < relative_error(tensors(made), expected) <= most


def learn_from_few_rows(policy: Path, kind: Kind, rows: int) -> Arrays:
    """On a rank: a gradient of fewer rows than there are groups, or than there are ranks."""
    engine = engine_of(policy, kind, **{SIZE: 2})
    few = BATCH.take(np.arange(rows))
    share = np.arange(parallel.rank() // 2, rows, parallel.num_ranks() // 2)
    return arrays(gradients(engine, few.take(share)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_group_without_rows_takes_part(run: RunRanks, policy: Path, kind: Kind, rows: int) -> None:
    expected = gradients(engine_of(policy, kind), BATCH.take(np.arange(rows)))
    for made in run(4, learn_from_few_rows, policy, kind, rows):
        assert relative_error(tensors(made), expected) <= 1e-6


def rows_without_much_to_learn() -> Batch:
    """Responses of no token, of one, and of several of which none or the last counts; one row has two positions."""
    rng, prompts, counts = (
        np.random.default_rng(shifted(3)),
        (4, 1, 3, 7, 2, 9),
        ("", "1", "0", "00000", "111111", "0" * 11 + "1"),
    )
    return Batch.from_rows(
        prompts=[rng.integers(3, 50, length) for length in prompts],
        responses=[rng.integers(3, 50, len(of_row)) for of_row in counts],
        response_mask=[np.array([count == "1" for count in of_row], np.bool_) for of_row in counts],
        advantages=[rng.normal(size=len(of_row)) for of_row in counts],
        returns=[rng.normal(size=len(of_row)) for of_row in counts],
    )


def learn_from_little(
    policy: Path, kind: Kind, together: int
) -> tuple[np.ndarray, dict[str, list[np.ndarray]], Arrays]:
    """On a rank: outputs of such rows and their gradient, after an update on rows in which no token counts."""
    engine, batch = engine_of(policy, kind, **{SIZE: together}), rows_without_much_to_learn()
    before = engine.compute_weights_digest()
    engine.update(batch.take(np.array([0, 2, 3])), forward_of(kind), loss_of(kind), progress=silent)
    assert engine.compute_weights_digest() == before
    rows = own_rows(engine, batch)
    return rows, computed(engine, batch.take(rows)), arrays(gradients(engine, batch.take(rows)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [pytest.param(2, marks=pytest.mark.extended), 4])
def test_rows_with_few_tokens_or_none_that_count(run: RunRanks, policy: Path, kind: Kind, together: int) -> None:
    alone, batch = engine_of(policy, kind), rows_without_much_to_learn()
    outputs, expected = computed(alone, batch), gradients(alone, batch)
    for rows, found, made in run(4, learn_from_little, policy, kind, together):
        near(found, rows, outputs)
        assert relative_error(tensors(made), expected) <= 1e-6


def last_token_apart(batch: Batch) -> Batch:
    """Rows as a reward model gets them: their last token is the response."""
    prompts = [[*prompt, *response][:-1] for prompt, response in zip(*tokens_of(batch), strict=True)]
    last = [[*prompt, *response][-1:] for prompt, response in zip(*tokens_of(batch), strict=True)]
    return Batch.from_rows(prompts=prompts, responses=last)


def tokens_of(batch: Batch) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return batch["prompts"].rows(), batch["responses"].rows()


LONG = BATCH.take(np.flatnonzero(BATCH["prompts"].lengths > 1))


def frozen_outputs(folders: Mapping[str, Path], **of_group: Any) -> dict[str, Column]:
    """A reward model's scores, and the most likely tokens of a policy, of the rows of this rank."""
    group = of_group.get("sequence_group")
    together = 1 if group is None else group.size()
    batch = LONG.take(rows_of_group(LONG, together))
    configs = {name: ComputedModelConfig(model=str(folder)) for name, folder in folders.items()}
    reward = FrozenModel(configs["reward"], kind="reward", device=CPU, **of_group)
    teacher = FrozenModel(configs["policy"], device=CPU, **of_group)
    likely = policy_forward(0.7, top_k=3, num_ids=len(VOCABULARY))
    return {
        **reward.compute(last_token_apart(batch), reward_forward, outputs=["scores"], progress=silent),
        **teacher.compute(batch, likely, outputs=["top_log_probs", "top_ids"], progress=silent),
    }


def frozen_beside(folders: Mapping[str, Path], together: int) -> tuple[np.ndarray, dict[str, list[np.ndarray]]]:
    """On a rank: the outputs of frozen models in the group of a policy."""
    engine = engine_of(folders["policy"], "policy", **{SIZE: together})
    found = frozen_outputs(folders, strategy=engine.strategy, sequence_group=engine.sequence_group)
    return rows_of_group(LONG, together), {name: column.rows() for name, column in found.items()}


def test_frozen_models_of_the_group_compute_the_same(run: RunRanks, policy: Path, tmp_path: Path) -> None:
    folders = {"policy": policy, "reward": save_reward_model(tmp_path / "reward")}
    expected = {name: column.rows() for name, column in frozen_outputs(folders).items()}
    for together in (2, 4):
        for rows, found in run(4, frozen_beside, folders, together):
            ids = found.pop("top_ids")
            near(found, rows, expected)
            for row, own in zip(rows, ids, strict=True):
                assert np.array_equal(own, expected["top_ids"][row])


def refuse(policy: Path, settings: Mapping[str, Any]) -> str:
    """On a rank: the error of a model that the ranks cannot compute together."""
    with pytest.raises(ValueError) as refused:
        engine_of(policy, "policy", **settings)
    return str(refused.value)


@pytest.mark.parametrize(
    ("num_ranks", "settings", "sentence"),
    [
        (3, {SIZE: 3}, f"{SIZE} (3) must divide the 4 attention heads of {{policy}}: 1, 2 or 4"),
        (2, {SIZE: 2, "use_remove_padding": False}, f"{SIZE} (2) needs packed rows, and those of Qwen2ForCausalLM are"),
        (4, {SIZE: 4, "fsdp_size": 2}, f"{SIZE} (4) must divide 2 ranks"),
    ],
)
def test_what_ranks_cannot_compute_together_is_one_sentence(
    run: RunRanks, policy: Path, num_ranks: int, settings: Mapping[str, Any], sentence: str
) -> None:
    for said in run(num_ranks, refuse, policy, settings):
        assert said.startswith(sentence.format(policy=policy))
