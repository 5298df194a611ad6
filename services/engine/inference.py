"""Runs forward passes without gradient over any number of batch rows, in micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from services.engine.batching.mini_batches import agree_on_micro_batches
from services.engine.batching.packing import MicroBatchLimits, collate, row_lengths
from services.engine.batching.segments import SegmentRows
from services.engine.batching.shared_images import together_for_images
from services.engine.model.forward import Forward
from services.engine.model.layer_attributes import of_each_layer
from services.engine.model.loading import supports_packing
from services.engine.strategies.protocol import Strategy
from splitppo.batch import Batch, Column
from splitppo.config import ComputedModelConfig
from splitppo.config.attention_heads import check_heads
from splitppo.config.rope import rope_switch

# (done, total, phase), at micro-batch boundaries.
ReportProgress = Callable[[int, int, str], None]


def micro_batch_limits(
    config: ComputedModelConfig, model: Any, sequence_group: ProcessGroup | None, device: torch.device
) -> MicroBatchLimits:
    """Reads the limits of micro-batches from the configuration; by default rows are packed if the model allows it.

    The tokens of a micro-batch are those of all ranks of a sequence group.

    Raises:
        ValueError: packing is configured, but the model cannot take packed rows; or see `check_sequence_ranks`.
    """
    packed = config.use_remove_padding
    can_pack = supports_packing(model)
    if packed is None:
        packed = can_pack
    if packed and not can_pack:
        raise ValueError(f"use_remove_padding: rows of {type(model).__name__} cannot be packed, set it to false")
    num_ranks = 1 if sequence_group is None else sequence_group.size()
    limits = MicroBatchLimits(
        packed,
        num_ranks * config.ppo_max_token_len_per_gpu,
        config.ppo_micro_batch_size_per_gpu,
        sequence_group,
        rope_switch(model.config.get_text_config().to_dict()),
        # On GPUs the kernel for packed rows takes numbers of two bytes alone.
        pads_attention=device.type == "cuda" and config.dtype == "fp32",
        image_settings=model.image_settings,
    )
    check_sequence_ranks(config, model, limits, num_ranks)
    return limits


def check_sequence_ranks(config: ComputedModelConfig, model: Any, limits: MicroBatchLimits, num_ranks: int) -> None:
    """Checks that `num_ranks` ranks can divide the positions of a model's rows among them.

    Raises:
        ValueError: rows are padded or have images, rotary factors depend on whole rows, or the ranks cannot share
            attention heads.
    """
    if num_ranks == 1:
        return
    key = "ulysses_sequence_parallel_size"
    description = model.config.get_text_config()
    if not limits.packed:
        raise ValueError(f"{key} ({num_ranks}) needs packed rows, and those of {type(model).__name__} are padded")
    if limits.image_settings is not None:
        raise ValueError(f"{key} ({num_ranks}): {config.model} reads images, whose rows ranks cannot divide among them")
    if limits.rope_switch is not None:
        raise ValueError(f"{key} ({num_ranks}): {config.model} has longrope, whose factors depend on whole rows")
    heads, key_values = (of_each_layer(description, f"num_{of}_heads") for of in ("attention", "key_value"))
    for pair in dict.fromkeys(zip(heads, key_values, strict=True)):
        check_heads(*pair, num_ranks, key, config.model)


def compute_columns(
    model: nn.Module,
    strategy: Strategy,
    batch: Batch,
    forward: Forward,
    *,
    outputs: Sequence[str],
    limits: MicroBatchLimits,
    device: torch.device,
    progress: ReportProgress,
) -> dict[str, Column]:
    """Computes the named outputs of `forward` per response token of each row, without gradient; all ranks call it.

    An output of several values per token becomes a column with as many values per token. Rows with several contexts are
    computed segment by segment, and the tokens of contexts that begin in a response have 0.

    Rows without response tokens are not computed: their results are empty.
    """
    segments = SegmentRows.of(batch)
    batch = segments.batch
    rows = np.flatnonzero(batch["responses"].lengths)
    lengths = row_lengths(batch)
    together = together_for_images(batch, lengths, limits)
    [micro_batches] = agree_on_micro_batches([rows], lengths, limits, device, together=together)
    results: dict[str, list[Tensor]] = {name: [] for name in outputs}
    with torch.no_grad():
        for done, part in enumerate(micro_batches, start=1):
            micro_batch = collate(batch.take(part), None, limits, device=device)
            named = forward(model, micro_batch)
            for name in outputs if len(part) else ():
                results[name].append(named[name])
            progress(done, len(micro_batches), "forward")
    strategy.release(model)

    empty_rows = np.flatnonzero(batch["responses"].lengths == 0)
    order = np.concatenate([*micro_batches, empty_rows]).astype(np.int64)
    in_order = batch["responses"].lengths[order]
    columns = {}
    for name, parts in results.items():
        values = torch.cat(parts).cpu().numpy() if parts else np.empty(0, np.float32)
        width = values[0].size if len(values) else 1
        values = values.reshape(-1).astype(np.int32 if values.dtype.kind == "i" else np.float32)
        of_segments = Column(values, in_order * np.int32(width)).take(np.argsort(order))
        columns[name] = segments.put_back(of_segments)
    return columns
