"""Proves at every start that the engine computes what a model itself computes, on a few short rows.

The engine does not call a model as transformers does: it packs rows or pads them without a mask, has an attention of
its own, and computes the head in chunks. An architecture to which this gives other numbers must not be trained. No list
of architectures can be complete, so each model is asked: its own forward (each row alone, the whole logits, attention
of transformers) must give the engine's log-probs, values or scores. Windows, chunks and other lengths that short rows
do not reach are proved by `tools.architectures` on small models.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from services.engine import parallel
from services.engine.batching.packing import MicroBatchLimits, collate, plan_micro_batches, row_lengths
from services.engine.batching.row_checks import most_positions
from services.engine.model.adapters import HEADS, base_parameters
from services.engine.model.compiled import not_compiled, only_compiled
from services.engine.model.forward import Forward, policy_forward, reward_forward, value_forward
from services.engine.model.weight_files import fill
from services.engine.model.weights import Kind
from services.engine.strategies.protocol import Strategy
from splitppo.batch import Array, Batch

log = logging.getLogger(__name__)

# (prompt, response) tokens of the rows; a reward model scores a whole row at its last token.
ROW_LENGTHS: Mapping[Kind, Sequence[tuple[int, int]]] = {
    "policy": ((5, 11), (1, 8), (9, 16), (3, 1)),
    "value": ((5, 11), (1, 8), (9, 16), (3, 1)),
    "reward": ((15, 1), (1, 1), (24, 1), (8, 1), (3, 1), (11, 1)),
}
FP32_BOUND = 1e-4  # nats; of values and scores, times their spread
# In bf16 a model differs from itself (eager and sdpa, a row alone and beside padding). The engine differs from the
# model by as much, 0.9 to 1.2 times (random models of ten families, 4 and 16 layers). These multiples of the mean and
# of the greatest difference of the model from itself are allowed.
_MEAN_MULTIPLE = 3.0
_MAX_MULTIPLE = 4.0
# Tokens that are less likely than this are not compared: heads give the ids behind the vocabulary such logits.
_LEAST_LOG_PROB = -1e4
_SCALE_OF_DRAWN_HEAD = 0.02  # transformers draws new heads at this scale
# Numbers are rounded to this share of the greatest of them.
_ROUNDING = {"fp32": 2**-19, "bf16": 2**-8}


class ProvedForward(NamedTuple):
    """The engine's forward pass of one kind of model, the name of its output, and the words for the output."""

    forward: Forward
    output: str
    output_in_words: str


FORWARDS: Mapping[Kind, ProvedForward] = {
    "policy": ProvedForward(policy_forward(1.0), "log_probs", "log-probs"),
    "value": ProvedForward(value_forward, "values", "values"),
    "reward": ProvedForward(reward_forward, "scores", "scores"),
}

# The code that the engine computes with, by what an error says of it.
_CODE: Mapping[str, Callable[[], AbstractContextManager[None]]] = {"": not_compiled, "compiled, ": only_compiled}

DType = Literal["fp32", "bf16"]
Row = tuple[Array, Array]  # token ids of prompt and response


@dataclass(frozen=True)
class Difference:
    """How far two computations of the same numbers are apart: on average, and at most."""

    mean: float
    largest: float

    @classmethod
    def of(cls, actual_N: Tensor, expected_N: Tensor) -> "Difference":
        """Compares two tensors of the same shape; a number that is not finite in one of them is infinitely far."""
        distance = (actual_N - expected_N).abs()
        distance = torch.where(distance.isfinite() | (actual_N == expected_N), distance, torch.inf)
        distance = torch.where(actual_N == expected_N, 0.0, distance)
        return cls(float(distance.mean()), float(distance.max()))


# No more than this counts as rounding of the model itself (nats; of values and scores, times their spread): random
# models of 16 layers show means of up to 0.13, trained ones 0.03. More is a forward that cannot be padded.
_MOST_OF_ITSELF = Difference(0.05, 0.5)


