"""Linear layers with oneDNN compute what `nn.Linear` computes, up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from services.engine.model.linear import MIN_ROWS, OneDnnLinear, use_onednn
from tests.support.seeds import shifted


def output_and_gradients(layer: nn.Module, rows: Tensor) -> list[Tensor]:
    """Returns the output, and the gradients of a loss that weighs every output differently."""
    rows = rows.clone().requires_grad_()
    output = layer(rows)
    (output * torch.linspace(0.1, 1.0, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    assert rows.grad is not None
    return [
        output.detach(),
        rows.grad,
        *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None),
    ]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(MIN_ROWS, 24), (2, MIN_ROWS // 2, 24), (1, MIN_ROWS - 1, 24)])
def test_output_and_gradients_are_those_of_a_linear_layer_in_float64(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(shifted(0))
    layer, rows = nn.Linear(24, 40, bias=bias), torch.randn(shape)
    exact = nn.Linear(24, 40, bias=bias).double()
    exact.load_state_dict(layer.state_dict())
    expected = output_and_gradients(exact, rows.double())
    use_onednn(layer)
    assert isinstance(layer, OneDnnLinear)
    for found, right in zip(output_and_gradients(layer, rows), expected, strict=True):
        assert found.dtype == torch.float32
        assert (found - right).norm() <= 1e-6 * right.norm()


def test_weights_that_are_not_trained_get_no_gradient() -> None:
    layer = nn.Linear(4, 4).requires_grad_(requires_grad=False)
    use_onednn(layer)
    rows = torch.randn(MIN_ROWS, 4, requires_grad=True)
    layer(rows).sum().backward()
    assert rows.grad is not None
    assert layer.weight.grad is layer.bias.grad is None


@pytest.mark.parametrize(("num_rows", "dtype"), [(MIN_ROWS - 1, torch.float32), (MIN_ROWS, torch.bfloat16)])
def test_few_rows_and_other_types_take_pytorchs_own_way(num_rows: int, dtype: torch.dtype) -> None:
    layer, rows = nn.Linear(8, 8, dtype=dtype), torch.randn(num_rows, 8, dtype=dtype)
    expected = layer(rows)
    use_onednn(layer)
    assert torch.equal(layer(rows), expected)


def test_names_and_weights_of_a_model_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1, bias=False))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    use_onednn(model)
    assert [type(layer) for layer in model] == [OneDnnLinear, nn.ReLU, OneDnnLinear]
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], parameter) for name, parameter in before.items())
    assert after.keys() == before.keys()
