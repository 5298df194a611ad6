"""Linear layers that compute otherwise than torch's: with oneDNN on a CPU, or fp32 logits from bf16 weights.

On a CPU PyTorch uses MKL for float32 products; oneDNN is faster over many rows. Neither kind changes the weights, their
names or their number.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# From this number of rows on oneDNN is faster; it first copies the weights into its own layout.
MIN_ROWS = 512


class OneDnnLinear(nn.Linear):
    """An `nn.Linear` that uses oneDNN for many float32 rows on a CPU; the results are the same up to rounding."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of the base class
        if not _is_faster(input):
            return functional.linear(input, self.weight, self.bias)
        output: Tensor = _Product.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return output


class Fp32Head(nn.Linear):
    """An output layer whose logits are float32, although its weights and inputs may be bfloat16."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of the base class
        return fp32_product(input, self.weight, self.bias)


def fp32_product(rows: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Computes input W^T + b, summed up in float32 and not rounded afterwards; input [..., I], W [O, I], b [O]."""
    if rows.is_cuda and rows.dtype != torch.float32:
        product = torch.mm(rows.flatten(0, -2), weight_OI.T, out_dtype=torch.float32).view(*rows.shape[:-1], -1)
        return product if bias_O is None else product + bias_O
    return functional.linear(rows.float(), weight_OI.float(), None if bias_O is None else bias_O.float())


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total` in place; the product is summed up in the dtype of `total`, and not rounded before.

    The factors have the dtype of `total`, which is float32 or wider, or are bfloat16 beside float32.
    """
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left.to(total.dtype) @ right.to(total.dtype)


def use_fp32_head(model: Any) -> None:
    """Turns the output layer of a language model into an `Fp32Head`."""
    model.get_output_embeddings().__class__ = Fp32Head


def use_onednn(model: nn.Module) -> None:
    """Turns every plain nn.Linear of a model into a `OneDnnLinear`, if PyTorch was built with oneDNN."""
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDnnLinear


def _is_faster(rows: Tensor) -> bool:
    """Returns True if oneDNN multiplies these rows faster than PyTorch's choice: many rows in fp32 on a CPU."""
    is_left_to_mkl = rows.device.type == "cpu" and rows.dtype == torch.float32
    # Compiled code is one for all lengths.
    return is_left_to_mkl and (torch.compiler.is_compiling() or rows.shape[:-1].numel() >= MIN_ROWS)


class _Product(torch.autograd.Function):
    """Computes input W^T + b with oneDNN, with gradients: input [..., I], W [O, I], b [O], float32 on a CPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight_OI)
        return _onednn(rows, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight_OI = ctx.saved_tensors
        [gradient] = gradients
        gradient_NO = gradient.flatten(0, -2)
        grad_rows = _onednn(gradient, weight_OI.T, None) if ctx.needs_input_grad[0] else None
        # MKL is faster for sums over many rows.
        grad_weight_OI = gradient_NO.T @ rows.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weight_OI, gradient_NO.sum(0) if ctx.needs_input_grad[2] else None


def _onednn(rows: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Computes input W^T + b with oneDNN; compiled code calls it as one operation, which it cannot look into."""
    product: Tensor
    if torch.compiler.is_compiling():
        product = _onednn_as_one(rows, weight_OI, bias_O)
        return product
    product = torch.ops.mkldnn._linear_pointwise(rows, weight_OI, bias_O, "none", [], "")  # noqa: SLF001
    return product


@torch.library.custom_op("splitppo::onednn", mutates_args=())
def _onednn_as_one(rows: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Computes the product inside compiled code; inductor itself takes only weights that never change."""
    return _onednn(rows, weight_OI, bias_O)


@_onednn_as_one.register_fake
def _(rows: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:  # noqa: ARG001 - as above
    return rows.new_empty(*rows.shape[:-1], len(weight_OI))
