"""What the engine runs a model for: log-probabilities of responses, or values of the states before their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from services.engine.attention import PackedCalls
from services.engine.log_probs import log_probs_and_entropy
from services.engine.packing import MicroBatch

# Runs the model; returns named [N] float32 tensors, one value per response token of the micro-batch.
Forward = Callable[[nn.Module, MicroBatch], dict[str, Tensor]]


def policy_forward(temperature: float) -> Forward:
    """Outputs "log_probs" and "entropy" of each response token; temperature divides the logits."""

    def forward(model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        log_probs, entropy = model.response_log_probs(  # type: ignore[operator]
            *_inputs(micro_batch), targets=micro_batch.targets, temperature=temperature
        )
        return {"log_probs": log_probs, "entropy": entropy}

    return forward


def value_forward() -> Forward:
    """Output "values": the value of the state before each response token."""

    def forward(model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        return {"values": model.response_values(*_inputs(micro_batch))}  # type: ignore[operator]

    return forward


def response_log_probs(
    self: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    previous: Tensor,
    cu_seq_lens: Tensor | None,
    max_length: int,
    *,
    targets: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Method of a causal language model; only response positions go through its head.

    Cohere multiplies its logits by `logit_scale`, Granite divides them by `logits_scaling`, Gemma 2 soft-caps them.
    """
    head, config = self.get_output_embeddings(), self.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return log_probs_and_entropy(
        _hidden_states(self, input_ids, position_ids, previous, cu_seq_lens, max_length),
        head.weight,
        targets,
        temperature=temperature / scale,
        bias_V=head.bias,
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def response_values(
    self: Any, input_ids: Tensor, position_ids: Tensor, previous: Tensor, cu_seq_lens: Tensor | None, max_length: int
) -> Tensor:
    """Method of a token classifier with one label; the head computes in fp32."""
    head = self.score if hasattr(self, "score") else self.classifier
    hidden_ND = _hidden_states(self, input_ids, position_ids, previous, cu_seq_lens, max_length)
    bias = None if head.bias is None else head.bias.float()
    return functional.linear(hidden_ND.float(), head.weight.float(), bias).squeeze(-1).clone()  # FSDP2 hooks no views


def _inputs(micro_batch: MicroBatch) -> tuple[Any, ...]:
    return (
        micro_batch.input_ids,
        micro_batch.position_ids,
        micro_batch.previous,
        micro_batch.cu_seq_lens,
        micro_batch.max_length,
    )


def _hidden_states(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    previous: Tensor,
    cu_seq_lens: Tensor | None,
    max_length: int,
) -> Tensor:
    """[N, D] final hidden states of the tokens before the response tokens."""
    packed: dict[str, Any] = {}
    if cu_seq_lens is not None:
        packed = {
            "cu_seq_lens_q": cu_seq_lens,
            "cu_seq_lens_k": cu_seq_lens,
            "max_length_q": max_length,
            "max_length_k": max_length,
        }
    calls = PackedCalls.count
    output = model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **packed)
    if packed and calls == PackedCalls.count:
        raise NotImplementedError(f"{type(model).__name__} cannot pack rows: set use_remove_padding to false")
    hidden: Tensor = output.last_hidden_state.flatten(0, 1)[previous]
    return hidden
