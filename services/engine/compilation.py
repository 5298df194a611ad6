"""Makes the compiled code of a model when it starts (`compile`), and proves its gradient.

Code is made for the same rows on every start, so it is the same code on every start, with or without inductor's cache
on disk: inductor chooses loops by the first lengths that it sees. The code holds for all lengths from two tokens on.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from services.engine import parallel
from services.engine.batching.packing import MicroBatch, MicroBatchLimits, collate
from services.engine.batching.row_checks import most_positions
from services.engine.forward_proof import FORWARDS, DType, drawn_head
from services.engine.model.adapters import adapters_off, rank_of
from services.engine.model.compiled import compile_layers, compiling, not_compiled
from services.engine.model.weights import Kind
from services.engine.strategies.fsdp2 import decoder_layers
from services.engine.strategies.protocol import Strategy
from splitppo.batch import Batch

log = logging.getLogger(__name__)

_NUM_ROWS = 4
# Tokens of a row; on a GPU, code is made for sums over thousands of tokens.
_ROW_TOKENS: Mapping[str, int] = {"cuda": 1024}
_FEWEST_TOKENS = 32
# The distance of the gradient from that without compiled code, as a share of its norm, that rounding explains. In bf16
# dense models show 0.01 to 0.04, and the router of an MoE model may choose other experts.
_GRADIENT_BOUND: Mapping[DType, float] = {"fp32": 1e-4, "bf16": 0.5}


def compile_model(
    model: Any,
    kind: Kind,
    name: str,
    *,
    strategy: Strategy,
    limits: MicroBatchLimits,
    device: torch.device,
    dtype: DType,
    is_trained: bool = False,
) -> None:
    """Compiles a model's layers and head, for all forms in which the engine calls it.

    All ranks call it, with weights loaded; for the arguments see `prove_forward`. `only_compiled` then uses the code.

    Raises:
        ValueError: there is no code, e.g. since there is no compiler; or its gradient is another one.
    """
    began_s = time.perf_counter()
    compile_layers(model, decoder_layers(model))
    forward = FORWARDS[kind].forward
    gradient_distances = [0.0]
    try:
        with compiling(), _one_sentence(f"{name}: compile: there is no code for it"), drawn_head(model, kind):
            for micro_batch in _micro_batches(model, kind, limits, device):
                with torch.no_grad():
                    forward(model, micro_batch)
                    if rank_of(model):  # adapters: without them it is the reference
                        with adapters_off(model):
                            forward(model, micro_batch)
                if is_trained:
                    gradient_distances.append(_gradient_distance(model, kind, micro_batch, strategy))
    finally:
        strategy.release(model)
    if not all(distance <= _GRADIENT_BOUND[dtype] for distance in gradient_distances):
        raise ValueError(
            f"{name}: compile: the gradient of compiled code differs by {max(gradient_distances):.2g} of its norm from"
            f" that without it, rounding explains {_GRADIENT_BOUND[dtype]:g}"
        )
    log.info("%s: layers and head are compiled (in %.1f s)", name, time.perf_counter() - began_s)


def _micro_batches(model: Any, kind: Kind, limits: MicroBatchLimits, device: torch.device) -> Iterator[MicroBatch]:
    """Yields the rows for which code is made: all together, and if rows are padded a single one.

    torch takes a size of 1 for one that never changes.
    """
    vocab_size = model.config.get_text_config().vocab_size
    num_rows = min(_NUM_ROWS, limits.max_rows or _NUM_ROWS)
    most = min(most_positions(model.config), limits.max_tokens // num_rows)
    num_tokens = max(2, min(_ROW_TOKENS.get(device.type, _FEWEST_TOKENS), most))
    num_responses = 1 if kind == "reward" else num_tokens // 2
    rows = (np.arange(num_rows * num_tokens) % vocab_size).reshape(num_rows, num_tokens)
    batch = Batch.from_rows(prompts=rows[:, :-num_responses], responses=rows[:, -num_responses:])
    for num_together in (num_rows,) if limits.packed else sorted({num_rows, 1}):
        yield collate(batch.take(np.arange(num_together)), None, limits, device=device)


def _gradient_distance(model: nn.Module, kind: Kind, micro_batch: MicroBatch, strategy: Strategy) -> float:
    """Computes a gradient with and without compiled code; returns their distance as a share of its norm.

    The norms are over all ranks: `clip_gradients` with an infinite limit computes them and clips nothing. Gradients are
    removed afterwards.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    with not_compiled():
        _backward(model, kind, micro_batch, strategy)
    norm = strategy.clip_gradients(trained, math.inf)
    expected = [None if weight.grad is None else parallel.local(weight.grad) for weight in trained]
    model.zero_grad(set_to_none=True)
    _backward(model, kind, micro_batch, strategy)
    for weight, gradient in zip(trained, expected, strict=True):
        if weight.grad is not None and gradient is not None:
            parallel.local(weight.grad).sub_(gradient)
    distance = strategy.clip_gradients(trained, math.inf)
    model.zero_grad(set_to_none=True)
    return distance / norm if norm else distance


def _backward(model: nn.Module, kind: Kind, micro_batch: MicroBatch, strategy: Strategy) -> None:
    """Computes the gradient of the sum of all outputs: any gradient will do to compare two ways of computing it."""
    model.train()
    with strategy.sync_gradients(model, last=True):
        outputs = FORWARDS[kind].forward(model, micro_batch)
        torch.stack([values.sum() for values in outputs.values() if values.numel()]).sum().backward()  # type: ignore[no-untyped-call]
    model.eval()


@contextmanager
def _one_sentence(subject: str) -> Iterator[None]:
    """Turns what torch.compile raises into a ValueError that begins with `subject`, and says what is needed."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.distributed.DistError, torch.AcceleratorError):
        raise
    except Exception as error:
        needs = "torch.compile needs a C++ compiler and Python's headers, on a GPU also Triton"
        raise ValueError(f"{subject} ({needs}): {_reason_of(error)}") from error


def _reason_of(error: Exception) -> str:
    """Returns the line of an error that names the reason: of a compiler's output the first one with an error."""
    from torch._inductor import config, exc  # late: the first compilation imports them

    cause = getattr(error, "inner_exception", error)
    if isinstance(cause, exc.InvalidCxxCompiler):  # its own words show a tuple of torch's configuration
        return f"the C++ compiler {config.cpp.cxx[-1]!r} cannot be run"
    lines = str(cause).splitlines() or [type(cause).__name__]
    return next((line for line in lines if "error:" in line), lines[0]).strip()
