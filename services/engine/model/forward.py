"""Runs forward passes of models on micro-batches: log-probs of response tokens, values of states, reward scores."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from services.engine.batching.packing import MicroBatch
from services.engine.model.attention import PackedCalls
from services.engine.model.linear import Fp32Head, fp32_product
from services.engine.model.log_probs import log_probs_and_entropy, most_likely_tokens
from services.engine.model.sequence_parallel import gather
from services.engine.model.vision import given_images

# The method that every model gets; FSDP gathers weights for it as for `forward`.
RESPONSE_METHOD = "compute_responses"

# Runs the model; returns named tensors, one value per response token of the micro-batch ([N] float32) or several.
Forward = Callable[[nn.Module, MicroBatch], dict[str, Tensor]]


def policy_forward(temperature: float, *, top_k: int = 0, num_ids: int = 0) -> Forward:
    """Returns a function that computes "log_probs" and "entropy" of each response token from logits / temperature.

    It also computes "top_log_probs" [N, K]: log-probs of the tokens that the column `teacher_top_ids` names, or with
    `top_k` of the K most likely tokens whose ids are less than `num_ids`; these are then "top_ids".
    """

    def forward(model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = model.compute_responses(micro_batch, temperature, top_k, num_ids)  # type: ignore[operator]
        return outputs

    return forward


def value_forward(model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
    """Runs the value model; returns as "values" the value of the state before each response token, [N]."""
    return {"values": model.compute_responses(micro_batch)}  # type: ignore[operator]


def reward_forward(model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
    """Runs the reward model; returns as "scores" the score of each row, whose response is its last token alone."""
    return {"scores": model.compute_responses(micro_batch)}  # type: ignore[operator]


def response_log_probs(
    self: Any, micro_batch: MicroBatch, temperature: float, top_k: int, num_ids: int
) -> dict[str, Tensor]:
    """Computes the outputs of `policy_forward`; becomes a method of each causal language model.

    Only response positions go through the head, in a sequence group only this rank's. Cohere multiplies its logits by
    `logit_scale`, Falcon H1 by `lm_head_multiplier`, Granite divides them by `logits_scaling`, Gemma soft-caps them.
    """
    head = self.get_output_embeddings()
    config = self.config.get_text_config()
    scale = _factor(config, "logit_scale") * _factor(config, "lm_head_multiplier") / _factor(config, "logits_scaling")
    product = fp32_product if isinstance(head, Fp32Head) else functional.linear
    hidden_ND, own = _hidden_states(self, micro_batch)
    top_ids_NK = micro_batch.tokens.columns.get("teacher_top_ids")
    if top_ids_NK is not None:
        top_ids_NK = top_ids_NK[own]
    if top_k:
        top_ids_NK = most_likely_tokens(hidden_ND, head.weight, head.bias, top_k, num_ids, product)
    log_probs_N, entropy_N, top_log_probs_NK = log_probs_and_entropy(
        hidden_ND,
        head.weight,
        micro_batch.targets[own],
        temperature=temperature / scale,
        bias_V=head.bias,
        softcap=getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None),
        others_NK=top_ids_NK,
        product=product,
        is_compiled=getattr(self, "has_compiled_head", False),
    )
    outputs = {"log_probs": log_probs_N, "entropy": entropy_N}
    if top_ids_NK is not None:
        outputs |= {"top_log_probs": top_log_probs_NK, "top_ids": top_ids_NK}
    return {name: _of_all_ranks(values, micro_batch, own) for name, values in outputs.items()}


def _factor(config: Any, name: str) -> float:
    """Returns a factor of a model's logits that its config may have; 1 if it has none."""
    return getattr(config, name, None) or 1.0


def response_values(self: Any, micro_batch: MicroBatch) -> Tensor:
    """Computes values of response tokens, [N], with an fp32 head; becomes a method of each value model."""
    head = self.score if hasattr(self, "score") else self.classifier
    return _scalars(self, head, micro_batch)


def response_scores(self: Any, micro_batch: MicroBatch) -> Tensor:
    """Computes the score at each response token, [N] fp32; becomes a method of each reward model."""
    return _scalars(self, self.score, micro_batch, shift=1)


def _scalars(model: Any, head: Any, micro_batch: MicroBatch, *, shift: int = 0) -> Tensor:
    """Computes one number for each response token (a value, or a score) with a linear head in fp32, [N].

    A token's number comes from the hidden states `shift` after the token before it.
    """
    hidden_ND, own = _hidden_states(model, micro_batch, shift=shift)
    bias = None if head.bias is None else head.bias.float()
    scalars_N = functional.linear(hidden_ND.float(), head.weight.float(), bias).squeeze(-1)
    return _of_all_ranks(scalars_N.clone(), micro_batch, own)  # FSDP2 hooks no views


def _of_all_ranks(values: Tensor, micro_batch: MicroBatch, own: slice) -> Tensor:
    """Returns the values of all response tokens, [N, ...], from those of this rank's."""
    if micro_batch.own is None:
        return values
    return gather(values, own, len(micro_batch.targets), micro_batch.own.group)


def _hidden_states(model: Any, micro_batch: MicroBatch, *, shift: int = 0) -> tuple[Tensor, slice]:
    """Runs the model without its head; returns final hidden states `shift` after the token before response tokens.

    They are [N, D] and, in a sequence group, only those of this rank's response tokens, which the slice names.
    """
    packed: dict[str, Any] = {}
    positions = micro_batch.previous + shift
    own = slice(None)
    if micro_batch.own is not None:
        own = micro_batch.own.tokens(shift)
        positions = positions[own] - micro_batch.own.first
        packed["sequence_group"] = micro_batch.own.group
    if micro_batch.cu_seq_lens is not None:
        for of in "qk":
            packed |= {f"cu_seq_lens_{of}": micro_batch.cu_seq_lens, f"max_length_{of}": micro_batch.max_length}
    if micro_batch.padded_rows is not None:
        packed["padded_rows"] = micro_batch.padded_rows
    calls = PackedCalls.count
    with given_images(model, micro_batch.images, micro_batch.input_ids.shape) as with_images:
        output = model.base_model(
            input_ids=micro_batch.input_ids,
            position_ids=micro_batch.position_ids,
            use_cache=False,
            **with_images,
            **packed,
        )
    if packed and calls == PackedCalls.count:
        raise NotImplementedError(f"{type(model).__name__} cannot pack rows: set use_remove_padding to false")
    return output.last_hidden_state.flatten(0, 1)[positions], own