def prove_forward(
    model: Any,
    kind: Kind,
    name: str,
    *,
    strategy: Strategy,
    limits: MicroBatchLimits,
    device: torch.device,
    dtype: DType,
    is_trained: bool = False,
    is_compiled: bool = False,
) -> Difference:
    """Compares the engine's forward with the model's own on a few rows; returns how far they are apart.

    All ranks call it, with weights loaded. `name` is the model's, for the error; `limits` say whether the engine packs
    rows or pads them, and which ranks share them; the model computes in `dtype`. If it `is_trained`, its forward in
    training must give the same numbers, too: some architectures then add noise, or drop something out. If it
    `is_compiled`, all that is proved with and without compiled code.

    Raises:
        ValueError: the numbers differ by more than rounding explains, or a forward cannot be run.
    """
    began_s = time.perf_counter()
    rows = rows_of(model.config, kind)
    how = "packed" if limits.packed else "padded"
    subject = f"{name}: the engine cannot compute with {model.config.model_type} in {how} rows"
    try:
        with as_bad_input(subject), drawn_head(model, kind):
            computed_by_mode: dict[str, Tensor] = {}
            codes = _CODE if is_compiled else {"": not_compiled}
            for how_compiled, code in codes.items():
                with code():
                    computed_by_mode[how_compiled] = _engine_outputs(model, kind, rows, limits, device)
                    if is_trained:
                        model.train()
                        in_training_N = _engine_outputs(model, kind, rows, limits, device)
                        computed_by_mode[f"{how_compiled}in training "] = in_training_N
                        model.eval()
            with not_compiled(), attention_of(model, "eager"):
                own_N, greatest_logit = own_outputs(model, kind, rows, device)
                own_difference = difference_from_itself(model, kind, rows, device, own_N, dtype)
    finally:
        strategy.release(model)
    if own_N.isnan().any():
        raise ValueError(f"{name}: the model's own forward gives what is no number: are its weights numbers?")
    bound = bound_of(own_difference, own_N, kind, dtype, greatest_logit)
    outputs = FORWARDS[kind].output_in_words
    for mode, computed_N in computed_by_mode.items():
        wrong = f"{subject}: {mode}the {outputs} are not those of the model itself"
        found = check_difference(computed_N, own_N, kind, bound, wrong)
    log.info(
        "%s: %s of %s rows are those of the model itself, up to %.1g (proved in %.2f s)",
        *(name, outputs, how, found.largest, time.perf_counter() - began_s),
    )
    return found


def rows_of(config: Any, kind: Kind) -> list[Row]:
    """Returns the rows of the proof: fixed token ids of the vocabulary, without padding or other special ones.

    A model with few positions gets shorter rows, and at least one token is left for the response.
    """
    text = config.get_text_config()
    special = {value for name, value in vars(text).items() if name.endswith("token_id") and isinstance(value, int)}
    ids = np.setdiff1d(np.arange(text.vocab_size), [*special]).astype(np.int32)
    ids = ids if len(ids) else np.arange(text.vocab_size, dtype=np.int32)
    most = most_positions(config)
    rng = np.random.default_rng(0)
    rows = []
    for num_prompt, num_response in ROW_LENGTHS[kind]:
        tokens = rng.choice(ids, min(num_prompt + num_response, max(2, most)))
        prompt, response = np.split(tokens, [min(num_prompt, len(tokens) - 1)])
        rows.append((prompt, response))
    return rows


@torch.no_grad()
def _engine_outputs(
    model: nn.Module, kind: Kind, rows: Sequence[Row], limits: MicroBatchLimits, device: torch.device
) -> Tensor:
    """Computes the numbers of all response tokens as the engine does, in few micro-batches; [N] float32."""
    forward, output, _ = FORWARDS[kind]
    prompts, responses = zip(*rows, strict=True)
    batch = Batch.from_rows(prompts=prompts, responses=responses)
    lengths = row_lengths(batch)
    together = replace(limits, max_tokens=int(lengths.sum()), max_rows=None)
    numbers: dict[int, Tensor] = {}
    for part in plan_micro_batches(lengths, together):
        micro_batch = collate(batch.take(part), None, together, device=device)
        computed_N = forward(model, micro_batch)[output].float()
        of_rows = torch.split(computed_N, [len(responses[row]) for row in part])
        numbers |= dict(zip(part.tolist(), of_rows, strict=True))
    return torch.cat([numbers[row] for row in range(len(rows))])


@torch.no_grad()
def own_outputs(model: Any, kind: Kind, rows: Sequence[Row], device: torch.device) -> tuple[Tensor, float]:
    """Computes the numbers of all response tokens by the model's own forward, row by row.

    Returns:
        (the numbers [N] float32, the greatest absolute value of each token's highest logit).
    """
    parts = []
    largest = 0.0
    for prompt, response in rows:
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64)).to(device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        parts.append(_of_response(logits, kind, prompt, ids))
        largest = max(largest, float(logits.max(-1).values.abs().max()))
    return torch.cat(parts), largest


@torch.no_grad()
def _own_outputs_padded(model: Any, kind: Kind, rows: Sequence[Row], device: torch.device) -> Tensor:
    """Computes the same numbers by the model's own forward, with all rows in one right-padded batch and a mask."""
    sequences = [torch.from_numpy(np.concatenate(row).astype(np.int64)).to(device) for row in rows]
    ids_BS = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask_BS = nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in sequences], batch_first=True)
    logits_BSV = model(input_ids=ids_BS, attention_mask=mask_BS, use_cache=False).logits
    return torch.cat(
        [
            _of_response(logits_SV[: len(ids)], kind, prompt, ids)
            for logits_SV, ids, (prompt, _) in zip(logits_BSV, sequences, rows, strict=True)
        ]
    )


