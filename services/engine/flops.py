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

    forward of a vision tower = 2 * (N_patch * patches + N_token * tokens) + 4 * H * d * pairs of patches, of all layers

Images that rows share are counted once. N_token are the weights of what merges patches into tokens, N_patch all others.
A pair of patches counts where both are in one image, in layers with windows in one window. A frozen tower computes
forward alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from services.engine import parallel
from services.engine.batching.mini_batches import MiniBatch
from services.engine.batching.packing import row_lengths
from services.engine.model.layer_attributes import of_all_layers, of_each_layer
from services.engine.model.vision import vision_tower
from splitppo.batch import Batch
from splitppo.config import TrainedModelConfig
from splitppo.images.columns import SIZES_EACH
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
    tower: "TowerShape | None" = None  # of a model that reads images


@dataclass(frozen=True)
class TowerShape:
    """The sizes of a vision tower, from which the number of FLOPs of an image is computed."""

    patch_parameters: float  # weights that a patch meets
    token_parameters: float  # weights that the patches meet together that are merged into a token
    attention_width: float  # heads x head dimension, of one layer
    num_full_layers: int  # in which a patch sees all patches of its image
    num_windowed_layers: int  # in which it sees those of its window
    window: int  # tokens of a window on each side
    merge: int  # patches of a token on each side
    learns: bool = True
    frozen_patch_parameters: float = 0  # those without a gradient
    frozen_token_parameters: float = 0

    @classmethod
    def of(cls, tower: nn.Module) -> Self:
        """Reads the shape of a vision tower of transformers."""
        config: Any = tower.config
        looked_up = {id(module.weight) for module in tower.modules() if isinstance(module, nn.Embedding)}
        met = {name: weight for name, weight in tower.named_parameters() if id(weight) not in looked_up}
        merging = {name: weight for name, weight in met.items() if "merger" in name}
        other = {name: weight for name, weight in met.items() if name not in merging}
        full = getattr(config, "fullatt_block_indexes", None)
        num_full = config.depth if full is None else len(full)
        window = getattr(config, "window_size", 0) // config.spatial_merge_size // config.patch_size
        return cls(
            patch_parameters=sum(weight.numel() for weight in other.values()),
            token_parameters=sum(weight.numel() for weight in merging.values()),
            attention_width=config.hidden_size,
            num_full_layers=num_full,
            num_windowed_layers=config.depth - num_full,
            window=window,
            merge=config.spatial_merge_size,
            learns=any(weight.requires_grad for weight in met.values()),
            frozen_patch_parameters=sum(weight.numel() for weight in other.values() if not weight.requires_grad),
            frozen_token_parameters=sum(weight.numel() for weight in merging.values() if not weight.requires_grad),
        )


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
        flops = 0.0
        for mini_batch in mini_batches:
            rows = np.concatenate([np.empty(0, np.int64), *mini_batch.micro_batches])
            flops += train_flops(self._shape, row_lengths(batch)[rows], batch["responses"].lengths[rows])
            if self._shape.tower is not None:
                flops += tower_train_flops(self._shape.tower, image_grids(batch, rows))
        return flops / self._num_copies

    def forward_flops(self, batch: Batch) -> float:
        """Counts the FLOPs of a forward pass over this rank's rows, segment by segment; NaN for an unknown shape."""
        segments = Segments.of(batch)
        response_lengths = segments.ends - segments.begins - segments.contexts
        flops = forward_flops(self._shape, segments.lengths(batch), response_lengths)
        if self._shape.tower is not None:
            flops += tower_forward_flops(self._shape.tower, image_grids(batch, np.arange(batch.num_rows)))
        return flops / self._num_copies

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
    tower = vision_tower(model)
    text = model.base_model if tower is None else model.base_model.language_model
    body = {name: weight for name, weight in text.named_parameters() if id(weight) not in looked_up}
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
        None if tower is None else TowerShape.of(tower),
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


def image_grids(batch: Batch, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns patch rows and columns of the images of some rows of a batch, [num_images, 2]; shared ones once."""
    if "images" not in batch:
        return np.empty((0, 2), np.int64)
    _, first_places = np.unique(batch["images"].stored_rows[rows], return_index=True)
    of_rows = batch["image_sizes"].take(rows[first_places]).rows()
    sizes: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *of_rows]).reshape(-1, SIZES_EACH)
    return sizes[:, 1:]


def tower_forward_flops(tower: TowerShape, grids: NDArray[np.int64]) -> float:
    """Counts the FLOPs of a vision tower for images of these rows and columns of patches, [num_images, 2]."""
    patches = grids.prod(axis=1, dtype=np.float64)
    tokens = patches.sum() / tower.merge**2
    weights = tower.patch_parameters * patches.sum() + tower.token_parameters * tokens
    pairs = tower.num_full_layers * (patches**2).sum()
    if tower.num_windowed_layers:
        pairs += tower.num_windowed_layers * _pairs_in_windows(tower.window * tower.merge, grids).sum()
    return float(2.0 * weights + 4.0 * tower.attention_width * pairs)


def tower_train_flops(tower: TowerShape, grids: NDArray[np.int64]) -> float:
    """Counts the FLOPs of a vision tower in an update: forward and backward, or forward alone if it is frozen."""
    forward = tower_forward_flops(tower, grids)
    if not tower.learns:
        return forward
    patches = grids.prod(axis=1, dtype=np.float64).sum()
    frozen = tower.frozen_patch_parameters * patches + tower.frozen_token_parameters * patches / tower.merge**2
    return 3.0 * forward - 2.0 * float(frozen)


def _pairs_in_windows(window: int, grids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Counts the pairs of patches that share a window of window x window patches, in each image; [num_images].

    The windows at the end of a row or column are smaller. Pairs along rows times pairs along columns are all pairs.
    """
    whole, rest = np.divmod(grids.astype(np.float64), window)
    pairs: NDArray[np.float64] = (whole * window**2 + rest**2).prod(axis=1)
    return pairs


def peak_flops(device_name: str, dtype: Literal["fp32", "bf16"]) -> float:
    """Returns the peak FLOPs per second of a device for dense matrix products; NaN for an unknown device."""
    return _PEAK_TFLOPS.get(device_name, (math.nan, math.nan))[0 if dtype == "bf16" else 1] * 1e12
