"""Log-probabilities, entropies and values against float64 references that materialise all logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from services.engine.frozen_model import FrozenModel
from services.engine.model.forward import policy_forward, value_forward
from services.engine.model.log_probs import log_probs_and_entropy, most_likely_tokens
from splitppo.config import ActorConfig
from tests.support.engines import CPU, make_batch, make_engine, silent
from tests.support.models import save_policy, save_value_model
from tests.support.seeds import shifted

BATCH = make_batch(8)


def reference(hidden, weight, targets, *, temperature, bias=None, softcap=None, others=None):
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_softmax = torch.log_softmax(logits / temperature, -1)
    log_probs = log_softmax.gather(-1, targets[:, None]).squeeze(-1)
    of_others = log_softmax.gather(-1, targets.new_empty(len(targets), 0) if others is None else others)
    return log_probs, -(log_softmax.exp() * log_softmax).sum(-1), of_others


@pytest.mark.parametrize("max_logits", [1, 60, 100_000])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(("bias", "softcap"), [(False, None), (True, None), (True, 3.0)])
def test_chunked_head_equals_full_logits_in_value_and_gradient(max_logits, temperature, bias, softcap) -> None:
    generator = torch.Generator().manual_seed(shifted(3))
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(7, 5), (30, 5), (30,)]]
    targets = torch.randint(30, (7,), generator=generator)
    others = torch.randint(30, (7, 4), generator=generator)
    others[0], others[1, 0] = 3, targets[1]  # a token may be named several times, and may be the sampled one
    cotangents = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(7,), (7,), (7, 4)]]
    results = []
    for function, settings in [(log_probs_and_entropy, {"max_logits": max_logits}), (reference, {})]:
        hidden, weight, bias_V = (leaf.clone().requires_grad_() for leaf in leaves)
        names = ("bias_V", "others_NK") if settings else ("bias", "others")
        settings |= dict(zip(names, (bias_V if bias else None, others), strict=True))
        outputs = function(hidden, weight, targets, temperature=temperature, softcap=softcap, **settings)
        sum((output * cotangent).sum() for output, cotangent in zip(outputs, cotangents, strict=True)).backward()
        results.append([*outputs, hidden.grad, weight.grad, *([bias_V.grad] if bias else [])])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_gradient_of_log_probs_alone_needs_no_entropy() -> None:
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64)
    targets = torch.tensor([0, 5, 2])
    log_probs_and_entropy(hidden, weight, targets, temperature=1.0)[0].sum().backward()
    twin = hidden.detach().clone().requires_grad_()
    reference(twin, weight, targets, temperature=1.0)[0].sum().backward()
    torch.testing.assert_close(hidden.grad, twin.grad)


@pytest.mark.parametrize("max_logits", [1, 12, 100_000])
def test_gradient_of_other_tokens_alone_needs_neither_log_probs_nor_entropy(max_logits: int) -> None:
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64)
    targets, others = torch.tensor([0, 5, 2]), torch.tensor([[1, 5], [0, 4], [2, 3]])
    outputs = log_probs_and_entropy(hidden, weight, targets, temperature=0.7, others_NK=others, max_logits=max_logits)
    outputs[2].square().sum().backward()
    twin = hidden.detach().clone().requires_grad_()
    reference(twin, weight, targets, temperature=0.7, others=others)[2].square().sum().backward()
    torch.testing.assert_close(hidden.grad, twin.grad)


@pytest.mark.parametrize("max_logits", [1, 60, 100_000])
@pytest.mark.parametrize("num_ids", [30, 11])
@pytest.mark.parametrize("has_bias", [False, True])
def test_most_likely_tokens_are_those_of_the_highest_logits_among_known_ids(
    max_logits: int, num_ids: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(shifted(4))
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in [(7, 5), (30, 5), (30,)])
    logits = hidden @ weight.T + (bias if has_bias else 0.0)
    found = most_likely_tokens(hidden, weight, bias if has_bias else None, 6, num_ids, max_logits=max_logits)
    assert found.tolist() == logits[:, :num_ids].argsort(-1, descending=True)[:, :6].tolist()
    assert most_likely_tokens(hidden[:0], weight, None, 6, num_ids, max_logits=max_logits).shape == (0, 6)


def test_bf16_inputs_give_fp32_results() -> None:
    hidden, weight = torch.randn(5, 16).bfloat16(), torch.randn(40, 16).bfloat16()
    targets, others = torch.arange(5), torch.arange(10).reshape(5, 2)
    outputs = log_probs_and_entropy(hidden, weight, targets, temperature=1.0, others_NK=others, max_logits=80)
    expected_outputs = reference(hidden, weight, targets, temperature=1.0, others=others)
    for output, expected in zip(outputs, expected_outputs, strict=True):
        assert output.dtype == torch.float32
        torch.testing.assert_close(output.double(), expected, rtol=0.02, atol=0.1)


def test_the_weight_gradient_of_a_bf16_head_does_not_depend_on_chunks() -> None:
    """With equal logits d log p(0) / d logits is (1/2, -1/2); two tokens give 2^-14, which bf16 sums would lose.

    (1 + 2^-7) (1 + 2^-7) - (1 + 2^-6) = 2^-14, and the first product needs 15 bits.
    """
    hidden = torch.tensor([[1 + 2**-7], [1 + 2**-6]], dtype=torch.bfloat16)
    for max_logits in (2, 100):
        weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(2, dtype=torch.long)
        log_probs, *_ = log_probs_and_entropy(hidden, weight, targets, temperature=1.0, max_logits=max_logits)
        log_probs.backward(torch.tensor([2 * (1 + 2**-7), -2.0]))
        assert weight.grad.tolist() == [[2**-14], [-(2**-14)]]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("fp32_lm_head", "least", "largest"), [(True, 0.0, 1e-5), (False, 1e-4, 0.1)])
def test_a_bf16_policy_with_an_fp32_head_has_the_log_probs_of_a_float64_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, fp32_lm_head: bool, least: float, largest: float
) -> None:
    errors = []

    def spy(hidden, weight, targets, **settings):
        outputs = log_probs_and_entropy(hidden, weight, targets, **settings)
        for output, expected in zip(outputs, reference(hidden, weight, targets, temperature=0.8), strict=True):
            errors.extend((output.double() - expected).abs().flatten().tolist())
        assert (hidden.dtype, weight.dtype) == (torch.bfloat16, torch.bfloat16)
        return outputs

    folder = save_policy(tmp_path / "policy", tie_word_embeddings=tied)
    config = ActorConfig.model_validate({"model": str(folder), "dtype": "bf16", "fp32_lm_head": fp32_lm_head})
    frozen = FrozenModel(config, device=CPU)
    monkeypatch.setattr("services.engine.model.forward.log_probs_and_entropy", spy)
    frozen.compute(BATCH, policy_forward(0.8), outputs=["log_probs", "entropy"], progress=silent)
    assert least <= max(errors) <= largest


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_policy_outputs_equal_a_float64_model_row_by_row(tmp_path: Path, packed: bool, temperature: float) -> None:
    folder = save_policy(tmp_path / "policy")
    engine = make_engine(folder, use_remove_padding=packed, ppo_max_token_len_per_gpu=64)
    columns = engine.compute(BATCH, policy_forward(temperature), outputs=["log_probs", "entropy"], progress=silent)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    log_probs, entropies = [], []
    for prompt, response in zip(BATCH["prompts"].rows(), BATCH["responses"].rows(), strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0] / temperature
        log_softmax = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        log_probs.append(log_softmax.gather(-1, tokens[len(prompt) :, None]).squeeze(-1))
        entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
    np.testing.assert_allclose(columns["log_probs"].values, torch.cat(log_probs).numpy(), rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(columns["entropy"].values, torch.cat(entropies).numpy(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("packed", [True, False])
def test_most_likely_tokens_of_a_model_come_with_their_log_probs_at_the_temperature(
    tmp_path: Path, packed: bool
) -> None:
    folder = save_policy(tmp_path / "policy")
    engine = make_engine(folder, use_remove_padding=packed, ppo_max_token_len_per_gpu=64)
    forward = policy_forward(0.6, top_k=4, num_ids=40)
    columns = engine.compute(BATCH, forward, outputs=["top_ids", "top_log_probs"], progress=silent)
    assert columns["top_ids"].lengths.tolist() == (4 * BATCH["responses"].lengths).tolist()
    assert (columns["top_ids"].values.dtype, columns["top_log_probs"].values.dtype) == (np.int32, np.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    rows = zip(BATCH["prompts"].rows(), BATCH["responses"].rows(), strict=True)
    for row, (prompt, response) in enumerate(rows):
        tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        with torch.no_grad():
            log_softmax = torch.log_softmax(model(tokens[None]).logits[0] / 0.6, -1)[len(prompt) - 1 : -1]
        expected = log_softmax[:, :40].topk(4)
        assert columns["top_ids"].rows()[row].tolist() == expected.indices.flatten().tolist()
        found = columns["top_log_probs"].rows()[row]
        np.testing.assert_allclose(found, expected.values.flatten().numpy(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("packed", [True, False])
def test_values_are_those_of_the_state_before_each_token(tmp_path: Path, packed: bool) -> None:
    folder = save_value_model(tmp_path / "value")
    engine = make_engine(folder, "value", use_remove_padding=packed, ppo_max_token_len_per_gpu=64)
    values = engine.compute(BATCH, value_forward, outputs=["values"], progress=silent)["values"]
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float64).eval()
    for row, (prompt, response) in enumerate(zip(BATCH["prompts"].rows(), BATCH["responses"].rows(), strict=True)):
        for index in range(len(response)):
            state = torch.from_numpy(np.concatenate([prompt, response[:index]]).astype(np.int64))
            with torch.no_grad():
                expected = model(state[None]).logits[0, -1, 0].item()
            assert values.rows()[row][index] == pytest.approx(expected, rel=1e-4, abs=1e-5)
