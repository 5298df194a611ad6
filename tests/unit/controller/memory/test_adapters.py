"""The memory of adapters, of ranks that hold copies, and of what waits in main memory, each calculated by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, inject_adapter_in_model

from controller.memory.estimate import GroupMemory, estimate_group
from controller.memory.gpus import way_out
from controller.memory.kept import GPU_PROCESS_BYTES
from controller.memory.plan import memory_plan
from controller.memory.terms import Terms
from controller.models.shape import ModelShape, read_model_shape
from services.engine.model.loading import build_model
from splitppo.config import Config
from splitppo.config.sections.models import ActorConfig
from tests.support.engines import make_engine
from tests.support.fake_services import make_config
from tests.support.models import save_policy, save_value_model
from tests.unit.controller.memory.test_estimate import LARGE, MODEL, config, phases
from tests.unit.controller.models.test_shape import TENSORS, write_folder

GIB = 1 << 30
# MODEL with linear layers: in each of two layers one of 8 to 8 and one of 8 to 16 numbers.
LINEAR = {
    f"model.layers.{layer}.{name}": (out, 8) for layer in (0, 1) for name, out in (("o_proj", 8), ("up_proj", 16))
}
WITH_LINEAR = ModelShape(**{**vars(MODEL), "linear_shapes": LINEAR})
ADAPTERS = 2 * 2 * (16 + 24)  # of rank 2


def lora(tmp_path: Path, **changes: Any) -> Config:
    return config(tmp_path, actor__lora_rank=2, **changes)


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"target_modules": ("q_proj", "down_proj")},
        {"target_modules": r".*layers\.1\..*_proj"},
        {"exclude_modules": ("mlp.gate_proj", "k_proj")},
        {"exclude_modules": r".*self_attn.*"},
    ],
)
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_adapters_have_the_weights_that_peft_makes(tmp_path: Path, kind: Any, chosen: dict[str, Any]) -> None:
    save = save_policy if kind == "policy" else save_value_model
    folder, trained = str(save(tmp_path)), ActorConfig(model="m", lora_rank=3, **chosen)
    model, plain = build_model(folder, kind), read_model_shape(folder, kind, "actor.model")
    described = {name: list(of) if isinstance(of, tuple) else of for name, of in chosen.items()}
    inject_adapter_in_model(LoraConfig(r=3, **{"target_modules": "all-linear", **described}), model)
    weights = {name: weight.numel() for name, weight in model.named_parameters() if not name.startswith("score.")}
    made, head = sum(size for name, size in weights.items() if ".lora_" in name), plain.head_parameters
    shape = plain.as_trained(trained)
    assert (head > 0) == (kind == "value")
    assert (shape.num_trained, shape.num_frozen) == (made + head, plain.num_parameters - head)


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        ("policy", {"freeze": [r"\.self_attn\."]}),
        ("policy", {"freeze": ["lm_head"]}),
        ("value", {"freeze": [r"^(?!model\.layers)"]}),
        ("policy", {"freeze": ["lora_A"], "lora_rank": 3}),
        ("value", {"freeze": [r"lora_A", "score"], "lora_rank": 3, "target_modules": ["q_proj", "down_proj"]}),
    ],
)
def test_weights_that_learn_are_counted_as_in_the_engine(tmp_path: Path, kind: Any, chosen: dict[str, Any]) -> None:
    folder = save_policy(tmp_path) if "score" not in chosen["freeze"] else save_value_model(tmp_path)
    engine = make_engine(folder, kind, **chosen)
    shape = read_model_shape(str(folder), kind, "actor.model").as_trained(engine.config)
    assert 0 < shape.num_trained == engine.num_trainable_parameters < engine.num_parameters


def test_frozen_weights_stay_in_fp32_without_gradients_and_moments(tmp_path: Path) -> None:
    weights = {"model.embed_tokens.weight": 80, "model.norm.weight": 8}
    weights |= {f"model.layers.{layer}.{name}": 228 for layer in (0, 1) for name in ("self_attn.weight", "mlp.weight")}
    model = ModelShape(**{**vars(MODEL), "weights": weights})
    assert sum(weights.values()) == model.num_parameters
    whole = phases(config(tmp_path, actor__dtype="bf16"), model=model)
    terms = phases(config(tmp_path, actor__dtype="bf16", actor__freeze=["self_attn"]), model=model)
    assert terms["optimizer step"].weights == whole["optimizer step"].weights == 4 * 1000
    assert terms["optimizer step"].optimizer == 8 * (1000 - 456)
    assert terms["optimizer step"].gradients == 4 * (1000 - 456)
    upper = phases(config(tmp_path, actor__freeze=["embed", r"layers\.0"]), model=model)["backward"]
    below = phases(config(tmp_path, actor__freeze=[r"layers\.0"]), model=model)["backward"]
    assert upper.activations < below.activations  # below an embedding that learns all layers pass gradients on


def test_experts_get_no_adapter(tmp_path: Path) -> None:
    experts = {"model.layers.0.mlp.experts.0.up_proj.weight": (6, 4), "model.layers.0.mlp.gate.weight": (2, 4)}
    shape = read_model_shape(write_folder(tmp_path / "model", TENSORS | experts), "policy", "actor.model")
    assert set(shape.linear_shapes) == {"model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate_proj"}


def test_without_adapters_all_weights_are_trained(tmp_path: Path) -> None:
    assert WITH_LINEAR.as_trained(config(tmp_path).actor) is WITH_LINEAR
    assert phases(config(tmp_path), model=WITH_LINEAR) == phases(config(tmp_path))


@pytest.mark.parametrize(("dtype", "bytes_each"), [("fp32", 4), ("bf16", 2)])
def test_frozen_weights_have_the_dtype_of_the_computation_and_no_moments(
    tmp_path: Path, dtype: str, bytes_each: int
) -> None:
    terms = phases(lora(tmp_path, actor__dtype=dtype), model=WITH_LINEAR)["optimizer step"]
    assert (terms.weights, terms.optimizer) == (bytes_each * 1000 + 4 * ADAPTERS, 8 * ADAPTERS)
    assert terms.gradients == 4 * ADAPTERS


def test_a_backward_pass_through_frozen_weights_keeps_less(tmp_path: Path) -> None:
    terms = phases(lora(tmp_path), model=WITH_LINEAR)["backward"]
    # As in test_estimate, without the normalised values of both norms, and with 2 layers x rank 2 of adapters.
    layer = 10 * (64 + 4 * (16 + 24 + 64 + 4))
    last_norm, response_states = 10 * 8 * 4, 4 * 4 * 8
    inside = 4 * 10 * (16 + 48)
    assert terms.activations == 2 * layer + last_norm + response_states + inside
    assert (terms.gradients, terms.logits) == (4 * ADAPTERS, 0)
    wide = ModelShape(**{**vars(WITH_LINEAR), "vocabulary": 10_000})
    assert phases(lora(tmp_path), model=wide)["backward"].logits == 12 * 4 * 10_000, "a frozen head has no gradient"


def test_the_reference_of_an_actor_with_adapters_takes_no_memory(tmp_path: Path) -> None:
    both = {"algorithm__use_kl_in_reward": True, "critic__lora_rank": 2}
    on_actor = phases(lora(tmp_path, **both), model=WITH_LINEAR, reference=MODEL)
    assert {terms.reference for terms in on_actor.values()} == {0}
    assert on_actor["reference"].activations > 0
    on_critic = phases(lora(tmp_path, **both), "critic", model=WITH_LINEAR, reference=MODEL)
    assert {terms.reference for terms in on_critic.values()} == {4 * 1000}


def test_a_checkpoint_of_adapters_is_as_small_as_they_are(tmp_path: Path) -> None:
    def saved(**changes: Any) -> int:
        saving = estimate_group(lora(tmp_path, **changes), "actor", WITH_LINEAR).saving
        assert saving is not None
        return saving.checkpoint

    assert (saved(), saved(checkpoint__save_hf_model=True)) == (4 * ADAPTERS // 2, 4 * ADAPTERS)


def test_rows_of_a_mesh_hold_copies_and_ddp_gathers_nothing(tmp_path: Path) -> None:
    four = {"services__actor__num_processes": 4, "actor__ppo_mini_batch_size": 2}
    rows = phases(config(tmp_path, actor__fsdp_size=2, **four))["backward"]
    assert (rows.weights, rows.optimizer, rows.gathered_weights) == (4 * 500, 8 * 500, 4 * 1000)
    ddp = phases(config(tmp_path, actor__strategy="ddp", **four))
    assert (ddp["backward"].weights, ddp["optimizer step"].gradients) == (4 * 1000, 4 * 1000)
    assert {terms.gathered_weights for terms in ddp.values()} == {0}
    bf16 = phases(config(tmp_path, actor__strategy="ddp", actor__dtype="bf16", **four))
    assert bf16["backward"].gathered_weights == 2 * 1000


OFFLOAD = {"actor__param_offload": True, "actor__optimizer_offload": True, "placement__reference_param_offload": True}
ON_GPU = {"services__actor__devices": [0], "algorithm__use_kl_in_reward": True, **OFFLOAD}


def present(memory: GroupMemory) -> dict[str, set[str]]:
    """Returns the terms of models that a rank has on its device in each phase."""
    terms = ("weights", "optimizer", "reference", "reward_model")
    return {name: {term for term in terms if getattr(phase, term)} for name, phase in memory.phases.items()}


def test_what_waits_is_on_the_device_in_its_own_phase_only(tmp_path: Path) -> None:
    memory = estimate_group(config(tmp_path, **ON_GPU), "actor", MODEL, reference=MODEL)
    assert present(memory) == {
        **{key: {"weights"} for key in ("generate", "log-probs", "backward")},
        "reference": {"reference"},
        "optimizer step": {"weights", "optimizer"},
        "at rest": set(),
    }
    assert memory.offloaded == {
        "actor.param_offload": 4 * 1000,
        "actor.optimizer_offload": 8 * 1000,
        "placement.reference_param_offload": 4 * 1000,
    }
    assert memory.saving is not None
    assert (memory.saving.offloaded, memory.peak.offloaded) == (16 * 1000, 0)
    with_adapters = present(
        estimate_group(config(tmp_path, actor__lora_rank=2, **ON_GPU), "actor", WITH_LINEAR, reference=MODEL)
    )
    assert with_adapters["reference"] == {"weights"}


# Moments, and the most that a step on all weights at once takes beside them; of large models buckets of 256 MiB.
@pytest.mark.parametrize(
    ("keys", "devices", "kept", "small", "num_buckets"),
    [
        ({}, [0], 8, 0, 0),
        ({"actor__optimizer_state_dtype": "bf16"}, [0], 4, 14, 1),
        ({"actor__optimizer_offload": True}, [0], 0, 8, 2),
        ({"actor__optimizer_offload": True}, [], 0, 8, 1),
        ({"actor__optimizer_offload": True, "actor__optimizer_state_dtype": "bf16"}, [0], 0, 14, 2),
    ],
)
def test_a_step_has_buckets_of_moments_that_are_offloaded_or_in_bf16(
    tmp_path: Path, keys: dict[str, Any], devices: list[int], kept: int, small: int, num_buckets: int
) -> None:
    given = config(tmp_path, **keys, services__actor__devices=devices)
    for model, in_step in ((MODEL, small * 1000), (LARGE, num_buckets << 28)):
        memory = estimate_group(given, "actor", model)
        moments = kept * model.num_parameters
        assert memory.phases["backward"].optimizer == moments
        assert memory.phases["optimizer step"].optimizer == moments + in_step
        if not kept:
            each = 4 if "actor__optimizer_state_dtype" in keys else 8
            assert memory.offloaded == {"actor.optimizer_offload": each * model.num_parameters}


def test_vllm_gets_the_weights_before_it_has_a_kv_cache(tmp_path: Path) -> None:
    vllm = {**ON_GPU, "rollout__backend": "vllm"}
    samples = phases(config(tmp_path, **vllm), gpu_bytes=10 * GIB)["generate"]
    assert (samples.vllm, samples.weights) == (5 * GIB, 0)
    loads = phases(config(tmp_path, **vllm, rollout__vllm__kv_cache_gb=1e-9), gpu_bytes=10 * GIB)["generate"]
    assert (loads.vllm, loads.weights) == (4 * 1000 + 2 * GIB, 4 * 1000)
    stays = phases(config(tmp_path, **vllm, rollout__vllm__sleep_level=0), gpu_bytes=10 * GIB)["generate"]
    assert (stays.vllm, stays.weights) == (5 * GIB, 4 * 1000)


def test_on_a_cpu_the_copies_are_memory_of_the_same_rank(tmp_path: Path) -> None:
    memory = estimate_group(config(tmp_path, **OFFLOAD), "actor", MODEL)
    assert memory.phases["at rest"] == Terms(offloaded=12 * 1000, process=memory.peak.process)
    assert memory.phases["optimizer step"].total - memory.peak.process == (4 + 8 + 12 + 4) * 1000


@pytest.mark.parametrize(("devices", "copies"), [([0], 0), ([], 4 * 1000)])
def test_a_reward_model_in_a_group_of_its_own_rests_too(tmp_path: Path, devices: list[int], copies: int) -> None:
    judge = {"model": "rm", "param_offload": True}
    own = config(tmp_path, reward_model=judge, placement__reward_model="reward", services__reward={"devices": devices})
    memory = estimate_group(own, "reward", MODEL, reward_model=MODEL)
    assert present(memory) == {"reward": {"reward_model"}, "at rest": set()}
    assert ({terms.offloaded for terms in memory.phases.values()}, memory.saving) == ({copies}, None)
    assert memory.offloaded == {"reward_model.param_offload": 4 * 1000}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_policy(tmp_path_factory.mktemp("policy")))


def on_gpus(tmp_path: Path, model: str, **changes: Any) -> Config:
    devices = {
        "services__actor__devices": [0, 1],
        "services__actor__num_processes": 2,
        "services__critic__devices": [2],
    }
    return make_config(tmp_path / "run", **{"actor__model": model} | devices | changes)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "set actor.param_offload to false, or train adapters (actor.lora_rank)"),
        ({"actor__fsdp_size": 1}, "set actor.strategy to fsdp2 and actor.fsdp_size to -1"),
        ({"actor__strategy": "ddp"}, "set actor.strategy to fsdp2 and actor.fsdp_size to -1"),
    ],
)
def test_more_than_main_memory_holds_is_one_sentence(
    tmp_path: Path, model: str, changes: dict[str, Any], advice: str
) -> None:
    offload = on_gpus(tmp_path, model, actor__param_offload=True, **changes)
    weights = read_model_shape(model, "policy", "key").num_parameters * 4 * (2 if changes else 1)
    assert memory_plan(offload, {}, weights).misfit is None
    size = f"{weights / GIB:.1f}"
    assert memory_plan(offload, {}, weights - 1).misfit == (
        f"the ranks of this machine would keep {size} GiB in main memory ({size} by actor.param_offload), it has {size}"
        f" GiB: {advice}"
    )
    on_a_cpu = {"services__actor__devices": [], "services__critic__devices": []}
    assert memory_plan(on_gpus(tmp_path, model, actor__param_offload=True, **on_a_cpu), {}, 1).misfit is None


@pytest.mark.parametrize(
    ("changes", "bytes_each", "advice"),
    [
        ({}, 8, "set actor.optimizer_state_dtype to bf16, or train adapters (actor.lora_rank)"),
        (
            {"actor__optimizer_state_dtype": "bf16"},
            4,
            "set actor.optimizer_offload to false, or train adapters (actor.lora_rank)",
        ),
    ],
)
def test_moments_that_main_memory_cannot_hold_may_be_bf16(
    tmp_path: Path, model: str, changes: dict[str, Any], bytes_each: int, advice: str
) -> None:
    offload = on_gpus(tmp_path, model, actor__optimizer_offload=True, **changes)
    moments = read_model_shape(model, "policy", "key").num_parameters * bytes_each
    assert memory_plan(offload, {}, moments).misfit is None
    assert str(memory_plan(offload, {}, moments - 1).misfit).endswith(f" GiB: {advice}")


ONE_LONG_ROW = {"actor__gradient_checkpointing": True, "actor__ppo_micro_batch_size_per_gpu": 1}


def group(phase: str, **offloaded: int) -> GroupMemory:
    terms = {"backward": Terms(), "optimizer step": Terms(), phase: Terms(process=GPU_PROCESS_BYTES)}
    return GroupMemory("actor", 2, (0, 1), terms, offloaded=offloaded)


@pytest.mark.parametrize(
    ("phase", "term", "changes", "advice"),
    [
        ("backward", "optimizer", {}, "set actor.optimizer_offload to true"),
        ("reference", "weights", {}, "set actor.param_offload to true"),
        ("optimizer step", "optimizer", {"actor__fsdp_size": 1}, "set actor.optimizer_offload to true"),
        (
            "optimizer step",
            "gradients",
            {"actor__fsdp_size": 1},
            "set actor.strategy to fsdp2 and actor.fsdp_size to -1",
        ),
        (
            "optimizer step",
            "weights",
            {},
            "raise services.actor.num_processes, with a GPU in services.actor.devices for each, or train adapters"
            " (actor.lora_rank)",
        ),
        (
            "optimizer step",
            "weights",
            {"actor__lora_rank": 8},
            "raise services.actor.num_processes, with a GPU in services.actor.devices for each",
        ),
        (
            "backward",
            "reference",
            {"algorithm__adv_estimator": "grpo"},
            "set placement.reference_param_offload to true",
        ),
        ("backward", "activations", ONE_LONG_ROW, "raise actor.ulysses_sequence_parallel_size"),
        (
            "backward",
            "activations",
            ONE_LONG_ROW | {"actor__ulysses_sequence_parallel_size": 2},
            "lower data.max_response_length",
        ),
    ],
)
def test_advice_names_the_key_that_helps(
    tmp_path: Path, model: str, phase: str, term: str, changes: dict[str, Any], advice: str
) -> None:
    assert way_out(on_gpus(tmp_path, model, **changes), group(phase), term) == advice
