"""The last layer's MLP at the positions that are read, and at no others.

Only the hidden states before response tokens (or of a row's last token) go through a head. What the last layer's MLP
adds elsewhere, to prompts and padding, nobody reads: neither a later layer's attention nor a gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from services.engine import parallel

_POSITIONS: ContextVar[Tensor | None] = ContextVar("positions", default=None)


@contextmanager
def read_at(positions: Tensor) -> Iterator[None]:
    """Inside, only these positions [N] of the flattened rows, each once, are right after the last layer."""
    token = _POSITIONS.set(positions)
    try:
        yield
    finally:
        _POSITIONS.reset(token)


def skip_unread(model: Any) -> None:
    """Lets the last layer of a Hugging Face model heed `read_at`, where its MLP is a dense one.

    Others compute every position: of experts, which may count their tokens, and with gradient checkpointing, which runs
    the layer again in the backward pass.
    """
    mlp = getattr(parallel.decoder_layers(model)[-1], "mlp", None)
    if isinstance(mlp, nn.Module) and _is_dense(mlp) and not model.is_gradient_checkpointing:
        forward: Callable[[Tensor], Tensor] = mlp.forward

        def at_positions(hidden: Tensor) -> Tensor:
            positions = _POSITIONS.get()
            if positions is None:
                return forward(hidden)
            rows = hidden.flatten(0, -2)
            added = forward(rows[positions])
            return torch.zeros_like(rows, dtype=added.dtype).index_copy(0, positions, added).view_as(hidden)

        mlp.forward = at_positions  # type: ignore[method-assign]


def _is_dense(mlp: nn.Module) -> bool:
    """Whether it consists of linear layers, and of modules without parameters."""
    has_own = any(True for _ in mlp.parameters(recurse=False))
    weighted = [child for child in mlp.children() if any(True for _ in child.parameters())]
    return bool(weighted) and not has_own and all(isinstance(child, nn.Linear) for child in weighted)
