"""Adapters: gradients on any ranks, the base untouched, merged weights and files as peft has them, exact resumes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from services.engine import export, parallel
from services.engine.exchange import PublishedWeights, Publisher
from services.engine.frozen_model import FrozenModel
from services.engine.model.adapters import adapters_off, base_parameters, trained_parameters
from services.engine.model.loading import build_model
from services.engine.shards import read_entries
from services.engine.train_engine import TrainEngine
from splitppo.balance import partition
from splitppo.batch import Batch
from splitppo.manifest import DamagedCheckpoint
from tests.support.adapters import OPTIONS, save_adapter
from tests.support.disks import fill, mounted
from tests.support.engines import (
    CPU,
    forward_of,
    gradients,
    loss_of,
    make_batch,
    make_engine,
    relative_error,
    silent,
)
from tests.support.models import save_policy, save_value_model
from tests.support.ranks import RunRanks, rank_processes

pytestmark = pytest.mark.slow

BATCH = make_batch()
KINDS = ("policy", "value")
OUTPUTS = {"policy": "log_probs", "value": "values"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a value model, and an adapter of random A and B for each, made by peft."""
    folder = tmp_path_factory.mktemp("models")
    save_policy(folder / "policy")
    save_value_model(folder / "value")
    for kind in KINDS:
        save_adapter(folder / f"{kind}_adapter", folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def ranks() -> Iterator[RunRanks]:
    with rank_processes(4) as run:
        yield run


def engine_of(models: Path, kind: str = "policy", **settings: Any) -> TrainEngine:
    """An engine whose adapters are those that peft has made."""
    options = {**OPTIONS, "lora_adapter_path": str(models / f"{kind}_adapter"), **settings}
    return make_engine(models / kind, kind, **options)


def step(engine: TrainEngine, batch: Batch = BATCH) -> dict[str, float]:
    return engine.update(batch, forward_of(engine.kind), loss_of(engine.kind), progress=silent).metrics


def computed(engine: TrainEngine | FrozenModel, kind: str = "policy", batch: Batch = BATCH) -> np.ndarray:
    name = OUTPUTS[kind]
    return engine.compute(batch, forward_of(kind), outputs=[name], progress=silent)[name].values


def own_rows() -> Batch:
    """This rank's rows of the batch."""
    lengths = (BATCH["prompts"].lengths + BATCH["responses"].lengths).astype(float)
    return BATCH.take(partition(lengths, parallel.num_ranks())[parallel.rank()])


def of_peft(models: Path, adapter: Path, kind: str = "policy", dtype: torch.dtype = torch.float32) -> Any:
    from peft import PeftModel

    auto = {"policy": AutoModelForCausalLM, "value": AutoModelForTokenClassification}[kind]
    return PeftModel.from_pretrained(auto.from_pretrained(models / kind, dtype=dtype), adapter).eval()


@torch.no_grad()
def outputs_of_peft(model: Any, kind: str) -> np.ndarray:
    """What `computed` returns, row by row."""
    found = []
    for prompt, response in zip(BATCH["prompts"].rows(), BATCH["responses"].rows(), strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, response])[None].astype(np.int64))
        logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float()
        if kind == "policy":
            chosen = torch.from_numpy(response.astype(np.int64))[:, None]
            logits = (logits / 0.7).log_softmax(-1).gather(-1, chosen)
        found.append(logits[:, 0].numpy() if len(response) else np.empty(0, np.float32))
    return np.concatenate(found)


# Numbers.


