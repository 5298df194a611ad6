"""The memory of one rank in one phase, as a sum of named parts, in bytes."""

from dataclasses import dataclass

GIB = 1 << 30
_LABELS = {"kv_cache": "KV cache", "vllm": "vLLM"}


def label(term: str) -> str:
    """Returns the name of a part of the memory for people: "KV cache" for "kv_cache"."""
    return _LABELS.get(term, term.replace("_", " "))


@dataclass(frozen=True)
class Terms:
    """The memory of one rank in one phase, divided into parts: bytes of weights, gradients, activations and so on."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0
    reward_model: int = 0
    teacher: int = 0
    gathered_weights: int = 0
    kv_cache: int = 0
    activations: int = 0
    logits: int = 0
    vllm: int = 0
    checkpoint: int = 0
    offloaded: int = 0
    images: int = 0  # in main memory
    process: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    @property
    def largest(self) -> str:
        """The name of the part that needs most bytes."""
        return max(vars(self), key=vars(self).__getitem__)


def largest_total(*moments: Terms) -> Terms:
    """Returns the moment of a phase that needs most memory."""
    return max(moments, key=lambda terms: terms.total)
