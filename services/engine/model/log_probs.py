"""Computes log-probs and entropies of given tokens, without the fp32 logits of all tokens in memory at once.

Legend: N tokens, D hidden, V vocabulary, C tokens of a chunk, K other tokens at the same position.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.model.compiled import compiled
from services.engine.model.linear import add_product
from splitppo.machine.memory_limits import MAX_LOGITS

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def log_probs_and_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
    others_NK: Tensor | None = None,
    product: Product = functional.linear,
    max_logits: int = MAX_LOGITS,
    is_compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes for each token log p(target), the entropy of softmax(logits / temperature), and log p of other tokens.

        logits = softcap * tanh((hidden W^T + b) / softcap);   without softcap: hidden W^T + b

    Logits are made chunk by chunk along the tokens, at most `max_logits` at once, in the forward pass and again in the
    backward pass. `product` computes hidden W^T + b. With `is_compiled` the outputs of each chunk of logits, and their
    gradient, are computed by compiled code.

    Returns:
        (log_probs [N], entropy [N], log-probs of `others_NK` [N, K]; K is 0 without them), each float32 (float64 for
        float64 input), in nats.
    """
    chunk = max(1, max_logits // weight_VD.shape[0])
    if others_NK is None:
        others_NK = targets_N.new_empty(len(targets_N), 0)
    scale = _Scale(temperature, softcap, bias_V is not None)
    if is_compiled:
        scale = _as_tensors(scale, hidden_ND)
    outputs: tuple[Tensor, Tensor, Tensor] = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, bias_V, targets_N, others_NK, scale, chunk, product, is_compiled
    )
    return outputs


@torch.no_grad()
def most_likely_tokens(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    top_k: int,
    num_ids: int,
    product: Product = functional.linear,
    max_logits: int = MAX_LOGITS,
) -> Tensor:
    """Finds the `top_k` tokens of the highest logits, hidden W^T + b, among the ids below `num_ids`; [N, top_k]."""
    chunk = max(1, max_logits // weight_VD.shape[0])
    starts = range(0, max(1, len(hidden_ND)), chunk)  # without tokens there is one empty chunk
    parts = (hidden_ND[start : start + chunk] for start in starts)
    return torch.cat([product(part, weight_VD, bias_V)[:, :num_ids].float().topk(top_k).indices for part in parts])


class _ChunkedHead(torch.autograd.Function):
    """Computes `log_probs_and_entropy`; saves two numbers per token and recomputes logits in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        others_NK: Tensor,
        scale: "_Scale",
        chunk: int,
        product: Product,
        is_compiled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the outputs of `log_probs_and_entropy` chunk by chunk: logits of only `chunk` tokens are in memory.

        The inputs are saved, the entropies, and the logarithms of the sums of exponentials, with which the backward
        pass needs no sum over the vocabulary.
        """
        outputs_of_chunk = compiled(_chunk_outputs) if is_compiled else _chunk_outputs
        chunks = []
        for start in range(0, max(1, len(hidden_ND)), chunk):
            part = slice(start, start + chunk)
            product_CV = product(hidden_ND[part], weight_VD, bias_V)
            chunks.append(outputs_of_chunk(product_CV, targets_N[part], others_NK[part], scale))
        log_probs_N, entropy_N, of_others_NK, normaliser_N = map(torch.cat, zip(*chunks, strict=True))
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, others_NK, entropy_N, normaliser_N)
        ctx.scale = scale
        ctx.chunk = chunk
        ctx.product = product
        ctx.is_compiled = is_compiled
        ctx.set_materialize_grads(False)
        return log_probs_N, entropy_N, of_others_NK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Computes the gradients of hidden states, weight and bias chunk by chunk, from logits computed again.

        An output that has no part in the loss has the gradient None; compiled code gets zeros then, so that it is one
        for all cases. The gradients of weight and bias are summed up in fp32 (or wider), and rounded at the end.
        """
        grad_log_probs_N, grad_entropy_N, grad_others_NK = gradients
        hidden_ND, weight_VD, bias_V, targets_N, others_NK, entropy_N, normaliser_N = ctx.saved_tensors
        gradient_of_chunk = _chunk_gradient
        if ctx.is_compiled:
            gradient_of_chunk = compiled(_chunk_gradient)
            grad_log_probs_N, grad_entropy_N = (
                torch.zeros_like(entropy_N) if grad_N is None else grad_N.contiguous()
                for grad_N in (grad_log_probs_N, grad_entropy_N)
            )
        # The target is one more token at its position, so its gradient is a case of K = 1.
        of_targets = None if grad_log_probs_N is None else (targets_N[:, None], grad_log_probs_N[:, None])
        of_others = None if grad_others_NK is None else (others_NK, grad_others_NK)
        ids_and_gradients = [pair for pair in (of_targets, of_others) if pair is not None]
        grad_hidden_ND = torch.empty_like(hidden_ND)
        wide = normaliser_N.dtype
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden_ND), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            rounded_grad_CV, grad_chunk_bias_V = gradient_of_chunk(
                ctx.product(hidden_ND[part], weight_VD, bias_V),
                normaliser_N[part],
                entropy_N[part],
                None if grad_entropy_N is None else grad_entropy_N[part],
                [(ids_NK[part], grad_NK[part]) for ids_NK, grad_NK in ids_and_gradients],
                ctx.scale,
                hidden_ND.dtype,
            )
            grad_hidden_ND[part] = rounded_grad_CV @ weight_VD
            if grad_weight_VD is not None:
                add_product(grad_weight_VD, rounded_grad_CV.T, hidden_ND[part])
            if grad_bias_V is not None and grad_chunk_bias_V is not None:
                grad_bias_V += grad_chunk_bias_V
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        # The other inputs have no gradient: targets, other tokens, scale, chunk, product, is_compiled.
        return grad_hidden_ND, grad_weight, grad_bias, None, None, None, None, None, None


class _Scale(NamedTuple):
    """The way from hidden W^T + b to logits; its numbers are tensors for compiled code, which holds for all values."""

    temperature: Any
    softcap: Any
    has_bias: bool


def _as_tensors(scale: _Scale, hidden_ND: Tensor) -> _Scale:
    """Returns a scale whose numbers are tensors on the device, so that code compiled once serves other numbers."""
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    temperature = hidden_ND.new_full((), scale.temperature, dtype=wide)
    softcap = None if scale.softcap is None else hidden_ND.new_full((), scale.softcap, dtype=wide)
    return _Scale(temperature, softcap, scale.has_bias)


def _chunk_outputs(
    product_CV: Tensor, targets_C: Tensor, others_CK: Tensor, scale: _Scale
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes (log_probs [C], entropy [C], log-probs of others [C, K], log of the sum of exponentials [C]).

    With the logits z of a token's position and log Z = logsumexp(z): log p = z - log Z, entropy = log Z - sum of p z.
    """
    logits_CV, _ = _scaled_logits(product_CV, scale)
    normaliser_C = logits_CV.logsumexp(-1)
    log_probs_C = logits_CV.gather(-1, targets_C[:, None]).squeeze(-1) - normaliser_C
    of_others_CK = logits_CV.gather(-1, others_CK) - normaliser_C[:, None]
    probs_CV = (logits_CV - normaliser_C[:, None]).exp_()
    entropy_C = normaliser_C - (probs_CV * logits_CV).sum(-1)
    return log_probs_C, entropy_C, of_others_CK, normaliser_C


