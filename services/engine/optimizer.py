"""AdamW over the trained weights of a model, with its moments where the configuration wants them; the learning rate."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from services.engine import parallel
from services.engine.model.adapters import trained_parameters
from services.engine.rest import host_memory
from splitppo.config import TrainedModelConfig
from splitppo.machine.memory_limits import MOMENT_BUCKET_BYTES, bucket_bytes_per_weight

MOMENTS = ("exp_avg", "exp_avg_sq")
_ALIGNMENT = 64  # the CPU's kernel computes what is left of a cache line in another way
_IN_FLIGHT = 2


class Piece(NamedTuple):
    """Neighbouring numbers of this rank's part of a parameter."""

    name: str
    weight: nn.Parameter
    numbers: slice

    def of(self, tensor: Tensor) -> Tensor:
        """Returns a view of these numbers of a tensor that is placed like the parameter."""
        return parallel.local(tensor.detach()).view(-1)[self.numbers]


def divide(parameters: Mapping[str, nn.Parameter], max_numbers: int) -> Iterator[list[Piece]]:
    """Divides this rank's parts of parameters into buckets of so many numbers; what is larger becomes several pieces.

    Pieces begin at multiples of `max_numbers`, whatever lies before them.
    """
    bucket: list[Piece] = []
    room = max_numbers
    for name, weight in parameters.items():
        numel = parallel.local(weight.detach()).numel()
        for start in range(0, numel, max_numbers):
            stop = min(start + max_numbers, numel)
            if stop - start > room:
                yield bucket
                bucket = []
                room = max_numbers
            bucket.append(Piece(name, weight, slice(start, stop)))
            room -= stop - start
    if bucket:
        yield bucket


