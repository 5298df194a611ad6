"""The fingerprint of weights: equal values give equal digests, on any number of ranks."""

from __future__ import annotations

import hashlib

from torch import nn

from services.engine import parallel


def weights_digest(model: nn.Module) -> str:
    """sha256 over named_parameters sorted by their Hugging Face names, values only, as little-endian fp32; tied once.

    Every rank must call it; every rank gets the same answer.
    """
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        values = parallel.full(parameter.detach())
        digest.update(values.float().cpu().contiguous().numpy().astype("<f4", copy=False).data)
    return digest.hexdigest()


def count_parameters(model: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