def _of_response(logits: Tensor, kind: Kind, prompt: Array, ids: Tensor) -> Tensor:
    """Picks the numbers of a row's response tokens from its logits: [S, V] of a policy, [S, 1] values, [1] a score."""
    if kind == "reward":
        return logits.reshape(-1)[:1].float()
    before = slice(len(prompt) - 1, len(ids) - 1)
    if kind == "value":
        return logits[before, 0].float()
    log_probs = logits[before].float().log_softmax(-1)
    return log_probs.gather(-1, ids[len(prompt) :, None]).squeeze(-1)


def difference_from_itself(
    model: Any, kind: Kind, rows: Sequence[Row], device: torch.device, own_N: Tensor, dtype: DType
) -> Difference:
    """Measures how far the model's own forward is from itself: with eager attention, with sdpa, and beside padding.

    In fp32 nothing is measured, because the bound is fixed there.
    """
    if dtype == "fp32":
        return Difference(0.0, 0.0)
    found = []
    if kind != "reward":  # transformers finds the last token of a padded row by the pad id, which a model may not have
        found.append(Difference.of(_own_outputs_padded(model, kind, rows, device), own_N))
    for attention in ("eager", "sdpa") if model._supports_sdpa else ():  # noqa: SLF001 - there is no public name
        if attention != model.config._attn_implementation:  # noqa: SLF001
            with attention_of(model, attention):
                found.append(Difference.of(own_outputs(model, kind, rows, device)[0], own_N))
    return Difference(max(one.mean for one in found), max(one.largest for one in found)) if found else Difference(0, 0)


def bound_of(itself: Difference, own_N: Tensor, kind: Kind, dtype: DType, largest: float) -> Difference:
    """Returns the differences that rounding explains.

    They are multiples of what the model differs from itself (bf16), up to _MOST_OF_ITSELF, or FP32_BOUND, but never
    less than the rounding of logits of up to `largest`. Values and scores have no unit: of them these are shares of
    their spread.
    """
    rounding = _ROUNDING[dtype] * largest
    spread = 1.0 if kind == "policy" else float(own_N.std())
    if dtype == "fp32":
        bound = max(rounding, FP32_BOUND * spread)
        return Difference(bound, bound)
    mean = min(itself.mean, _MOST_OF_ITSELF.mean * spread)
    largest_of_itself = min(itself.largest, _MOST_OF_ITSELF.largest * spread)
    return Difference(_MEAN_MULTIPLE * mean + rounding, _MAX_MULTIPLE * largest_of_itself + 2 * rounding)


def check_difference(actual_N: Tensor, expected_N: Tensor, kind: Kind, bound: Difference, subject: str) -> Difference:
    """Returns how far two computations are apart; ValueError, which begins with `subject`, if over the bound."""
    if kind == "policy":
        is_likely_N = ~(expected_N < _LEAST_LOG_PROB)
        actual_N = actual_N[is_likely_N]
        expected_N = expected_N[is_likely_N]
    found = Difference.of(actual_N, expected_N)
    if not (found.mean <= bound.mean and found.largest <= bound.largest):
        raise ValueError(
            f"{subject}: they differ by {found.mean:.2g} on average and by up to {found.largest:.2g}, rounding explains"
            f" {bound.mean:.2g} and {bound.largest:.2g}"
        )
    return found


@contextlib.contextmanager
def drawn_head(model: nn.Module, kind: Kind) -> Iterator[None]:
    """Gives a value head that is all 0, as a new one is, random weights in the `with` block.

    With 0 all forwards give the same values, and weights below the head no gradient: nothing could differ. A head with
    other weights stays as it is. Each rank draws all weights and keeps its own.
    """
    heads = {name: weight for name, weight in base_parameters(model).items() if name.startswith(HEADS)}
    shards = [parallel.local(weight.detach()) for weight in heads.values()]
    is_new = kind == "value" and not any(shard.any() for shard in shards)
    if is_new:
        generator = torch.Generator().manual_seed(0)
        for name, weight in heads.items():
            fill(weight.detach(), name, torch.randn(weight.shape, generator=generator) * _SCALE_OF_DRAWN_HEAD)
    try:
        yield
    finally:
        if is_new:
            for shard in shards:
                shard.zero_()


@contextlib.contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """Gives a model an attention of transformers in the `with` block, if it has another one."""
    before = model.config._attn_implementation  # noqa: SLF001 - there is no public name
    if before == name:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextlib.contextmanager
def as_bad_input(subject: str) -> Iterator[None]:
    """Turns what a model raises in its forward into a ValueError that begins with `subject`.

    Errors of the device, and of communication, stay as they are.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.distributed.DistError, torch.AcceleratorError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{subject}: {reason}") from error
