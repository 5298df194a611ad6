"""Runs forward passes of models on micro-batches: log-probs of response tokens, values of states, reward scores."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from services.engine.batching.packing import MicroBatch
from services.engine.model.attention import PackedCalls
from services.engine.model.log_probs import log_probs_and_entropy

# The method that every model gets; FSDP gathers weights for it as for `forward`.
RESPONSE_METHOD = "compute_responses"

# Runs the model; returns named [N] float32 tensors, one value per response token of the micro-batch.
Forward = Callable[[nn.Module, MicroBatch], dict[str, Tensor]]


def policy_forward(temperature: float) -> Forward:
    """Returns a function that computes "log_probs" and "entropy" of each response token from logits / temperature."""

    def forward(model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        log_probs, entropy = model.compute_responses(micro_batch, temperature)  # type: ignore[operator]
        return {"log_probs": log_probs, "entropy": entropy}

    return forward


def value_forward(model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
    """Runs the value model; returns as "values" the value of the state before each response token, [N]."""
    return {"values": model.compute_responses(micro_batch)}  # type: ignore[operator]


def reward_forward(model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
    """Runs the reward model; returns as "scores" the score of each row, whose response is its last token alone."""
    return {"scores": model.compute_responses(micro_batch)}  # type: ignore[operator]


def response_log_probs(self: Any, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Computes (log-probs, entropies) of response tokens, each [N]; becomes a method of each causal language model.

    Only response positions go through the head. Cohere multiplies its logits by `logit_scale`, Granite divides them by
    `logits_scaling`, Gemma 2 soft-caps them.
    """
    head, config = self.get_output_embeddings(), self.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return log_probs_and_entropy(
        _hidden_states(self, micro_batch, micro_batch.previous),
        head.weight,
        micro_batch.targets,
        temperature=temperature / scale,
        bias_V=head.bias,
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def response_values(self: Any, micro_batch: MicroBatch) -> Tensor:
    """Computes values of response tokens, [N], with an fp32 head; becomes a method of each value model."""
    head = self.score if hasattr(self, "score") else self.classifier
    return _scalars(head, _hidden_states(self, micro_batch, micro_batch.previous))


def response_scores(self: Any, micro_batch: MicroBatch) -> Tensor:
    """Computes the score at each response token, [N] fp32; becomes a method of each reward model."""
    return _scalars(self.score, _hidden_states(self, micro_batch, micro_batch.previous + 1))


def _scalars(head: Any, hidden_ND: Tensor) -> Tensor:
    bias = None if head.bias is None else head.bias.float()
    return functional.linear(hidden_ND.float(), head.weight.float(), bias).squeeze(-1).clone()  # FSDP2 hooks no views


def _hidden_states(model: Any, micro_batch: MicroBatch, positions: Tensor) -> Tensor:
    """Runs the model without its head; returns final hidden states at `positions` of the flattened batch, [N, D]."""
    packed: dict[str, Any] = {}
    if micro_batch.cu_seq_lens is not None:
        for of in "qk":
            packed |= {f"cu_seq_lens_{of}": micro_batch.cu_seq_lens, f"max_length_{of}": micro_batch.max_length}
    calls = PackedCalls.count
    output = model.base_model(
        input_ids=micro_batch.input_ids, position_ids=micro_batch.position_ids, use_cache=False, **packed
    )
    if packed and calls == PackedCalls.count:
        raise NotImplementedError(f"{type(model).__name__} cannot pack rows: set use_remove_padding to false")
    hidden: Tensor = output.last_hidden_state.flatten(0, 1)[positions]
    return hidden
