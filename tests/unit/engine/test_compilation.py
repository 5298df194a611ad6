"""With `compile` layers and head are computed by code that is made at the start, for all lengths, and proved."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from services.actor.losses.actor_loss import actor_loss
from services.engine.compilation import compile_model
from services.engine.forward_proof import prove_forward
from services.engine.inference import micro_batch_limits
from services.engine.model.adapters import adapters_off
from services.engine.model.compiled import compile_layers
from services.engine.model.weights import Kind
from services.engine.strategies.fsdp2 import decoder_layers
from services.engine.strategies.registry import build_strategy
from services.engine.train_engine import TokenLoss, TrainEngine
from splitppo.batch import Batch
from splitppo.config import ActorConfig, ComputedModelConfig
from tests.support.engines import (
    CPU,
    forward_of,
    gradients,
    load_model,
    loss_of,
    make_batch,
    make_engine,
    relative_error,
    silent,
    with_old_log_probs,
)
from tests.support.models import save_policy, save_value_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]
OUTPUTS = {"policy": "log_probs", "value": "values"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_policy(folder / "policy")
    save_value_model(folder / "value")
    return folder


@pytest.fixture(autouse=True)
def _code_of_its_own() -> Iterator[None]:
    """A test begins without compiled code, as a process does; the files of inductor's cache stay."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def outputs_of(engine: TrainEngine, batch: Batch) -> np.ndarray[Any, Any]:
    name = OUTPUTS[engine.kind]
    return engine.compute(batch, forward_of(engine.kind), outputs=(name,), progress=silent)[name].values


def num_calls(computes: Callable[[], object]) -> int:
    """Returns how often compiled code is called."""
    with torch.profiler.profile() as profile:
        computes()
    return sum(event.name.startswith("Torch-Compiled Region") for event in profile.events())


def calls_of_a_gradient(engine: TrainEngine, batch: Batch, loss: TokenLoss | None = None) -> float:
    """Returns how often a micro-batch of an update calls compiled code."""
    [mini_batch] = engine.plan_update(batch)
    return num_calls(lambda: gradients(engine, batch, loss)) / len(mini_batch.micro_batches)


def check_same(with_code: TrainEngine, without: TrainEngine) -> None:
    """Compares an engine with compiled code to one without it, in gradients and outputs, for rows of all lengths."""
    calls = set()
    for num_rows in (2, 9, 60):  # one row with a response; the last are more than 512 tokens
        batch = make_batch(num_rows, seed=num_rows)
        assert relative_error(gradients(with_code, batch), gradients(without, batch)) < 1e-5
        np.testing.assert_allclose(outputs_of(with_code, batch), outputs_of(without, batch), rtol=0, atol=1e-5)
        calls.add(calls_of_a_gradient(with_code, batch))
    [num_calls_of_each] = calls
    assert num_calls_of_each >= 4  # in each of the layers, and in the head of a policy


def pair_of(folder: Path, kind: Kind = "policy", **settings: Any) -> tuple[TrainEngine, TrainEngine]:
    """Starts an engine with compiled code, and one without it."""
    with_code, without = (make_engine(folder / kind, kind, compile=switch, **settings) for switch in (True, False))
    return with_code, without


def test_one_code_computes_the_same_in_packed_rows_of_all_lengths_whatever_the_loss_takes(models: Path) -> None:
    with_code, without = pair_of(models, ppo_max_token_len_per_gpu=2048)
    check_same(with_code, without)
    batch = with_old_log_probs(make_batch())
    log_probs_alone = actor_loss(ActorConfig.model_validate({"model": "unused"}))
    assert calls_of_a_gradient(with_code, batch, log_probs_alone) == calls_of_a_gradient(with_code, batch)
    with torch.no_grad(), with_code.gathered() as model:
        assert not num_calls(lambda: model(input_ids=torch.tensor([[3, 4, 5]])))  # generation


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_compiled_code_computes_the_same_in_padded_rows(models: Path, kind: Kind, checkpointing: Any) -> None:
    check_same(*pair_of(models, kind, use_remove_padding=False, gradient_checkpointing=checkpointing))


@pytest.mark.extended
@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_compiled_code_computes_the_same_where_activations_are_computed_again(models: Path, checkpointing: Any) -> None:
    check_same(*pair_of(models, gradient_checkpointing=checkpointing))


