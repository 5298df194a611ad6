"""The fingerprint of weights: equal values give equal digests, on any number of ranks."""

import hashlib
from collections.abc import Iterable

from torch import Tensor, nn

from services.engine import parallel


def weights_digest(model: nn.Module) -> str:
    """`values_digest` of named_parameters sorted by their Hugging Face names, tied once; on all ranks, by all ranks."""
    return values_digest(parallel.full(parameter.detach()) for _, parameter in sorted(model.named_parameters()))


def values_digest(tensors: Iterable[Tensor]) -> str:
    """sha256 over the values of whole tensors, in this order, as little-endian fp32."""
    digest = hashlib.sha256()
    for values in tensors:
        digest.update(values.float().cpu().contiguous().numpy().astype("<f4", copy=False).data)
    return digest.hexdigest()