def gradients_on_rank(models: Path, kind: str, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    return gradients(engine_of(models, kind, **layout), own_rows())


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [(2, {}), pytest.param(4, {}, marks=pytest.mark.extended), (4, {"fsdp_size": 2}), (2, {"strategy": "ddp"})],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_does_not_depend_on_the_ranks(
    models: Path, ranks: RunRanks, kind: str, num_ranks: int, layout: dict[str, Any]
) -> None:
    expected = gradients(engine_of(models, kind), BATCH)
    assert all(gradient.norm() > 0.0 for gradient in expected.values())
    for found in ranks(num_ranks, gradients_on_rank, models, kind, layout):
        assert relative_error(found, expected) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_no_gradient(models: Path, kind: str) -> None:
    expected = gradients(engine_of(models, kind), BATCH)
    found = gradients(engine_of(models, kind, gradient_checkpointing=True), BATCH)
    assert relative_error(found, expected) <= 1e-6


@pytest.mark.promise("adapters")
@pytest.mark.parametrize("kind", KINDS)
def test_only_adapters_and_the_value_head_are_trained(models: Path, kind: str) -> None:
    engine = make_engine(models / kind, kind, **OPTIONS)
    frozen = {name: weight.detach().clone() for name, weight in base_parameters(engine.model).items()}
    names = {*trained_parameters(engine.model)}
    heads = {name for name in names if ".lora_" not in name}
    assert heads == ({"score.weight", "score.bias"} if kind == "value" else set())
    assert "model.layers.1.mlp.down_proj.lora_B.weight" in names
    assert engine.num_trainable_parameters == sum(
        weight.numel() for weight in trained_parameters(engine.model).values()
    )
    step(engine)
    for name, weight in base_parameters(engine.model).items():
        assert torch.equal(weight, frozen[name]) == (name not in heads), name
    assert engine.num_parameters == sum(weight.numel() for weight in frozen.values())


def test_a_new_adapter_is_a_function_of_the_seed_and_changes_nothing_at_first(models: Path) -> None:
    state = torch.get_rng_state()
    engine, again, other = (make_engine(models / "policy", seed=seed, **OPTIONS) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert engine.compute_weights_digest() == again.compute_weights_digest() != other.compute_weights_digest()
    for name, weight in trained_parameters(engine.model).items():
        assert bool(weight.any()) == name.endswith("lora_A.weight"), name
    assert computed(engine).tobytes() == computed(make_engine(models / "policy")).tobytes()
    step(engine)
    engine.load_checkpoint(None)
    assert engine.compute_weights_digest() == again.compute_weights_digest()


def on_and_off(models: Path, dtype: str) -> tuple[bytes, bytes, bytes]:
    """Log-probs of the policy, without its adapters, and of the frozen model."""
    rows, engine = own_rows(), engine_of(models, dtype=dtype)
    with adapters_off(engine.model):
        off = computed(engine, batch=rows)
    assert any(weight.requires_grad for weight in engine.model.parameters())
    on, frozen = computed(engine, batch=rows), computed(FrozenModel(engine.config, device=CPU), batch=rows)
    return on.tobytes(), off.tobytes(), frozen.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_without_its_adapters_a_policy_is_the_frozen_model(
    models: Path, ranks: RunRanks, num_ranks: int, dtype: str
) -> None:
    for on, off, frozen in ranks(num_ranks, on_and_off, models, dtype):
        assert off == frozen != on


def test_weights_and_moments_at_rest_change_nothing(models: Path, tmp_path: Path) -> None:
    plain, resting = engine_of(models), engine_of(models, param_offload=True, optimizer_offload=True)
    for engine in (plain, resting):
        step(engine)
    resting.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    resting.load_checkpoint(tmp_path / "part")
    with adapters_off(resting.model):
        assert computed(resting).tobytes() == computed(FrozenModel(plain.config, device=CPU)).tobytes()
    for (name, weight), (_, expected) in zip(*(e.whole_weights(torch.float32) for e in (resting, plain)), strict=True):
        assert torch.equal(weight, expected), name
    assert resting.compute_weights_digest() == plain.compute_weights_digest()


# Merged weights, and files of peft.


def merged_on_rank(models: Path, dtype: str) -> dict[str, torch.Tensor]:
    return dict(engine_of(models, dtype=dtype).whole_weights(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_whole_weights_are_those_that_peft_merges(models: Path, ranks: RunRanks, num_ranks: int, dtype: str) -> None:
    expected = of_peft(models, models / "policy_adapter", dtype=DTYPES[dtype]).merge_and_unload()
    for merged in ranks(num_ranks, merged_on_rank, models, dtype):
        assert merged.keys() == dict(expected.named_parameters()).keys()
        for name, weight in expected.named_parameters():
            assert torch.equal(merged[name], weight), name


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_peft_computes_the_same_here(models: Path, kind: str) -> None:
    expected = outputs_of_peft(of_peft(models, models / f"{kind}_adapter", kind), kind)
    assert np.abs(computed(engine_of(models, kind), kind) - expected).max() <= 1e-6


@pytest.mark.promise("adapters")
@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_of_a_checkpoint_computes_the_same_in_peft(models: Path, tmp_path: Path, kind: str) -> None:
    engine = make_engine(models / kind, kind, **OPTIONS)
    step(engine)
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    expected = computed(engine, kind)
    export.export(tmp_path / "part", tmp_path / "adapter", adapter=True)
    assert np.abs(outputs_of_peft(of_peft(models, tmp_path / "adapter", kind), kind) - expected).max() <= 1e-6
    again = make_engine(models / kind, kind, **{**OPTIONS, "lora_adapter_path": str(tmp_path / "adapter")})
    assert computed(again, kind).tobytes() == expected.tobytes()


def test_published_weights_are_those_of_a_model_without_adapters(models: Path, tmp_path: Path) -> None:
    engine = engine_of(models)
    digest = Publisher(tmp_path, engine.model, engine.whole_weights, torch.float32, CPU).publish("run", 1, 0, silent)
    published = PublishedWeights.open(tmp_path, 1, digest)
    published.check("run", build_model(str(models / "policy"), "policy"), torch.float32)
    merged = merged_on_rank(models, "fp32")
    assert all(torch.equal(weight, merged[name]) for name, weight in published.weights())


# Checkpoints.


def resumed_on_rank(models: Path, folder: Path) -> list[tuple[str, str]]:
    """Digests after the update that follows a save: in the engine that has saved, and in a new one."""
    digests = []
    for kind, dtype in (("policy", "fp32"), ("policy", "bf16"), ("value", "bf16")):
        settings, rows = {**OPTIONS, "dtype": dtype}, own_rows()
        engine = make_engine(models / kind, kind, **settings)
        step(engine, rows)
        saved = engine.save_checkpoint(folder / kind / dtype, b"state", with_hf_model=False)
        before = engine.compute_weights_digest()
        step(engine, rows)
        saved.result(30)
        new = make_engine(models / kind, kind, seed=7, **settings)
        assert new.load_checkpoint(folder / kind / dtype) == b"state"
        assert new.compute_weights_digest() == before
        step(new, rows)
        digests.append((engine.compute_weights_digest(), new.compute_weights_digest()))
    return digests


@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.extended)])
def test_a_resumed_engine_goes_on_bit_for_bit(models: Path, tmp_path: Path, num_ranks: int) -> None:
    with rank_processes(num_ranks) as run:  # of their own: torch's planner of checkpoints takes a process for one rank
        for digests in run(num_ranks, resumed_on_rank, models, tmp_path):
            assert [going_on for going_on, _ in digests] == [resumed for _, resumed in digests]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_what_is_trained_and_an_export_all_weights(models: Path, tmp_path: Path, kind: str) -> None:
    engine = make_engine(models / kind, kind, **OPTIONS)
    step(engine)
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=True).result(30)
    saved = {name for name in read_entries(tmp_path / "part") if name.startswith("model.")}
    assert saved == {f"model.{name}" for name in trained_parameters(engine.model)}
    export.export(tmp_path / "part", tmp_path / "export")
    expected = dict(engine.whole_weights(torch.float32))
    for folder in (tmp_path / "part" / "huggingface", tmp_path / "export"):
        found = load_file(folder / "model.safetensors")
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), name
    auto = {"policy": AutoModelForCausalLM, "value": AutoModelForTokenClassification}[kind]
    loaded = auto.from_pretrained(tmp_path / "part" / "huggingface")
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.named_parameters())


