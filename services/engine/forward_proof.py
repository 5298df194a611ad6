"""Proves at every start that the engine computes what a model itself computes, on a few short rows.

The engine does not call a model as transformers does: it packs rows or pads them without a mask, has an attention of
its own, and computes the head in chunks. An architecture to which this gives other numbers must not be trained. No list
of architectures can be complete, so each model is asked: its own forward (each row alone, the whole logits, attention
of transformers, for images its own places and positions) must give the engine's log-probs, values or scores. Windows,
chunks and other lengths that short rows do not reach are proved by `tools.architectures` on small models.
"""

import contextlib
import io
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from services.engine import parallel
from services.engine.batching.packing import MicroBatchLimits, collate, plan_micro_batches, row_lengths
from services.engine.batching.row_checks import most_positions
from services.engine.model.adapters import HEADS, base_parameters
from services.engine.model.compiled import not_compiled, only_compiled
from services.engine.model.forward import Forward, policy_forward, reward_forward, value_forward
from services.engine.model.vision import use_attention
from services.engine.model.weight_files import fill
from services.engine.model.weights import Kind
from services.engine.strategies.protocol import Strategy
from splitppo.batch import Array, Batch
from splitppo.images.columns import RowImage, row_of_images
from splitppo.images.grid import num_image_tokens, patch_grid
from splitppo.images.pixels import decode_rgb, make_patches
from splitppo.images.settings import ImageSettings

log = logging.getLogger(__name__)

# (prompt, response) tokens of the rows; a reward model scores a whole row at its last token.
ROW_LENGTHS: Mapping[Kind, Sequence[tuple[int, int]]] = {
    "policy": ((5, 11), (1, 8), (9, 16), (3, 1)),
    "value": ((5, 11), (1, 8), (9, 16), (3, 1)),
    "reward": ((15, 1), (1, 1), (24, 1), (8, 1), (3, 1), (11, 1)),
}
# Rows and columns of tokens of the images: one that has several windows of a tower with windows, and a small one.
_TOKENS_OF_IMAGES = ((4, 6), (2, 2))
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


class Row(NamedTuple):
    """Token ids of the prompt and the response of a row, and the images in its prompt."""

    prompt: Array
    response: Array
    images: Sequence[RowImage] = ()


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
    rows = [*rows_of(model.config, kind), *rows_with_images(model)]
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
    named = (*vars(config).items(), *vars(text).items())
    special = {value for name, value in named if name.endswith("token_id") and isinstance(value, int)}
    ids = np.setdiff1d(np.arange(text.vocab_size), [*special]).astype(np.int32)
    ids = ids if len(ids) else np.arange(text.vocab_size, dtype=np.int32)
    most = most_positions(config)
    rng = np.random.default_rng(0)
    rows = []
    for num_prompt, num_response in ROW_LENGTHS[kind]:
        tokens = rng.choice(ids, min(num_prompt + num_response, max(2, most)))
        prompt, response = np.split(tokens, [min(num_prompt, len(tokens) - 1)])
        rows.append(Row(prompt, response))
    return rows


def rows_with_images(model: Any) -> list[Row]:
    """Returns rows of the proof with drawn images, for a model that reads images: one, two of other sizes, one again.

    There are none for a model with too few positions.
    """
    settings: ImageSettings | None = getattr(model, "image_settings", None)
    if settings is None:
        return []
    side = settings.patch_size * settings.merge_size
    wide, small = (_draw(rows * side, columns * side, settings) for rows, columns in _TOKENS_OF_IMAGES)
    text = next(row.prompt for row in rows_of(model.config, "policy"))
    rows = []
    for images in ((wide,), (small, wide), (wide,)):
        prompt = text.tolist()
        for image in images:
            tokens = [settings.image_token_id] * num_image_tokens(image.rows, image.columns, settings)
            prompt += [settings.vision_start_token_id, *tokens, settings.vision_end_token_id, *text[:2].tolist()]
        rows.append(Row(np.array(prompt, np.int32), text[::-1], images))
    longest = max(len(row.prompt) + len(row.response) for row in rows)
    return rows if longest <= most_positions(model.config) else []