@pytest.mark.extended
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_code_trains_adapters_and_computes_without_them(models: Path, checkpointing: bool) -> None:
    settings = {"lora_rank": 4, "gradient_checkpointing": checkpointing}
    engine, without = pair_of(models, **settings)
    check_same(engine, without)
    whole = make_engine(models / "policy", compile=True)
    with adapters_off(engine.model):
        np.testing.assert_array_equal(outputs_of(engine, make_batch()), outputs_of(whole, make_batch()))


def updated(folder: Path, lengths_before: list[int]) -> str:
    """Starts an engine, computes rows of other lengths, then updates; returns the digest of the weights."""
    torch.compiler.reset()
    engine = make_engine(folder, compile=True)
    for num_rows in lengths_before:
        outputs_of(engine, make_batch(num_rows, seed=num_rows))
        gradients(engine, make_batch(num_rows, seed=num_rows))
    engine.update(with_old_log_probs(make_batch()), forward_of("policy"), loss_of("policy"), progress=silent)
    return engine.compute_weights_digest()


@pytest.mark.extended
def test_the_weights_after_an_update_do_not_depend_on_what_the_process_has_computed_before(models: Path) -> None:
    assert updated(models / "policy", []) == updated(models / "policy", [40, 2, 3])


class Otherwise(nn.Module):
    """An MLP that compiled code computes otherwise, as a compiler's fault would."""

    def __init__(self, mlp: nn.Module, *, only_gradient: bool) -> None:
        super().__init__()
        self.mlp, self.only_gradient = mlp, only_gradient

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.mlp(hidden)
        if not torch.compiler.is_compiling():
            return output
        return output.detach() if self.only_gradient else output * 1.5


def model_with_a_fault(folder: Path, *, only_gradient: bool) -> tuple[Any, dict[str, Any]]:
    model = load_model(str(folder))
    config = ComputedModelConfig(model=str(folder))
    for layer in model.model.layers:
        layer.mlp = Otherwise(layer.mlp, only_gradient=only_gradient)
    limits = micro_batch_limits(config, model, None, CPU)
    return model, {"strategy": build_strategy(CPU), "limits": limits, "device": CPU, "dtype": "fp32"}


def test_code_that_computes_other_numbers_is_refused(models: Path) -> None:
    model, facts = model_with_a_fault(models / "policy", only_gradient=False)
    compile_model(model, "policy", "a model", **facts)
    prove_forward(model, "policy", "a model", **facts)
    with pytest.raises(ValueError, match=r"^a model: .* in packed rows: compiled, the log-probs are not those of the"):
        prove_forward(model, "policy", "a model", is_compiled=True, **facts)


@pytest.mark.extended
def test_code_with_another_gradient_is_refused(models: Path) -> None:
    model, facts = model_with_a_fault(models / "policy", only_gradient=True)
    with pytest.raises(ValueError, match=r"^a model: compile: the gradient of compiled code differs by 0\.\d+ of its"):
        compile_model(model, "policy", "a model", is_trained=True, **facts)


def test_no_compiler_is_one_sentence(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    no_compiler = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    sentence = r"policy: compile: .*: the C\+\+ compiler 'no-such-compiler' cannot be run$"
    with no_compiler, pytest.raises(ValueError, match=sentence) as error:
        make_engine(models / "policy", compile=True)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_what_a_compiler_lacks_is_one_sentence(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(
        "#!/bin/sh\n"
        "[ $1 = --version ] && { echo g++ 12.2.0; exit; }\n"
        "echo 'a.cpp:1: fatal error: Python.h: No such file' >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    lacking = torch._inductor.config.patch({"cpp.cxx": (str(compiler),)})
    with (
        lacking,
        pytest.raises(ValueError, match=r"policy: compile: .*: fatal error: Python.h: No such file$") as error,
    ):
        make_engine(models / "policy", compile=True)
    assert "\n" not in str(error.value)


def test_layers_of_a_class_share_their_code(models: Path) -> None:
    model = load_model(str(models / "policy"))
    compile_layers(model, decoder_layers(model))
    assert len({layer.forward.__func__ for layer in decoder_layers(model)}) == 1