@pytest.mark.parametrize("settings", [OPTIONS, {}])
def test_a_value_model_of_a_policys_folder_is_exported_as_a_value_model(
    models: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    engine = make_engine(models / "policy", "value", **settings)
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    export.export(tmp_path / "part", tmp_path / "export")
    described = json.loads((tmp_path / "export" / "config.json").read_text())
    assert described["architectures"] == ["Qwen2ForTokenClassification"]
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == base_parameters(engine.model).keys()


def test_a_checkpoint_over_another_base_is_refused_also_by_an_export(models: Path, tmp_path: Path) -> None:
    base = save_policy(tmp_path / "base")
    make_engine(base, **OPTIONS).save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    other = make_engine(save_policy(tmp_path / "other", seed=1), **OPTIONS)
    with pytest.raises(ValueError, match=r"part was trained over another base than actor\.model holds"):
        other.check_checkpoint(tmp_path / "part")
    make_engine(models / "policy", **OPTIONS).check_checkpoint(tmp_path / "part")  # a copy of the base
    save_policy(base, seed=2)
    code = (
        "import sys; from services.engine.export import main;"
        f"sys.exit(main(['--checkpoint', {str(tmp_path / 'part')!r}, '--output', {str(tmp_path / 'export')!r}]))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
    assert f"part was trained over another base than {base} holds" in ended.stderr


@pytest.mark.parametrize(
    ("saved", "here", "sentence"),
    [
        (OPTIONS, {}, "holds adapters of rank 4, this run trains all weights"),
        ({}, OPTIONS, "holds all weights, this run trains adapters of rank 4"),
        (OPTIONS, {"lora_rank": 8}, "holds adapters of rank 4, this run trains adapters of rank 8"),
        (OPTIONS, {**OPTIONS, "target_modules": ["q_proj"]}, "is of another model: "),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(
    models: Path, tmp_path: Path, saved: dict[str, Any], here: dict[str, Any], sentence: str
) -> None:
    make_engine(models / "policy", **saved).save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    with pytest.raises(ValueError, match=f"part {sentence}"):
        make_engine(models / "policy", **here).load_checkpoint(tmp_path / "part")


def test_a_checkpoint_whose_base_is_not_named_is_damaged(models: Path, tmp_path: Path) -> None:
    engine = make_engine(models / "policy", **OPTIONS)
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    (tmp_path / "part" / "base.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"base\.json is missing"):
        engine.check_checkpoint(tmp_path / "part")
    for adapter in (False, True):
        with pytest.raises(DamagedCheckpoint, match=r"base\.json is missing"):
            export.export(tmp_path / "part", tmp_path / "export", adapter=adapter)
        assert not (tmp_path / "export").exists()


def test_a_base_that_changes_while_a_run_trains_over_it_is_noticed(tmp_path: Path) -> None:
    base = save_policy(tmp_path / "base")
    early, late = make_engine(base, **OPTIONS), make_engine(base, **OPTIONS)
    late.save_checkpoint(tmp_path / "first", b"", with_hf_model=True).result(30)
    save_policy(base, seed=2)
    with pytest.raises(ValueError, match=r"model\.safetensors has changed since this run loaded it"):
        early.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    late.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)  # it knows its base by now
    assert (tmp_path / "part" / "base.json").read_bytes() == (tmp_path / "first" / "base.json").read_bytes()
    with pytest.raises(ValueError, match="was trained over another base than"):
        late.save_checkpoint(tmp_path / "part", b"", with_hf_model=True).result(30)


def test_a_disk_that_is_full_at_the_adapter_is_an_error_of_storage(models: Path, tmp_path: Path) -> None:
    engine = make_engine(models / "policy", lora_rank=256)
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    sizes = {file: file.stat().st_size for file in (tmp_path / "part").rglob("*") if file.is_file()}
    num_bytes = sizes.pop(tmp_path / "part" / "adapter" / "adapter_model.safetensors")
    with mounted(tmp_path / "disk", "size=64m") as disk:
        fill(disk, left=sum(sizes.values()) + num_bytes // 2)
        with pytest.raises(OSError, match=r"part/adapter: .*[Nn]o space"):
            engine.save_checkpoint(disk / "part", b"", with_hf_model=False).result(30)


@pytest.mark.parametrize("content", [b"", b"torn", None])
def test_an_adapter_that_is_torn_is_not_copied(models: Path, tmp_path: Path, content: bytes | None) -> None:
    make_engine(models / "policy", **OPTIONS).save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    weights = tmp_path / "part" / "adapter" / "adapter_model.safetensors"
    weights.unlink()
    if content is not None:
        weights.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"part is torn: .*adapter_model\.safetensors"):
        export.export(tmp_path / "part", tmp_path / "adapter", adapter=True)


def test_a_shard_that_cannot_be_read_is_named_and_nothing_is_left(models: Path, tmp_path: Path) -> None:
    make_engine(models / "policy", **OPTIONS).save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    [shard] = (tmp_path / "part").glob("*.distcp")
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(DamagedCheckpoint, match=f"part is torn: {shard.name} cannot be read"):
        export.export(tmp_path / "part", tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_checkpoint_of_all_weights_has_no_adapter_to_copy(models: Path, tmp_path: Path) -> None:
    make_engine(models / "policy").save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    with pytest.raises(ValueError, match="holds all weights and no adapter: leave --adapter out"):
        export.export(tmp_path / "part", tmp_path / "adapter", adapter=True)


def test_peft_is_imported_for_adapters_only() -> None:
    code = "import services.actor.role, services.critic.role, sys; sys.exit('peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
