"""Computes the model FLOPs utilisation (MFU): the share of the devices' peak that an update or forward pass used.

    forward = 2 * (N_body * tokens + N_head * response tokens) + 4 * L * H * d * sum over segments of tokens^2
    FLOPs = 3 * forward - 2 * (frozen part of N_body * tokens + frozen part of N_head * response tokens)
    MFU = FLOPs / (seconds * sum over devices of their peak)

Chowdhery et al. (2022, PaLM), appendix B, with L layers of H heads of dimension d: 2 FLOPs per weight and token and
4 * L * H * d per pair of positions forward, twice that backward, but for frozen weights (beside adapters), which get no
gradient, once. Pairs that a causal mask or a window hides are counted too; what is computed again (gradient
checkpointing), padding and look-ups of embeddings are not counted. The head counts where it is computed, at response
tokens. Of E stacked experts, k of which compute a token, k / E of the weights count. A row has one segment for each of
its contexts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from services.engine import parallel
from services.engine.batching.mini_batches import MiniBatch
from services.engine.batching.packing import row_lengths
from services.engine.model.layer_attributes import of_all_layers, of_each_layer
from splitppo.batch import Batch
from splitppo.config import TrainedModelConfig
from splitppo.segments import Segments

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# Dense peak of (bf16 tensor cores, fp32 without TF32), TFLOPS, by PyTorch's name of a whole GPU (not of a MIG
# slice). From NVIDIA's data sheets of A100 (2021), H100 (2022; NVL 2024), H200 (2024), L4 and L40S (2023); half of the
# number if they give bf16 with sparsity only.
_PEAK_TFLOPS = {
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), (312.0, 19.5)),
    **dict.fromkeys(("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"), (312.0, 19.5)),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), (989.5, 67.0)),
    **dict.fromkeys(("NVIDIA H100 NVL", "NVIDIA H200 NVL"), (835.5, 60.0)),
    "NVIDIA H100 PCIe": (756.5, 51.0),
    "NVIDIA L4": (121.0, 30.3),
    "NVIDIA L40S": (362.05, 91.6),
}


@dataclass(frozen=True)
class DenseShape:
    """The sizes of the dense transformer that computes one token, from which the number of FLOPs is computed."""

    body_parameters: float  # weights that a token meets; no embeddings
    head_parameters: float  # weights that every response token meets; tied or not
    attention_width: float  # heads x head dimension, of all layers
    frozen_body_parameters: float = 0  # those without a gradient
    frozen_head_parameters: float = 0


class FlopsMeter:
    """Counts the FLOPs of one model, and their share of the devices' peak; built before the model is sharded."""

    def __init__(self, model: Any, config: TrainedModelConfig, device: torch.device) -> None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self.peak_flops = peak_flops(name, config.dtype)
        self._shape = dense_shape(model)
        self._device = device
        self._num_copies = config.ulysses_sequence_parallel_size  # ranks that share this one's rows

    def update_flops(self, batch: Batch, mini_batches: Sequence[MiniBatch]) -> float:
        """Counts the FLOPs of the gradients of mini-batches with this rank's rows; NaN for an unknown model shape.

        The rows have one context each.
        """
        parts = [part for mini_batch in mini_batches for part in mini_batch.micro_batches]
        rows = np.concatenate([np.empty(0, np.int64), *parts])
        return train_flops(self._shape, row_lengths(batch)[rows], batch["responses"].lengths[rows]) / self._num_copies

    def forward_flops(self, batch: Batch) -> float:
        """Counts the FLOPs of a forward pass over this rank's rows, segment by segment; NaN for an unknown shape."""
        segments = Segments.of(batch)
        response_lengths = segments.ends - segments.begins - segments.contexts
        return forward_flops(self._shape, segments.lengths(batch), response_lengths) / self._num_copies

    def utilisation(self, flops: float, seconds: float, name: str = "mfu") -> dict[str, float]:
        """Computes the MFU of all ranks as metric `name`, from this rank's FLOPs and seconds. Collective.

        The result is empty if a rank does not know its FLOPs or the peak of its device.
        """
        flops, peak = parallel.reduce_array([flops, self.peak_flops], self._device)
        [longest_s] = parallel.reduce_array([seconds], self._device, dist.ReduceOp.MAX)
        mfu = float(flops / (peak * longest_s))
        return {name: mfu} if math.isfinite(mfu) else {}


def dense_shape(model: Any) -> DenseShape:
    """Reads the DenseShape of an unsharded Hugging Face model; NaN for layers other than attention.

    It is NaN, too, if experts are not stacked, or the config does not say how many of them compute a token.
    """
    config = model.config.get_text_config()
    heads = of_each_layer(config, "num_attention_heads")
    other_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    body = {name: weight for name, weight in model.base_model.named_parameters() if id(weight) not in looked_up}
    num_experts = next((number for name in _EXPERTS if (number := of_all_layers(config, name))), 0)
    stacked = {name for name, weight in body.items() if ".experts." in name and len(weight) == num_experts}
    per_token = of_all_layers(config, "num_experts_per_tok")
    if (
        not all(isinstance(number, int) for number in heads)
        or other_layers
        or (num_experts and not (stacked and per_token))
    ):
        return DenseShape(math.nan, math.nan, math.nan)
    head_dims = of_each_layer(config, "head_dim")
    widths = (num * (dim or config.hidden_size // num) for num, dim in zip(heads, head_dims, strict=True))
    met = {name: weight.numel() for name, weight in body.items()}
    met |= {name: met[name] // num_experts * per_token for name in stacked}
    named = model.named_parameters(remove_duplicate=False)
    head = [parameter for name, parameter in named if not name.startswith(f"{model.base_model_prefix}.")]
    return DenseShape(
        sum(met.values()),
        sum(parameter.numel() for parameter in head),
        sum(widths),
        sum(met[name] for name, weight in body.items() if not weight.requires_grad),
        sum(parameter.numel() for parameter in head if not parameter.requires_grad),
    )


def forward_flops(shape: DenseShape, lengths: NDArray[Any], response_lengths: NDArray[Any]) -> float:
    """Counts the FLOPs of one forward pass over rows of these lengths; NaN for an unknown shape.

    `lengths` count the tokens of prompt and response together.
    """
    tokens = lengths.astype(np.float64)
    response_tokens = response_lengths.astype(np.float64)
    weights = shape.body_parameters * tokens.sum() + shape.head_parameters * response_tokens.sum()
    return float(2.0 * weights + 4.0 * shape.attention_width * (tokens**2).sum())


def train_flops(shape: DenseShape, lengths: NDArray[Any], response_lengths: NDArray[Any]) -> float:
    """Counts the FLOPs of one forward and one backward pass, for the arguments of `forward_flops`.

    The backward pass takes twice the FLOPs of the forward pass: one half for gradients of inputs, one for those of
    weights. Frozen weights have none, which saves 2 FLOPs for each weight and token.
    """
    frozen = shape.frozen_body_parameters * lengths.sum(dtype=np.float64)
    frozen += shape.frozen_head_parameters * response_lengths.sum(dtype=np.float64)
    return 3.0 * forward_flops(shape, lengths, response_lengths) - 2.0 * float(frozen)


def peak_flops(device_name: str, dtype: Literal["fp32", "bf16"]) -> float:
    """Returns the peak FLOPs per second of a device for dense matrix products; NaN for an unknown device."""
    return _PEAK_TFLOPS.get(device_name, (math.nan, math.nan))[0 if dtype == "bf16" else 1] * 1e12
