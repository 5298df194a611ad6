"""The fingerprint of weights: equal values give equal digests, on any number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torch import Tensor, nn

from services.engine import parallel


def weights_digest(model: nn.Module) -> str:
    """sha256 over named_parameters sorted by their Hugging Face names, values only, as little-endian fp32; tied once.

    Every rank must call it; every rank gets the same answer.
    """
    return values_digest(parallel.full(parameter.detach()) for _, parameter in sorted(model.named_parameters()))


def values_digest(tensors: Iterable[Tensor]) -> str:
    """sha256 over the values of whole tensors, in this order, as little-endian fp32."""
    digest = hashlib.sha256()
    for values in tensors:
        digest.update(values.float().cpu().contiguous().numpy().astype("<f4", copy=False).data)
    return digest.hexdigest()


def count_parameters(model: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
