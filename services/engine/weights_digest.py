"""The digest of weights: equal values give equal digests, on any number of ranks."""

import hashlib
from collections.abc import Iterable

from torch import Tensor, nn

from services.engine import parallel


def weights_digest(model: nn.Module) -> str:
    """Returns the `values_digest` of all parameters, sorted by Hugging Face name, tied ones once. Collective."""
    return values_digest(parallel.full(parameter.detach()) for _, parameter in sorted(model.named_parameters()))


def values_digest(tensors: Iterable[Tensor]) -> str:
    """Returns the sha256 over the values of whole tensors, in this order, as little-endian fp32."""
    digest = hashlib.sha256()
    for values in tensors:
        digest.update(values.float().cpu().contiguous().numpy().astype("<f4", copy=False).data)
    return digest.hexdigest()