def _draw(height: int, width: int, settings: ImageSettings) -> RowImage:
    """Makes an image of random colours, as a PNG file."""
    colours = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).save(file, "PNG")
    return RowImage(file.getbuffer(), *patch_grid(width, height, settings))


@torch.no_grad()
def _engine_outputs(
    model: nn.Module, kind: Kind, rows: Sequence[Row], limits: MicroBatchLimits, device: torch.device
) -> Tensor:
    """Computes the numbers of all response tokens as the engine does, in few micro-batches; [N] float32."""
    forward, output, _ = FORWARDS[kind]
    batch = Batch.from_rows(prompts=[row.prompt for row in rows], responses=[row.response for row in rows])
    if any(row.images for row in rows):
        batch = batch.merge(_images_of(rows))
    lengths = row_lengths(batch)
    together = replace(limits, max_tokens=int(lengths.sum()), max_rows=None)
    numbers: dict[int, Tensor] = {}
    for part in plan_micro_batches(lengths, together):
        micro_batch = collate(batch.take(part), None, together, device=device)
        computed_N = forward(model, micro_batch)[output].float()
        of_rows = torch.split(computed_N, [len(rows[row].response) for row in part])
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
    for row in rows:
        ids = _ids(row, device)
        images = _own_images(model, [row], ids[None])
        logits = model(input_ids=ids[None], use_cache=False, **images).logits[0]
        parts.append(_of_response(logits, kind, row, ids))
        largest = max(largest, float(logits.max(-1).values.abs().max()))
    return torch.cat(parts), largest


@torch.no_grad()
def _own_outputs_padded(model: Any, kind: Kind, rows: Sequence[Row], device: torch.device) -> Tensor:
    """Computes the same numbers by the model's own forward, with all rows in one right-padded batch and a mask."""
    sequences = [_ids(row, device) for row in rows]
    ids_BS = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask_BS = nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in sequences], batch_first=True)
    images = _own_images(model, rows, ids_BS)
    logits_BSV = model(input_ids=ids_BS, attention_mask=mask_BS, use_cache=False, **images).logits
    return torch.cat(
        [
            _of_response(logits_SV[: len(ids)], kind, row, ids)
            for logits_SV, ids, row in zip(logits_BSV, sequences, rows, strict=True)
        ]
    )


def _ids(row: Row, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([row.prompt, row.response]).astype(np.int64)).to(device)


def _images_of(rows: Sequence[Row]) -> Batch:
    """Returns the columns with the images of rows."""
    columns = [row_of_images(row.images) for row in rows]
    return Batch.from_rows(images=[files for files, _ in columns], image_sizes=[sizes for _, sizes in columns])


def _own_images(model: Any, rows: Sequence[Row], ids_BS: Tensor) -> dict[str, Tensor]:
    """Returns the arguments with the images of rows for a model's own forward, which then makes its own positions."""
    images = [image for row in rows for image in row.images]
    if not images:
        return {}
    settings = model.image_settings
    pixels = [make_patches(decode_rgb(bytes(image.data)), (image.rows, image.columns), settings) for image in images]
    grids = [(1, image.rows, image.columns) for image in images]
    return {
        "pixel_values": torch.from_numpy(np.concatenate(pixels)).to(ids_BS.device),
        "image_grid_thw": torch.tensor(grids, device=ids_BS.device),
        "mm_token_type_ids": (ids_BS == settings.image_token_id).int(),
    }


def _of_response(logits: Tensor, kind: Kind, row: Row, ids: Tensor) -> Tensor:
    """Picks the numbers of a row's response tokens from its logits: [S, V] of a policy, [S, 1] values, [1] a score."""
    if kind == "reward":
        return logits.reshape(-1)[:1].float()
    before = slice(len(row.prompt) - 1, len(ids) - 1)
    if kind == "value":
        return logits[before, 0].float()
    log_probs = logits[before].float().log_softmax(-1)
    return log_probs.gather(-1, ids[len(row.prompt) :, None]).squeeze(-1)


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
    use_attention(model, name)
    try:
        yield
    finally:
        use_attention(model, before)


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