def _chunk_gradient(
    product_CV: Tensor,
    normaliser_C: Tensor,
    entropy_C: Tensor,
    grad_entropy_C: Tensor | None,
    of_tokens: Sequence[tuple[Tensor, Tensor]],
    scale: _Scale,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gradient of hidden W^T + b, [C, V], rounded to a dtype, and its sum over the tokens, for b.

    `of_tokens` are ids of tokens and the gradients of their log-probs, each [C, K].
    """
    logits_CV, slope_CV = _scaled_logits(product_CV, scale)
    log_softmax_CV = logits_CV.sub_(normaliser_C[:, None])
    probs_CV = log_softmax_CV.exp()
    # d log p(token) / d logit = 1[token] - p;  d entropy / d logit = -p (log p + entropy)
    grad_CV = torch.zeros_like(probs_CV)
    if grad_entropy_C is not None:
        grad_CV = log_softmax_CV.add_(entropy_C[:, None]).mul_(-grad_entropy_C[:, None])
    for _, grad_CK in of_tokens:
        grad_CV.sub_(grad_CK.sum(-1, keepdim=True))
    grad_CV.mul_(probs_CV)
    for ids_CK, grad_CK in of_tokens:
        grad_CV.scatter_add_(-1, ids_CK, grad_CK)
    grad_CV.mul_(slope_CV)
    return grad_CV.to(dtype), grad_CV.sum(0) if scale.has_bias else None


def _scaled_logits(product_CV: Tensor, scale: _Scale) -> tuple[Tensor, Any]:
    """Computes ([C, V] logits / temperature in fp32 or wider, their derivative with respect to hidden W^T + b).

    With x = hidden W^T + b, temperature T and softcap s: x / T, or s tanh(x / s) / T, whose derivative is (1 - tanh(x /
    s)^2) / T.
    """
    logits_CV = product_CV.to(torch.promote_types(product_CV.dtype, torch.float32))
    if torch.compiler.is_compiling():
        logits_CV = logits_CV.clone()  # no copy is made; without it, what is computed in place would be written back
    temperature = scale.temperature
    softcap = scale.softcap
    if softcap is None:
        return logits_CV.div_(temperature), 1.0 / temperature
    squashed_CV = logits_CV.div_(softcap).tanh_()
    return squashed_CV * (softcap / temperature), (1.0 - squashed_CV**2) / temperature