class BucketedAdamW(torch.optim.AdamW):
    """torch's fused AdamW, which can keep its moments in main memory (`optimizer_offload`), or in bf16.

    In both cases it steps on one bucket of weights after the other: their moments come to the device in fp32, and go
    where they are kept. From main memory two buckets are in flight, each on a CUDA stream, so that copies in both
    directions run at the same time. The weights of a step have the bits of torch's step on the same moments.

    Moments in bf16 are rounded stochastically: up or down, such that the mean is the fp32 value. To the nearest, the
    mean of squares could not fall at a decay of 0.999. The random numbers depend on seed, optimizer step and place in
    the model alone, so a resumed run rounds as one without a break, and ranks that hold copies round alike.

    Args:
        parameters: the trained parameters of this rank, by name.
        device: the device of the parameters; `step` must find them there.
        bucket_bytes: memory on the device for the moments of a bucket, and what it takes to round them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: TrainedModelConfig,
        *,
        seed: int,
        device: torch.device,
        bucket_bytes: int = MOMENT_BUCKET_BYTES,
    ) -> None:
        super().__init__(
            parameters.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._parameters = parameters
        self._seed = seed
        self._device = device
        self._in_main_memory = config.optimizer_offload
        is_bf16 = config.optimizer_state_dtype == "bf16"
        self._dtype = torch.bfloat16 if is_bf16 else torch.float32
        self._bucket_numbers = bucket_bytes // bucket_bytes_per_weight(self._dtype.itemsize)
        self._bucket_numbers -= self._bucket_numbers % _ALIGNMENT
        self._random = torch.Generator(device)
        self._streams: list[Any] = []
        if self._in_main_memory and device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(_IN_FLIGHT)]  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Changes all parameters that have a gradient.

        Moments in fp32 on the device need no buckets: torch's own step changes all at once.
        """
        if self._dtype == torch.float32 and not self._in_main_memory:
            super().step(closure)
            return
        changing = {name: weight for name, weight in self._parameters.items() if weight.grad is not None}
        self.state.update(self.fresh_states([weight for weight in changing.values() if weight not in self.state]))
        for weight in changing.values():
            self.state[weight]["step"] += 1
        for lane, bucket in zip(cycle(self._lanes()), divide(changing, self._bucket_numbers), strict=False):
            with lane:
                self._step_bucket(bucket)
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)
            stream.synchronize()  # whoever saves reads main memory
        if self._streams:
            torch.cuda.empty_cache()  # another engine on this device gets the memory

    def fresh_states(self, parameters: Sequence[nn.Parameter]) -> dict[Tensor, dict[str, Tensor]]:
        """Makes the states of parameters that have not been stepped on; moments are placed like their parameter."""
        if not self._in_main_memory:
            is_plain = self._dtype == torch.float32
            return {
                weight: {
                    "step": torch.zeros((), device=self._device if is_plain else None),
                    **{moment: torch.zeros_like(weight.detach(), dtype=self._dtype) for moment in MOMENTS},
                }
                for weight in parameters
            }
        shapes = [parallel.local(weight.detach()).shape for weight in parameters]
        sizes = [shape.numel() * self._dtype.itemsize for shape in shapes for _ in MOMENTS]
        memory = host_memory(sizes, pinned=self._device.type == "cuda")
        states: dict[Tensor, dict[str, Tensor]] = {}
        for weight, shape in zip(parameters, shapes, strict=True):
            states[weight] = {"step": torch.zeros(())}
            for moment in MOMENTS:
                zeros = next(memory).zero_().view(self._dtype).view(shape)
                states[weight][moment] = parallel.placed_like(weight, zeros)
        return states

    def _lanes(self) -> list[AbstractContextManager[Any]]:
        """Returns contexts in which buckets are stepped on in turns, after all that the device has been told to do."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        return [torch.cuda.stream(stream) for stream in self._streams] or [nullcontext()]

    def _step_bucket(self, bucket: Sequence[Piece]) -> None:
        """Steps on a bucket: moments to the device in fp32, AdamW there, moments back to where they are kept.

        The states' `step` counts this step already, but torch's function counts it itself, so it gets one less. On the
        way back bf16 moments are rounded stochastically, with random numbers seeded anew for each piece.
        """
        group = self.param_groups[0]
        states = [self.state[piece.weight] for piece in bucket]
        kept = [[piece.of(state[name]) for piece, state in zip(bucket, states, strict=True)] for name in MOMENTS]
        exp_avgs, exp_avg_sqs = ([self._to_device(values) for values in of_all] for of_all in kept)
        adamw(
            [piece.of(piece.weight) for piece in bucket],
            [piece.of(piece.weight.grad) for piece in bucket if piece.weight.grad is not None],
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs=[],
            state_steps=[torch.full((), int(state["step"]) - 1.0, device=self._device) for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for piece, state, *kept_of_piece, exp_avg, exp_avg_sq in zip(
            bucket, states, *kept, exp_avgs, exp_avg_sqs, strict=True
        ):
            self._random.manual_seed(self._seed_of(piece, int(state["step"])))
            for stored, values in zip(kept_of_piece, (exp_avg, exp_avg_sq), strict=True):
                is_fp32 = self._dtype == torch.float32
                stored.copy_(values if is_fp32 else rounded_stochastically(values, self._random), non_blocking=True)

    def _to_device(self, values: Tensor) -> Tensor:
        """Copies moments to the device, as fp32."""
        return values.to(self._device, non_blocking=True, copy=self._in_main_memory).float()

    def _seed_of(self, piece: Piece, step: int) -> int:
        """Returns the seed of the rounding of one piece in one step: a hash of its place in the whole model."""
        first_row, _ = parallel.local_rows(piece.weight)
        key = f"{self._seed}/{step}/{piece.name}/{first_row}/{piece.numbers.start}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])


def rounded_stochastically(values: Tensor, random: torch.Generator) -> Tensor:
    """Rounds fp32 values to a bf16 neighbour: up with the probability that makes the mean exact; bf16 values stay."""
    bits = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=random)
    return bits.add_(values.view(torch.int32)).bitwise_and_(-1 << 16).view(torch.float32).bfloat16()


def build_optimizer(model: nn.Module, config: TrainedModelConfig, *, seed: int, device: torch.device) -> BucketedAdamW:
    """Builds AdamW over the trained, fp32 parameters of a model; the caller sets the learning rate before each step."""
    return BucketedAdamW(trained_parameters(model), config, seed=seed, device=device)


def learning_rate(config: TrainedModelConfig, step: int, total_steps: int) -> float:
    """Computes the learning rate of RL step `step`, counted from 1, in a run of `total_steps` steps.

    `total_steps` counts only if `config.needs_total_steps`. With W = lr_warmup_steps, or lr_warmup_steps_ratio *
    total_steps rounded down, S = W + lr_stable_steps, D = lr_decay_steps, or total_steps, f = lr_min_ratio:

        step <= W:      lr * step / W                                 never 0, `lr` at step W
        W < step <= S:  lr                                            WSD (Hu et al., 2024, MiniCPM, eq. 1)
        step > S:       constant  lr
                        linear    lr * (f + (1 - f) * (1 - p))        p = min(1, (step - 1 - S) / max(1, D - S))
                        cosine    lr * (f + (1 - f) * (1 + cos(pi * p)) / 2)

    The decay counts the steps that are done, as LambdaLR does: it begins at `lr`, is still above its minimum in step D,
    and reaches it in the step after.
    """
    warmup = config.lr_warmup_steps or int(config.lr_warmup_steps_ratio * total_steps)
    if step <= warmup:
        return config.lr * step / warmup
    stable = warmup + config.lr_stable_steps
    if step <= stable or config.lr_schedule == "constant":
        return config.lr
    decay_end = config.lr_decay_steps or total_steps
    progress = min(1.0, (step - 1 - stable) / max(1, decay_end - stable))
    remaining = 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.lr_min_ratio + (1.0 - config.lr_min_ratio) * remaining)
