"""Computes the sha256 of a model's weights: equal values give equal digests, on any number of ranks."""

import hashlib
from collections.abc import Iterable

import numpy as np
from torch import Tensor, nn

from services.engine import parallel
from services.engine.model.adapters import saved_parameters


def weights_digest(model: nn.Module) -> str:
    """Computes the sha256 (`values_digest`) of the parameters that checkpoints hold, sorted by name, tied ones once.

    Collective.
    """
    saved = sorted(saved_parameters(model).items())
    return values_digest(parallel.full(parameter.detach()) for _, parameter in saved)


def values_digest(tensors: Iterable[Tensor]) -> str:
    """Computes the sha256 over the values of whole tensors, in the given order, as little-endian fp32; hexadecimal."""
    digest = hashlib.sha256()
    for values in tensors:
        array = np.from_dlpack(values.float().cpu().contiguous())  # numpy() would forbid to free the memory at rest
        digest.update(array.astype("<f4", copy=False).data)
    return digest.hexdigest()
